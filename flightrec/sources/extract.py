"""Turns a quantized tensor of any known library into plain arrays and plain metadata.

The only file that knows other libraries' private fields. Owns no state but a cache of metadata; imports no quantization
library: a tensor of a library can only exist if that library is loaded already. Launches nothing, never synchronises.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flightrec.hosthooks import describe
from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources import sharded
from flightrec.sources.memory import LARGE_BYTES, MAX_OVERLAP, why_unreadable
from flightrec.sources.quantized import Quantized
from flightrec.sources.sink import is_plain

FORMATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
"""Element formats of codes that ``Quantized`` may name."""

_BYTE_DTYPES = (torch.uint8, torch.int8)
_TORCHAO_FLOAT8 = "torchao.float8.float8_training_tensor"
_MAX_METADATA_DEPTH = 4

# Wrapper subclasses that are no quantized tensors: their values are ordinary tensors somewhere else.
_NOT_QUANTIZED = frozenset({"DTensor", "FakeTensor", "FunctionalTensor", "NestedTensor", "AsyncCollectiveTensor"})


class Extraction(NamedTuple):
    """Result of ``extract``: the parts, or None and the reason in plain words."""

    parts: QuantizedParts | None
    reason: str = ""


def is_quantized(value: object) -> bool:
    """Say whether ``extract`` would know what to do with this object, by its type alone."""
    if isinstance(value, (Quantized, QuantizedParts)):
        return True
    return isinstance(value, torch.Tensor) and (_is_wrapper(value) or _has_quantized_dtype(value))


def extract(quantized: object, columnwise: object = None) -> Extraction:
    """Take a quantized tensor apart.

    Args:
        quantized: a ``Quantized``, finished ``QuantizedParts``, torchao's ``Float8TrainingTensor``, a tensor of a torch
            quantized dtype (``qint8``, ...), a ``DTensor`` of any of these, or any wrapper subclass with
            ``__tensor_flatten__`` (kept raw, under its class name). None if there is only ``columnwise``.
        columnwise: the same values quantized for the other direction of a product, or None. Its arrays come as
            ``columnwise_data``, ``columnwise_scale``, ...

    Returns:
        The parts: detached tensors that share the caller's memory (the codes of a torch quantized dtype are a copy), on
        its device, any strides. Or None with a reason.
    """
    if columnwise is None and isinstance(quantized, Quantized):
        columnwise = quantized.columnwise
    if columnwise is None:
        return _extract_one(quantized)
    second = _extract_one(columnwise)
    if second.parts is None:
        return Extraction(None, f"columnwise: {second.reason}")
    if quantized is None:
        return Extraction(_with_columnwise(None, second.parts))
    first = _extract_one(quantized)
    return first if first.parts is None else Extraction(_with_columnwise(first.parts, second.parts))


def _extract_one(value: object) -> Extraction:
    if isinstance(value, QuantizedParts):
        return Extraction(value)
    if isinstance(value, Quantized):
        return _from_quantized(value)
    if not isinstance(value, torch.Tensor):
        return Extraction(None, f"{_class_name(value)} is not a quantized tensor that flightrec knows")
    if is_torchao_float8(value):
        return _readable(_from_torchao_float8(value))
    if sharded.is_dtensor(value):
        parts, reason = _extract_one(sharded.local_part(value))
        return Extraction(with_facts(parts, {"dtensor": sharded.facts_of(value)}) if parts else None, reason)
    if _has_quantized_dtype(value):
        return _from_quantized_dtype(value)
    if _is_wrapper(value):
        return _from_wrapper(value)
    return Extraction(None, f"{_class_name(value)} is a plain tensor; wrap it in flightrec.Quantized(data, format)")


def with_facts(parts: QuantizedParts, facts: Mapping[str, Any]) -> QuantizedParts:
    """The same parts, with more metadata."""
    info = parts.info
    more = QuantizerInfo(
        info.class_name, info.format, info.scale_direction, info.block_shape, {**info.metadata, **facts}
    )
    return dataclasses.replace(parts, info=more)


def _readable(parts: QuantizedParts) -> Extraction:
    """The parts, unless the memory of one is gone or is no place for all its elements."""
    for name, tensor in parts.components.items():
        reason = why_unreadable(tensor) or _why_too_expanded(tensor)
        if reason:
            return Extraction(None, f"{parts.info.class_name}: {name}: {reason}")
    return Extraction(parts)


def _why_too_expanded(tensor: torch.Tensor) -> str:
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > LARGE_BYTES and num_bytes > MAX_OVERLAP * tensor.untyped_storage().nbytes():
        return f"{num_bytes} bytes expanded from {tensor.untyped_storage().nbytes()}"
    return ""


def _with_columnwise(first: QuantizedParts | None, second: QuantizedParts) -> QuantizedParts:
    """Join two quantizations of one tensor under the first one's metadata."""
    components = dict(first.components) if first else {}
    formats = dict(first.formats) if first else {}
    for name, tensor in second.components.items():
        components[f"columnwise_{name}"] = tensor
        formats[f"columnwise_{name}"] = second.formats.get(name, dtype_name(tensor.dtype))
    info = first.info if first else second.info
    other = second.info
    metadata = {
        **info.metadata,
        "columnwise": {
            "class_name": other.class_name,
            "format": other.format,
            "scale_direction": other.scale_direction,
            **other.metadata,
        },
    }
    joined = QuantizerInfo(info.class_name, info.format, info.scale_direction, info.block_shape, metadata)
    pair = first.pair_codes if first else second.pair_codes and f"columnwise_{second.pair_codes}"
    return QuantizedParts(joined, components, formats, pair)


# -- flightrec.Quantized


def _from_quantized(value: Quantized) -> Extraction:
    data: object = value.data
    if value.format not in FORMATS:
        return Extraction(None, f"Quantized.format is {value.format!r}, expected one of {', '.join(FORMATS)}")
    if not isinstance(data, torch.Tensor):
        return Extraction(None, f"Quantized.data is a {_class_name(data)}, expected a tensor")
    if dtype_name(data.dtype) != value.format and data.dtype not in _BYTE_DTYPES:
        return Extraction(
            None, f"Quantized.data has dtype {dtype_name(data.dtype)}, expected {value.format} or uint8 codes of it"
        )
    components: dict[str, torch.Tensor] = {}
    given = {"data": data, "scale": value.scale, "scale_inv": value.scale_inv, "amax_history": value.amax_history}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not is_plain(tensor):
            return Extraction(None, f"Quantized.{name} is not a plain dense tensor but {_class_name(tensor)}")
        components[name] = tensor.detach()
    scale_name = "scale_inv" if value.scale_inv is not None else "scale"
    direction = "none"
    if scale_name in components:
        direction = "multiply_to_decode" if scale_name == "scale_inv" else "multiply_to_encode"
    block_shape = _block_shape(_logical_shape(data, value.format), components.get(scale_name))
    info = QuantizerInfo("flightrec.Quantized", value.format, direction, block_shape, {})
    return _readable(QuantizedParts(info, components, {"data": value.format}, pair_codes="data"))


def _logical_shape(data: torch.Tensor, element_format: str) -> tuple[int, ...]:
    """Shape in elements; packed FP4 holds two along the last dimension."""
    shape = tuple(data.shape)
    if element_format.endswith("_x2") and shape:
        return (*shape[:-1], shape[-1] * 2)
    return shape


def _block_shape(shape: tuple[int, ...], scale: torch.Tensor | None) -> tuple[int, ...]:
    """Elements that share a scale, by dimension; empty for one scale a tensor or if the shapes do not divide."""
    if scale is None or scale.numel() <= 1 or scale.dim() != len(shape):
        return ()
    if any(n == 0 or n % s for n, s in zip(shape, scale.shape, strict=True) if s != 0) or 0 in scale.shape:
        return ()
    return tuple(n // s for n, s in zip(shape, scale.shape, strict=True))


# -- torch's quantized dtypes


def _has_quantized_dtype(value: torch.Tensor) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.is_quantized


_AFFINE = {
    torch.per_tensor_affine: False,
    torch.per_tensor_symmetric: False,
    torch.per_channel_affine: True,
    torch.per_channel_symmetric: True,
}


def _from_quantized_dtype(value: torch.Tensor) -> Extraction:
    """Take a ``qint8``, ``quint8`` or ``qint32`` tensor: x = (data - zero_point) * scale_inv.

    Torch keeps the scale of a whole tensor on the host, and calls ``scale`` what multiplies to decode.
    """
    name, scheme = dtype_name(value.dtype), value.qscheme()
    if value.dtype not in (torch.qint8, torch.quint8, torch.qint32) or scheme not in _AFFINE:
        return Extraction(None, f"quantized dtype {name} with {scheme}")
    codes = value.detach().int_repr()
    metadata: dict[str, Any] = {"qscheme": str(scheme).removeprefix("torch."), "dtype": name}
    if _AFFINE[scheme]:
        scale, zero_point = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        metadata["axis"] = value.q_per_channel_axis()
    else:  # as components: as metadata, each new scale would be a new quantizer
        scale = torch.full((), value.q_scale(), dtype=torch.float64, device=codes.device)
        zero_point = torch.full((), value.q_zero_point(), dtype=torch.int64, device=codes.device)
    info = QuantizerInfo(f"torch.{name}", dtype_name(codes.dtype), "multiply_to_decode", (), metadata)
    components = {"data": codes, "scale_inv": scale.detach(), "zero_point": zero_point.detach()}
    return _readable(QuantizedParts(info, components, {n: dtype_name(t.dtype) for n, t in components.items()}))


# -- torchao


def is_torchao_float8(value: object) -> bool:
    """Say whether a tensor is torchao's Float8 training tensor."""
    module = sys.modules.get(_TORCHAO_FLOAT8)
    return module is not None and isinstance(value, module.Float8TrainingTensor)


def torchao_role(value: Any) -> str:
    """Which operand a Float8 training tensor is: ``input``, ``weight`` or ``grad_output``."""
    return str(value._gemm_input_role.value)


def is_torchao_axiswise(value: Any) -> bool:
    """Say whether a Float8 training tensor has a scale for each row or column, so that its direction matters."""
    return value._axiswise_dim is not None


def _from_torchao_float8(value: Any) -> QuantizedParts:
    """Take a Float8 training tensor: ``_data`` = ``x * _scale``, so the scale multiplies to encode."""
    data, scale = value._data.detach(), value._scale.detach()
    block_shape = _block_shape(tuple(data.shape), scale)
    info = _torchao_float8_info(data.dtype, value._orig_dtype, value._axiswise_dim, torchao_role(value), block_shape)
    return QuantizedParts(info, {"data": data, "scale": scale}, pair_codes="data")


@functools.lru_cache(maxsize=1024)
def _torchao_float8_info(
    dtype: torch.dtype, original: torch.dtype, axiswise_dim: int | None, role: str, block_shape: tuple[int, ...]
) -> QuantizerInfo:
    metadata = {
        "original_dtype": dtype_name(original),
        "granularity": "tensorwise" if axiswise_dim is None else "axiswise",
        "axiswise_dim": axiswise_dim,
        "gemm_input_role": role,
    }
    name = f"{_TORCHAO_FLOAT8}.Float8TrainingTensor"
    return QuantizerInfo(name, dtype_name(dtype), "multiply_to_encode", block_shape, metadata)


# -- any other wrapper subclass


def _is_wrapper(value: torch.Tensor) -> bool:
    """A subclass that can name its inner tensors and is not one of torch's own that hold no codes."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or any(base.__name__ in _NOT_QUANTIZED for base in kind.__mro__):
        return False
    return hasattr(kind, "__tensor_flatten__")


def _from_wrapper(value: torch.Tensor) -> Extraction:
    """Keep the inner arrays raw: what they mean is known to the class whose name stands in the metadata.

    The metadata say under which attribute each was found, and the context, so that they can be understood later.
    """
    components: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {"attributes": {}}
    try:
        _flatten(value, "", "", components, metadata)
        metadata["original_dtype"] = dtype_name(value.dtype)
    except Exception as error:  # a stranger's method: whatever it raises is a reason, not ours to pass on
        return Extraction(None, f"{_class_name(value)}.__tensor_flatten__ failed: {describe(error)}")
    if not components:
        return Extraction(None, f"{_class_name(value)} has no inner tensors")
    for name, tensor in components.items():
        if not is_plain(tensor) or tensor.is_quantized or tensor.is_nested:
            return Extraction(None, f"{_class_name(value)}: inner tensor {name} is not plain and dense")
    codes = [t.dtype for t in components.values() if dtype_name(t.dtype) in FORMATS]
    element_format = dtype_name(codes[0]) if codes else dtype_name(next(iter(components.values())).dtype)
    info = QuantizerInfo(_class_name(value), element_format, "unknown", (), metadata)
    formats = {name: dtype_name(tensor.dtype) for name, tensor in components.items()}
    return _readable(QuantizedParts(info, components, formats, pair_codes=None, is_understood=False))


def _flatten(
    value: Any, prefix: str, path: str, components: dict[str, torch.Tensor], metadata: dict[str, Any], depth: int = 0
) -> None:
    names, context = value.__tensor_flatten__()
    metadata[f"{prefix}context"] = _plain(context)
    for name in names:
        inner = getattr(value, name)
        word = f"{prefix}{name.lstrip('_').lower()}" or "inner"
        word = "inner_high_precision" if word == "high_precision" else word
        while word in components:
            word += "_"
        if isinstance(inner, torch.Tensor) and _is_wrapper(inner) and depth < _MAX_METADATA_DEPTH:
            _flatten(inner, f"{word}_", f"{path}{name}.", components, metadata, depth + 1)
        elif isinstance(inner, torch.Tensor):
            components[word] = inner.detach()
            metadata["attributes"][word] = f"{path}{name}"


def _plain(value: object, depth: int = 0) -> Any:
    """JSON-able picture of a stranger's context: values where they are plain, else their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.Tensor):  # its text would synchronise
        return f"tensor {tuple(value.shape)} {dtype_name(value.dtype)}"
    if depth < _MAX_METADATA_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            fields = getattr(type(value), "_fields", None)
            items = [_plain(item, depth + 1) for item in value]
            return dict(zip(fields, items, strict=False)) if fields else items
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            return {name: _plain(getattr(value, name), depth + 1) for name in value.__dataclass_fields__}
    return _class_name(value) if not isinstance(value, (torch.device, torch.Size, torch.layout)) else str(value)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float8_e4m3fn`` as ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
