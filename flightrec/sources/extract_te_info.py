"""Metadata of Transformer Engine's quantized tensors: what is constant for a quantizer, as plain words.

Built once for each set of words and cached, because extraction runs at every record. Imports nothing of Transformer
Engine, reads attributes by name. Launches nothing, never synchronises.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flightrec.records import QuantizerInfo
from flightrec.sources.extract_base import dtype_name, plain_metadata

_MAX_INFOS = 4096
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})

_FORMATS = {
    "kFloat8E4M3": "float8_e4m3fn",
    "kFloat8E5M2": "float8_e5m2",
    "kFloat4E2M1": "float4_e2m1fn_x2",
    "kBFloat16": "bfloat16",
    "kFloat16": "float16",
    "kFloat32": "float32",
    "kByte": "uint8",
    "kInt32": "int32",
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizerState:
    """What a module knows of a quantizer beside the tensor that it made; for delayed scaling.

    Attributes:
        scale: float32 [1] on the tensor's device, multiplies to encode; the quantizer's live word.
        amax: float32 [1], likewise: the amax that the quantizer has seen so far.
        amax_history: float32 [history length], the column of the module's history that belongs to this tensor.
        recipe: the recipe's fields, JSON-able; constant for a run. Hand in the same object each time.
        at_quantizing: the words are read in the very call that quantized the tensor, so that ``scale`` times
            ``scale_inv`` must be 1. Delayed scaling changes the words later, on purpose.
    """

    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    amax_history: torch.Tensor | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    at_quantizing: bool = False


class Words(NamedTuple):
    """What metadata say of one side; hashable. ``more`` are further (key, value) pairs."""

    scheme: str
    format: str
    block_shape: tuple[int, ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def direction(self) -> str:
        """``scale_direction`` of the scheme."""
        is_identity = self.scheme == "identity" or (self.scheme == "grouped" and ("member", "identity") in self.more)
        return "none" if is_identity else "multiply_to_decode"

    def to_json(self) -> dict[str, Any]:
        """As ``metadata["columnwise"]``."""
        return {
            "scheme": self.scheme,
            "format": self.format,
            "scale_direction": self.direction,
            "block_shape": list(self.block_shape),
            **{key: _listed(value) for key, value in self.more},
        }


_infos: dict[Hashable, tuple[QuantizerInfo, object]] = {}


def info_of(
    operand: object,
    quantizer: object,
    state: QuantizerState | None,
    row: Words | None,
    column: Words | None,
    *,
    live: tuple[str, ...] = (),
    logical_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizerInfo:
    """Metadata of a tensor, the same object for the same words.

    Args:
        operand: the tensor or storage; its class counts.
        quantizer: what made it, or None; its plain attributes count.
        state: its ``recipe`` counts.
        row: the row-wise side, None if there is none.
        column: the column-wise side, likewise.
        live: components that were read from the quantizer when recorded, not when it quantized.
        logical_shape: where the components do not tell it.
        dtype: the high-precision dtype that the tensor stands for.
    """
    recipe: Mapping[str, Any] | None = state.recipe if state is not None and state.recipe else None
    attributes = attributes_of(quantizer)
    key = (type(operand), type(quantizer), attributes, row, column, live, logical_shape, dtype, id(recipe))
    found = _infos.get(key)
    if found is not None and found[1] is recipe:
        return found[0]
    if len(_infos) >= _MAX_INFOS:
        _infos.clear()
    info = _build(operand, quantizer, recipe, row, column, live, logical_shape, dtype)
    _infos[key] = (info, recipe)  # the recipe is kept alive, so that its id stays its own
    return info


def attributes_of(quantizer: object) -> tuple[tuple[str, Any], ...]:
    """Plain attributes of a quantizer, sorted as they were set; tensors and process groups are left out."""
    if quantizer is None:
        return ()
    try:
        attributes = vars(quantizer)
    except TypeError:  # slots
        return ()
    found = []
    for name, value in attributes.items():
        kind = type(value)
        if kind in _PLAIN_TYPES or isinstance(value, (enum.Enum, torch.dtype)):
            found.append((name, value))
        elif kind is tuple or kind is list:
            found.append((name, tuple(item if type(item) in _PLAIN_TYPES else repr(item) for item in value)))
    return tuple(found)


def format_name(dtype: object) -> str:
    """Element format of Transformer Engine's ``DType`` (either enumeration), of a torch dtype, or its text."""
    if isinstance(dtype, torch.dtype):
        return dtype_name(dtype)
    name = getattr(dtype, "name", "")
    if name == "E2M1":  # of the reference quantizers
        return "float4_e2m1fn_x2"
    return _FORMATS.get(name, str(name or dtype))


def quantizer_words(quantizer: object) -> dict[str, Any]:
    """A quantizer's class and plain attributes as JSON-able data."""
    words: dict[str, Any] = {"class": type(quantizer).__qualname__}
    for name, value in attributes_of(quantizer):
        if name == "dtype" or isinstance(value, torch.dtype):
            words[name] = None if value is None else format_name(value)
        else:
            words[name] = _listed(plain_metadata(value))
    return words


def _build(
    operand: object,
    quantizer: object,
    recipe: Mapping[str, Any] | None,
    row: Words | None,
    column: Words | None,
    live: tuple[str, ...],
    logical_shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
) -> QuantizerInfo:
    first = row or column
    assert first is not None
    metadata: dict[str, Any] = {"scheme": first.scheme}
    metadata.update((key, _listed(value)) for key, value in (row.more if row else ()))
    if dtype is not None:
        metadata["original_dtype"] = dtype_name(dtype)
    if logical_shape is not None:
        metadata["logical_shape"] = list(logical_shape)
    if quantizer is not None:
        metadata["quantizer"] = quantizer_words(quantizer)
    if recipe is not None:
        metadata["recipe"] = plain_metadata(recipe)
    if live:
        metadata["live"] = list(live)
    if column is not None:
        metadata["columnwise"] = column.to_json()
    kind = type(operand)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return QuantizerInfo(name, first.format, first.direction, first.block_shape, metadata)


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value
