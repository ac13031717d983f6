"""What taking quantized tensors apart has in common, whichever library they are of.

Pure functions; no state, no launch, no synchronisation.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.memory import LARGE_BYTES, MAX_OVERLAP, why_unreadable

FORMATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
"""Element formats of codes that ``Quantized`` may name."""

COLUMNWISE = "columnwise_"
"""Beginning of the names of the other direction's components."""

_MAX_JOINED = 4096

MAX_METADATA_DEPTH = 4
"""Levels of a stranger's nested context that metadata keep."""


class Extraction(NamedTuple):
    """Result of ``extract``: the parts, or None and the reason in plain words."""

    parts: QuantizedParts | None
    reason: str = ""


def with_facts(parts: QuantizedParts, facts: Mapping[str, Any]) -> QuantizedParts:
    """The same parts, with more metadata."""
    info = parts.info
    more = QuantizerInfo(
        info.class_name, info.format, info.scale_direction, info.block_shape, {**info.metadata, **facts}
    )
    return dataclasses.replace(parts, info=more)


def readable(parts: QuantizedParts) -> Extraction:
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


def with_columnwise(first: QuantizedParts | None, second: QuantizedParts, class_name: str = "") -> QuantizedParts:
    """Join two quantizations of one tensor, one for each direction of a product.

    Args:
        first: the row-wise one, whose metadata stay; or None.
        second: the column-wise one: its column-wise arrays where it has some, else all of them.
        class_name: of the tensor that holds both, where it is neither's.
    """
    own = [name for name in second.components if name.startswith(COLUMNWISE)]
    names = {name: name for name in own} if f"{COLUMNWISE}data" in own else {}
    names = names or {name: f"{COLUMNWISE}{name}" for name in second.components}
    components = {} if first is None else {n: t for n, t in first.components.items() if n not in names.values()}
    formats = {n: form for n, form in first.formats.items() if n in components} if first else {}
    for name, joined in names.items():
        components[joined] = second.components[name]
        formats[joined] = second.formats.get(name, dtype_name(second.components[name].dtype))
    info = _joined_info(first.info if first else None, second.info, class_name)
    pair = first.pair_codes if first else names.get(second.pair_codes or "")
    understood = second.is_understood and (first is None or first.is_understood)
    return QuantizedParts(info, components, formats, pair, is_understood=understood)


_joined: dict[tuple[int, int, str], tuple[QuantizerInfo | None, QuantizerInfo, QuantizerInfo]] = {}


def _joined_info(first: QuantizerInfo | None, second: QuantizerInfo, class_name: str) -> QuantizerInfo:
    """Cached by the objects: those of a source are the same at every record."""
    key = (id(first), id(second), class_name)
    found = _joined.get(key)
    if found is not None and found[0] is first and found[1] is second:
        return found[2]
    if len(_joined) >= _MAX_JOINED:
        _joined.clear()
    info = first or second
    words: dict[str, Any] = {name: word for name, word in second.metadata.items() if name != "columnwise"}
    words |= {"class_name": second.class_name, "format": second.format, "scale_direction": second.scale_direction}
    words["block_shape"] = list(second.block_shape)
    words |= second.metadata.get("columnwise") or {}
    metadata = {**info.metadata, "columnwise": words}
    if class_name and first is not None:
        metadata["rowwise_class_name"] = first.class_name
    joined = QuantizerInfo(class_name or info.class_name, info.format, info.scale_direction, info.block_shape, metadata)
    _joined[key] = (first, second, joined)
    return joined


def logical_shape(data: torch.Tensor, element_format: str) -> tuple[int, ...]:
    """Shape in elements; packed FP4 holds two along the last dimension."""
    shape = tuple(data.shape)
    if element_format.endswith("_x2") and shape:
        return (*shape[:-1], shape[-1] * 2)
    return shape


def blocks_of(shape: tuple[int, ...], scale: torch.Tensor | None) -> tuple[int, ...]:
    """Elements that share a scale, by dimension; empty for one scale a tensor or if the shapes do not divide."""
    if scale is None or scale.numel() <= 1 or scale.dim() != len(shape):
        return ()
    if any(n == 0 or n % s for n, s in zip(shape, scale.shape, strict=True) if s != 0) or 0 in scale.shape:
        return ()
    return tuple(n // s for n, s in zip(shape, scale.shape, strict=True))


def plain_metadata(value: object, depth: int = 0) -> Any:
    """JSON-able picture of a stranger's context: values where they are plain, else their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.Tensor):  # its text would synchronise
        return f"tensor {tuple(value.shape)} {dtype_name(value.dtype)}"
    if depth < MAX_METADATA_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): plain_metadata(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            fields = getattr(type(value), "_fields", None)
            items = [plain_metadata(item, depth + 1) for item in value]
            return dict(zip(fields, items, strict=False)) if fields else items
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            return {name: plain_metadata(getattr(value, name), depth + 1) for name in value.__dataclass_fields__}
    return class_name(value) if not isinstance(value, (torch.device, torch.Size, torch.layout)) else str(value)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float8_e4m3fn`` as ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def class_name(value: object) -> str:
    """Qualified name of an object's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
