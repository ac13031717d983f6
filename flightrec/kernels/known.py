"""Which records the Triton kernels know, and how the parts of one lie: looked at once for each layout of a record.

Reads shapes, strides and addresses of tensors, never their data; launches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flightrec.kernels import finishing
from flightrec.kernels.formats import CODE_FORMATS
from flightrec.kernels.lying import Way, elements_a_row, is_aligned, is_simple, way_of
from flightrec.kernels.plan import CapturePlan, Destination

CODES = {"float8_e4m3fn": 0, "float8_e5m2": 1, "float4_e2m1fn_x2": 2}
SCALES = {"float32": 0, "float8_e8m0fnu": 1, "float8_e4m3fn": 2}
_SMALL = 4096
"""Words of a component that one program copies on the side."""

_COUNTS = (torch.int32, torch.int64)
_MAX_NUMEL = 1 << 33  # places of scales are found by products of 31 bits


class Grid(NamedTuple):
    """How the words of a scale lie over what it scales, both in two dimensions."""

    row_stride: int
    column_stride: int
    block_rows: int
    block_columns: int


class Known:
    """One record."""

    __slots__ = (
        "codes", "destination", "grid", "is_packed", "more", "other", "parts", "plan", "scale", "small", "valid_rows",
        "way", "x",
    )  # fmt: skip

    def __init__(
        self,
        plan: CapturePlan,
        destination: Destination,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        valid_rows: int | torch.Tensor | None,
    ) -> None:
        self.plan, self.destination, self.x, self.parts, self.valid_rows = plan, destination, x, parts, valid_rows
        self.codes = parts[plan.codes] if plan.codes >= 0 else None
        self.scale = parts[plan.scale] if plan.scale >= 0 else None
        self.other = self.more = -1  # scales: another of one word (if packed, the second level), another of several
        self.grid: Grid | None = None
        self.is_packed = plan.codes >= 0 and (
            plan.format == "float4_e2m1fn_x2" or plan.tensor_scale >= 0 or SCALES.get(self.scale_format, 0) > 0
        )
        """The record is one of ``packed``'s: FP4 codes, scales that are codes, or two levels of scale."""
        self.small: list[int] = []
        self.way = Way.NONE if x is None else way_of(x, is_pair=self.is_pair, is_masked=valid_rows is not None)

    # -- is it a record that the kernels know?

    def is_known(self) -> bool:
        """Whether the kernels give what the reference gives."""
        plan, x, codes = self.plan, self.x, self.codes
        if (x is None and codes is None) or plan.scale_shape:
            return False
        if codes is None and plan.scale >= 0:
            return False
        if x is not None and self.way in (Way.NONE, Way.COPIED):
            return False
        if codes is None and self.way is Way.PLAIN and (plan.history >= 0 or plan.amax >= 0):
            return False
        if codes is not None and not (plan.format in CODES and codes.dtype.itemsize == 1 and is_simple(codes, 4)):
            return False
        if self.valid_rows is not None and not self._knows_rows():
            return False
        return (
            self._knows_places()
            and (self._knows_levels() if self.is_packed else self._knows_scales())
            and self._knows_words()
            and self._knows_pair()
            and self._knows_copies()
        )

    def _knows_places(self) -> bool:
        targets = [self.destination.high_precision if self.way in (Way.WHOLE, Way.ROWS) else None]
        targets += [self.destination.parts[self.plan.codes] if self.codes is not None else None]
        return all(target is None or is_aligned(target) for target in targets)

    def _knows_rows(self) -> bool:
        """Rows must end where words of the passes end, and those of values and codes must be the same."""
        if isinstance(self.valid_rows, torch.Tensor) and self.valid_rows.dtype not in _COUNTS:
            return False
        given = [tensor for tensor in (None if self.way is Way.PLAIN else self.x, self.codes) if tensor is not None]
        if any(not tensor.dim() or elements_a_row(tensor) % 4 for tensor in given):
            return False
        return len({tensor.shape[0] for tensor in given}) <= 1

    def _knows_scales(self) -> bool:
        plan = self.plan
        if plan.scales and self.scale is None:
            return False
        for at, _ in plan.scales:
            scale = self.parts[at]
            if scale.dtype != torch.float32 or not scale.numel() or scale.is_neg():
                return False
            if scale.numel() > 1 and (self.valid_rows is not None or scale.dim() != 2):
                return False
            if at == plan.scale:
                continue
            single = scale.numel() == 1 and self.scale is not None and self.scale.numel() == 1
            if (self.other if single else self.more) >= 0:
                return False
            if single:
                self.other = at
            else:
                self.more = at
        if self.scale is None or self.scale.numel() == 1:
            return plan.inverse in (-1, self.other)
        if plan.inverse >= 0 or self.codes is None:
            return False
        self.grid = _grid(self.scale, self.codes.shape, plan.block_shape)
        return self.grid is not None

    def _knows_levels(self) -> bool:
        """Whether the scales are such as ``packed`` takes: words of any kind that multiply, perhaps a second level."""
        plan, formats = self.plan, dict(self.plan.scales)
        if self.valid_rows is not None or plan.inverse >= 0 or (self.scale is None and plan.scales):
            return False
        for at, name in plan.scales:
            scale = self.parts[at]
            if at not in (plan.scale, plan.tensor_scale) and name not in CODE_FORMATS and not scale.is_floating_point():
                continue  # words whose meaning is not known: a copy
            size = 4 if name == "float32" else 1
            if name not in SCALES or not scale.numel() or scale.dtype.itemsize != size or in_two(scale) is None:
                return False
            if size == 4 and (scale.dtype != torch.float32 or scale.is_neg()):
                return False
            if at in (plan.scale, plan.tensor_scale):
                continue
            if self.more >= 0:
                return False
            self.more = at
        if self.scale is None:
            return plan.tensor_scale < 0
        if not plan.multiply_to_decode or plan.scale not in formats or self.codes is None:
            return False
        self.grid = self._grid_of_levels()
        has_ratio = plan.history >= 0 and self.scale.numel() == 1  # of past amaxes to one scale for all
        return self.grid is not None and not has_ratio and self._knows_second()

    def _grid_of_levels(self) -> Grid | None:
        assert self.scale is not None
        scale, shape, blocks = in_two(self.scale), self.decoded_shape, self.plan.block_shape
        if scale is None or not shape:
            return None
        if self.scale.numel() == 1:
            return Grid(0, 0, math.prod(shape[:-1]), shape[-1])
        if self.scale.dim() < 2 or len(shape) < 2 or len(blocks) == 1:
            return None
        if self.scale.dim() > 2 and self.scale.shape[:-1] != shape[:-1]:
            return None  # in more than two dimensions: a row of words for each row
        return _grid(scale, shape, blocks)

    def _knows_second(self) -> bool:
        """One word for all, or one for each row of the first scale's."""
        plan = self.plan
        if plan.tensor_scale < 0:
            return True
        if plan.tensor_scale not in dict(plan.scales) or self.scale is None:
            return False
        second = self.parts[plan.tensor_scale]
        self.other = plan.tensor_scale
        if second.dtype != torch.float32 or second.numel() == 1:
            return second.dtype == torch.float32
        words = self.scale.shape
        if len(words) < 2 or second.numel() != math.prod(words[:-1]):
            return False
        if second.dim() == 1:
            return True
        return second.shape == (*words[:-1], 1) and second.is_contiguous()

    def _knows_words(self) -> bool:
        for at in (self.plan.history, self.plan.amax):
            if at >= 0:
                words = self.parts[at]
                if words.dtype != torch.float32 or words.dim() > 1 or not words.numel():
                    return False
        return self.plan.amax < 0 or self.parts[self.plan.amax].is_contiguous()

    def _knows_pair(self) -> bool:
        if not (self.plan.pairs and self.x is not None and self.codes is not None):
            return True
        if self.x.numel() != math.prod(self.decoded_shape) or self.x.numel() % 8:
            return False
        if self.grid is None:
            return True
        if self.x.numel() >= _MAX_NUMEL:
            return False
        columns, block = self.decoded_shape[-1], self.grid.block_columns
        return columns % 8 == 0 and (block % 8 == 0 or block >= columns or (self.is_packed and block == 1))

    def _knows_copies(self) -> bool:
        if self.codes is None and self.way is Way.PLAIN:
            return True  # each by itself
        for at, target in enumerate(self.destination.parts):
            part = self.parts[at]
            if target is None or at in (self.plan.codes, self.more) or (at == self.plan.scale and self.grid):
                continue
            if part.numel() <= _SMALL and part.dtype.itemsize == 4 and (part.dim() <= 1 or part.is_contiguous()):
                self.small.append(at)
        return len(self.small) <= finishing.MAX_SMALL

    # -- what there is to do

    @property
    def scale_format(self) -> str:
        """The element format of the scale that decodes."""
        return dict(self.plan.scales).get(self.plan.scale, "")

    @property
    def decoded_shape(self) -> tuple[int, ...]:
        """Of the codes' values: packed codes are two in the last dimension."""
        shape = () if self.codes is None else tuple(self.codes.shape)
        return (*shape[:-1], 2 * shape[-1]) if shape and self.plan.format == "float4_e2m1fn_x2" else shape

    @property
    def counts_zero_scales(self) -> bool:
        """Whether zero scales are a fault that is counted: a word that is a code may be 0, what stands over it not."""
        return SCALES.get(self.scale_format, 0) == 0 or self.plan.tensor_scale >= 0

    @property
    def is_pair(self) -> bool:
        """Whether values and codes are to be looked at together."""
        return self.plan.pairs and self.x is not None and self.codes is not None

    @property
    def others(self) -> list[int]:
        """Parts that are copied and no more, each by itself."""
        own = {self.plan.codes, self.more, *self.small, *([self.plan.scale] if self.grid else ())}
        return [at for at, target in enumerate(self.destination.parts) if target is not None and at not in own]


def _grid(scale: torch.Tensor, shape: Sequence[int], block_shape: Sequence[int]) -> Grid | None:
    """How a two-dimensional scale lies over a tensor of ``shape``, leading dimensions flattened; None if unclear."""
    if len(shape) < 2:
        return None
    sizes = (math.prod(shape[:-1]), shape[-1])
    blocks = []
    given = block_shape[-2:] if len(block_shape) > 1 else (0, 0)
    for size, count, block in zip(sizes, scale.shape, given, strict=True):
        if count == 1:
            blocks.append(size)
        elif count == size:
            blocks.append(1)
        elif block * count >= size:
            blocks.append(block)
        elif size % count == 0:
            blocks.append(size // count)
        else:
            return None
    return Grid(*scale.stride(), *blocks)


def in_two(words: torch.Tensor) -> torch.Tensor | None:
    """A view in two dimensions, leading ones flattened; None if there is none."""
    if words.dim() == 2:
        return words
    try:
        return words.view(-1, words.shape[-1] if words.dim() else 1)
    except RuntimeError:
        return None
