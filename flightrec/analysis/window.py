"""Jumps of amax within an incident's own iterations, for histories too short to tell what is usual. No state."""

from __future__ import annotations

import numpy as np

from flightrec.analysis.changes import MAX_CHANGES, Change
from flightrec.analysis.verdict import name_of
from flightrec.storage.rank import Rank

FACTOR = 100.0
"""Times the amax that the same tensor had in the iteration before: far beyond the wandering of the first iterations."""

_KEY = ("layer", "tensor", "part", "microbatch", "phase", "call", "stage")


def find_jumps(rank: Rank, *, until: tuple[int, int]) -> list[Change]:
    """Find tensors whose amax rose by ``FACTOR`` from one recorded iteration to the next.

    Args:
        rank: whose ``/records`` are compared.
        until: (attempt, iteration), the last that counts; only its attempt is looked at.

    Returns:
        The first jump of each series, unlabelled, by iteration, stage and sequence.

    Raises:
        IncidentError: a table is damaged.
    """
    table = rank.records
    with np.errstate(invalid="ignore"):
        there = (table["attempt"] == until[0]) & (table["iteration"] <= until[1]) & (table["amax"] > 0)
    rows = np.flatnonzero(there)
    if len(rows) < 2:
        return []
    columns = [np.unique(table[name][rows], return_inverse=True)[1].reshape(-1) for name in _KEY]
    order = np.lexsort((table["iteration"][rows], *columns))
    same = np.ones(len(rows) - 1, bool)
    for column in columns:
        same &= column[order][1:] == column[order][:-1]
    amax = table["amax"][rows[order]]
    found = np.flatnonzero(same & np.isfinite(amax[1:]) & (amax[1:] >= FACTOR * amax[:-1]))
    found = found[np.argsort(rows[order[found + 1]], kind="stable")]  # rows lie in time order
    changes: dict[object, Change] = {}
    keys = rank.keys(rows[order[found + 1]])
    for place, key in zip(found.tolist(), keys, strict=True):
        row, before, after = table[rows[order[place + 1]]], float(amax[place]), float(amax[place + 1])
        iteration = int(row["iteration"])
        words = f"amax of {name_of(key)} went from {before:.4g} to {after:.4g} in iteration {iteration}"
        change = Change("", "amax", key.series, rank.rank, until[0], iteration, before, after, words)
        changes.setdefault(key.series, change)
        if len(changes) == MAX_CHANGES:
            break
    return sorted(changes.values(), key=lambda change: (change.iteration, change.key.stage.order))
