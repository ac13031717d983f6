"""Takes Transformer Engine's quantized tensors and storage objects apart; knows their private fields.

Everything comes as views, in logical order and without padding wherever a view can bring it there: the codecs and
``docs/format.md`` say what the components are. Imports nothing of Transformer Engine: classes are known by their names.
Launches nothing but one multiplication of a few words for NVFP4's second scale; never synchronises. Called on the
training thread and on autograd's threads, on whatever stream is current.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import Extraction, class_name, dtype_name, readable, with_columnwise
from flightrec.sources.extract_te_blocks import block_parts, mxfp8_parts, nvfp4_parts, nvfp4_ref_parts
from flightrec.sources.extract_te_grouped import grouped_parts
from flightrec.sources.extract_te_info import QuantizerState, Words, format_name, info_of
from flightrec.sources.extract_te_other import plain_parts, unknown_parts
from flightrec.sources.sink import is_plain
from flightrec.sources.te_classes import STORAGES, te_classes

__all__ = ["QuantizerState", "extract_te", "identity_data", "is_te"]

_MAX_CLASSES = 4096
_NO_DATA = "it holds no data: its buffers were released or are saved for the backward pass"


def is_te(value: object) -> bool:
    """Say whether this is one of Transformer Engine's quantized tensors or storages, or of a class made from them."""
    return _family(type(value)) is not None


def identity_data(value: object) -> torch.Tensor | None:
    """The plain tensor inside an ``IdentityTensor`` or its storage, detached; None for any other object."""
    if _family(type(value)) is not _identity:
        return None
    data = getattr(value, "_hp_data", None)
    return data.detach() if isinstance(data, torch.Tensor) else None


def extract_te(operand: Any, *, quantizer: object = None, state: QuantizerState | None = None) -> Extraction:
    """Take a tensor or storage object of Transformer Engine apart.

    Args:
        operand: ``Float8Tensor``, ``Float8BlockwiseQTensor``, ``MXFP8Tensor``, ``NVFP4Tensor``, ``HybridQuantized...``,
            ``IdentityTensor``, ``GroupedTensor`` (each also as ``...Storage``), ``DebugQuantizedTensor``, tensors of
            the reference recipes. An unknown class of theirs is kept by the tensors it names, not understood.
        quantizer: what made it, where the operand does not hold it.
        state: what its module knows of the quantizer: live scale, amax, history column, recipe.

    Returns:
        The parts: tensors that share the operand's memory, on its device, any strides. Or None with a reason.
    """
    take = _family(type(operand))
    if take is None:
        return Extraction(None, f"{class_name(operand)} is not of Transformer Engine")
    if quantizer is None:
        quantizer = getattr(operand, "_quantizer", None) or getattr(operand, "quantizer", None)
    found = take(operand, quantizer, state)
    if isinstance(found, Extraction):
        return found
    return readable(found) if found is not None else Extraction(None, f"{class_name(operand)}: {_NO_DATA}")


Taker = Callable[[Any, Any, "QuantizerState | None"], "QuantizedParts | Extraction | None"]


_known: dict[type, Taker | None] = {}


def _family(kind: type) -> Taker | None:
    """The function that takes a class apart, None for a stranger; looked for once a class."""
    try:
        return _known[kind]
    except KeyError:
        if len(_known) >= _MAX_CLASSES:
            _known.clear()
        return _known.setdefault(kind, _find_family(kind))


def _find_family(kind: type) -> Taker | None:
    known = te_classes(kind)
    for names, take in _FAMILIES:
        if not known.isdisjoint(names):
            return take
    return None


# -- per-tensor FP8


def _float8(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    """Codes once: the transpose is a permutation of them, and the only holder where the row-wise data are gone."""
    data, transpose = tensor._data, tensor._transpose
    if data is None:
        if transpose is None or tensor._transpose_invalid:
            return None
        data = transpose.movedim(0, -1) if transpose.dim() else transpose
    name = format_name(tensor._fp8_dtype)
    components = {"data": data, "scale_inv": tensor._scale_inv}
    if tensor._scale_inv is None:
        return None
    live = _add_state(components, quantizer, state)
    info = info_of(tensor, quantizer, state, Words("float8", name), None, live=live, dtype=tensor._dtype)
    return QuantizedParts(info, components, {"data": name}, pair_codes="data")


def _add_state(components: dict[str, torch.Tensor], quantizer: Any, state: QuantizerState | None) -> tuple[str, ...]:
    """Add the words of delayed scaling; returns those that the quantizer may have changed since it quantized."""
    given = {
        "scale": getattr(quantizer, "scale", None) if state is None or state.scale is None else state.scale,
        "amax": getattr(quantizer, "amax", None) if state is None or state.amax is None else state.amax,
        "amax_history": None if state is None else state.amax_history,
    }
    device, live = components["data"].device, []
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.device == device:
            components[name] = tensor.detach()
            live.append(name)
    return () if state is not None and state.at_quantizing else tuple(live)


def _current_scaling_ref(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    data, scale = tensor.data, tensor.scale
    if data is None and tensor.data_t is not None:
        data, scale = tensor.data_t.t(), tensor.scale_t
    if data is None or scale is None:
        return None
    name = format_name(tensor.quant_dtype) if tensor.quant_dtype is not None else dtype_name(data.dtype)
    info = info_of(tensor, quantizer, state, Words("float8", name), None, dtype=tensor.dtype)
    return QuantizedParts(info, {"data": data, "scale_inv": scale}, {"data": name}, pair_codes="data")


# -- tensors made of others


def _identity(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    data = tensor._hp_data
    return None if data is None else plain_parts(data, tensor, quantizer, state)


def _hybrid(tensor: Any, _quantizer: Any, state: QuantizerState | None) -> Extraction:
    return _two(tensor, tensor._rowwise_storage, tensor._columnwise_storage, state)


def _debug(tensor: Any, _quantizer: Any, state: QuantizerState | None) -> Extraction:
    return _two(tensor, tensor.rowwise_gemm_tensor, tensor.columnwise_gemm_tensor, state)


def _two(whole: Any, row: Any, column: Any, state: QuantizerState | None) -> Extraction:
    """A tensor for each direction, each of any class."""
    if row is None and column is None:
        return Extraction(None, f"{class_name(whole)}: {_NO_DATA}")
    first = _any(row, state) if row is not None else None
    if first is not None and (first.parts is None or column is None or column is row):
        return first
    second = _any(column, state)
    if second.parts is None:
        return Extraction(None, f"columnwise: {second.reason}")
    return Extraction(with_columnwise(None if first is None else first.parts, second.parts, class_name(whole)))


def _any(tensor: Any, state: QuantizerState | None) -> Extraction:
    if is_te(tensor):
        return extract_te(tensor, state=state)
    if is_plain(tensor):
        return readable(plain_parts(tensor, tensor, None, state))
    return Extraction(None, f"{class_name(tensor)} inside a tensor of Transformer Engine")


_FAMILIES: tuple[tuple[tuple[str, ...], Taker], ...] = (
    (("Float8TensorStorage", "Float8TensorBase"), _float8),
    (("Float8BlockwiseQTensorStorage", "Float8BlockwiseQTensorBase"), block_parts),
    (("MXFP8TensorStorage", "MXFP8TensorBase"), mxfp8_parts),
    (("NVFP4TensorStorage",), nvfp4_parts),
    (("HybridQuantizedTensorStorage",), _hybrid),
    (("IdentityTensorStorage",), _identity),
    (("GroupedTensorStorage",), grouped_parts),
    (("DebugQuantizedTensor",), _debug),
    (("NVFP4TensorRef",), nvfp4_ref_parts),
    (("CurrentScalingTensorRef",), _current_scaling_ref),
    (STORAGES, unknown_parts),
)
