"""The bytes of one suspect record, read window by window: histograms, worst elements, the map of its scales.

Offline, any thread, no state. What is read is bounded (``MAX_WINDOWS``); a larger array is sampled, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base, quantized, scaled, sides
from flightrec.errors import FlightrecError, FormatError
from flightrec.reports.page import counting
from flightrec.reports.page.measures import rounded, rounded_list
from flightrec.reports.summary import key_of, plain
from flightrec.storage.rank import Rank, StoredComponent
from flightrec.storage.record import HIGH_PRECISION, Record

MAX_WINDOWS = 16
"""Of one array; 64 Mi elements."""

MAX_WHOLE_BYTES = 64 << 20
"""Up to here an array is read whole, with its checksum, and both sides of a pair are compared element by element."""

MAX_MAP = 96
"""Rows and columns of a map of scales; more are merged, the largest is shown."""

Document = dict[str, Any]


def look(rank: Rank, record: Record, reasons: Sequence[str]) -> Document:
    """Everything about one record that the page shows closely; what cannot be read is told in ``problems``."""
    key = record.key
    described: Document = {
        "rank": record.rank,
        "attempt": record.attempt,
        "iteration": record.iteration,
        "key": key_of(key),
        "reasons": list(reasons),
        "shape": list(record.shape),
        "dtype": record.dtype,
        "bytes": record.num_bytes,
        "statistics": {name: plain(value) for name, value in record.statistics.items() if value is not None},
        "quantizer": plain(dict(record.metadata)),
        "problems": [],
    }
    absent = record.why_absent
    if absent:
        described["problems"].append(absent)
    parts: dict[str, Callable[[], Any]] = {
        "values": lambda: _values(rank, record),
        "codes": lambda: _codes(rank, record),
        "scales": lambda: _scales(record),
        "pairs": lambda: _pairs(record),
    }
    for name, part in parts.items():
        described[name] = _attempt(name, part, described["problems"])
    return described


def _attempt(name: str, part: Callable[[], Any], problems: list[str]) -> Any:
    """Damaged bytes, or a format that is not understood, cost this part only."""
    try:
        return part()
    except (FlightrecError, ValueError) as error:
        problems.append(f"{name}: {error}")
        return None


def values_of(rank: Rank, record: Record) -> Document | None:
    """The histogram of a record's values alone, for comparison; None when it cannot be read."""
    found: Document | None = _attempt("values", lambda: _values(rank, record), [])
    return found


def _values(rank: Rank, record: Record) -> Document | None:
    """The high-precision values; without them what the codes stand for."""
    part = _component(record, HIGH_PRECISION)
    if part is not None and rank.has_payload(record.index, record.path, part.name):
        if base.element_format(part.format).storage.kind == "c" or part.format == "complex32":
            return None
        counter = counting.Values(part.shape)
        sampled = _read(rank, record, part, lambda stored, start: counter.add(_decode(stored, part), start))
        return {**counter.told(), "of": part.format, "sampled": sampled, "range": _value_range(record)}
    held = record.quantized
    if held is None or record.num_bytes > MAX_WHOLE_BYTES or not quantized.sides_of(held.formats):
        return None
    values = held.dequantize()
    counter = counting.Values(values.shape)
    counter.add(values, 0)
    told = {"of": "dequantized codes", "sampled": "", "range": _value_range(record)}
    return {**counter.told(), **told}


def _codes(rank: Rank, record: Record) -> Document | None:
    """The codes of the first side that is there."""
    for prefix in sides.PREFIXES.values():
        part = _component(record, f"{prefix}data")
        if part is None or not rank.has_payload(record.index, record.path, part.name):
            continue
        form = part.format if part.format != "uint8" else str(record.metadata.get("format", ""))
        if not counting.Codes.can_count(form):
            return None
        counter = counting.Codes(form)
        sampled = _read(rank, record, part, lambda stored, _, counter=counter: counter.add(stored))
        return {**counter.told(), "component": part.name, "sampled": sampled}
    return None


def _scales(record: Record) -> Document | None:
    """The map of a tensor's scales, where it has more than one."""
    held = record.quantized
    if held is None:
        return None
    for side in quantized.sides_of(held.formats):
        names = quantized.component_names(held.formats, side)
        prefix = sides.PREFIXES[side]
        wanted = [n for n in names if n.removeprefix(prefix) in ("scale", "scale_inv", scaled.SWIZZLED)]
        parts = [part for part in record.components if part.name in wanted and math.prod(part.shape) > 1]
        if parts and sum(part.num_bytes for part in parts) <= MAX_WHOLE_BYTES:
            return _map(record, parts[0], side, held.metadata, held.formats)
    return None


def _map(
    record: Record, part: StoredComponent, side: str, info: Mapping[str, Any], formats: Mapping[str, str]
) -> Document:
    taken = sides.take({part.name: record.raw(part.name)}, info, formats=formats, shape=record.shape, side=side)
    short = part.name.removeprefix(sides.PREFIXES[side])
    if taken.metadata.get("scheme") == "nvfp4":
        taken = taken.with_format(short, "float8_e4m3fn")
    is_swizzled = short == scaled.SWIZZLED or bool(taken.metadata.get("swizzled"))
    shape = record.shape
    if side == "columnwise" and taken.metadata.get("transposed"):
        shape = (*shape[-1:], *shape[:-1])
    if is_swizzled and taken.metadata.get("scheme") != "grouped":
        scales = scaled.block_scales(taken, shape)
    else:
        scales = sides.read_scale(taken, short)
    square = scales.reshape(-1, scales.shape[-1]) if scales.ndim > 1 else scales.reshape(1, -1)
    blocks = taken.block_shape
    if len(blocks) >= 2 and len(shape) >= 2 and not is_swizzled:  # without the padding
        rows, columns = math.prod(shape[:-1]), shape[-1]
        square = square[: -(-rows // max(1, blocks[-2])), : -(-columns // max(1, blocks[-1]))]
    smallest, largest = _extremes(square)
    return {
        "component": part.name,
        "side": side,
        "format": part.format,
        "direction": taken.scale_direction,
        "blocks": list(blocks),
        "shape": list(square.shape),
        "map": [rounded_list(row) for row in _shrunk(square)],
        "smallest": smallest,
        "largest": largest,
        "num_nonfinite": int(np.count_nonzero(~np.isfinite(square))),
        "num_zero": int(np.count_nonzero(square == 0)),
    }


def _pairs(record: Record) -> list[Document] | None:
    """The elements that quantization changed most: both sides of a pair, where both are there and not too large."""
    held, part = record.quantized, _component(record, HIGH_PRECISION)
    if held is None or part is None or record.num_bytes > MAX_WHOLE_BYTES or not quantized.sides_of(held.formats):
        return None
    high = record.high_precision
    if high is None or high.dtype.kind != "f":
        return None
    decoded = held.dequantize()
    if decoded.shape != high.shape:
        raise FormatError(f"the codes stand for a tensor of shape {decoded.shape}, the values have {high.shape}")
    with np.errstate(all="ignore"):
        error = np.abs(decoded.astype(np.float64) - high).reshape(-1)
    error[~np.isfinite(error)] = 0
    count = min(counting.NUM_WORST, error.size)
    places = np.argsort(-error, kind="stable")[:count] if error.size <= 1 << 16 else _top(error, count)
    return [
        {
            "index": [int(axis) for axis in np.unravel_index(int(place), high.shape)] if high.ndim else [],
            "value": rounded(high.reshape(-1)[place], 6),
            "dequantized": rounded(decoded.reshape(-1)[place], 6),
        }
        for place in places
        if error[place] > 0
    ]


def _top(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    found = np.argpartition(values, len(values) - count)[len(values) - count :]
    return np.asarray(found[np.argsort(-values[found])])


def _read(rank: Rank, record: Record, part: StoredComponent, use: Callable[..., None]) -> str:
    """Give an array's parts to ``use(stored, start)``; tells in words if only some of it was read."""
    packed = base.element_format(part.format).elements_per_item if part.format in base.FORMATS else 1
    if part.num_bytes <= MAX_WHOLE_BYTES:
        use(record.raw(part.name), 0)
        return ""
    limit = counting.WINDOW_ELEMENTS // packed
    chosen, total = counting.windows(part.shape, limit, MAX_WINDOWS)
    for window in chosen:
        stored = rank.read_window(record.path, part.name, window.slices)
        expected = tuple(range(size)[cut] for size, cut in zip(part.shape, window.slices, strict=True))
        if stored.shape != tuple(map(len, expected)) or stored.dtype != base.storage_dtype(part.format):
            raise FormatError(f"{part.name} is not {part.format} {part.shape} as /records says")
        use(stored, window.start)
    whole = f"{part.num_bytes / 2**20:.0f} MiB were read in parts, without comparing the checksum"
    return whole if len(chosen) == total else f"a sample: {len(chosen)} of {total} parts of {part.name}, evenly spaced"


def _decode(stored: npt.NDArray[Any], part: StoredComponent) -> npt.NDArray[Any]:
    return base.decode(stored, part.format)


def _component(record: Record, name: str) -> StoredComponent | None:
    return next((part for part in record.components if part.name == name), None)


def _value_range(record: Record) -> Document | None:
    """What the codes can hold, as magnitudes of values: where the format's range lies under the scales of the tensor.

    ``scale_min`` and ``scale_max`` are in the scale's own direction.
    """
    limits = counting.format_range(str(record.metadata.get("format", "")))
    numbers, direction = record.statistics, record.metadata.get("scale_direction")
    low, high = numbers["scale_min"], numbers["scale_max"]
    if limits is None:
        return None
    if direction == sides.NONE:
        low = high = 1.0
    if low is None or high is None or not low > 0 or direction not in (sides.ENCODE, sides.DECODE, sides.NONE):
        return None
    if direction == sides.ENCODE:
        low, high = 1 / high, 1 / low
    return {
        "smallest": rounded(limits["smallest"] * low),
        "smallest_normal": rounded(limits["smallest_normal"] * low),
        "largest": rounded(limits["largest"] * high),
        "largest_of_smallest_scale": rounded(limits["largest"] * low),
        "format": str(record.metadata.get("format", "")),
    }


def _extremes(values: npt.NDArray[Any]) -> tuple[float | int | None, float | int | None]:
    finite = values[np.isfinite(values)]
    return (rounded(finite.min()), rounded(finite.max())) if finite.size else (None, None)


def _shrunk(square: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """At most ``MAX_MAP`` rows and columns, the largest of each group; non-finite scales as NaN."""
    values = np.where(np.isfinite(square), square, np.nan).astype(np.float64)
    for axis in (0, 1):
        size = -(-values.shape[axis] // MAX_MAP) or 1
        if values.shape[axis]:
            values = np.fmax.reduceat(values, np.arange(0, values.shape[axis], size), axis=axis)
    return values
