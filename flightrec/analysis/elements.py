"""Which elements of a record are at fault: indices, whole rows and columns, a tail that nobody wrote.

Reads the payload of one record in pieces along its first dimension, so that a tensor of many gigabytes takes little
memory. Pure functions, no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base
from flightrec.storage.rank import StoredComponent
from flightrec.storage.record import HIGH_PRECISION, Record

NUM_INDICES = 16
"""Indices, rows and columns that are named at most."""

NEAR_AMAX = 0.5
"""Of a tensor that is finite, elements of at least this share of its largest magnitude are told."""

_SCALES = ("scale_inv", "scale", "columnwise_scale_inv", "columnwise_scale")
_CODES = ("data", "columnwise_data")

_Mask = Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Elements:
    """What of a tensor is at fault. A row is an index of all dimensions but the last; of a vector, its elements.

    Attributes:
        component: which array was looked at: ``high_precision``, ``data``, ``scale_inv``, ...
        num_faulty: elements at fault.
        numel: elements in all.
        shape: of the array; indices belong to it.
        indices: the first of them, in order.
        values: what stands there.
        rows: the first of the rows that are at fault as a whole.
        columns: the same of columns.
        row_share: share of the rows that hold at least one, 0 to 1.
        column_share: the same of columns.
        is_tail: all rows from ``valid_rows`` on hold one, and none before: as memory that a kernel did not write.
        valid_rows: the first index of dimension 0 that holds one; as many are clean before it.
    """

    component: str
    num_faulty: int
    numel: int
    shape: tuple[int, ...]
    indices: tuple[tuple[int, ...], ...]
    values: tuple[float, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_share: float
    column_share: float
    is_tail: bool
    valid_rows: int

    @property
    def where(self) -> str:
        """In words: the pattern if there is one, else the first indices."""
        return _where(self)


def find_elements(record: Record, side: str, *, num_indices: int = NUM_INDICES) -> Elements | None:
    """Find the elements of a record that are at fault.

    Args:
        record: whose payload is read.
        side: ``high_precision`` or ``quantized``: NaN and Inf in the tensor, or among its codes; ``scale``: scales that
            are NaN, Inf or zero; empty: no fault of this kind, then the largest elements are told (``NEAR_AMAX``).
        num_indices: how many indices, rows and columns to give at most.

    Returns:
        None if the bytes are not there, or no element is at fault.

    Raises:
        IncidentError: the bytes are damaged.
    """
    for part in _candidates(record, side):
        found = _scan(record, part, _mask(record, side), num_indices)
        if found is not None:
            return found
    return None


def _candidates(record: Record, side: str) -> list[StoredComponent]:
    names: tuple[str, ...] = {"scale": _SCALES, "quantized": _CODES}.get(side, (HIGH_PRECISION,))
    here = {part.name: part for part in record.components if part.format in base.FORMATS}
    return [
        here[name]
        for name in names
        if name in here and record.has_bytes(name) and base.element_format(here[name].format).elements_per_item == 1
    ]


def _mask(record: Record, side: str) -> _Mask:
    if side == "scale":
        return lambda values: ~np.isfinite(values) | (values == 0)
    if side:
        return lambda values: ~np.isfinite(values)
    amax = record.statistics["amax"] or 0.0
    return lambda values: (np.abs(values) >= NEAR_AMAX * amax) & (values != 0)


def _scan(record: Record, part: StoredComponent, mask: _Mask, num_indices: int) -> Elements | None:
    shape = part.shape
    num_columns = shape[-1] if len(shape) > 1 else 1
    by_row = np.zeros(int(np.prod(shape)) // num_columns if num_columns else 0, np.int64)
    by_column = np.zeros(num_columns, np.int64)
    places: list[int] = []
    values: list[float] = []
    done = 0
    for piece in record.pieces(part.name):
        numbers = _numbers(piece, part.format)
        flat = numbers.reshape(-1)
        bad = mask(flat)
        grid = bad.reshape(-1, num_columns) if num_columns else bad.reshape(0, 0)
        first = done // num_columns if num_columns else 0
        by_row[first : first + len(grid)] += grid.sum(1)
        by_column += grid.sum(0)
        if len(places) < num_indices:
            new = np.flatnonzero(bad)[: num_indices - len(places)]
            places += (new + done).tolist()
            values += flat[new].astype(np.float64).tolist()
        done += flat.size
    if not by_row.any():
        return None
    return _told(part, by_row, by_column, places, values, num_indices)


def _numbers(piece: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    element = base.element_format(name)
    numbers = piece if element.is_native and name not in ("bool", "complex32") else base.decode(piece, name)
    return numbers if numbers.dtype.kind in "fc" else numbers.astype(np.float64)


def _told(
    part: StoredComponent,
    by_row: npt.NDArray[np.int64],
    by_column: npt.NDArray[np.int64],
    places: list[int],
    values: list[float],
    num_indices: int,
) -> Elements:
    shape = part.shape
    holds = by_row > 0
    per_index = len(by_row) // shape[0] if shape and shape[0] else 1  # rows of one index of dimension 0
    by_index: npt.NDArray[np.bool_] = np.any(holds.reshape(-1, per_index or 1), axis=1)
    first = int(np.argmax(by_index))
    return Elements(
        component=part.name,
        num_faulty=int(by_row.sum()),
        numel=len(by_row) * len(by_column),
        shape=shape,
        indices=tuple(tuple(int(i) for i in np.unravel_index(place, shape)) for place in places),
        values=tuple(values),
        rows=tuple(np.flatnonzero(by_row == len(by_column))[:num_indices].tolist()),
        columns=tuple(np.flatnonzero(by_column == len(by_row))[:num_indices].tolist()),
        row_share=float(holds.mean()),
        column_share=float((by_column > 0).mean()),
        is_tail=first > 0 and bool(by_index[first:].all()),
        valid_rows=first,
    )


def _where(found: Elements) -> str:
    if found.num_faulty == found.numel:
        return f"all {found.numel} elements"
    length = found.shape[0] if found.shape else 1
    if found.is_tail and (length - found.valid_rows > 1 or found.num_faulty > 1):
        return f"rows {found.valid_rows} to {length - 1} of {length}, none before"
    some = f"{found.num_faulty} of {found.numel} elements"
    num_rows, num_columns = found.numel // (found.shape[-1] if len(found.shape) > 1 else 1), found.shape[-1:]
    if found.rows and len(found.shape) > 1 and found.num_faulty == len(found.rows) * found.shape[-1]:
        return f"{some}: {_listed('row', found.rows)} of {num_rows} as a whole"
    if found.columns and len(found.shape) > 1 and found.num_faulty == len(found.columns) * num_rows:
        return f"{some}: {_listed('column', found.columns)} of {num_columns[0]} as a whole"
    shown = ", ".join(str(list(index)) for index in found.indices[:4])
    return f"{some}, first at {shown}" + (" and others" if found.num_faulty > 4 else "")


def _listed(word: str, numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"{word}{'s' if len(numbers) > 1 else ''} {shown}"
