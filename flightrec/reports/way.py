"""Which records of an incident belong to the fault's story, from the columns of ``/records``; no payload is read.

Offline, any thread, no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.analysis.blame import Finding
from flightrec.errors import IncidentError
from flightrec.records import Key
from flightrec.storage import files
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident

AMAX_FACTOR = 4.0
"""A finite tensor is on the fault's way when its amax is this many times what the same tensor had before."""

UNDERFLOW_STEP = 0.25
"""Or when this much more of its non-zero values became zero."""

NUM_NEIGHBOURS = 3
"""Records before and after the blamed one whose statistics are shown beside it."""

_Columned = tuple[Any, ...]
_KEY_COLUMNS = ["layer", "tensor", "part", "microbatch", "phase", "call", "stage"]


@dataclass(frozen=True)
class _Columns:
    """Derived columns of one rank's ``/records``, one entry a row."""

    nonfinite: npt.NDArray[np.float64]
    quantized_nonfinite: npt.NDArray[np.float64]
    amax: npt.NDArray[np.float64]
    rms: npt.NDArray[np.float64]
    underflow: npt.NDArray[np.float64]
    saturated: npt.NDArray[np.float64]
    zero: npt.NDArray[np.float64]


def _derive(table: npt.NDArray[np.void]) -> _Columns:
    def count(*names: str) -> npt.NDArray[np.float64]:
        total: npt.NDArray[np.float64] = sum(np.nan_to_num(table[name]) for name in names) + np.zeros(len(table))
        return total

    nonfinite = count("nan_count", "positive_inf_count", "negative_inf_count")
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = table["numel"] - nonfinite
        return _Columns(
            nonfinite=nonfinite,
            quantized_nonfinite=count("quantized_nan_count", "quantized_inf_count", "scale_nonfinite_count"),
            amax=table["amax"],
            rms=np.where(finite > 0, np.sqrt(table["sum_of_squares"] / finite), np.nan),
            underflow=table["underflow_count"] / (finite - table["zero_count"]),
            saturated=table["quantized_saturated_count"] / table["quantized_numel"],
            zero=table["zero_count"] / table["numel"],
        )


def steps(incident: Incident, findings: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    """Give the records that show the fault, in blame order, of the blamed iteration and of the trigger's.

    A record shows it when it holds NaN or Inf, when a rule fired on it, or when its amax or its underflow left what
    the same tensor had in the earliest iteration before the blamed one (see the constants of this module).

    Args:
        incident: an open one.
        findings: what ``blame`` gave; rank and iteration of the first are looked at, nothing is given without one.

    Raises:
        IncidentError: a table is damaged.
    """
    if not findings:
        return
    first, trigger = findings[0], incident.trigger
    rank = _rank(incident, first.rank)
    with files.reading(rank.facts_path, "/records"):
        table = rank.records
        columns = _derive(table)
        keys = list(zip(*(table[name].tolist() for name in _KEY_COLUMNS), strict=True))
        before = _earlier(table, keys, first.attempt, first.iteration)
        rules = _rules(findings, rank)
        for attempt, iteration in sorted({(first.attempt, first.iteration), (trigger.attempt, trigger.iteration)}):
            num_microbatches = rank.num_microbatches.get((attempt, iteration), 0)
            here = np.flatnonzero((table["attempt"] == attempt) & (table["iteration"] == iteration))
            keyed = [(rank.key(table[row]), int(row)) for row in here]
            keyed.sort(key=lambda pair: pair[0].blame_order(int(table["sequence"][pair[1]]), num_microbatches))
            for key, row in keyed:
                reasons = _reasons(columns, row, before.get(keys[row]), rules.get(row, []))
                if reasons:
                    yield {**_row(rank, table, columns, row, key), "reasons": reasons}


def around(incident: Incident, findings: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    """Give the statistics around the blamed record: the same tensor through the iterations, then its neighbours.

    Args:
        incident: an open one.
        findings: what ``blame`` gave; the first one's record is looked at, nothing is given when it names none.

    Raises:
        IncidentError: a table is damaged.
    """
    if not findings or findings[0].record < 0:
        return
    first = findings[0]
    rank = _rank(incident, first.rank)
    with files.reading(rank.facts_path, "/records"):
        table = rank.records
        columns = _derive(table)
        here = np.flatnonzero((table["attempt"] == first.attempt) & (table["iteration"] == first.iteration))
        same = np.flatnonzero(table[_KEY_COLUMNS] == table[first.record][_KEY_COLUMNS])
        for row in same[np.lexsort((table["iteration"][same], table["attempt"][same]))]:
            yield {**_row(rank, table, columns, int(row), rank.key(table[row])), "role": "through_time"}
        place = int(np.flatnonzero(here == first.record)[0])
        for row in here[max(0, place - NUM_NEIGHBOURS) : place + NUM_NEIGHBOURS + 1]:
            yield {**_row(rank, table, columns, int(row), rank.key(table[row])), "role": "neighbour"}


def _rank(incident: Incident, number: int) -> Rank:
    found = next((rank for rank in incident.ranks if rank.rank == number), None)
    if found is None:
        raise IncidentError(f"{incident.path}: rank {number} is blamed, but its files are not here")
    return found


def _earlier(
    table: npt.NDArray[np.void], keys: Sequence[_Columned], attempt: int, iteration: int
) -> dict[_Columned, int]:
    """Key -> row of the earliest iteration of the same attempt that has the key, before the given one."""
    rows = np.flatnonzero((table["attempt"] == attempt) & (table["iteration"] < iteration))
    found: dict[_Columned, int] = {}
    for row in rows[np.argsort(table["iteration"][rows], kind="stable")]:
        found.setdefault(keys[row], int(row))
    return found


def _rules(findings: Sequence[Finding], rank: Rank) -> dict[int, list[str]]:
    """Row of ``/records`` -> names of the rules that fired on it."""
    found: dict[int, list[str]] = {}
    for finding in findings:
        if finding.rank == rank.rank and finding.rule and finding.rule not in found.setdefault(finding.record, []):
            found[finding.record].append(finding.rule)
    return found


def _reasons(columns: _Columns, row: int, before: int | None, rules: list[str]) -> list[str]:
    reasons = []
    if columns.nonfinite[row] > 0:
        reasons.append("nonfinite")
    if columns.quantized_nonfinite[row] > 0:
        reasons.append("quantized_nonfinite")
    if before is not None:
        if columns.amax[row] > AMAX_FACTOR * columns.amax[before] > 0:
            reasons.append("amax")
        if columns.underflow[row] > columns.underflow[before] + UNDERFLOW_STEP:
            reasons.append("underflow")
    return reasons + [f"rule {name}" for name in rules]


def _row(rank: Rank, table: npt.NDArray[np.void], columns: _Columns, row: int, key: Key) -> dict[str, Any]:
    def number(value: Any) -> float | None:
        return None if math.isnan(value) else float(value)

    record = table[row]
    return {
        "rank": rank.rank,
        "attempt": int(record["attempt"]),
        "iteration": int(record["iteration"]),
        "sequence": int(record["sequence"]),
        "key": key,
        "numel": number(record["numel"]),
        "nan": number(record["nan_count"]),
        "inf": number(record["positive_inf_count"] + record["negative_inf_count"]),
        "quantized_nonfinite": float(columns.quantized_nonfinite[row]),
        "amax": number(columns.amax[row]),
        "rms": number(columns.rms[row]),
        "zero_share": number(columns.zero[row]),
        "underflow_share": number(columns.underflow[row]),
        "saturated_share": number(columns.saturated[row]),
    }
