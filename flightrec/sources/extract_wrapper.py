"""Takes wrapper subclasses of unknown libraries apart: raw, under the names that they give their inner tensors.

Owns no state. Launches nothing, never synchronises; calls the strangers' ``__tensor_flatten__``.
"""

from __future__ import annotations

from typing import Any

import torch

from flightrec.hosthooks import describe
from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import (
    FORMATS,
    MAX_METADATA_DEPTH,
    Extraction,
    class_name,
    dtype_name,
    plain_metadata,
    readable,
)
from flightrec.sources.sink import is_plain

# Wrapper subclasses that are no quantized tensors: their values are ordinary tensors somewhere else.
_NOT_QUANTIZED = frozenset({"DTensor", "FakeTensor", "FunctionalTensor", "NestedTensor", "AsyncCollectiveTensor"})


def is_wrapper(value: torch.Tensor) -> bool:
    """A subclass that can name its inner tensors and is not one of torch's own that hold no codes."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or any(base.__name__ in _NOT_QUANTIZED for base in kind.__mro__):
        return False
    return hasattr(kind, "__tensor_flatten__")


def from_wrapper(value: torch.Tensor) -> Extraction:
    """Keep the inner arrays raw: what they mean is known to the class whose name stands in the metadata.

    The metadata say under which attribute each was found, and the context, so that they can be understood later.
    """
    components: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {"attributes": {}}
    try:
        _flatten(value, "", "", components, metadata)
        metadata["original_dtype"] = dtype_name(value.dtype)
    except Exception as error:  # a stranger's method: whatever it raises is a reason, not ours to pass on
        return Extraction(None, f"{class_name(value)}.__tensor_flatten__ failed: {describe(error)}")
    if not components:
        return Extraction(None, f"{class_name(value)} has no inner tensors")
    for name, tensor in components.items():
        if not is_plain(tensor) or tensor.is_quantized or tensor.is_nested:
            return Extraction(None, f"{class_name(value)}: inner tensor {name} is not plain and dense")
    codes = [t.dtype for t in components.values() if dtype_name(t.dtype) in FORMATS]
    element_format = dtype_name(codes[0]) if codes else dtype_name(next(iter(components.values())).dtype)
    info = QuantizerInfo(class_name(value), element_format, "unknown", (), metadata)
    formats = {name: dtype_name(tensor.dtype) for name, tensor in components.items()}
    return readable(QuantizedParts(info, components, formats, pair_codes=None, is_understood=False))


def _flatten(
    value: Any, prefix: str, path: str, components: dict[str, torch.Tensor], metadata: dict[str, Any], depth: int = 0
) -> None:
    names, context = value.__tensor_flatten__()
    metadata[f"{prefix}context"] = plain_metadata(context)
    for name in names:
        inner = getattr(value, name)
        word = f"{prefix}{name.lstrip('_').lower()}" or "inner"
        word = "inner_high_precision" if word == "high_precision" else word
        while word in components:
            word += "_"
        if isinstance(inner, torch.Tensor) and is_wrapper(inner) and depth < MAX_METADATA_DEPTH:
            _flatten(inner, f"{word}_", f"{path}{name}.", components, metadata, depth + 1)
        elif isinstance(inner, torch.Tensor):
            components[word] = inner.detach()
            metadata["attributes"][word] = f"{path}{name}"
