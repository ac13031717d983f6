"""Takes torchao's tensors with scales in blocks apart: ``MXTensor``, ``NVFP4Tensor``, ``Float8Tensor``.

Knows their private fields, imports no torchao: classes are known by package and name. Everything comes as views, in
logical order: FP4 codes that torchao holds transposed stay packed, as the transpose of what they are. Scales in the
tensor cores' order come as ``swizzled_scale_inv``. Launches nothing, never synchronises; owns a cache of metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import Extraction, blocks_of, class_name, dtype_name, plain_metadata, readable
from flightrec.sources.extract_wrapper import from_wrapper
from flightrec.sources.sink import is_plain

_FP4 = "float4_e2m1fn_x2"
_FORMATS = {"fp6_e2m3": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn"}  # torchao's words for what torch has no dtype of
_MAX_CACHED = 1024

_Taker = Callable[[Any], "QuantizedParts | None"]
_takers: dict[type, _Taker | None] = {}
_infos: dict[tuple[Any, ...], tuple[object, QuantizerInfo]] = {}


def is_torchao_blocks(value: object) -> bool:
    """Say whether ``from_torchao_blocks`` is for this tensor, by its type alone."""
    return _taker(type(value)) is not None


def from_torchao_blocks(value: Any) -> Extraction:
    """Take the tensor apart; one that is laid out in a way that is not known is kept raw, like any wrapper."""
    take = _taker(type(value))
    assert take is not None
    try:
        parts = take(value)
    except AttributeError:  # of another version of torchao
        parts = None
    if parts is None or not all(is_plain(tensor) for tensor in parts.components.values()):
        return from_wrapper(value)
    return readable(parts)


def _taker(kind: type) -> _Taker | None:
    if kind not in _takers:
        if len(_takers) >= _MAX_CACHED:
            _takers.clear()
        names = {base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "torchao"}
        _takers[kind] = next((take for name, take in _FAMILIES.items() if name in names), None)
    return _takers[kind]


def _mx(value: Any) -> QuantizedParts | None:
    """``MXTensor``: a power of two (E8M0) over each ``block_size`` codes of FP8, FP6 (one a byte) or FP4 (packed)."""
    element = value.elem_dtype
    name = dtype_name(element) if isinstance(element, torch.dtype) else _FORMATS.get(element)
    if name is None:
        return None
    return _blocks(value, name, value.scale, value.kernel_preference)


def _nvfp4(value: Any) -> QuantizedParts | None:
    """``NVFP4Tensor``: E4M3 over each 16 packed FP4 codes; under it one float32 for all, one an expert, or none."""
    parts = _blocks(value, _FP4, value.scale, value.use_triton_kernel)
    if parts is None:
        return None
    more: dict[str, torch.Tensor] = {}
    codes = parts.components["data"]
    if (second := value.per_tensor_scale) is not None:
        second = second.detach()
        if second.dim() == codes.dim() > 1:  # one a leading entry, as a view of one a row
            second = second.expand(*codes.shape[:-1], 1)
        more["tensor_scale_inv"] = second
    if (other := value.act_per_tensor_scale) is not None:  # of the activation that this weight will meet
        more["activation_tensor_scale_inv"] = other.detach()
    return QuantizedParts(parts.info, {**parts.components, **more}, parts.formats, parts.pair_codes)


def _blocks(value: Any, name: str, scale: torch.Tensor, kernel: object) -> QuantizedParts | None:
    """Codes with a scale for each ``block_size`` of them along the last dimension, or, transposed, the one before."""
    data, scale, block = value.qdata.detach(), scale.detach(), int(value.block_size)
    if data.dim() < 2 or block < 1:
        return None
    swizzled = bool(value.is_swizzled_scales)
    transposed = data.stride(-2) < data.stride(-1) if swizzled else scale.shape[:-1] != data.shape[:-1]
    shape: tuple[int, ...] | None = None
    lead = (1,) * (data.dim() - 2)
    blocks = (*lead, block, 1) if transposed else (*lead, 1, block)
    if transposed and (swizzled or name == _FP4):
        if data.dim() > 2:
            return None  # leading dimensions before a transposed matrix: no view has the last one in front
        data, scale, blocks, shape = data.t(), scale.t(), (1, block), tuple(value.shape)
    if not swizzled and not _fits(data, scale, blocks, packed=name == _FP4):
        return None
    word = "swizzled_scale_inv" if swizzled else "scale_inv"
    info = _info(value, name, blocks, shape, kernel)
    formats = {"data": name, word: dtype_name(scale.dtype)}
    return QuantizedParts(info, {"data": data, word: scale}, formats, pair_codes=None if shape else "data")


def _fits(data: torch.Tensor, scale: torch.Tensor, blocks: tuple[int, ...], *, packed: bool) -> bool:
    shape = (*data.shape[:-1], data.shape[-1] * 2) if packed else data.shape
    needed = tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))
    return tuple(scale.shape) == needed


def _float8(value: Any) -> QuantizedParts | None:
    """``Float8Tensor``: FP8 with a float32 scale over the tensor, a row, or a block; its ``scale`` decodes."""
    data, scale = value.qdata.detach(), value.scale.detach()
    name = dtype_name(data.dtype)
    if scale.numel() > 1 and scale.dim() != data.dim():
        return None
    info = _info(value, name, blocks_of(tuple(data.shape), scale), None, value.kernel_preference)
    return QuantizedParts(info, {"data": data, "scale_inv": scale}, {"data": name}, pair_codes="data")


def _info(
    value: Any, name: str, blocks: tuple[int, ...], shape: tuple[int, ...] | None, kernel: object
) -> QuantizerInfo:
    """Metadata; the same object for the same words."""
    dtype, arguments = value.dtype, value.act_quant_kwargs
    swizzled = bool(getattr(value, "is_swizzled_scales", False))
    key = (type(value), name, blocks, shape, dtype, kernel, swizzled, id(arguments))
    found = _infos.get(key)
    if found is not None and found[0] is arguments:
        return found[1]
    metadata: dict[str, Any] = {"original_dtype": dtype_name(dtype), "is_swizzled_scales": swizzled}
    metadata["use_triton_kernel" if isinstance(kernel, bool) else "kernel_preference"] = plain_metadata(kernel)
    metadata["act_quant_kwargs"] = plain_metadata(arguments)
    if shape is not None:
        metadata |= {"transposed": True, "logical_shape": list(shape)}
    info = QuantizerInfo(class_name(value), name, "multiply_to_decode", blocks, metadata)
    if len(_infos) >= _MAX_CACHED:
        _infos.clear()
    _infos[key] = (arguments, info)  # kept alive, so that its id stays its own
    return info


_FAMILIES: dict[str, _Taker] = {"MXTensor": _mx, "NVFP4Tensor": _nvfp4, "Float8Tensor": _float8}
