"""Records that a reader chooses: by layer, tensor, iteration, rank and microbatch, and the worst of them.

From the tables; of the tensors only those are read whose elements are asked for. The form is that of
``docs/inspect.md``. Offline, any thread, no state.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.recfunctions import repack_fields

from flightrec.analysis.incident import open_incident
from flightrec.errors import IncidentError
from flightrec.reports.elements import elements_of
from flightrec.reports.summary import key_of, plain, summarize
from flightrec.storage import files
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident
from flightrec.storage.record import Record

MAX_VALUES = 8
"""Records of which elements are shown."""

_SERIES = ["layer", "tensor", "part", "microbatch", "phase", "call", "stage"]

_RANGED = ("iteration", "rank", "microbatch")

Document = dict[str, Any]
Floats = npt.NDArray[np.float64]
Ranges = Sequence[Sequence[int | None]]


def inspect_path(path: Path, wanted: Mapping[str, Any], worst: int | None = None, values: bool = False) -> Document:
    """Open an incident and tell its story, and the chosen records as the field ``selected``.

    Args:
        path: of the incident.
        wanted: filters, see ``select``.
        worst: see ``select``.
        values: see ``select``.

    Raises:
        IncidentError: it cannot be read, or nothing is selected.
    """
    with open_incident(path) as incident:
        return {**summarize(incident), "selected": select(incident, wanted, worst=worst, values=values)}


def select(
    incident: Incident, wanted: Mapping[str, Any], *, worst: int | None = None, values: bool = False
) -> Document:
    """Tell the records that are chosen.

    Args:
        incident: an open one.
        wanted: ``layer`` and ``tensor``: patterns as in ``Incident.records``; ``iteration``, ``rank`` and
            ``microbatch``: ranges [first, last], both included, None for an open end. What is absent or None chooses
            all.
        worst: only so many, the worst first; None for all, in the order in which they were seen.
        values: also the elements around the worst place of the worst of them (of ``worst`` records, at most
            ``MAX_VALUES``).

    Returns:
        JSON data, see ``docs/inspect.md``.

    Raises:
        IncidentError: nothing is selected, or a table is damaged.
    """
    records = incident.records(layer=wanted.get("layer"), tensor=wanted.get("tensor"))
    for name in _RANGED:
        if wanted.get(name) is not None:
            records = [record for record in records if _within(_number(record, name), wanted[name])]
    if not records:
        raise IncidentError(f"{incident.path}: no record is selected by {_told(wanted)}; {_there_is(incident, wanted)}")
    columns = _columns(incident)
    by_badness = records
    if worst or values:
        by_badness = sorted(records, key=lambda record: _badness(columns[record.rank], record.index))
    return {
        "filters": {name: value for name, value in wanted.items() if value is not None},
        "worst": worst,
        "num_selected": len(records),
        "records": [_row(record, columns[record.rank]) for record in (by_badness[:worst] if worst else records)],
        "values": _values(by_badness, min(worst or 1, MAX_VALUES)) if values else [],
    }


def _number(record: Record, name: str) -> int:
    return record.key.microbatch if name == "microbatch" else int(getattr(record, name))


def _within(number: int, ranges: Ranges) -> bool:
    return any((first is None or first <= number) and (last is None or number <= last) for first, last in ranges)


def _told(wanted: Mapping[str, Any]) -> str:
    def words(name: str, value: Any) -> str:
        if name in _RANGED:
            ends = [["" if end is None else str(end) for end in pair] for pair in value]
            return ",".join(first if first == last else f"{first}:{last}" for first, last in ends)
        return " ".join(value)

    return ", ".join(f"--{name} {words(name, value)}" for name, value in wanted.items() if value) or "these options"


def _there_is(incident: Incident, wanted: Mapping[str, Any]) -> str:
    """What could have been meant: the layers whose names are nearest, and the span of each number."""
    keys = [rank.key(row) for rank in incident.ranks for row in rank.records]
    if not keys:
        return "the incident holds no record"
    layers = list(dict.fromkeys(key.layer for key in keys if key.layer))
    near = [name for word in wanted.get("layer") or () for name in difflib.get_close_matches(word, layers, 3, 0.5)]
    some = near or layers[:4]
    its = [entry.iteration for entry in incident.iterations]
    microbatches = [key.microbatch for key in keys]
    return (
        f"there are layers {', '.join(some)}{', ...' if len(layers) > len(some) else ''}; "
        f"tensors {', '.join(dict.fromkeys(key.tensor for key in keys))}; iterations {min(its)} to {max(its)}; "
        f"ranks {', '.join(str(rank.rank) for rank in incident.ranks[:8])}; "
        f"microbatches {min(microbatches)} to {max(microbatches)} (-1: of the whole iteration)"
    )


def _columns(incident: Incident) -> dict[int, dict[str, Floats]]:
    columns = {}
    for rank in incident.ranks:
        with files.reading(rank.facts_path, "/records"):
            columns[rank.rank] = _derive(rank)
    return columns


def _row(record: Record, columns: Mapping[str, Floats]) -> Document:
    numbers = {name: float(values[record.index]) for name, values in columns.items()}
    return {
        "rank": record.rank,
        "attempt": record.attempt,
        "iteration": record.iteration,
        "sequence": record.sequence,
        "key": key_of(record.key),
        "row": record.index,
        "shape": list(record.shape),
        "path": record.path,
        **{name: None if math.isnan(number) else plain(number) for name, number in numbers.items()},
    }


def _derive(rank: Rank) -> dict[str, Floats]:
    """What is told of each row of ``/records``, float64 [rows], NaN for absent."""
    table = rank.records

    def column(name: str) -> Floats:
        there = name in (table.dtype.names or ())  # a file of an earlier minor version lacks the later ones
        return np.asarray(table[name] if there else np.full(len(table), np.nan), dtype=np.float64)

    def count(*names: str) -> Floats:
        total: Floats = sum((np.nan_to_num(column(name)) for name in names), np.zeros(len(table)))
        return total

    nan, infinite = column("nan_count"), column("positive_inf_count") + column("negative_inf_count")
    quantized = count("quantized_nan_count", "quantized_inf_count", "scale_nonfinite_count")
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = column("numel") - np.nan_to_num(nan) - np.nan_to_num(infinite)
        return {
            "numel": column("numel"),
            "nan": nan,
            "inf": infinite,
            "quantized_nonfinite": quantized,
            "amax": column("amax"),
            "amax_growth": column("amax") / _earliest_amax(table),
            "rms": np.where(finite > 0, np.sqrt(column("sum_of_squares") / finite), np.nan),
            "nonfinite_share": np.fmax(
                count("nan_count", "positive_inf_count", "negative_inf_count") / column("numel"),
                np.minimum(1, quantized / column("quantized_numel")),  # scales are counted too
            ),
            "zero_share": column("zero_count") / column("numel"),
            "saturated_share": column("quantized_saturated_count") / column("quantized_numel"),
            "underflow_share": column("underflow_count") / (finite - column("zero_count")),
            "quantization_error": np.sqrt(column("squared_error") / column("sum_of_squares")),
            "scale_min": column("scale_min"),
            "scale_max": column("scale_max"),
        }


def _earliest_amax(table: npt.NDArray[np.void]) -> Floats:
    """Amax that the same key had in the earliest iteration of the same attempt, NaN where there is none before."""
    keys = [row.tobytes() for row in repack_fields(table[["attempt", *_SERIES]])]
    first: dict[bytes, int] = {}
    for row in np.argsort(table["iteration"], kind="stable"):
        first.setdefault(keys[row], int(row))
    rows = np.array([first[key] for key in keys], dtype=np.intp)
    is_later = table["iteration"] > table["iteration"][rows] if len(rows) else np.zeros(0, bool)
    return np.where(is_later & (table["amax"][rows] > 0), table["amax"][rows], np.nan)


def _badness(columns: Mapping[str, Floats], row: int) -> tuple[float, ...]:
    """Sort key: share of NaN and Inf, then saturation, underflow, quantization error, growth of amax; worst first.

    Shares and errors are compared in whole percent: scaling to the largest value always saturates that one.
    """

    def value(name: str) -> float:
        found = float(columns[name][row])
        return 0.0 if math.isnan(found) else found

    percents = [-(100 * value(name) // 1) for name in ("saturated_share", "underflow_share", "quantization_error")]
    return (-value("nonfinite_share"), *percents, -max(1.0, value("amax_growth")))


def _values(records: Sequence[Record], wanted: int) -> list[Document]:
    """Elements of the first records that have any, worst first."""
    found: list[Document] = []
    for record in records:
        if record.components and not record.why_absent:
            found.append(plain(elements_of(record)))
        if len(found) == wanted:
            break
    return found
