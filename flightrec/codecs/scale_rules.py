"""How quantizers choose scales from what they read: float32 arithmetic in their own order.

Sources: Transformer Engine's ``recipe_common.cuh`` (``compute_scale_from_amax``), ``ptx.cuh`` (``float_to_e8m0``) and
reference quantizer of NVFP4 (2.20.2); torchao's ``amax_to_scale``, ``to_mx`` and ``nvfp4_quantize`` (0.18). Pure
functions on numpy arrays, no state.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

FLOAT32_MAX = float(np.finfo(np.float32).max)
LARGEST_OF = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0}
"""Largest finite value of the types that quantizers read, where it is not float32's."""
MX_MODES = ("floor", "rceil", "ceil", "even")
"""torchao's ``ScaleCalculationMode``. Transformer Engine's is ``rceil`` with a product for the quotient: ``te``."""

_FP4_MAX = np.float32(6.0)
_TORCHAO_EPS = 1e-12
_E4M3_EPS = 2.0**-6  # torchao: the smallest normal E4M3, below which it lets no scale of NVFP4 fall


def amax_of(values: Floats, block: tuple[int, int]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Largest magnitude of each block, NaN left out, and where a block holds NaN.

    Args:
        values: float32 [rows, columns].
        block: rows and columns of a block; the last ones may be cut off.

    Returns:
        float32 and bool, [blocks down, blocks across].
    """
    rows, columns = values.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    magnitude = np.abs(values)
    if (down * block[0], across * block[1]) != values.shape:
        magnitude = np.pad(magnitude, ((0, down * block[0] - rows), (0, across * block[1] - columns)))
    magnitude = magnitude.reshape(down, block[0], across, block[1])
    has_nan = np.asarray(np.isnan(magnitude).any(axis=(1, 3)))
    return np.asarray(np.fmax.reduce(magnitude, axis=(1, 3), initial=np.float32(0))), has_nan


def fp8_scale(
    amax: Floats, largest: float, *, power_of_two: bool, epsilon: float, for_infinity: float = FLOAT32_MAX
) -> Floats:
    """Transformer Engine's scale that multiplies to encode: ``largest / max(amax, epsilon)``, 1 without an amax.

    Args:
        amax: float32, any shape.
        largest: finite value of the codes.
        power_of_two: rounded down to one (``force_pow_2_scales``).
        epsilon: ``amax_epsilon``.
        for_infinity: what stands where the quotient overflows.
    """
    with np.errstate(all="ignore"):
        floor = np.where(amax < np.float32(epsilon), np.float32(epsilon), amax).astype(np.float32)
        scale = (np.float32(largest) / floor).astype(np.float32)
    scale = np.where(np.isinf(scale), np.float32(for_infinity), scale)
    if power_of_two:
        scale = (np.ascontiguousarray(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(np.isinf(floor) | (floor == 0) | np.isnan(floor), np.float32(1), scale).astype(np.float32)


def torchao_scale(amax: Floats, largest: float) -> Floats:
    """The scale of torchao's Float8 that multiplies to encode: the quotient in float64, rounded once."""
    with np.errstate(all="ignore"):
        return np.asarray(largest / np.maximum(amax.astype(np.float64), _TORCHAO_EPS), np.float64).astype(np.float32)


def down_to_power_of_two(scale: Floats) -> Floats:
    """The largest power of two that is not larger."""
    return (np.ascontiguousarray(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)


def e8m0_up(values: Floats) -> npt.NDArray[np.uint8]:
    """E8M0 code of a number, rounded up, saturating: ``cvt.rp.satfinite.ue8m0``, as Transformer Engine spells it."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    exponent, mantissa = (bits >> 23 & 0xFF).astype(np.int32), bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = exponent + up
    code = np.where(np.isinf(values), 0xFE, code)
    return np.where(np.isnan(values), 0xFF, code).astype(np.uint8)


def mx_scale(amax: Floats, largest: float, mantissa_bits: int, mode: str) -> npt.NDArray[np.uint8]:
    """E8M0 code of an MX block by torchao's modes.

    Args:
        amax: float32, any shape.
        largest: finite value of the codes.
        mantissa_bits: of the codes.
        mode: one of ``MX_MODES``, or ``te``.
    """
    if mode == "te":
        return e8m0_up((amax * (np.float32(1) / np.float32(largest))).astype(np.float32))
    if mode == "rceil":
        return e8m0_up((amax / np.float32(largest)).astype(np.float32))
    bits = np.ascontiguousarray(amax).view(np.int32).astype(np.int64)
    if mode == "even":
        bits = (bits + (1 << (22 - mantissa_bits))) & 0x7F800000
    exponent = (bits >> 23 & 0xFF) - 127
    if mode == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    found = np.clip(exponent - int(np.floor(np.log2(largest))), -127, 128) + 127
    return np.where(np.isnan(amax), 255, found).astype(np.uint8)


def e8m0_value(codes: npt.NDArray[np.uint8]) -> Floats:
    """Numbers of E8M0 codes."""
    return np.asarray(codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def nvfp4_global_scale(amax: Floats, e4m3_max: float) -> Floats:
    """NVFP4's scale over all blocks, multiplies to encode: ``e4m3_max * 6 / amax``, 1 where that is 0."""
    with np.errstate(all="ignore"):
        scale = np.minimum(np.float32(e4m3_max) * _FP4_MAX / amax, np.float32(FLOAT32_MAX)).astype(np.float32)
    return np.where(scale == 0, np.float32(1), scale)


def nvfp4_block_scales(amax: Floats, over_blocks: Floats, metadata: Mapping[str, object]) -> list[Floats]:
    """Scales that Transformer Engine may give the blocks, float32 before they are rounded to E4M3.

    Args:
        amax: of the blocks.
        over_blocks: ``nvfp4_global_scale``, broadcastable.
        metadata: of the side; with ``four_over_six`` a block has one of two scales.
    """
    with np.errstate(all="ignore"):
        if metadata.get("four_over_six"):
            plain = (amax / _FP4_MAX * over_blocks).astype(np.float32)
            return [plain, (plain * np.float32(1.5)).astype(np.float32)]
        return [(amax * (over_blocks * (np.float32(1) / _FP4_MAX))).astype(np.float32)]


def torchao_nvfp4_block_scale(amax: Floats, second: Floats | None) -> Floats:
    """The scale of a block by torchao, in the range that it lets E4M3 use."""
    with np.errstate(all="ignore"):
        scale = (amax / _FP4_MAX).astype(np.float32)
        scale = scale if second is None else (scale / second).astype(np.float32)
    return np.clip(scale, np.float32(_E4M3_EPS), np.float32(448))
