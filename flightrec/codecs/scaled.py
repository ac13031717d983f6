"""The general rule of scaled formats: codes and scales become the numbers that they stand for.

Decode the codes, decode the scales (which may be FP8 or E8M0 codes themselves), bring the scales to the codes' shape,
and divide by ``scale`` (it multiplies to encode) or multiply by ``scale_inv`` (it multiplies to decode). The codecs of
the families check what theirs must have, and end here. Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import affine, sides, swizzle
from flightrec.codecs.sides import DECODE, ENCODE, NONE, Side
from flightrec.errors import FormatError

_SCALES = {ENCODE: "scale", DECODE: "scale_inv"}
_TENSOR_SCALE = "tensor_scale_inv"
_ZERO_POINT = "zero_point"
SWIZZLED = "swizzled_scale_inv"
COMPONENTS = ("data", *_SCALES.values(), SWIZZLED, _TENSOR_SCALE, _ZERO_POINT)
"""Names, without a side's prefix, of what this rule looks at."""


def component_names(present: Iterable[str], side: str = "rowwise") -> list[str]:
    """Give those of the present components that ``dequantize`` looks at (``FormatError`` for an unknown side)."""
    prefix = sides.prefix_of(side)
    return [name for name in sides.names_of(present, side) if name.removeprefix(prefix) in COMPONENTS]


def dequantize(
    components: Mapping[str, npt.NDArray[Any]],
    info: Mapping[str, Any],
    *,
    formats: Mapping[str, str] | None = None,
    shape: tuple[int, ...] | None = None,
    side: str = "rowwise",
) -> npt.NDArray[np.float32]:
    """Turn codes and scales into numbers.

    Args:
        components: stored arrays: ``data`` and, by ``scale_direction``, ``scale`` or ``scale_inv``; with a
            ``zero_point`` the codes are integers, see ``affine``; optionally
            ``tensor_scale_inv`` (a second scale over all blocks, or one a row; float32, multiplies to decode). Prefixed
            with ``columnwise_`` for the columnwise side.
        info: ``QuantizerInfo.to_json()``: ``format``, ``scale_direction``, ``block_shape``, ``metadata``. Metadata
            ``columnwise_transposed`` says that the columnwise codes have the last axis in front, ``swizzled`` that
            scales lie in the tensor cores' order.
        formats: element format of each component; what it lacks is ``format`` for the codes and the native type for
            floating-point scales.
        shape: logical shape, needed where packed codes or padding leave it open.
        side: ``rowwise`` or ``columnwise``.

    Returns:
        float32, in the logical shape. A zero or infinite scale gives what IEEE arithmetic gives, without a warning.

    Raises:
        FormatError: a component or a word is missing or unknown, or shapes do not fit.
    """
    return apply(sides.take(components, info, formats=formats, shape=shape, side=side), info)


def apply(side: Side, info: Mapping[str, Any] | None = None) -> npt.NDArray[np.float32]:
    """The general rule for one side; ``info`` as ``affine.dequantize`` takes it. Raises as ``dequantize``."""
    side.codes()
    if _ZERO_POINT in side.components:
        return affine.dequantize(side.components, info or {"metadata": side.metadata}, shape=side.shape)
    moved = bool(side.metadata.get("transposed"))
    shape = side.shape
    values = sides.read_codes(side, shape if shape is None or not moved else (*shape[-1:], *shape[:-1]))
    values = scale_codes(values, side)
    if moved and values.ndim:
        values = np.moveaxis(values, 0, -1)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(values.shape)


def scale_codes(values: npt.NDArray[np.float32], side: Side) -> npt.NDArray[np.float32]:
    """Multiply or divide the codes' own numbers, in their stored shape, by the scales.

    Raises:
        FormatError: scales are missing, of an unknown direction, or do not fit.
    """
    if side.scale_direction == NONE:
        return values
    scale = expand_scale(block_scales(side, values.shape), values.shape, side.block_shape)
    with np.errstate(all="ignore"):
        if _TENSOR_SCALE in side.components:  # the two scales first: that is how the libraries round
            scale = scale * over_rows(side.components[_TENSOR_SCALE].astype(np.float32), values.shape)
        scaled = values / scale if side.scale_direction == ENCODE else values * scale
    return np.asarray(scaled, dtype=np.float32)


def block_scales(side: Side, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The scales' numbers, out of the tensor cores' order where they are held in it; ``shape`` is the codes'.

    Raises:
        FormatError: they are missing, of no known direction, or not as many as blocks and tiles need.
    """
    if side.scale_direction not in _SCALES:
        raise FormatError(
            f"scale_direction {side.scale_direction!r} is not understood; expected {ENCODE}, {DECODE} or {NONE}"
        )
    name = _SCALES[side.scale_direction]
    if SWIZZLED in side.components and name not in side.components:
        name = SWIZZLED
    elif not side.metadata.get("swizzled"):
        return sides.read_scale(side, name)
    stored, blocks = sides.read_scale(side, name), side.block_shape
    if len(blocks) < 2 or len(blocks) > len(shape) or sum(block != 1 for block in blocks) != 1:
        raise FormatError(f"swizzled scales of blocks {blocks} over codes of shape {shape} are not understood")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if blocks[-1] == 1:  # the blocks run down the columns, and the tiles are those of the transposed scales
        return swizzle.unswizzle(stored, columns, -(-rows // blocks[-2])).T
    found = swizzle.unswizzle(stored, rows, -(-columns // blocks[-1]))
    return found.reshape(*shape[:-1], found.shape[-1])


def over_rows(scale: npt.NDArray[np.float32], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A second scale in a shape that multiplies codes of ``shape``: one of all, or one a row.

    Raises:
        FormatError: there are as many as neither.
    """
    if scale.size == 1:
        return scale.reshape(())
    if scale.size != math.prod(shape[:-1]):
        raise FormatError(f"{scale.size} scales over all blocks, expected one, or one for each row of {shape}")
    return scale.reshape(*shape[:-1], 1)


def expand_scale(
    scale: npt.NDArray[Any], shape: tuple[int, ...], block_shape: tuple[int, ...] = ()
) -> npt.NDArray[Any]:
    """Bring scales to the shape of the codes.

    Args:
        scale: one number, broadcastable to ``shape``, or one number a block.
        shape: of the codes, in elements.
        block_shape: elements that share a scale, an entry an axis; when empty it is the ratio of the two shapes,
            which must then divide. Scales padded beyond the last block are ignored.

    Raises:
        FormatError: the shapes do not fit.
    """
    if scale.size == 1:
        return scale.reshape(())
    if block_shape:
        return _expand_blocks(scale, shape, block_shape)
    if scale.ndim > len(shape):
        raise FormatError(f"scales of shape {scale.shape} have more axes than codes of shape {shape}")
    missing = (1,) * (len(shape) - scale.ndim)
    if missing and scale.shape == shape[: scale.ndim] and scale.shape != shape[-scale.ndim :]:
        scale = scale.reshape(*scale.shape, *missing)  # one a row, without the last axis
    else:
        scale = scale.reshape(*missing, *scale.shape)
    for axis, size in enumerate(shape):
        length = scale.shape[axis]
        if length not in {1, size}:
            if not length or size % length:
                raise FormatError(f"axis {axis}: {length} scales do not divide {size} elements; block_shape is needed")
            scale = np.repeat(scale, size // length, axis=axis)
    return scale


def _expand_blocks(scale: npt.NDArray[Any], shape: tuple[int, ...], block_shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if len(block_shape) > len(shape) or min(block_shape) < 1:
        raise FormatError(f"block shape {block_shape} does not fit codes of shape {shape}")
    blocks = (*(1,) * (len(shape) - len(block_shape)), *block_shape)
    needed = tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))
    if scale.ndim != len(shape) and scale.size == math.prod(needed):
        scale = scale.reshape(needed)
    if scale.ndim != len(shape) or any(have < need for have, need in zip(scale.shape, needed, strict=True)):
        raise FormatError(
            f"codes of shape {shape} in blocks of {blocks} need scales of shape {needed}, there are {scale.shape}"
        )
    for axis, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        # a block larger than the tensor is not filled up
        repeated = np.repeat(np.take(scale, range(needed[axis]), axis=axis), min(block, max(size, 1)), axis=axis)
        scale = np.take(repeated, range(size), axis=axis)
    return scale
