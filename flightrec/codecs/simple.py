"""Brings one side of a quantized tensor to one rule that a few lines can apply: codes times, or over, block scales.

Second scales are multiplied in, the tensor cores' order is undone, padding is gone. What scripts that are exported
decode with; the codecs stay the reference. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base, grouped, mxfp8, nvfp4, scaled, sides
from flightrec.codecs.sides import Side
from flightrec.errors import FormatError


@dataclass(frozen=True)
class Simple:
    """How to decode codes.

    Attributes:
        format: element format of the codes.
        codes_shape: of the codes in elements, as they are held.
        scales: float32, one word, or one a block in the codes' own axes; None: the codes are the numbers.
        block_shape: elements that share a scale, an entry an axis of the codes; empty for one word.
        divide: the codes are divided by the scales instead.
        transposed: the last axis of the tensor is held in front.
        shape: logical shape of the tensor.
    """

    format: str
    codes_shape: tuple[int, ...]
    scales: npt.NDArray[np.float32] | None
    block_shape: tuple[int, ...]
    divide: bool
    transposed: bool
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """All but the scales, as plain JSON data."""
        return {
            "format": self.format,
            "codes_shape": list(self.codes_shape),
            "block_shape": list(self.block_shape),
            "divide": self.divide,
            "transposed": self.transposed,
            "shape": list(self.shape),
        }


def simplify(side: Side) -> Simple:
    """Find the rule of one side.

    Raises:
        FormatError: its scheme is another (groups, zero points), or something is missing.
    """
    scheme = side.metadata.get("scheme")
    if scheme == grouped.SCHEME or "zero_point" in side.components:
        raise FormatError(f"{scheme or 'codes with a zero point'}: no rule of codes and block scales")
    stored, name = side.codes(), side.formats.get("data") or side.format
    moved = bool(side.metadata.get("transposed"))
    codes_shape = tuple(stored.shape)
    if base.element_format(name).elements_per_item == 2:
        codes_shape = (*codes_shape[:-1], codes_shape[-1] * 2)
        held = side.shape if side.shape is None or not moved else (*side.shape[-1:], *side.shape[:-1])
        if held is not None and held[:-1] == codes_shape[:-1] and held[-1] == codes_shape[-1] - 1:
            codes_shape = held
    for scale in ("scale_inv", scaled.SWIZZLED):
        words = {nvfp4.SCHEME: nvfp4.SCALE_FORMAT, mxfp8.SCHEME: mxfp8.SCALE_FORMAT}
        if scheme in words:
            side = side.with_format(scale, words[str(scheme)])
    shape = side.shape or ((*codes_shape[1:], codes_shape[0]) if moved else codes_shape)
    scales = None if side.scale_direction == sides.NONE or scheme == "identity" else _scales(side, codes_shape)
    blocks: tuple[int, ...] = ()
    if scales is not None and scales.size > 1:
        blocks = _blocks(side, scales, codes_shape)
        scales = scales[tuple(slice(-(-size // block)) for size, block in zip(codes_shape, blocks, strict=True))]
    return Simple(name, codes_shape, scales, blocks, side.scale_direction == sides.ENCODE, moved, shape)


def apply(simple: Simple, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Decode stored codes by the rule, float32 in the logical shape; what the exported script does with torch."""
    packed = base.element_format(simple.format).elements_per_item == 2
    values = base.decode(stored, simple.format, num_columns=simple.codes_shape[-1] if packed else None)
    values = values.astype(np.float32, copy=False)
    if simple.scales is not None:
        spread = simple.scales
        for axis, block in enumerate(simple.block_shape):
            spread = np.take(np.repeat(spread, block, axis=axis), range(simple.codes_shape[axis]), axis=axis)
        spread = spread.reshape(()) if spread.size == 1 else spread
        with np.errstate(all="ignore"):
            values = values / spread if simple.divide else values * spread
    if simple.transposed:
        values = np.moveaxis(values, 0, -1)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(simple.shape)


def _scales(side: Side, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The scales with the one over them, if there is one, in the order in which the libraries round."""
    found = scaled.block_scales(side, shape)
    if side.metadata.get("scheme") == nvfp4.SCHEME and "amax" in side.components:
        factor = np.float32(1.0 / (6.0 * float(side.metadata.get("e4m3_max") or 448)))
        return np.asarray(found * scaled.over_rows(side.components["amax"].astype(np.float32), shape) * factor)
    if "tensor_scale_inv" in side.components:
        second = scaled.over_rows(side.components["tensor_scale_inv"].astype(np.float32), shape)
        return np.asarray(found * second, dtype=np.float32)
    return found


def _blocks(side: Side, scales: npt.NDArray[np.float32], shape: tuple[int, ...]) -> tuple[int, ...]:
    if scales.ndim != len(shape):
        raise FormatError(f"scales of shape {scales.shape} over codes of shape {shape}: no rule of blocks")
    if side.block_shape:
        return (*(1,) * (len(shape) - len(side.block_shape)), *side.block_shape)
    return tuple(-(-size // count) for size, count in zip(shape, scales.shape, strict=True))
