"""What ``flightrec inspect --quantizer`` tells: quantizers of a layer, what they are and how they went, as JSON data.

From the tables and the history; of the tensors only a short amax history is read, where it is there. The form is that
of ``docs/inspect.md``. Offline, any thread, no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flightrec.errors import FlightrecError, IncidentError
from flightrec.reports.summary import key_of, plain
from flightrec.storage.read import Incident, open_incident
from flightrec.storage.record import Record
from flightrec.storage.scale_age import ScaleAge
from flightrec.storage.select import Texts
from flightrec.storage.series import History, Series

DOCUMENT = "flightrec-quantizers"
VERSION = 1
MAX_AMAX_HISTORY = 4096
"""A longer amax history is not read."""

HISTORY = ("amax", "quantizer_amax", "scale_min", "scale_max", "range_ratio", "clipped_share")
"""Statistics of the past iterations that are told."""

_USE = ("amax", "quantizer_amax", "amax_history_max", "scale_min", "scale_max", "range_ratio", "history_ratio")

Document = dict[str, Any]


def quantizers_of_path(path: Path, layer: str, tensor: Texts | None = None) -> Document:
    """Open an incident and tell its quantizers; see ``quantizers_of``.

    Raises:
        IncidentError: it cannot be read, or nothing quantized is selected.
    """
    with open_incident(path) as incident:
        return quantizers_of(incident, layer, tensor)


def quantizers_of(incident: Incident, layer: str, tensor: Texts | None = None) -> Document:
    """Tell the quantizers of a layer.

    Args:
        incident: an open incident.
        layer: its name, a glob, or a regular expression after ``re:``.
        tensor: likewise, or several; None for all.

    Returns:
        JSON data, see ``docs/inspect.md``.

    Raises:
        IncidentError: nothing quantized is selected, or a table is damaged.
    """
    found = incident.records(layer=layer, tensor=tensor)
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in found:
        if _is_quantized(record):
            groups.setdefault((record.rank, record.key.series), []).append(record)
    if not groups:
        what = f"{len(found)} records are selected, none of them quantized" if found else "no record is selected"
        wanted = f"layer {layer!r}" + (f", tensor {tensor!r}" if tensor else "")
        raise IncidentError(f"{incident.path}: {wanted}: {what}; quantized are {_some_quantized(incident)}")
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "incident": incident.incident_id,
        "quantizers": [_quantizer(incident, records) for records in groups.values()],
    }


def _is_quantized(record: Record) -> bool:
    """Sparse and distributed tensors have metadata too."""
    if not record.metadata:
        return False
    has_arrays = any(part.name.endswith("data") or "scale" in part.name for part in record.components)
    return (
        has_arrays
        or record.statistics["quantized_numel"] is not None
        or record.metadata.get("scale_direction") == "unknown"
    )


def _some_quantized(incident: Incident) -> str:
    names = dict.fromkeys(f"{r.key.layer} {r.key.tensor}" for r in incident.records() if _is_quantized(r))
    return ", ".join(list(names)[:6]) + (", ..." if len(names) > 6 else "") or "none"


def _quantizer(incident: Incident, records: Sequence[Record]) -> Document:
    last = records[-1]
    history = next(rank.history for rank in incident.ranks if rank.rank == last.rank)
    key = last.key.series
    series = next((entry for entry in history.all_series if entry.key.series == key), None)
    info = last.metadata
    return {
        "rank": last.rank,
        "key": key_of(key),
        "class_name": info.get("class_name", ""),
        "format": info.get("format", ""),
        "scale_direction": info.get("scale_direction", ""),
        "block_shape": list(info.get("block_shape") or ()),
        "metadata": plain(info.get("metadata") or {}),
        "uses": [_use(record) for record in records],
        "since": _since(series, records),
        "amax_history": _amax_history(records),
        "history": _history(series, history),
    }


def _use(record: Record) -> Document:
    """One record: scale, amax and what became of the values."""
    numbers = record.statistics
    infinite = (numbers["positive_inf_count"] or 0) + (numbers["negative_inf_count"] or 0)
    finite = _number(numbers["numel"]) - (numbers["nan_count"] or 0) - infinite
    age = record.scale_age
    error = _share(numbers["squared_error"], _number(numbers["sum_of_squares"]))
    return {
        "attempt": record.attempt,
        "iteration": record.iteration,
        "microbatch": record.key.microbatch,
        **{name: plain(numbers[name]) for name in _USE},
        "clipped_share": plain(_share(numbers["clipped_count"], finite)),
        "underflow_share": plain(_share(numbers["underflow_count"], finite - (numbers["zero_count"] or 0))),
        "quantization_error": plain(None if error is None else math.sqrt(error)),
        "scale_unchanged_iterations": None if age is None else age.unchanged_iterations,
        "scale_differed_iterations": None if age is None else age.differed_iterations,
        "scale_age": None if age is None else str(age),
    }


def _since(series: Series | None, records: Sequence[Record]) -> Document | None:
    """The iteration since which the last record's scale is known to stand still, and the amax then."""
    last = records[-1]
    age = last.scale_age or ScaleAge()
    if age.unchanged_iterations < 1:
        return None
    iteration = last.iteration - age.unchanged_iterations
    amax = None
    if series is not None:
        rows = np.flatnonzero((series.iterations == iteration) & (series.attempts <= last.attempt))
        if len(rows):
            amax = next((v for v in (float(series[name][rows[-1]]) for name in HISTORY[:2]) if v == v), None)
    if amax is None:
        then = [record.statistics for record in records if record.iteration == iteration]
        known = [_number(s["amax"] if s["amax"] is not None else s["quantizer_amax"]) for s in then]
        amax = max((value for value in known if value == value), default=None)
    return {"iteration": iteration, "amax": plain(amax)}


def _amax_history(records: Sequence[Record]) -> list[Any] | None:
    """The last recorded amax history, None if there is none, it is long, or its bytes are not there."""
    for record in reversed(records):
        part = next((part for part in record.components if part.name == "amax_history"), None)
        if part is None or part.num_bytes > 4 * MAX_AMAX_HISTORY:
            continue
        try:
            return [plain(float(value)) for value in record.raw("amax_history").reshape(-1)]
        except (FlightrecError, ValueError):  # its bytes did not arrive, or are damaged: the tables tell the rest
            continue
    return None


def _history(series: Series | None, history: History) -> Document | None:
    if series is None:
        return None
    told = {name: [plain(float(value)) for value in series[name]] for name in HISTORY}
    return {"iterations": history.iterations.tolist(), "attempts": history.attempts.tolist(), **told}


def _share(part: float | int | None, whole: float) -> float | None:
    return None if part is None or not whole > 0 else part / whole


def _number(value: float | int | None) -> float:
    return math.nan if value is None else float(value)
