"""Tensors that suddenly move from one iteration to the next as they never did: for losses that leave their range.

A learning rate that is wrong moves a weight's amax by a few percent an iteration: no change point of the amax itself,
but many times what it moved by before. Looked for only where nothing left its range. Pure functions; tables only.
"""

from __future__ import annotations

import numpy as np

from flightrec.analysis.changes import MAX_CHANGES, MAX_ITERATIONS, MAX_SAMPLES, Change
from flightrec.analysis.verdict import name_of
from flightrec.storage.rank import Rank

STATISTIC = "amax"
FASTER = 3.0
"""How many times the fastest usual step a step must be."""

MIN_SAMPLES = 32
SETTLING = 0.2
"""Share of the samples that training takes to settle; they tell nothing of what is usual."""

USUAL = 0.7
"""Share of the samples up to which steps are taken for usual."""


def find_speeds(rank: Rank, *, until: tuple[int, int]) -> list[Change]:
    """Find the series whose amax moved by more than ``FASTER`` times its fastest usual step.

    Args:
        rank: whose history is read.
        until: (attempt, iteration), the last sample that counts; only its attempt is looked at.

    Returns:
        By iteration, then stage, then the order of the series; unlabelled. Their numbers are factors an iteration.

    Raises:
        IncidentError: the history is damaged.
    """
    history = rank.history
    series, iterations = history.all_series, history.iterations
    rows = np.flatnonzero((history.attempts == until[0]) & (iterations <= until[1]))
    rows = rows[-max(MIN_SAMPLES, min(MAX_ITERATIONS, MAX_SAMPLES // max(1, len(series)))) :]
    if len(rows) < MIN_SAMPLES or STATISTIC not in history.statistics:
        return []
    values = history.read_rows(STATISTIC, int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = np.abs(np.diff(np.log2(values), axis=0))
    moved[~np.isfinite(moved)] = np.nan
    settled, late = int(SETTLING * len(moved)), int(USUAL * len(moved))
    known = ~np.isnan(moved[settled:late])
    usual = np.where(known, moved[settled:late], 0).max(0)
    with np.errstate(invalid="ignore"):
        fast = (moved[late:] > FASTER * usual) & (usual > 0) & (known.sum(0) >= MIN_SAMPLES // 4)
    found = []
    for column in np.flatnonzero(fast.any(0)).tolist():
        start = late + int(np.argmax(fast[:, column]))
        key, when = series[column].key, int(iterations[rows[start + 1]])
        before, after = float(2.0 ** usual[column]), float(2.0 ** np.nanmax(moved[late:, column]))
        times = float(np.nanmax(moved[late:, column]) / usual[column])
        words = f"{name_of(key)} moved {times:.3g} times as fast as ever before, from iteration {when} on"
        found.append(Change("", STATISTIC, key, rank.rank, until[0], when, before, after, words))
    order = {one.key: number for number, one in enumerate(series)}
    found.sort(key=lambda change: (change.iteration, change.key.stage.order, order[change.key]))
    return found[:MAX_CHANGES]
