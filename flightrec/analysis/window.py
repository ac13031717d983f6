"""What changed within an incident's own iterations, for histories too short to tell what is usual. No state.

Of few iterations only what is far beyond wandering counts: an amax that rose by ``FACTOR`` at once, or by ``LEAST`` in
each of ``MIN_RUN`` steps or more and by ``GROWTH`` in all; a share or an error that rose by more than ``STEPS`` says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightrec.analysis.changes import MAX_CHANGES, Change
from flightrec.analysis.verdict import name_of
from flightrec.records import Key
from flightrec.storage.rank import Rank

FACTOR = 100.0
"""Times the amax that the same tensor had in the iteration before: far beyond the wandering of the first iterations."""

GROWTH = 16.0
LEAST = 1.25
MIN_RUN = 2
STEPS = {"clipped_share": 0.05, "saturated_share": 0.05, "underflow_share": 0.1, "quantization_error": 0.1}

_KEY = ("layer", "tensor", "part", "microbatch", "phase", "call", "stage")
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]


def find_jumps(rank: Rank, *, until: tuple[int, int]) -> list[Change]:
    """Find tensors whose amax grew, or whose share of clipped, saturated or lost values rose.

    Args:
        rank: whose ``/records`` are compared.
        until: (attempt, iteration), the last that counts; only its attempt is looked at.

    Returns:
        The first change of each series and statistic, unlabelled, by iteration, stage and sequence.

    Raises:
        IncidentError: a table is damaged.
    """
    table = rank.records
    rows = np.flatnonzero((table["attempt"] == until[0]) & (table["iteration"] <= until[1]))
    if len(rows) < 2:
        return []
    columns = [np.unique(table[name][rows], return_inverse=True)[1].reshape(-1) for name in _KEY]
    rows = rows[np.lexsort((table["iteration"][rows], *columns))]
    same = np.ones(len(rows) - 1, bool)
    for name in _KEY:
        same &= table[name][rows][1:] == table[name][rows][:-1]
    changes: dict[tuple[Key, str], tuple[int, Change]] = {}
    for statistic, values in _statistics(table, rows).items():
        for first, place, grown in _found(values, same, statistic):
            row = int(rows[first] if grown else rows[place])
            key = rank.key(table[row]).series
            change = _change(rank, key, statistic, table, rows, values, first, place, grown)
            known = changes.get((key, statistic))
            if known is None or row < known[0]:
                changes[key, statistic] = row, change
    told = sorted(changes.values(), key=lambda pair: (pair[1].iteration, pair[1].key.stage.order, pair[0]))
    return [change for _, change in told[:MAX_CHANGES]]


def _statistics(table: npt.NDArray[np.void], rows: Rows) -> dict[str, Floats]:
    def of(name: str) -> Floats:
        there = name in (table.dtype.names or ())  # a file of an earlier minor version lacks the later ones
        found: Floats = table[name][rows] if there else np.full(len(rows), np.nan)
        return found

    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "amax": of("amax"),
            "clipped_share": of("clipped_count") / of("quantized_numel"),
            "saturated_share": of("quantized_saturated_count") / of("quantized_numel"),
            "underflow_share": of("underflow_count") / (of("numel") - of("zero_count")),
            "quantization_error": np.sqrt(of("squared_error") / of("sum_of_squares")),
        }


def _found(values: Floats, same: npt.NDArray[np.bool_], statistic: str) -> list[tuple[int, int, int]]:
    """(where it was usual, where it changed, steps of growth) of what changed, places in the sorted rows."""
    before, after = values[:-1], values[1:]
    with np.errstate(invalid="ignore"):
        if statistic != "amax":
            rose = np.flatnonzero(same & (after > before + STEPS[statistic]))
            return [(place, place + 1, 0) for place in rose.tolist()]
        finite = same & np.isfinite(after) & (before > 0)
        jumps = np.flatnonzero(finite & (after >= FACTOR * before))
        up = finite & (after >= LEAST * before) & (after < FACTOR * before)
    found = [(place, place + 1, 0) for place in jumps.tolist()]
    # The run of growth that leads to the last record of each series.
    steps = np.arange(len(up)) - np.maximum.accumulate(np.where(up, -1, np.arange(len(up))))
    last = np.flatnonzero(up & ~np.append(same[1:], False) & (steps >= MIN_RUN))
    for place in last.tolist():
        run = int(steps[place])
        if values[place + 1] >= GROWTH * values[place + 1 - run]:
            found.append((place + 1 - run, place + 1, run))
    return found


def _change(
    rank: Rank, key: Key, statistic: str, table: npt.NDArray[np.void], rows: Rows, values: Floats, first: int,
    place: int, grown: int,
) -> Change:  # fmt: skip
    start, end = int(table["iteration"][rows[first]]), int(table["iteration"][rows[place]])
    before, after = float(values[first]), float(values[place])
    what = f"{statistic.replace('_', ' ')} of {name_of(key)}"
    words = f"{what} went from {before:.4g} to {after:.4g} in iteration {end}"
    if grown:
        words = (
            f"{what} grew in each of the last {grown} iterations, from {before:.4g} to {after:.4g} (iteration {end})"
        )
    attempt = int(table["attempt"][rows[place]])
    when = start if grown else end
    return Change("", statistic, key, rank.rank, attempt, when, before, after, words, grown)
