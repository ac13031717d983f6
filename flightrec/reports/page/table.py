"""The table of tensors in the iteration of the fault, for searching. Reads tables only; no state."""

from __future__ import annotations

from typing import Any

import numpy as np

from flightrec.reports.page import measures
from flightrec.reports.summary import key_of
from flightrec.storage import files
from flightrec.storage.rank import Rank

MAX_ROWS = 1500
"""More tensors are left out, the least suspect first."""

Document = dict[str, Any]


def tensors_at(rank: Rank, attempt: int, iteration: int) -> Document:
    """All records of an iteration (of the last one before it that has any) with their statistics.

    Returns:
        ``attempt``, ``iteration``, ``rows`` in the order in which they were seen, ``num``: how many there are.

    Raises:
        IncidentError: a table is damaged.
    """
    with files.reading(rank.facts_path, "/records"):
        table = rank.records
        earlier = (table["attempt"] < attempt) | ((table["attempt"] == attempt) & (table["iteration"] <= iteration))
        if not earlier.any():
            earlier = np.ones(len(table), bool)
        times = sorted(set(zip(table["attempt"][earlier].tolist(), table["iteration"][earlier].tolist(), strict=True)))
        if not times:
            return {"attempt": attempt, "iteration": iteration, "rows": [], "num": 0}
        attempt, iteration = times[-1]
        rows = np.flatnonzero((table["attempt"] == attempt) & (table["iteration"] == iteration))
        measured = measures.of_records(table[rows])
        chosen = np.arange(len(rows))
        if len(rows) > MAX_ROWS:
            suspect = [-np.nan_to_num(measured[name], nan=-1) for name in ("amax", "error", "nonfinite")]
            chosen = np.sort(np.lexsort(suspect)[:MAX_ROWS])
        names = ("amax", "rms", "nonfinite", "underflow", "zero", "saturated", "error")
        columns = {name: measures.rounded_list(measured[name][chosen]) for name in names}
        keys = rank.keys(rows[chosen])
    return {
        "attempt": attempt,
        "iteration": iteration,
        "num": len(rows),
        "rows": [
            {
                **key_of(key),
                **{name: column[place] for name, column in columns.items()},
            }
            for place, key in enumerate(keys)
        ],
    }
