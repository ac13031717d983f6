"""Puts Transformer Engine's quantized tensors together again, from recorded components and metadata.

The way back of ``sources/extract_te*``: padding is added, column-wise codes are laid out as the library holds them. The
words of metadata are those of ``docs/format.md``. ``flightrec export`` copies this file beside its script, so that it
imports torch, Transformer Engine and ``te_layout`` only. Owns no state; any thread; copies bytes, launches no kernel of
its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flightrec.codecs import te_layout

_CODES = {"float8_e4m3fn": "kFloat8E4M3", "float8_e5m2": "kFloat8E5M2", "float4_e2m1fn_x2": "kFloat4E2M1"}
_QUANTIZERS = {
    "Float8Quantizer": "float8_tensor",
    "Float8CurrentScalingQuantizer": "float8_tensor",
    "Float8BlockQuantizer": "float8_blockwise_tensor",
    "MXFP8Quantizer": "mxfp8_tensor",
    "NVFP4Quantizer": "nvfp4_tensor",
}
_RENAMED = {"rowwise": "rowwise_usage", "columnwise": "columnwise_usage"}
_SIDES = {"rowwise": "", "columnwise": "columnwise_"}

Components = Mapping[str, torch.Tensor]


def build(info: Mapping[str, Any], components: Components, shape: tuple[int, ...]) -> Any:
    """Make the tensor that was recorded.

    Args:
        info: ``class_name``, ``format``, ``scale_direction``, ``block_shape`` and ``metadata`` of its quantizer.
        components: recorded arrays, bit patterns as uint8, scales and amax float32, all on the device that the tensor
            shall be on. They are copied only where their order differs.
        shape: logical shape; metadata ``logical_shape`` goes before it.

    Returns:
        ``Float8Tensor``, ``Float8BlockwiseQTensor``, ``MXFP8Tensor`` or ``NVFP4Tensor``, with a quantizer of the
        recorded class where one can be made on this machine.

    Raises:
        ValueError: of another class, or a component is missing.
        ImportError: Transformer Engine cannot be imported.
    """
    metadata = info.get("metadata") or {}
    column = metadata.get("columnwise")
    scheme = str(metadata.get("scheme", ""))
    known = sorted(_BUILDERS)
    if scheme not in _BUILDERS or (isinstance(column, Mapping) and column.get("scheme", scheme) != scheme):
        what = info.get("class_name") or scheme or "a tensor without scheme"
        raise ValueError(f"{what} is none of Transformer Engine's tensors that can be made; expected one of {known}")
    if not any(f"{prefix}data" in components for prefix in _SIDES.values()):
        raise ValueError(f"{info.get('class_name')}: there are no codes among {sorted(components)}")
    shape = tuple(metadata.get("logical_shape") or shape)
    return _BUILDERS[scheme](info, dict(components), shape)


def _float8(info: Mapping[str, Any], components: Components, shape: tuple[int, ...]) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    return Float8Tensor(
        data=_need(components, "data").reshape(shape).contiguous(),
        fp8_scale_inv=_need(components, "scale_inv").reshape(1),
        fp8_dtype=_code(str(info["format"])),
        quantizer=_quantizer(info, components),
        **_wrapper(info, components, shape),
    )


def _float8_block(info: Mapping[str, Any], components: Components, shape: tuple[int, ...]) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    sides = [words for words in (info, (info.get("metadata") or {}).get("columnwise")) if words]
    two_d = all(block > 1 for words in sides for block in tuple(words.get("block_shape") or (1,))[-2:])
    made: dict[str, Any] = {}
    for side, prefix in _SIDES.items():
        data = components.get(f"{prefix}data")
        if data is not None and prefix:  # held transposed
            data = data.reshape(-1, shape[-1]).t().contiguous().reshape(shape[-1], *shape[:-1])
        made[f"{side}_data"] = data.reshape(shape).contiguous() if data is not None and not prefix else data
        scale = None if data is None else _scales("float8_block", components, side, shape, two_d=two_d)
        made[f"{side}_scale_inv"] = scale
    return Float8BlockwiseQTensor(
        **made,
        fp8_dtype=_code(str(info["format"])),
        quantizer=_quantizer(info, components),
        is_2D_scaled=two_d,
        **_wrapper(info, components, shape),
    )


def _mxfp8(info: Mapping[str, Any], components: Components, shape: tuple[int, ...]) -> Any:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

    made: dict[str, Any] = {}
    for side, prefix in _SIDES.items():
        data = components.get(f"{prefix}data")
        made[f"{side}_data"] = None if data is None else data.reshape(shape).contiguous()
        made[f"{side}_scale_inv"] = None if data is None else _scales("mxfp8", components, side, shape)
    return MXFP8Tensor(
        **made,
        fp8_dtype=_code(str(info["format"])),
        quantizer=_quantizer(info, components),
        with_gemm_swizzled_scales=_is_swizzled(components),
        **_wrapper(info, components, shape),
    )


def _nvfp4(info: Mapping[str, Any], components: Components, shape: tuple[int, ...]) -> Any:
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

    metadata = info.get("metadata") or {}
    made: dict[str, Any] = {}
    for side, prefix in _SIDES.items():
        data = components.get(f"{prefix}data")
        if data is not None:
            held = (shape[-1], *shape[:-1]) if prefix else shape  # column-wise codes are packed along the rows
            data = data.reshape(*held[:-1], held[-1] // 2).contiguous()
        made[f"{side}_data"] = data
        made[f"{side}_scale_inv"] = None if data is None else _scales("nvfp4", components, side, shape)
        made[f"amax_{side}"] = components.get(f"{prefix}amax")
    words = {**(metadata.get("columnwise") or {}), **metadata}
    return NVFP4Tensor(
        **made,
        fp4_dtype=_code(str(info["format"])),
        quantizer=_quantizer(info, components),
        with_gemm_swizzled_scales=_is_swizzled(components),
        row_scaled_nvfp4=bool(words.get("row_scaled")),
        nvfp4_use_4over6=bool(words.get("four_over_six")),
        nvfp4_e4m3_max=int(words.get("e4m3_max") or 448),
        **_wrapper(info, components, shape),
    )


_BUILDERS: dict[str, Callable[[Mapping[str, Any], Components, tuple[int, ...]], Any]] = {
    "float8": _float8,
    "float8_block": _float8_block,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def _scales(
    scheme: str, components: Components, side: str, shape: tuple[int, ...], *, two_d: bool = False
) -> torch.Tensor:
    """The scales of one side as the library holds them, padded with zeros: the way back of ``logical_scale``."""
    prefix = _SIDES[side]
    if f"{prefix}swizzled_scale_inv" in components:
        return components[f"{prefix}swizzled_scale_inv"]
    logical = _need(components, f"{prefix}scale_inv")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    columnwise = bool(prefix)
    held = logical.new_zeros(te_layout.scale_shape(scheme, rows, columns, columnwise=columnwise, two_d=two_d))
    place, _ = te_layout.logical_scale(scheme, held, rows, columns, columnwise=columnwise, two_d=two_d)
    place.copy_(logical.reshape(place.shape))
    return held


def _is_swizzled(components: Components) -> bool:
    return any(f"{prefix}swizzled_scale_inv" in components for prefix in _SIDES.values())


def _need(components: Components, name: str) -> torch.Tensor:
    if name not in components:
        raise ValueError(f"component {name!r} is missing among {sorted(components)}")
    return components[name]


def _wrapper(info: Mapping[str, Any], components: Components, shape: tuple[int, ...]) -> dict[str, Any]:
    """What torch's side of the tensor is made with."""
    name = str((info.get("metadata") or {}).get("original_dtype") or "float32")
    device = next(iter(components.values())).device
    return {"shape": torch.Size(shape), "dtype": getattr(torch, name), "device": device}


def _code(name: str) -> Any:
    """Transformer Engine's word for an element format."""
    from transformer_engine.pytorch.constants import DType

    if name not in _CODES:
        raise ValueError(f"codes are {name}, expected one of {sorted(_CODES)}")
    return getattr(DType, _CODES[name])


def _quantizer(info: Mapping[str, Any], components: Components) -> Any:
    """A quantizer of the recorded class with the recorded attributes; None where it needs more than was recorded."""
    import importlib

    words = dict((info.get("metadata") or {}).get("quantizer") or {})
    module = _QUANTIZERS.get(str(words.get("class", "")))
    if module is None:
        return None
    try:
        kind = getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), words["class"])
        takes = inspect.signature(kind.__init__).parameters
        given: dict[str, Any] = {name: words[name] for name in takes if name in words}
        given |= {name: words[word] for name, word in _RENAMED.items() if word in words}
        code = next((name for name in takes if name in ("fp8_dtype", "fp4_dtype")), None)
        if code is not None:
            given[code] = _code(str(words.get("dtype") or info["format"]))
        if "device" in takes:
            given["device"] = next(iter(components.values())).device
        if words["class"] == "Float8Quantizer":
            given |= {"scale": components["scale"].reshape(1), "amax": components["amax"].reshape(1)}
        else:
            for name in ("scale", "amax", "use_existing_amax"):  # words that later versions ignore, with a warning
                given.pop(name, None)
        return kind(**given)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError, AssertionError):
        return None  # of another version, or one that only a GPU can make (NVFP4's needs its Hadamard matrix there)
