"""Computes a quantized tensor's scales again, where they are a function of the tensor, and says where they differ.

Those of current scaling, of FP8 in blocks, of MX and of NVFP4 are; delayed scaling's come from earlier iterations.
Pure functions on numpy arrays, no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flightrec.codecs import encode, scale_rules
from flightrec.codecs.encode import Plan
from flightrec.codecs.rounding import Floats

_MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2, "float6_e2m3fn": 3, "float6_e3m2fn": 2, "float4_e2m1fn_x2": 1}
_E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class Expected:
    """Scales of some blocks, by each way in which they may have been computed.

    Attributes:
        words: by way, float32 [blocks down, blocks across], as they would be recorded.
        encode: by way, the exact scale that multiplies to encode, where the format has one; else None.
        slack: relative; E4M3 scales are compared after rounding the ends of this interval.
        at_least: the words may also be larger: an amax that was reduced over the ranks.
    """

    words: Mapping[str, Floats]
    encode: Mapping[str, Floats]
    slack: float = 0.0
    at_least: bool = False


def whole_amax(plan: Plan) -> bool:
    """Whether a scale is made from the whole tensor, or for other blocks than those of ``plan.block``."""
    return plan.scales.size == 1 or plan.block == (1, 1)


def is_function(plan: Plan) -> str:
    """Empty if the scales can be computed from the tensor, else why not."""
    if plan.family == "general":
        return "the class that chose the scale is not known"
    if plan.family == "float8" and not _is_current(plan):
        return "delayed scaling: the scale comes from earlier iterations"
    if plan.family == "torchao_float8" and plan.block == (1, 1):
        return "the scales' blocks are not known"
    if plan.family == "nvfp4" and "amax" not in plan.side.components:
        return "no amax is recorded"
    return ""


def expected(
    plan: Plan, amax: Floats, has_nan: npt.NDArray[np.bool_], *, dtype: str, second: Floats | None, is_distributed: bool
) -> Expected:
    """Scales of blocks.

    Args:
        plan: of the side, for which ``is_function`` is empty.
        amax: of the blocks over all that is not NaN, [blocks down, blocks across].
        has_nan: whether blocks hold NaN: kernels leave it out, references let it through, so that both are right.
        dtype: of the high-precision tensor.
        second: NVFP4's second word, broadcastable to the blocks.
        is_distributed: more than one rank, so that an amax may have been reduced over them.
    """
    ways = {"": amax}
    if has_nan.any():
        ways["nan"] = np.where(has_nan, np.float32(np.nan), amax)
    with np.errstate(all="ignore"):
        found = [_FAMILIES[plan.family](plan, way, dtype, second) for way in ways.values()]
    words: dict[str, Floats] = {}
    exact: dict[str, Floats] = {}
    for name, (some, multiply) in zip(ways, found, strict=True):
        words.update({f"{name}{key}": value for key, value in some.items()})
        exact.update({f"{name}{key}": value for key, value in multiply.items()})
    reduced = bool(plan.quantizer.get("with_amax_reduction")) or (plan.family == "torchao_float8" and is_distributed)
    slack = encode.HADAMARD_TOLERANCE if plan.is_hadamard else encode.TOLERANCE if "nvfp4" in plan.family else 0.0
    return Expected(words, exact, slack, reduced and whole_amax(plan))


def differ(plan: Plan, recorded: Floats, computed: Expected) -> dict[str, npt.NDArray[np.bool_]]:
    """By way, where recorded scales are not those computed. Ways ``nan`` and plain count as one for each block."""
    wrong: dict[str, npt.NDArray[np.bool_]] = {}
    with np.errstate(all="ignore"):
        for way, words in computed.words.items():
            words = np.broadcast_to(words, recorded.shape)
            if computed.slack:
                low, high = (_e4m3(words * np.float32(1 + sign * computed.slack)) for sign in (-1, 1))
                same = (recorded >= low) & (recorded <= high)
            else:
                same = recorded == words
            if computed.at_least:
                is_encode = plan.side.scale_direction == "multiply_to_encode"
                same |= (recorded <= words) if is_encode else (recorded >= words)
            wrong[way] = ~(same | (np.isnan(recorded) & np.isnan(words)))
    plain = {way: mask for way, mask in wrong.items() if not way.startswith("nan")}
    joined = {way: mask & wrong.get(f"nan{way}", mask) for way, mask in plain.items()}
    if plan.family == "nvfp4":  # with 4over6 each block has one of two
        return {"": np.logical_and.reduce(list(joined.values()))}
    return joined


def _is_current(plan: Plan) -> bool:
    return "Current" in str(plan.quantizer.get("class", ""))


def _e4m3(values: Floats) -> Floats:
    return np.clip(values, -448, 448).astype(_E4M3).astype(np.float32)


Found = tuple[dict[str, Floats], dict[str, Floats]]


def _fp8(plan: Plan, amax: Floats, dtype: str, _second: Floats | None) -> Found:
    words = plan.quantizer
    power = bool(words.get("force_pow_2_scales", words.get("pow_2_scales", False)))
    epsilon = float(words.get("amax_epsilon", words.get("eps", 0.0)) or 0.0)
    in_blocks = plan.family == "float8_block"
    limit = scale_rules.LARGEST_OF.get(dtype, scale_rules.FLOAT32_MAX) if in_blocks else scale_rules.FLOAT32_MAX
    powers = {"": power} if words else {"": False, " power of two": True}
    scales = {
        name: scale_rules.fp8_scale(amax, plan.grid.largest, power_of_two=is_power, epsilon=epsilon, for_infinity=limit)
        for name, is_power in powers.items()
    }
    return {name: np.float32(1) / scale for name, scale in scales.items()}, scales


def _torchao_float8(plan: Plan, amax: Floats, _dtype: str, _second: Floats | None) -> Found:
    scale = scale_rules.torchao_scale(amax, plan.grid.largest)
    scales = {"": scale, " power of two": scale_rules.down_to_power_of_two(scale)}
    return scales, scales


def _mx(plan: Plan, amax: Floats, _dtype: str, _second: Floats | None) -> Found:
    modes = ("te",) if plan.family == "mxfp8" else scale_rules.MX_MODES
    bits, largest = _MANTISSA_BITS[plan.grid.name], plan.grid.largest
    codes = {mode: scale_rules.mx_scale(amax, largest, bits, mode) for mode in modes}
    return {f" {mode}": scale_rules.e8m0_value(code) for mode, code in codes.items()}, {}


def _nvfp4(plan: Plan, amax: Floats, _dtype: str, second: Floats | None) -> Found:
    assert second is not None
    over = scale_rules.nvfp4_global_scale(second, float(plan.side.metadata.get("e4m3_max") or 448))
    found = scale_rules.nvfp4_block_scales(amax, over, plan.side.metadata)
    return {f" {number}": words for number, words in enumerate(found)}, {}


def _torchao_nvfp4(_plan: Plan, amax: Floats, _dtype: str, second: Floats | None) -> Found:
    return {"": scale_rules.torchao_nvfp4_block_scale(amax, second)}, {}


_FAMILIES: dict[str, Any] = {
    "float8": _fp8,
    "float8_block": _fp8,
    "mxfp8": _mx,
    "nvfp4": _nvfp4,
    "torchao_float8": _torchao_float8,
    "torchao_mx": _mx,
    "torchao_nvfp4": _torchao_nvfp4,
}
