"""Quantizes again, with the recorded scales: which codes each element may have.

A ``Plan`` says of one side of a quantized tensor how its codes lie, in rows and columns, and which arithmetic made
them. What hardware and numpy may do differently is part of the answer, as an interval of codes:

- exact: FP8 under one scale, in blocks and MXFP8 (one float32 product, rounded to nearest even, saturating), NVFP4 in
  Transformer Engine's and torchao's own order of operations. Stochastic rounding: one of the two neighbours.
- ``TOLERANCE`` where the order of operations is not known (a class that is none of theirs, torchao's kernels, a scale
  of which only the inverse is recorded and that the tensor does not explain): a value so near to the midpoint of two
  codes that three float32 roundings can decide may be either of them.
- ``HADAMARD_TOLERANCE`` after a random Hadamard transform, whose 16 products the kernel sums in an order of its own and
  may round to bfloat16.
- NaN is NaN with any sign; FP4 and FP6 have none, there a NaN is not compared. Denormal values may become zero (FTZ),
  and a zero of FP4 may have either sign.

Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base, mxfp8, nvfp4, quantized, rounding, scale_rules, scaled, sides
from flightrec.codecs.rounding import Floats, Grid, Ranks
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError

TOLERANCE = 2.0**-22
HADAMARD_TOLERANCE = 2.0**-7
_MAX_CANDIDATES = 8
_FREE_E8M0 = (2.0**127, np.inf)  # Transformer Engine's reciprocal of these scales is not a number of theirs
_TORCHAO = {"Float8TrainingTensor": "torchao_float8", "MXTensor": "torchao_mx", "NVFP4Tensor": "torchao_nvfp4"}


@dataclass(frozen=True)
class Plan:
    """How one side was quantized.

    Attributes:
        family: ``float8``, ``float8_block``, ``mxfp8``, ``nvfp4`` (Transformer Engine), ``torchao_float8``,
            ``torchao_mx``, ``torchao_nvfp4``, or ``general``: the general rule, by whatever made it.
        side: its arrays and words.
        grid: the codes' format.
        rows: of the codes, all leading axes together.
        columns: of the codes, in elements.
        block: rows and columns that share a scale.
        scales: float32 [blocks down, blocks across], as recorded, in the side's direction.
        moved: the codes are those of the transpose.
    """

    family: str
    side: Side
    grid: Grid
    rows: int
    columns: int
    block: tuple[int, int]
    scales: Floats
    moved: bool

    @property
    def quantizer(self) -> Mapping[str, Any]:
        """The quantizer's attributes, as recorded."""
        words = self.side.metadata.get("quantizer")
        return words if isinstance(words, Mapping) else {}

    @property
    def is_stochastic(self) -> bool:
        """Whether codes were rounded by chance."""
        return bool(self.quantizer.get("stochastic_rounding"))

    @property
    def is_hadamard(self) -> bool:
        """Whether values were transformed first."""
        return bool(self.side.metadata.get("rht"))

    @property
    def row_step(self) -> int:
        """Rows are taken in multiples of this, so that no block is cut."""
        if self.family == "nvfp4":  # whose blocks may be of 16 x 16, with the scales of each row
            return nvfp4.HADAMARD_SIZE
        return self.block[0] if self.block[0] < self.rows else 1

    def lay(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A view of a high-precision array, in its logical shape, in the codes' rows and columns."""
        flat = stored.reshape(-1, stored.shape[-1]) if stored.ndim else stored.reshape(1, 1)
        return flat.T if self.moved else flat

    def codes(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Codes of some rows, one a byte."""
        stored = self.side.codes()
        part = np.ascontiguousarray(stored.reshape(-1, stored.shape[-1] if stored.ndim else 1)[start:stop])
        if self.grid.bits == 4:
            return base.unpack_fp4(part, self.columns)
        return part & np.uint8((1 << self.grid.bits) - 1) if self.grid.bits == 6 else part

    def over_elements(self, blocks: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[Any]:
        """Words of blocks (all of them) for each element of some rows; one that is for all stays one."""
        if blocks.size == 1:
            return blocks.reshape(1, 1)
        first, last = start // self.block[0], -(-stop // self.block[0])
        part = np.repeat(blocks[first:last], self.block[0], axis=0)[start - first * self.block[0] :][: stop - start]
        if blocks.shape[1] == 1:
            return part
        return np.repeat(part, self.block[1], axis=1)[:, : self.columns]

    def second(self, start: int, stop: int) -> Floats | None:
        """NVFP4's second word (``amax``, or torchao's scale) for some rows, [1 or rows, 1]."""
        name = "amax" if self.family == "nvfp4" and "amax" in self.side.components else "tensor_scale_inv"
        word = self.side.components.get(name)
        if word is None:
            return None
        flat = np.asarray(word, dtype=np.float32).reshape(-1, 1)
        return flat if flat.size == 1 else flat[start:stop]

    def transform(self, values: Floats) -> Floats:
        """What the quantizer made of the values (in the codes' rows) before it looked for scales."""
        if not self.is_hadamard:
            return values
        matrix = nvfp4.hadamard(int(self.side.metadata.get("rht_sign_mask") or 0))
        with np.errstate(all="ignore"):
            return (values.reshape(-1, nvfp4.HADAMARD_SIZE) @ matrix).reshape(values.shape)


@dataclass(frozen=True)
class Admissible:
    """Codes that elements may have: ranks from ``low`` to ``high``; NaN where ``nan``; any where ``free``."""

    low: Ranks
    high: Ranks
    nan: npt.NDArray[np.bool_]
    free: npt.NDArray[np.bool_]

    def differ(self, codes: npt.NDArray[np.uint8], of: Grid) -> npt.NDArray[np.bool_]:
        """Where codes are none of these."""
        ranks = of.rank(codes)
        if of.has_nan:
            is_nan = np.isnan(codes.view(of.dtype).astype(np.float32))
            wrong = np.where(self.nan | is_nan, self.nan != is_nan, (ranks < self.low) | (ranks > self.high))
        else:
            wrong = (ranks < self.low) | (ranks > self.high)
        return np.asarray(wrong & ~self.free)


def plan_of(
    components: Mapping[str, npt.NDArray[Any]],
    info: Mapping[str, Any],
    *,
    formats: Mapping[str, str],
    shape: tuple[int, ...],
    side: str,
) -> Plan:
    """How a side was quantized; arguments as ``quantized.dequantize``.

    Raises:
        FormatError: this cannot be quantized again; the message says why.
    """
    taken = sides.take(components, info, formats=formats, shape=shape, side=side)
    family = _family(taken, info)
    if family in ("mxfp8", "nvfp4"):
        element = mxfp8.SCALE_FORMAT if family == "mxfp8" else nvfp4.SCALE_FORMAT
        for name in ("scale_inv", scaled.SWIZZLED):
            taken = taken.with_format(name, element)
    of = rounding.grid(taken.formats.get("data") or taken.format)
    stored = taken.codes()
    columns = (stored.shape[-1] if stored.ndim else 1) * (2 if of.bits == 4 else 1)
    moved = bool(taken.metadata.get("transposed")) and family != "float8"
    logical = taken.shape or shape
    if of.bits == 4:
        wanted = math.prod(logical[:-1]) if moved else (logical[-1] if logical else 1)
        columns = wanted if wanted in (columns, columns - 1) else columns
    rows = math.prod(stored.shape[:-1])
    if rows * columns != math.prod(logical):
        raise FormatError(f"codes of {rows} x {columns} in a tensor of shape {logical}")
    code_shape = (*stored.shape[:-1], columns) if stored.ndim else (1,)
    scales = scaled.block_scales(taken, code_shape)
    block, scales = _in_two_dimensions(scales, code_shape, taken.block_shape)
    return Plan(family, taken, of, rows, columns, block, scales, moved)


def _family(side: Side, info: Mapping[str, Any]) -> str:
    scheme = side.metadata.get("scheme")
    if scheme in ("grouped", "identity"):
        raise FormatError(f"of {scheme} tensors no high-precision partner is recorded that codes could be made from")
    if scheme is not None:
        if scheme not in quantized.DECODERS:
            raise FormatError(f"scheme {scheme!r} is not known to this version")
        return str(scheme)
    if "zero_point" in side.components:
        raise FormatError("integer codes with a zero point are not quantized again")
    name = str(info.get("class_name", ""))
    if name.startswith("torchao."):
        return _TORCHAO.get(name.rpartition(".")[2], "general")
    return "general"


def _in_two_dimensions(
    scales: Floats, shape: tuple[int, ...], block_shape: tuple[int, ...]
) -> tuple[tuple[int, int], Floats]:
    """Blocks in (rows, columns), the leading axes taken together, and the scales without padding in [down, across]."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if scales.size == 1:
        return (max(rows, 1), max(columns, 1)), scales.reshape(1, 1)
    if not block_shape:
        full = np.broadcast_to(scaled.expand_scale(scales, shape), shape)
        return (1, 1), full.reshape(rows, columns)
    blocks = (*(1,) * (len(shape) - len(block_shape)), *block_shape)
    needed = tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))
    if scales.shape != needed:
        if scales.ndim != len(shape) or any(h < n for h, n in zip(scales.shape, needed, strict=True)):
            scales = scales.reshape(needed) if scales.size == math.prod(needed) else scales
        scales = scales[tuple(slice(n) for n in needed)]
    if scales.shape != needed:
        raise FormatError(f"codes of shape {shape} in blocks of {blocks} need scales of {needed}, got {scales.shape}")
    lead = blocks[:-1]
    if all(block >= size for block, size in zip(lead, shape[:-1], strict=True)):
        down = rows
    elif all(block == 1 for block in lead[:-1]) and (len(lead) == 1 or shape[-2] % lead[-1] == 0):
        down = lead[-1]
    else:
        raise FormatError(f"blocks of {blocks} over codes of shape {shape} are not understood")
    return (max(down, 1), blocks[-1]), scales.reshape(-1, needed[-1])


def candidates(plan: Plan) -> list[Floats]:
    """Scales that may have encoded a tensor that has one: the recorded one, or those whose inverse was recorded."""
    word = plan.scales.reshape(())
    if plan.side.scale_direction == sides.ENCODE:
        return [word]
    with np.errstate(all="ignore"):
        guess = np.float32(1) / word
        around = [guess]
        for direction in (np.float32(np.inf), np.float32(0)):
            at = guess
            for _ in range(_MAX_CANDIDATES):
                at = np.nextafter(at, direction)
                around.append(at)
        recorded = plan.side.components.get("scale")
        if recorded is not None and np.size(recorded) == 1:
            around.insert(0, np.asarray(recorded, np.float32).reshape(()))
        found = [np.asarray(scale) for scale in around if np.float32(1) / scale == word]
    return list({float(scale): scale for scale in found}.values()) or [np.asarray(guess)]


def admissible(plan: Plan, values: Floats, start: int, stop: int, *, encode: Floats | None = None) -> Admissible:
    """Codes that some rows may have.

    Args:
        plan: of the side.
        values: float32 [rows, columns], what was quantized, in the codes' rows; after ``Plan.transform``.
        start: first of the rows.
        stop: behind the last of the rows.
        encode: scales that multiply, where they are known exactly: one, or [blocks down, blocks across].
    """
    with np.errstate(all="ignore"):
        scaled_values, tolerance, free = _scaled(plan, values, start, stop, encode)
        nan = np.isnan(scaled_values)
        if plan.is_stochastic:
            width = _width(plan, scaled_values, tolerance)
            low, high = plan.grid.neighbours(scaled_values - width)[0], plan.grid.neighbours(scaled_values + width)[1]
        else:
            low, high = plan.grid.interval(scaled_values, _width(plan, scaled_values, tolerance))
        either = rounding.is_denormal(values)
        if not plan.grid.has_nan:
            free, either = free | nan, either | (scaled_values == 0)
        if plan.family in ("mxfp8", "torchao_mx"):  # 2^-127: taken as 1, as 2^-126, or as itself
            tiny = plan.over_elements(plan.scales, start, stop) == np.float32(2.0**-127)
            either = either | (tiny & (values != 0))
        low = np.where(either, np.minimum(low, np.int16(-1)), low)
        high = np.where(either, np.maximum(high, np.int16(0)), high)
    return Admissible(low, high, nan, np.broadcast_to(free, low.shape))


def _width(plan: Plan, values: Floats, tolerance: float) -> Floats:
    """How far a kernel's scaled values may lie from these.

    After a Hadamard transform also by what the order of its float32 sums changes: 16 roundings of sums that are up to
    16 times the largest result, since the transform keeps the norm and its terms add up to at most 4 norms.
    """
    width = np.abs(values) * np.float32(tolerance)
    if plan.is_hadamard:
        blocks = np.abs(values).reshape(len(values), -1, nvfp4.HADAMARD_SIZE)
        width += np.repeat(np.fmax.reduce(blocks, axis=2), nvfp4.HADAMARD_SIZE, axis=1) * np.float32(2.0**-17)
    return np.asarray(np.where(np.isfinite(values), width, 0), dtype=np.float32)


def _scaled(
    plan: Plan, values: Floats, start: int, stop: int, encode: Floats | None
) -> tuple[Floats, float, npt.NDArray[np.bool_]]:
    """The values in the codes' own range, the tolerance, and where nothing can be said."""
    nothing = np.zeros((1, 1), dtype=bool)
    if encode is not None:
        return values * plan.over_elements(encode, start, stop), 0.0, nothing
    scales = plan.over_elements(plan.scales, start, stop)
    if plan.side.scale_direction == sides.NONE:
        return values, 0.0, nothing
    if plan.side.scale_direction == sides.ENCODE:
        return values * scales, 0.0 if plan.family == "torchao_float8" else TOLERANCE, nothing
    if plan.family == "mxfp8":
        return values / scales, 0.0, (scales == _FREE_E8M0[0]) | np.isnan(scales)
    if plan.family == "torchao_mx":
        return values / scales, 0.0, nothing
    second = plan.second(start, stop)
    if plan.family == "nvfp4" and "amax" in plan.side.components:
        assert second is not None
        over = scale_rules.nvfp4_global_scale(second, float(plan.side.metadata.get("e4m3_max") or 448))
        multiplier = np.minimum(np.float32(1) / (scales * (np.float32(1) / over)), np.float32(scale_rules.FLOAT32_MAX))
        return values * multiplier, HADAMARD_TOLERANCE if plan.is_hadamard else 0.0, nothing
    if plan.family == "torchao_nvfp4":
        first = np.float32(1) if second is None else np.float32(1) / second
        return values * (first / scales), TOLERANCE if plan.side.metadata.get("use_triton_kernel") else 0.0, nothing
    if second is not None:
        scales = scales * second
    return values / scales, TOLERANCE, nothing
