"""Where a statistic left what it used to be: change points in the history, for faults whose numbers stay finite.

A first, vectorised look at all series picks those whose latest samples left the range of the earlier ones; only these
are followed back to where they left it. Magnitudes are compared as logarithms, since they wander by factors; shares and
errors as they are. Pure functions, no state; reads tables only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flightrec.records import Key
from flightrec.storage.rank import Rank
from flightrec.storage.series import Series

MIN_SAMPLES = 8
"""Fewer tell nothing of what is usual."""

MAX_ITERATIONS = 512
MAX_SAMPLES = 1 << 22
"""Of one statistic that are read at most: with many series fewer iterations are looked at."""

MAX_CHANGES = 256
"""The earliest are kept."""

SIGMAS = 6.0
"""How far beyond the usual wandering, in robust standard deviations (1.4826 x the median absolute deviation)."""

MIN_RUN = 3
"""Iterations of growth one after the other that count as growing."""

_LOG = {"amax": 1.0, "rms": 1.0, "quantizer_amax": 1.0, "scale_min": 1.0, "scale_max": 1.0}
"""Magnitudes, and by how much log2 must change at least: a factor of 2."""

_LINEAR = {
    "underflow_share": 0.1,
    "saturated_share": 0.05,
    "clipped_share": 0.05,
    "quantization_error": 0.1,
    "zero_share": 0.2,
}
"""Shares and errors, and by how much they must change at least."""

WATCHED = (*_LOG, *_LINEAR)
"""The statistics that are looked at."""


@dataclass(frozen=True)
class Change:
    """A statistic of one series that left what it used to be, and did not come back.

    Attributes:
        label: ``precursor``, ``origin`` or ``symptom``; empty until somebody compared it with an origin.
        statistic: its name in ``/history``.
        key: of the series.
        rank: whose.
        attempt: when it began.
        iteration: when it began.
        before: what was usual, the median.
        after: the latest sample.
        sentence: the same in words.
        growing_iterations: for how many iterations it had grown one after the other, 0 for a jump.
    """

    label: str
    statistic: str
    key: Key
    rank: int
    attempt: int
    iteration: int
    before: float
    after: float
    sentence: str
    growing_iterations: int = 0


def find_changes(rank: Rank, *, until: tuple[int, int]) -> list[Change]:
    """Find the changes of all watched statistics of a rank's series.

    Args:
        rank: whose history is read.
        until: (attempt, iteration), the last sample that counts; only its attempt is looked at.

    Returns:
        In causal order: by iteration, then stage, then the order of the series; at most ``MAX_CHANGES``.

    Raises:
        IncidentError: the history is damaged.
    """
    history = rank.history
    series = history.all_series
    attempts, iterations = history.attempts, history.iterations
    rows = np.flatnonzero((attempts == until[0]) & (iterations <= until[1]))
    rows = rows[-max(MIN_SAMPLES, min(MAX_ITERATIONS, MAX_SAMPLES // max(1, len(series)))) :]
    if len(rows) < MIN_SAMPLES or not series:
        return []
    found: list[Change] = []
    for statistic in WATCHED:
        if statistic in history.statistics:
            values = history.read_rows(statistic, int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]
            found += _of_statistic(rank.rank, until[0], statistic, iterations[rows], values, series)
    order = {one.key: number for number, one in enumerate(series)}
    found.sort(key=lambda change: (change.iteration, change.key.stage.order, order[change.key], change.statistic))
    return found[:MAX_CHANGES]


def _of_statistic(
    rank: int,
    attempt: int,
    statistic: str,
    iterations: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32],
    series: Sequence[Series],
) -> list[Change]:
    least = _LOG.get(statistic, _LINEAR.get(statistic, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log2(values) if statistic in _LOG else values.astype(np.float32)
    scaled[~np.isfinite(scaled)] = np.nan
    found = []
    for column in screen(scaled, least).tolist():
        there = np.flatnonzero(~np.isnan(scaled[:, column]))
        samples = scaled[there, column].astype(np.float64)
        start = change_point(samples, least)
        if start is None:
            continue
        numbers, at = values[there, column].astype(float), iterations[there]
        usual = float(np.median(numbers[:start]))
        grown = growth(samples)
        if grown < MIN_RUN or len(samples) - grown - 1 > start:  # wandering after a jump is no growth
            grown = 0
        else:
            start = len(samples) - grown - 1
        words = _sentence(series[column].key, statistic, usual, numbers, at, start, grown)
        found.append(
            Change(
                label="",
                statistic=statistic,
                key=series[column].key,
                rank=rank,
                attempt=attempt,
                iteration=int(at[start]),
                before=usual,
                after=float(numbers[-1]),
                sentence=words,
                growing_iterations=grown,
            )
        )
    return found


def screen(samples: npt.NDArray[np.float32], least: float) -> npt.NDArray[np.intp]:
    """Columns whose latest sample lies more than ``least`` outside of their first half's range; NaN is no sample.

    Args:
        samples: float32 [n, series].
        least: in the samples' own unit.
    """
    half = samples[: max(1, len(samples) // 2)]
    counts = (~np.isnan(half)).sum(0)
    high = np.where(np.isnan(half), -np.inf, half).max(0)
    low = np.where(np.isnan(half), np.inf, half).min(0)
    last = np.full(samples.shape[1], np.nan, samples.dtype)
    for row in samples:
        there = ~np.isnan(row)
        last[there] = row[there]
    return np.flatnonzero((counts >= MIN_SAMPLES // 2) & ((last > high + least) | (last < low - least)))


def change_point(samples: npt.NDArray[np.float64], least: float) -> int | None:
    """Index of the first sample of the last stretch that lies outside of what was usual in the first half.

    Args:
        samples: float64 [n], no NaN.
        least: a distance that is usual whatever the samples did.

    Returns:
        None for fewer than ``MIN_SAMPLES``, or where the latest sample is usual, or none is.
    """
    if len(samples) < MIN_SAMPLES:
        return None
    usual = samples[: len(samples) // 2]
    middle = float(np.median(usual))
    spread = 1.4826 * float(np.median(np.abs(usual - middle)))
    is_usual = np.abs(samples - middle) <= max(least, SIGMAS * spread)
    if is_usual[-1] or not is_usual.any():
        return None
    return int(np.flatnonzero(is_usual)[-1]) + 1


def growth(samples: npt.NDArray[np.float64]) -> int:
    """How many of the latest steps went up, one after the other."""
    falls = np.flatnonzero(np.diff(samples) <= 0)
    return len(samples) - 1 - (int(falls[-1]) + 1 if len(falls) else 0)


def _sentence(
    key: Key, statistic: str, usual: float, numbers: npt.NDArray[np.float64], at: npt.NDArray[np.int64], start: int,
    grown: int,
) -> str:  # fmt: skip
    part = f" ({key.part})" if key.part else ""
    what = f"{statistic.replace('_', ' ')} of {key.layer or 'the model'} {key.tensor}{part}"
    if grown:
        return (
            f"{what} grew in each of the last {grown} iterations, from {numbers[start]:.4g} to {numbers[-1]:.4g} "
            f"(iteration {at[-1]})"
        )
    went = f"{what} went from {usual:.4g} to {numbers[start]:.4g} in iteration {at[start]}"
    return went if start == len(numbers) - 1 else f"{went}, {numbers[-1]:.4g} at the end"
