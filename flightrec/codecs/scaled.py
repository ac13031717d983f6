"""Scaled formats: codes and scales become the numbers that they stand for. Pure functions on numpy arrays, no state.

One rule for FP8 with a scale a tensor, row, column or block, MXFP8 and packed FP4: decode the codes, decode the
scales (which may be FP8 or E8M0 codes themselves), bring the scales to the codes' shape, and divide by ``scale``
(it multiplies to encode) or multiply by ``scale_inv`` (it multiplies to decode).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import affine, base
from flightrec.errors import FormatError

ENCODE = "multiply_to_encode"
DECODE = "multiply_to_decode"
NONE = "none"

_PREFIXES = {"rowwise": "", "columnwise": "columnwise_"}
_SCALES = {ENCODE: "scale", DECODE: "scale_inv"}
_TENSOR_SCALE = "tensor_scale_inv"
_ZERO_POINT = "zero_point"


def component_names(present: Iterable[str], side: str = "rowwise") -> list[str]:
    """Give those of the present components that ``dequantize`` looks at (``FormatError`` for an unknown side)."""
    prefix = _prefix(side)
    beside = (*_SCALES.values(), _TENSOR_SCALE, _ZERO_POINT)
    wanted = {f"{prefix}data", *(prefix + name for name in beside)}
    return [name for name in present if name in wanted]


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
            ``tensor_scale_inv`` (one float32 over all blocks, multiplies to decode). Prefixed with ``columnwise_`` for
            the columnwise side.
        info: ``QuantizerInfo.to_json()``: ``format``, ``scale_direction``, ``block_shape``, ``metadata``. Metadata
            ``columnwise_transposed`` says that the columnwise codes have the last axis in front, ``swizzled`` that
            scales lie in a hardware order.
        formats: element format of each component; what it lacks is ``format`` for the codes and the native type for
            floating-point scales.
        shape: logical shape, needed where packed codes or padding leave it open.
        side: ``rowwise`` or ``columnwise``.

    Returns:
        float32, in the logical shape. A zero or infinite scale gives what IEEE arithmetic gives, without a warning.

    Raises:
        FormatError: a component or a word is missing or unknown, or shapes do not fit.
    """
    prefix = _prefix(side)
    formats = formats or {}
    metadata = info.get("metadata") or {}
    name = f"{prefix}data"
    if name not in components:
        raise FormatError(f"the {side} side has no codes: component {name!r} is missing among {sorted(components)}")
    if metadata.get("swizzled"):
        raise FormatError("scales in a hardware (swizzled) order cannot be decoded by this version")
    moved = side == "columnwise" and bool(metadata.get("columnwise_transposed"))
    stored_shape = shape if shape is None or not moved else (*shape[-1:], *shape[:-1])
    if prefix + _ZERO_POINT in components:
        return affine.dequantize(components, info, prefix=prefix, shape=shape)
    values = _codes(components[name], formats.get(name) or info.get("format", ""), stored_shape)
    block_shape = tuple(info.get("block_shape") or ()) if side == "rowwise" else ()
    values = _apply_scale(values, components, prefix, info.get("scale_direction", NONE), block_shape, formats)
    tensor_scale = components.get(prefix + _TENSOR_SCALE)
    if tensor_scale is not None:
        with np.errstate(all="ignore"):
            values = values * tensor_scale.astype(np.float32).reshape(())
    if moved and values.ndim:
        values = np.moveaxis(values, 0, -1)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(values.shape)


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
        repeated = np.repeat(np.take(scale, range(needed[axis]), axis=axis), block, axis=axis)
        scale = np.take(repeated, range(size), axis=axis)
    return scale


def _prefix(side: str) -> str:
    if side not in _PREFIXES:
        raise FormatError(f"side {side!r} is not known; expected rowwise or columnwise")
    return _PREFIXES[side]


def _codes(codes: npt.NDArray[Any], name: str, shape: tuple[int, ...] | None) -> npt.NDArray[np.float32]:
    columns = shape[-1] if shape else None
    packed = base.element_format(name).elements_per_item == 2
    values = base.decode(codes, name, num_columns=columns if packed else None).astype(np.float32, copy=False)
    if shape is not None and values.shape != shape:
        raise FormatError(f"codes of shape {values.shape} in a tensor of shape {shape}")
    return values


def _apply_scale(
    values: npt.NDArray[np.float32],
    components: Mapping[str, npt.NDArray[Any]],
    prefix: str,
    direction: str,
    block_shape: tuple[int, ...],
    formats: Mapping[str, str],
) -> npt.NDArray[np.float32]:
    if direction == NONE:
        return values
    if direction not in _SCALES:
        raise FormatError(f"scale_direction {direction!r} is not understood; expected {ENCODE}, {DECODE} or {NONE}")
    name = prefix + _SCALES[direction]
    if name not in components:
        raise FormatError(f"scales that {direction} are missing: component {name!r} among {sorted(components)}")
    scale = expand_scale(_scale(components[name], name, formats), values.shape, block_shape)
    with np.errstate(all="ignore"):
        scaled = values / scale if direction == ENCODE else values * scale
    return np.asarray(scaled, dtype=np.float32)


def _scale(stored: npt.NDArray[Any], name: str, formats: Mapping[str, str]) -> npt.NDArray[np.float32]:
    element = formats.get(name)
    if element is None:
        if stored.dtype.kind != "f":
            raise FormatError(f"component {name!r} holds codes of {stored.dtype}; their format is needed")
        return stored.astype(np.float32)
    return base.decode(stored, element).astype(np.float32)
