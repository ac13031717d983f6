"""Turns a quantized tensor of any known library into plain arrays and plain metadata.

The one entry; the files ``extract_*`` beside it know other libraries' private fields, and nothing else does. Owns no
state but caches of metadata; imports no quantization library: a tensor of a library can only exist if that library is
loaded already. Launches nothing, never synchronises.
"""

from __future__ import annotations

from typing import Any

import torch

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources import sharded
from flightrec.sources.extract_base import (
    FORMATS,
    Extraction,
    blocks_of,
    class_name,
    dtype_name,
    logical_shape,
    readable,
    with_columnwise,
    with_facts,
)
from flightrec.sources.extract_te import extract_te, is_te
from flightrec.sources.extract_torchao import from_torchao_float8, is_torchao_axiswise, is_torchao_float8, torchao_role
from flightrec.sources.extract_wrapper import from_wrapper, is_wrapper
from flightrec.sources.quantized import Quantized
from flightrec.sources.sink import is_plain

__all__ = [
    "FORMATS",
    "Extraction",
    "device_of",
    "dtype_name",
    "extract",
    "is_quantized",
    "is_torchao_axiswise",
    "is_torchao_float8",
    "torchao_role",
    "with_facts",
]

_BYTE_DTYPES = (torch.uint8, torch.int8)


def is_quantized(value: object) -> bool:
    """Say whether ``extract`` would know what to do with this object, by its type alone."""
    if isinstance(value, (Quantized, QuantizedParts)) or is_te(value):
        return True
    return isinstance(value, torch.Tensor) and (is_wrapper(value) or _has_quantized_dtype(value))


def device_of(value: object) -> torch.device | None:
    """Device of a tensor, or of what a quantized object holds; None for anything else, and without memory."""
    tensor: object = value
    if isinstance(value, QuantizedParts) or (is_te(value) and not isinstance(value, torch.Tensor)):
        parts = extract(value).parts
        tensor = next(iter(parts.components.values()), None) if parts is not None else None
    elif not isinstance(value, torch.Tensor):
        tensor = getattr(value, "data", None)
    return tensor.device if isinstance(tensor, torch.Tensor) else None


def extract(quantized: object, columnwise: object = None) -> Extraction:
    """Take a quantized tensor apart.

    Args:
        quantized: a ``Quantized``, finished ``QuantizedParts``, torchao's ``Float8TrainingTensor``, a quantized tensor
            or storage object of Transformer Engine (the latter a plain Python object), a tensor of a torch quantized
            dtype (``qint8``, ...), a ``DTensor`` of any of these, or any wrapper subclass with ``__tensor_flatten__``
            (kept raw, under its class name). None if there is only ``columnwise``.
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
        return Extraction(with_columnwise(None, second.parts))
    first = _extract_one(quantized)
    return first if first.parts is None else Extraction(with_columnwise(first.parts, second.parts))


def _extract_one(value: object) -> Extraction:
    if isinstance(value, QuantizedParts):
        return Extraction(value)
    if isinstance(value, Quantized):
        return _from_quantized(value)
    if is_te(value):
        return extract_te(value)
    if not isinstance(value, torch.Tensor):
        return Extraction(None, f"{class_name(value)} is not a quantized tensor that flightrec knows")
    if is_torchao_float8(value):
        return readable(from_torchao_float8(value))
    if sharded.is_dtensor(value):
        parts, reason = _extract_one(sharded.local_part(value))
        return Extraction(with_facts(parts, {"dtensor": sharded.facts_of(value)}) if parts else None, reason)
    if _has_quantized_dtype(value):
        return _from_quantized_dtype(value)
    if is_wrapper(value):
        return from_wrapper(value)
    return Extraction(None, f"{class_name(value)} is a plain tensor; wrap it in flightrec.Quantized(data, format)")


# -- flightrec.Quantized


def _from_quantized(value: Quantized) -> Extraction:
    data: object = value.data
    if value.format not in FORMATS:
        return Extraction(None, f"Quantized.format is {value.format!r}, expected one of {', '.join(FORMATS)}")
    if not isinstance(data, torch.Tensor):
        return Extraction(None, f"Quantized.data is a {class_name(data)}, expected a tensor")
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
            return Extraction(None, f"Quantized.{name} is not a plain dense tensor but {class_name(tensor)}")
        components[name] = tensor.detach()
    scale_name = "scale_inv" if value.scale_inv is not None else "scale"
    direction = "none"
    if scale_name in components:
        direction = "multiply_to_decode" if scale_name == "scale_inv" else "multiply_to_encode"
    blocks = blocks_of(logical_shape(data, value.format), components.get(scale_name))
    info = QuantizerInfo("flightrec.Quantized", value.format, direction, blocks, {})
    return readable(QuantizedParts(info, components, {"data": value.format}, pair_codes="data"))


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
    return readable(QuantizedParts(info, components, {n: dtype_name(t.dtype) for n, t in components.items()}))
