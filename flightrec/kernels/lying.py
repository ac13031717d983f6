"""How a tensor of values lies in memory, and by which kernel it is therefore read.

Looks at shapes, strides and addresses, never at data; launches nothing.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import torch

from flightrec.kernels.pieces import is_expanded

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Values that ``fused`` reads in vectors."""

NUMBERS = {
    **KINDS,
    torch.float64: 3,
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), 4),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), 5),
    torch.bool: 6,
}
"""All that ``plain`` reads, and its number for them."""

MAX_DENSE_BYTES = 256 << 20
"""What is put in order in memory of its own before it is read, at most."""

_FEW = 1 << 14
"""Elements that ``plain`` reads in any order, rather than with a copy before."""

_MAX_EXPANDED = 1 << 31
_VECTOR_BYTES = 16


class Way(enum.Enum):
    """What reads a tensor of values."""

    WHOLE = enum.auto()  # ``fused``, as one row of vectors
    ROWS = enum.auto()  # ``fused``, as rows of vectors that lie apart
    PLAIN = enum.auto()  # ``plain``
    COPIED = enum.auto()  # whichever of these reads a dense copy
    NONE = enum.auto()


def way_of(x: torch.Tensor, *, is_pair: bool, is_masked: bool) -> Way:
    """The way that costs least; ``is_pair``: beside its codes, which is for dense tensors; ``is_masked``: by rows."""
    if x.dtype not in NUMBERS or x.is_neg():
        return Way.NONE
    in_vectors = x.dtype in KINDS and not (is_masked and (not x.dim() or elements_a_row(x) % 4))
    if in_vectors and is_simple(x, 1 if x.dtype is torch.float32 else 2):
        return Way.WHOLE
    if x.is_contiguous():
        return Way.NONE if is_pair else Way.PLAIN
    axes = axes_of(x)
    repeats = is_expanded(x)
    if not is_pair:
        if in_vectors and rows_of(x) is not None:
            return Way.ROWS
        if len(axes) <= 3 and x.numel() <= (_MAX_EXPANDED if repeats else _FEW):
            return Way.PLAIN
    return Way.NONE if repeats or x.nbytes > MAX_DENSE_BYTES else Way.COPIED


def axes_of(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of as few dimensions as can be, in elements, which list the same elements in the same order."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes


class Rows(NamedTuple):
    """Dense rows that lie apart, in two dimensions or three.

    Attributes:
        length: vectors of 16 bytes in a row.
        apart: vectors from the beginning of a row to that of the next.
        num: rows after which there is a jump.
        jump: how many vectors farther the next row then begins.
    """

    length: int
    apart: int
    num: int
    jump: int


def rows_of(x: torch.Tensor) -> Rows | None:
    """How its rows lie, if they are of whole vectors; otherwise None."""
    axes = axes_of(x)
    if not 2 <= len(axes) <= 3 or x.dtype not in KINDS or not x.numel() or x.data_ptr() % _VECTOR_BYTES:
        return None
    (num_outer, outer), (num, apart), (length, stride) = [(1, 0)] * (3 - len(axes)) + axes
    a_vector = _VECTOR_BYTES // x.dtype.itemsize
    if stride != 1 or length % a_vector or apart % a_vector or outer % a_vector:
        return None
    jump = outer - num * apart if num_outer > 1 else 0
    return Rows(length // a_vector, apart // a_vector, num, jump // a_vector)


def is_simple(tensor: torch.Tensor, multiple: int) -> bool:
    """Whether it is dense, aligned to 16 bytes, and has a number of elements that ``multiple`` divides."""
    return (
        tensor.numel() > 0
        and tensor.numel() % multiple == 0
        and tensor.is_contiguous()
        and tensor.data_ptr() % _VECTOR_BYTES == 0
        and not tensor.is_neg()
    )


def is_aligned(target: torch.Tensor) -> bool:
    """Whether every slot's place of a copy starts at a multiple of 16 bytes."""
    return target.data_ptr() % 16 == 0 and target.stride(0) * target.dtype.itemsize % 16 == 0


def elements_a_row(tensor: torch.Tensor) -> int:
    """Elements of one index of dimension 0."""
    return math.prod(tensor.shape[1:])
