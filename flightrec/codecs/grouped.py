"""Grouped tensors: many of one format in one buffer, split by rows or columns that may be known to the device only.

The buffers are kept as they are, one-dimensional, and are cut here. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base, scaled, te_layout
from flightrec.codecs.sides import Array, Side
from flightrec.errors import FormatError

SCHEME = "grouped"
MAX_MEMBERS = 1 << 20
Decoder = Callable[[Side], npt.NDArray[np.float32]]


def decode_members(side: Side, decoders: dict[str, Decoder]) -> list[npt.NDArray[np.float32]]:
    """The members' numbers, float32 [rows, columns] each.

    Needs ``data`` (one buffer), ``scale_inv`` and ``amax`` as the members' format has them, and, where members differ,
    ``first_dims`` and ``last_dims`` (integers, one a member); ``tensor_offsets`` (in elements) if there are gaps.
    Metadata: ``member`` (its ``scheme``), ``num_tensors``, ``group_shape`` (rows and columns of all together, -1
    for the one that the splits or the buffer tell).

    Args:
        side: of the grouped tensor.
        decoders: by scheme, for the members.

    Raises:
        FormatError: something is missing, or a buffer is too short.
    """
    member = str(side.metadata.get("member", ""))
    if member not in decoders:
        raise FormatError(f"grouped tensor of members {member!r}; expected one of {', '.join(sorted(decoders))}")
    shapes = member_shapes(side)
    starts = _starts(side, shapes)
    cut = _Cutter(side, member)
    return [decoders[member](cut.member(shape, start)) for shape, start in zip(shapes, starts, strict=True)]


def join(members: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Members below each other where they have as many columns, else their elements one after the other."""
    if not members:
        return np.zeros(0, np.float32)
    if len({member.shape[1:] for member in members}) == 1:
        return np.concatenate(members)
    return np.concatenate([member.reshape(-1) for member in members])


def member_shapes(side: Side) -> list[tuple[int, int]]:
    """Rows and columns of each member (``FormatError`` where they cannot be told)."""
    num = side.metadata.get("num_tensors")
    group = side.metadata.get("group_shape")
    if not isinstance(num, int) or not isinstance(group, (list, tuple)) or len(group) != 2:
        raise FormatError("grouped tensor: metadata num_tensors or group_shape (rows, columns) is missing")
    if not 0 <= num <= MAX_MEMBERS:
        raise FormatError(f"grouped tensor of {num} members, expected at most {MAX_MEMBERS}")
    rows, columns = side.components.get("first_dims"), side.components.get("last_dims")
    same_rows = _rows_in_buffer(side, group[1]) // max(num, 1) if columns is None else group[0]
    firsts = [int(same_rows)] * num if rows is None else [int(size) for size in rows]
    lasts = [int(group[1])] * num if columns is None else [int(size) for size in columns]
    if len(firsts) != num or len(lasts) != num or min(firsts + lasts, default=0) < 0:
        raise FormatError(f"grouped tensor of {num} members: first_dims {firsts}, last_dims {lasts}")
    return list(zip(firsts, lasts, strict=True))


def _rows_in_buffer(side: Side, columns: int) -> int:
    per_item = base.element_format(side.formats.get("data") or side.format).elements_per_item
    return int(side.codes().size) * per_item // max(int(columns), 1)


def _starts(side: Side, shapes: list[tuple[int, int]]) -> list[int]:
    offsets = side.components.get("tensor_offsets")
    if offsets is None:
        return [sum(math.prod(shape) for shape in shapes[:at]) for at in range(len(shapes))]
    if offsets.size < len(shapes):
        raise FormatError(f"grouped tensor of {len(shapes)} members has {offsets.size} tensor_offsets")
    return [int(start) for start in offsets.reshape(-1)[: len(shapes)]]


class _Cutter:
    """Cuts the members' arrays out of the buffers, in order."""

    def __init__(self, side: Side, member: str) -> None:
        self._side, self._scheme = side, member
        self._columnwise = side.name == "columnwise"
        self._index = self._next_scale = self._next_amax = 0
        self._buffer = side.codes().reshape(-1)
        self._per_item = base.element_format(side.formats.get("data") or side.format).elements_per_item

    def member(self, shape: tuple[int, int], start: int) -> Side:
        """The next member, as its codec takes it."""
        rows, columns = shape
        transposed = self._columnwise and self._scheme in ("float8", "float8_block", "nvfp4")
        held = (columns, rows) if transposed else (rows, columns)
        start, length = start // self._per_item, rows * columns // self._per_item
        codes = _slice(self._buffer, start, length, self._side.full_name("data"))
        codes = codes.reshape(held[0], length // held[0] if held[0] else held[1] // self._per_item)
        if transposed and self._scheme != "nvfp4":
            codes = codes.T
        components: dict[str, Array] = {"data": codes}
        blocks = self._add_scales(components, rows, columns)
        self._index += 1
        metadata: dict[str, Any] = {**self._side.metadata, "transposed": transposed and self._scheme == "nvfp4"}
        return replace(self._side, components=components, block_shape=blocks, metadata=metadata, shape=shape)

    def _add_scales(self, components: dict[str, Array], rows: int, columns: int) -> tuple[int, ...]:
        if self._scheme == "identity":
            return ()
        if self._scheme == "float8":
            components["scale_inv"] = self._take("scale_inv", self._index, 1)
            return ()
        two_d = bool(self._side.metadata.get("two_d"))
        held = te_layout.scale_shape(self._scheme, rows, columns, columnwise=self._columnwise, two_d=two_d)
        name = scaled.SWIZZLED if scaled.SWIZZLED in self._side.components else "scale_inv"
        raw = self._take(name, self._next_scale, math.prod(held)).reshape(held)
        self._next_scale += math.prod(held)
        logical, blocks = te_layout.logical_scale(
            self._scheme, raw, rows, columns, columnwise=self._columnwise, two_d=two_d
        )
        components[name] = raw if name == scaled.SWIZZLED else logical
        if self._scheme == "nvfp4":
            is_one_each = (
                self._columnwise and self._side.need("amax", "NVFP4").size == self._side.metadata["num_tensors"]
            )
            lines = columns if self._columnwise else rows
            count = lines if self._side.metadata.get("row_scaled") and not is_one_each else 1
            components["amax"] = self._take("amax", self._next_amax, count)
            self._next_amax += count
        return blocks

    def _take(self, name: str, start: int, length: int) -> Array:
        whole = self._side.need(name, f"grouped tensor of {self._scheme} members").reshape(-1)
        return _slice(whole, start, length, self._side.full_name(name))


def _slice(buffer: Array, start: int, length: int, name: str) -> Array:
    if start < 0 or start + length > buffer.size:
        raise FormatError(
            f"grouped tensor: {name!r} holds {buffer.size} items, a member needs [{start}, {start + length})"
        )
    return buffer[start : start + length]
