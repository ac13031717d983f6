"""What Transformer Engine's quantizers know, for a feature that is shown an operand and no module.

Reads references only: never synchronises, launches nothing. Holds plain values of recipes, one a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from flightrec.sources.extract_te import QuantizerState, extract_te, is_te
from flightrec.sources.te_state import recipe_fields

_QUANTIZATION = "transformer_engine.pytorch.quantization"


class Recipes:
    """The recipe of each layer, as its latest forward had it: a backward runs outside of ``autocast``."""

    def __init__(self) -> None:
        self._of_layer: dict[str, Mapping[str, Any]] = {}

    def of(self, layer: str, *, is_forward: bool) -> Mapping[str, Any]:
        """Plain values of a layer's recipe, the same object as long as they are equal; empty without one."""
        known = self._of_layer.get(layer, {})
        if is_forward and (recipe := _current_recipe()) is not None:
            fields = recipe_fields(recipe)
            if fields != known:
                known = self._of_layer[layer] = fields
        return known


def _current_recipe() -> object | None:
    """The recipe of the ``autocast`` that the calling thread is in, None outside of one."""
    manager: Any = getattr(sys.modules.get(_QUANTIZATION), "FP8GlobalStateManager", None)
    if manager is None or not manager.is_fp8_enabled():
        return None
    recipe: object = manager.get_fp8_recipe()
    return recipe


def with_state(operand: object, quantizer: object, recipe: Mapping[str, Any], *, at_quantizing: bool) -> object:
    """An operand of Transformer Engine as parts, with the live state of its quantizer; any other as it is.

    Args:
        operand: what a product reads.
        quantizer: that was shown with it, or None.
        recipe: plain values, the same object each time.
        at_quantizing: the operand was quantized right before.

    Returns:
        What ``extract`` takes. What cannot be taken apart comes back as it is: whoever records it says why.
    """
    if not is_te(operand):
        return operand
    own = getattr(operand, "_quantizer", None) if quantizer is None else quantizer
    scale, amax = getattr(own, "scale", None), getattr(own, "amax", None)
    is_delayed = isinstance(scale, torch.Tensor) and isinstance(amax, torch.Tensor)
    state = QuantizerState(
        scale if is_delayed else None,
        amax if is_delayed else None,
        _history(amax) if is_delayed else None,
        recipe,
        at_quantizing,
    )
    parts = extract_te(operand, quantizer=own, state=state).parts
    return operand if parts is None else parts


def _history(amax: Any) -> torch.Tensor | None:
    """The column of a module's amax history that a quantizer writes to: its ``amax`` is a view of the first row."""
    history = amax._base
    if not isinstance(history, torch.Tensor) or history.dim() != 2 or not history.is_contiguous():
        return None
    column = int(amax.storage_offset()) - int(history.storage_offset())
    return history.detach()[:, column] if 0 <= column < history.shape[1] else None
