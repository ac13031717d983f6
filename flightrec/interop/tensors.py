"""Gives a record's arrays as tensors: torch's own, bit by bit, and Transformer Engine's or torchao's quantized classes.

The only module that has torch beside the reader. Owns no state; any thread; reads the record's bytes on each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flightrec.codecs import base
from flightrec.errors import FormatError, IncidentError, MissingExtraError
from flightrec.interop import te_tensors
from flightrec.storage.record import HIGH_PRECISION, Record

_AS_STORED = frozenset({"float6_e2m3fn", "float6_e3m2fn"})
"""Formats of which torch has no dtype: their codes come as uint8."""
_TORCHAO_FLOAT8 = "torchao.float8.float8_training_tensor.Float8TrainingTensor"
_TORCHAO_MX = ("MXTensor",)


def to_torch(
    record: Record, component: str = HIGH_PRECISION, *, device: torch.device | str = "cpu", check: bool = True
) -> torch.Tensor:
    """Give one array of a record as a tensor of the dtype that was recorded, bit by bit.

    Args:
        record: of an open incident.
        component: ``high_precision``, ``data``, ``scale_inv``, ...: a name of ``record.components``.
        device: where the tensor shall be; a copy that waits, if that is a GPU.
        check: compare its checksum first.

    Returns:
        Contiguous, in the component's stored shape, owned by the caller: bfloat16, float8 and the others as torch has
        them (packed FP4 as ``float4_e2m1fn_x2``, two codes an element); FP6 codes and unknown formats as uint8.

    Raises:
        IncidentError: the record has no such component, its bytes are missing (says why), or they are damaged.
    """
    form = next((part.format for part in record.components if part.name == component), "")
    array = np.array(record.raw(component, check=check), copy=True, order="C")
    return _as_dtype(torch.from_numpy(array.reshape(array.shape)), form).to(device)


def to_transformer_engine(record: Record, *, device: torch.device | str = "cpu") -> Any:
    """Give a record's quantized side as the class of Transformer Engine that it was, put together from its components.

    Args:
        record: of an open incident, quantized as FP8 with delayed or current scaling, FP8 in blocks, MXFP8 or NVFP4.
        device: where the tensor shall be. Transformer Engine decodes MXFP8 and NVFP4 on a GPU only.

    Returns:
        ``Float8Tensor``, ``Float8BlockwiseQTensor``, ``MXFP8Tensor`` or ``NVFP4Tensor`` with the sides that were
        recorded; ``dequantize()`` gives what ``record.quantized.dequantize()`` gives, in ``original_dtype``.

    Raises:
        IncidentError: there is no quantized side, or its bytes are damaged.
        FormatError: it is of another class (``record.metadata`` says which).
        MissingExtraError: Transformer Engine is not installed, or cannot be imported here.
    """
    components, metadata = _quantized(record, device)
    try:
        return te_tensors.build(metadata, components, _logical_shape(record))
    except ImportError as error:
        raise MissingExtraError(
            f"{record!r}: making a tensor of Transformer Engine needs the package, which cannot be imported ({error}): "
            "pip install 'transformer_engine[pytorch]'"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise FormatError(f"{record!r}: {error}") from error


def to_torchao(record: Record, *, device: torch.device | str = "cpu") -> Any:
    """Give a record's quantized side as torchao's ``Float8TrainingTensor`` or ``MXTensor``.

    Arguments and errors as ``to_transformer_engine``; a record of another class of torchao is a ``FormatError``.
    """
    components, info = _quantized(record, device)
    metadata: Mapping[str, Any] = info.get("metadata") or {}
    name = str(info.get("class_name", ""))
    try:
        if name == _TORCHAO_FLOAT8:
            return _float8_training(components, info, metadata)
        if name.rpartition(".")[2] in _TORCHAO_MX and name.startswith("torchao.") and "data" in components:
            return _mx(components, info, metadata)
    except ImportError as error:
        raise MissingExtraError(
            f"{record!r}: making a tensor of torchao needs it ({error}): pip install 'torch-flightrec[torchao]'"
        ) from error
    raise FormatError(f"{record!r}: is {name or 'of no class'}, expected torchao's Float8TrainingTensor or MXTensor")


def _float8_training(components: Mapping[str, torch.Tensor], info: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig

    return Float8TrainingTensor(
        _as_dtype(components["data"], str(info["format"])),
        components["scale"],
        getattr(torch, str(words["original_dtype"])),
        LinearMMConfig(),
        GemmInputRole(words["gemm_input_role"]),
        words.get("axiswise_dim"),
    )


def _mx(components: Mapping[str, torch.Tensor], info: Mapping[str, Any], words: Mapping[str, Any]) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    codes = str(info["format"])
    blocks = tuple(info["block_shape"])
    swizzled = "swizzled_scale_inv" in components
    data, scale = components["data"], components["swizzled_scale_inv" if swizzled else "scale_inv"]
    if words.get("transposed"):
        data, scale = data.t(), scale.t()
    six = {"float6_e2m3fn": "fp6_e2m3", "float6_e3m2fn": "fp6_e3m2"}
    element: Any = six.get(codes) or getattr(torch, codes)
    if codes.startswith("float8"):
        data = data.view(element)
    return MXTensor(
        data,
        scale.view(torch.float8_e8m0fnu),
        element,
        max(blocks),
        getattr(torch, str(words["original_dtype"])),
        KernelPreference.EMULATED,
        None,
        swizzled,
    )


def _quantized(record: Record, device: torch.device | str) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """The stored arrays of a record's quantized side, bit patterns as they are, and its metadata."""
    quantized = record.quantized
    if quantized is None:
        raise IncidentError(f"{record!r}: has no quantized side. {record.why_absent}".rstrip(". "))
    found = {}
    for name in quantized.components:
        array = np.array(quantized.components[name], copy=True, order="C")
        found[name] = torch.from_numpy(array.reshape(array.shape)).to(device)
    return found, quantized.metadata


def _logical_shape(record: Record) -> tuple[int, ...]:
    return tuple((record.metadata.get("metadata") or {}).get("logical_shape") or record.shape)


def _as_dtype(stored: torch.Tensor, form: str) -> torch.Tensor:
    """Bit patterns seen as the dtype that they are of."""
    if form in _AS_STORED or form not in base.FORMATS:
        return stored
    dtype = getattr(torch, form, None)
    if not isinstance(dtype, torch.dtype) or dtype == stored.dtype:
        return stored
    if form == "bool":
        return stored.ne(0)
    return stored.view(dtype)
