"""Integer codes with a zero point (torch's ``qint8``, ``quint8``, ``qint32``): x = (data - zero_point) * scale_inv.

Pure functions on numpy arrays, no state. The arithmetic is torch's own, so that the numbers are equal to those of
``Tensor.dequantize()`` to the bit (but for a 32-bit code whose distance from the zero point overflows there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError


def dequantize(
    components: Mapping[str, npt.NDArray[Any]],
    info: Mapping[str, Any],
    *,
    prefix: str = "",
    shape: tuple[int, ...] | None = None,
) -> npt.NDArray[np.float32]:
    """Turn integer codes into numbers.

    Args:
        components: ``data`` (int8, uint8 or int32), ``scale_inv`` and ``zero_point`` (one of each, or one for each
            channel), under ``prefix``.
        info: ``QuantizerInfo.to_json()``; metadata ``axis`` is the channels' axis, absent for one scale.
        prefix: of the component names.
        shape: logical shape, None for the codes' own.

    Returns:
        float32, in the codes' shape.

    Raises:
        FormatError: a component is missing, codes are no integers, or the number of scales does not fit.
    """
    missing = [name for name in ("data", "scale_inv", "zero_point") if prefix + name not in components]
    if missing:
        raise FormatError(f"codes with a zero point need {missing[0]!r}; there are {sorted(components)}")
    codes, scale, zero_point = (np.asarray(components[prefix + n]) for n in ("data", "scale_inv", "zero_point"))
    if codes.dtype.kind not in "iu":
        raise FormatError(f"codes with a zero point are integers, got {codes.dtype}")
    if shape is not None and codes.shape != shape:
        raise FormatError(f"codes of shape {codes.shape} in a tensor of shape {shape}")
    axis = (info.get("metadata") or {}).get("axis")
    with np.errstate(all="ignore"):
        if axis is None:
            if scale.size != 1 or zero_point.size != 1:
                raise FormatError(f"{scale.size} scales, {zero_point.size} zero points, and no axis to lay them along")
            whole = codes.astype(np.int64) - zero_point.astype(np.int64).reshape(())
            values: npt.NDArray[Any] = whole.astype(np.float32) * scale.astype(np.float32).reshape(())
        else:  # torch keeps the channels' scales in double precision
            distance = codes.astype(np.float32) - _along(zero_point, codes.shape, axis).astype(np.float32)
            values = distance.astype(np.float64) * _along(scale, codes.shape, axis).astype(np.float64)
    return np.asarray(values, dtype=np.float32).reshape(codes.shape)


def _along(words: npt.NDArray[Any], shape: tuple[int, ...], axis: int) -> npt.NDArray[Any]:
    if not -len(shape) <= axis < len(shape) or words.size != shape[axis]:
        raise FormatError(f"{words.size} scales or zero points along axis {axis} of codes of shape {shape}")
    return words.reshape([words.size if at == axis % len(shape) else 1 for at in range(len(shape))])
