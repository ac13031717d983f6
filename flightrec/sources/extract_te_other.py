"""Transformer Engine's tensors that hold no codes, and classes of its kind that nobody here knows.

Launches nothing, never synchronises; asks a stranger for its own ``get_metadata()``.
"""

from __future__ import annotations

from typing import Any

import torch

from flightrec.hosthooks import describe
from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import FORMATS, Extraction, class_name, dtype_name, plain_metadata, readable
from flightrec.sources.extract_te_info import QuantizerState, Words, info_of, quantizer_words
from flightrec.sources.sink import is_plain


def plain_parts(data: torch.Tensor, owner: object, quantizer: object, state: QuantizerState | None) -> QuantizedParts:
    """High-precision values where codes could have been."""
    name = dtype_name(data.dtype)
    info = info_of(owner, quantizer, state, Words("identity", name), None, dtype=data.dtype)
    return QuantizedParts(info, {"data": data.detach()}, {"data": name}, pair_codes=None)


def unknown_parts(tensor: Any, quantizer: Any, _state: QuantizerState | None) -> Extraction:
    """An unknown class: the tensors among what it says of itself, under the names that it gives them."""
    components: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {"attributes": {}}
    try:
        for name, value in _fields(tensor).items():
            if not isinstance(value, torch.Tensor):
                metadata["attributes"][name] = quantizer_words(value) if "quantizer" in name else plain_metadata(value)
            elif is_plain(value):
                components[_word(name, components)] = value.detach()
    except Exception as error:  # a stranger's method: whatever it raises is a reason, not ours to pass on
        return Extraction(None, f"{class_name(tensor)}.get_metadata failed: {describe(error)}")
    if not components:
        return Extraction(None, f"{class_name(tensor)} holds no tensors that could be read")
    if quantizer is not None:
        metadata["quantizer"] = quantizer_words(quantizer)
    formats = {name: dtype_name(part.dtype) for name, part in components.items()}
    element = next((form for form in formats.values() if form in FORMATS), next(iter(formats.values())))
    info = QuantizerInfo(class_name(tensor), element, "unknown", (), metadata)
    return readable(QuantizedParts(info, components, formats, pair_codes=None, is_understood=False))


def _fields(tensor: Any) -> dict[str, Any]:
    try:
        return dict(tensor.get_metadata())
    except (AttributeError, NotImplementedError):
        return {name: value for name, value in vars(tensor).items() if name not in ("_quantizer", "quantizer")}


def _word(name: str, taken: dict[str, torch.Tensor]) -> str:
    word = name.lstrip("_").lower() or "inner"
    word = "inner_high_precision" if word == "high_precision" else word
    while word in taken:
        word += "_"
    return word
