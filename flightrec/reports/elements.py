"""The elements around the worst place of a record: values, codes, and what the codes stand for, as JSON data.

Reads the bytes of the records that it is given, and of no other. Offline, any thread, no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base, quantized, sides
from flightrec.errors import FlightrecError
from flightrec.reports.summary import key_of
from flightrec.storage.record import Record

MAX_NUMEL = 1 << 27
"""Larger tensors are not looked at: numbers, codes and scales of one take some gigabytes."""

ALONG_ROW = 4
"""Elements before and after the worst one, along the last axis."""

ALONG_COLUMN = 2
"""And along the axis before."""

Array = npt.NDArray[Any]
Document = dict[str, Any]


def elements_of(record: Record) -> Document:
    """Tell the elements around the worst place of a record.

    The worst place is the first value that is NaN or Inf; else the first code that stands for one; else where
    quantization changed the value most; else, without both sides, the largest magnitude.

    Args:
        record: one whose bytes are there.

    Returns:
        JSON data, see ``docs/inspect.md``; ``absent`` says why there are no elements.
    """
    told: Document = {
        "rank": record.rank,
        "attempt": record.attempt,
        "iteration": record.iteration,
        "key": key_of(record.key),
        "shape": list(record.shape),
        "format": "",
        "reason": "",
        "worst": None,
        "elements": [],
        "absent": "",
    }
    numel = math.prod(record.shape)
    if not 0 < numel <= MAX_NUMEL:
        told["absent"] = "it has no elements" if not numel else f"{numel} elements, more than {MAX_NUMEL} are not read"
        return told
    try:
        values, decoded = record.high_precision, _Decoded.of(record)
        found = _worst(values, None if decoded is None else decoded.values)
        if found is None:
            told["absent"] = "none of its components can be read as numbers"
            return told
        told["reason"], place = found
        shape = decoded.values.shape if values is None and decoded is not None else record.shape
        worst = tuple(int(index) for index in np.unravel_index(place, shape))
        told |= {"format": "" if decoded is None else decoded.format, "worst": list(worst)}
        told["elements"] = [_element(index, values, decoded) for index in _around(worst, shape)]
    except (FlightrecError, ValueError) as error:  # damaged bytes, or codes that this version cannot decode
        told["absent"] = str(error)
    return told


class _Decoded:
    """The quantized side of a record in its logical shape.

    Attributes:
        values: float32, what codes and scales stand for.
        scale_inv: float32 in the same shape, what a code's own number is multiplied by; None where that is not all.
        codes: uint8 or integers, in the same shape; None where codes lie in an order of their own (grouped tensors).
        format: of the codes.
    """

    def __init__(self, values: Array, scale_inv: Array | None, codes: Array | None, form: str) -> None:
        self.values, self.scale_inv, self.codes, self.format = values, scale_inv, codes, form

    @classmethod
    def of(cls, record: Record) -> _Decoded | None:
        """Decode a record's codes; None if it has none."""
        side = record.quantized
        names = () if side is None else quantized.sides_of(side.formats)
        if side is None or not names:
            return None
        name = names[0]
        parts = {part: side.components[part] for part in quantized.component_names(side.formats, name)}
        taken = sides.take(parts, side.metadata, formats=side.formats, shape=record.shape, side=name)
        form = taken.formats.get("data") or taken.format

        def decode(components: Mapping[str, Array]) -> Array:
            return quantized.dequantize(components, side.metadata, formats=side.formats, shape=record.shape, side=name)

        values = decode(parts)
        scale_inv = None
        if "zero_point" not in taken.components and not taken.metadata.get("rht"):
            scale_inv = decode({**parts, taken.full_name("data"): _ones(taken.codes(), form)})
        moved = bool(taken.metadata.get("transposed"))
        return cls(values, scale_inv, _codes(taken.codes(), form, values.shape, moved=moved), form)


def _ones(codes: Array, form: str) -> Array:
    """Codes of the number 1, as many: what they decode to is the scale of each."""
    element = base.element_format(form)
    if element.codes is None:
        return np.ones_like(codes)
    word = np.array(1, element.codes).view(f"u{element.storage.itemsize}").item()
    return np.full_like(codes, word * 0x11 if element.elements_per_item == 2 else word)


def _codes(stored: Array, form: str, shape: tuple[int, ...], *, moved: bool) -> Array | None:
    """Codes one by one, in the logical shape; None where they are not as many, or are the numbers themselves."""
    element = base.element_format(form)
    if element.is_native and stored.dtype.kind == "f":
        return None
    if element.elements_per_item == 2:
        stored = base.unpack_fp4(stored)
    if moved and stored.ndim:
        stored = np.moveaxis(stored, 0, -1)
    if stored.ndim == len(shape) and stored.shape[:-1] == shape[:-1]:
        stored = stored[..., : shape[-1]]  # the last byte of an odd row
    return stored.reshape(shape) if stored.size == math.prod(shape) else None


def _worst(values: Array | None, decoded: Array | None) -> tuple[str, int] | None:
    """Why it is the worst, and the place in the flattened tensor."""
    for array, reason in ((values, "nonfinite"), (decoded, "quantized_nonfinite")):
        if array is not None and array.dtype.kind in "fc":
            wrong = ~np.isfinite(array.reshape(-1))
            if wrong.any():
                return reason, int(wrong.argmax())
    if values is not None and decoded is not None and values.shape == decoded.shape:
        with np.errstate(over="ignore"):
            return "largest_error", int(np.abs(decoded.reshape(-1) - values.reshape(-1)).argmax())
    array = decoded if values is None else values
    return None if array is None else ("largest", int(np.abs(array.reshape(-1)).argmax()))


def _around(worst: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Neighbours of a place along the last two axes, in order."""
    if not worst:
        yield ()
        return
    *front, row, last = (0, *worst) if len(worst) == 1 else worst
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape[-2:]
    for near in range(max(0, row - ALONG_COLUMN), min(rows, row + ALONG_COLUMN + 1)):
        reach = ALONG_ROW if near == row else 0
        for column in range(max(0, last - reach), min(columns, last + reach + 1)):
            yield (column,) if len(shape) == 1 else (*front, near, column)


def _element(index: tuple[int, ...], values: Array | None, decoded: _Decoded | None) -> Document:
    def at(array: Array | None) -> Any:
        return array[index].item() if array is not None and array.ndim == len(index) else None

    told: Document = {"index": list(index), "value": at(values), "code": None, "code_value": None}
    if decoded is not None:
        code = at(decoded.codes)
        told |= {"code": code, "code_value": None if code is None else _number(code, decoded.format)}
    return told | {
        "scale_inv": None if decoded is None else at(decoded.scale_inv),
        "decoded": None if decoded is None else at(decoded.values),
    }


def _number(code: int, form: str) -> float:
    """The number that a code stands for without its scale."""
    element = base.element_format(form)
    if element.codes is None:
        return float(code)
    return float(np.array(code, dtype=element.storage).view(element.codes).astype(np.float32))
