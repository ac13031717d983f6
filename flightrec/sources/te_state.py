"""What Transformer Engine's quantizers know beside the codes: the recipe, and delayed scaling's live state.

Owns a small cache of recipes as plain values. Reads references only: never synchronises, launches nothing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import torch

from flightrec.sources.extract_te import QuantizerState
from flightrec.sources.te_classes import is_storage

_MAX_RECIPES = 64
_recipes: dict[int, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
"""By id: the recipe, which is kept, so that its id is not used again; its attributes when read; the plain values."""


def is_per_tensor(operand: object) -> bool:
    """Say whether the operand's codes are the same for both directions: per-tensor FP8, whose transpose is a copy."""
    return hasattr(operand, "_transpose") and hasattr(operand, "_scale_inv")


def has_own_columnwise(operand: object) -> bool:
    """Say whether a wgrad product reads other codes of such an operand than the forward product."""
    return is_storage(operand) and not is_per_tensor(operand)


def has_columnwise(operand: object) -> bool:
    """Say whether the operand holds the codes that a wgrad product reads, or needs none of their own."""
    if not has_own_columnwise(operand):
        return True
    names = ("_columnwise_data", "columnwise_data", "data_t")
    return any(getattr(operand, name, None) is not None for name in names)


def state_of(module: Any, operand: Any, *, at_quantizing: bool) -> QuantizerState:
    """What a module knows of the quantizer that made an operand.

    Args:
        module: the module or operation whose ``fp8_meta`` may hold the recipe and the history.
        operand: a quantized operand.
        at_quantizing: the operand was quantized in this very pass, so that the quantizer's scale is that of its codes.
    """
    recipe: Mapping[str, Any] = {}
    history = None
    quantizer = getattr(operand, "_quantizer", None)
    scale, amax = getattr(quantizer, "scale", None), getattr(quantizer, "amax", None)
    metas = metas_of(module)
    for meta in metas:
        if not recipe and meta.get("recipe") is not None:
            recipe = recipe_fields(meta["recipe"])
    if not isinstance(scale, torch.Tensor) or not isinstance(amax, torch.Tensor):
        return QuantizerState(recipe=recipe, at_quantizing=at_quantizing)
    for meta in metas:
        history = _history(meta, amax) if history is None else history
    return QuantizerState(scale, amax, history, recipe, at_quantizing)


def metas_of(module: Any) -> list[dict[str, Any]]:
    """What a module, or an operation by mode, holds of FP8; empty without any."""
    attributes = vars(module)  # asking a module for an attribute that it has not is slow
    metas = attributes.get("_fp8_metas")
    if type(metas) is dict:
        return [meta for meta in metas.values() if isinstance(meta, dict)]
    meta = attributes.get("fp8_meta")
    return [meta] if isinstance(meta, dict) else []


def _history(meta: Mapping[str, Any], amax: torch.Tensor) -> torch.Tensor | None:
    """Column of the module's amax history whose first element is ``amax``."""
    found = history_in(meta, amax)
    if found is None:
        return None
    history = found[2]
    offset = (amax.data_ptr() - history.data_ptr()) // history.element_size()
    return history.detach()[:, offset]


def history_in(meta: Mapping[str, Any], amax: torch.Tensor) -> tuple[Mapping[str, Any], str, torch.Tensor, int] | None:
    """The amax history of which ``amax`` is a word: where it is held, by which key, the history, its address."""
    for key in ("scaling_fwd", "scaling_bwd"):
        history = getattr(meta.get(key), "amax_history", None)
        if not isinstance(history, torch.Tensor) or history.dim() != 2 or history.shape[0] == 0:
            continue
        pointer = history.data_ptr()
        if 0 <= amax.data_ptr() - pointer < history.shape[1] * history.element_size():
            return meta, key, history, pointer
    return None


def recipe_fields(recipe: Any) -> Mapping[str, Any]:
    """A recipe's fields as plain values: enumerations and functions by name. The same object until one is changed."""
    known = _recipes.get(id(recipe))
    attributes = getattr(recipe, "__dict__", {})
    if known is not None and known[0] is recipe and known[1] == attributes:
        return known[2]
    fields: dict[str, Any] = {"class": type(recipe).__name__}
    if dataclasses.is_dataclass(recipe):
        for field in dataclasses.fields(recipe):
            fields[field.name] = _plain(getattr(recipe, field.name, None))
    if len(_recipes) >= _MAX_RECIPES:
        _recipes.clear()
    _recipes[id(recipe)] = (recipe, dict(attributes), fields)
    return fields


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return getattr(value, "__qualname__", type(value).__qualname__)
