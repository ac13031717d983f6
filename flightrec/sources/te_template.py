"""Takes a per-tensor FP8 operand apart as ``parts_of`` does, but from what it found of the one before.

Everything but the tensors' values is the same for an operand in every iteration, and to find it out again would be most
of a record's cost. So it is kept and compared: class, shapes and dtypes, every attribute of the quantizer, those of the
recipe once a run, the module's amax history. Compared by identity, and never by the operand's own, since sharded
training makes new objects of old names: what differs is looked at in full again. Owns references to a quantizer's small
words, to its attributes and to a module's amax history, no operand. Never synchronises, launches nothing.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch

from flightrec.ring.layout import QuantizedParts
from flightrec.ring.looks import Looks, looks_like, looks_of
from flightrec.sources.extract_te import QuantizerState
from flightrec.sources.plain import has_memory
from flightrec.sources.te_classes import te_classes
from flightrec.sources.te_state import history_in, metas_of

Facts = tuple[tuple[str, Any], ...]

_OPERANDS = ("data", "scale_inv")
_FLOAT8 = ("Float8TensorStorage", "Float8TensorBase")


class Template:
    """What was found of one operand, and how it is known that the next one is the same but for its values."""

    __slots__ = (
        "_attributes",
        "_class",
        "_components",
        "_data",
        "_dtype",
        "_facts",
        "_fp8_dtype",
        "_history",
        "_is_current",
        "_module",
        "_parts",
        "_quantizer_class",
        "_scale_inv",
        "_words",
    )

    def __init__(
        self,
        operand: Any,
        look: ModuleLook,
        parts: QuantizedParts,
        state: QuantizerState,
        is_current: bool,
        facts: Facts,
    ) -> None:
        quantizer = operand._quantizer
        self._class, self._quantizer_class = type(operand), type(quantizer)
        self._data, self._scale_inv = looks_of(operand._data), looks_of(operand._scale_inv)
        self._dtype, self._fp8_dtype = operand._dtype, operand._fp8_dtype
        self._attributes = [] if quantizer is None else list(vars(quantizer).values())
        self._is_current, self._facts = is_current, facts
        self._module = look
        self._parts = dataclasses.replace(parts, components={}, template=self)
        self._components = {name: word for name, word in parts.components.items() if name not in _OPERANDS}
        self._words = [(word, word.data_ptr()) for word in (state.scale, state.amax) if word is not None]
        self._history: tuple[Mapping[str, Any], str, torch.Tensor, int] | None = None
        if state.amax is not None:
            self._history = next((found for meta in look.metas if (found := history_in(meta, state.amax))), None)

    @classmethod
    def of(
        cls,
        operand: Any,
        look: ModuleLook,
        parts: QuantizedParts,
        state: QuantizerState,
        is_current: bool,
        facts: Facts,
    ) -> Template | None:
        """A template of an operand that ``parts_of`` took apart; None for one that has to be looked at each time."""
        if te_classes(type(operand)).isdisjoint(_FLOAT8) or parts.components.get("data") is not operand._data:
            return None
        if not (operand._quantizer is None or hasattr(operand._quantizer, "__dict__")):
            return None
        if state.amax is not None and state.amax_history is None:  # it may be there the next time
            return None
        return cls(operand, look, parts, state, is_current, facts)

    def parts(self, operand: Any, look: ModuleLook, is_current: bool, facts: Facts) -> QuantizedParts | None:
        """The operand's parts; None if anything is not as it was."""
        if type(operand) is not self._class or is_current is not self._is_current or facts != self._facts:
            return None
        data, scale_inv = operand._data, operand._scale_inv
        if not (is_like(data, self._data) and is_like(scale_inv, self._scale_inv)):
            return None
        if operand._dtype is not self._dtype or operand._fp8_dtype is not self._fp8_dtype:
            return None
        if look is not self._module or not (self._has_same_quantizer(operand._quantizer) and self._has_same_history()):
            return None
        known = self._parts
        components = {"data": data, "scale_inv": scale_inv, **self._components}
        return QuantizedParts(known.info, components, known.formats, known.pair_codes, template=self)

    def _has_same_quantizer(self, quantizer: Any) -> bool:
        if type(quantizer) is not self._quantizer_class:
            return False
        if quantizer is not None and not are_same(vars(quantizer), self._attributes):
            return False
        for word, pointer in self._words:  # noqa: SIM110  a generator would be most of the cost
            if word.data_ptr() != pointer:
                return False
        return True

    def _has_same_history(self) -> bool:
        if self._history is None:
            return True
        meta, key, history, pointer = self._history
        return getattr(meta.get(key), "amax_history", None) is history and history.data_ptr() == pointer


class ModuleLook:
    """What a module holds of FP8, and of its recipe: the same object as long as all of it is the same.

    Attributes:
        metas: as ``te_state.metas_of`` gives them.
    """

    __slots__ = ("_recipe", "_recipe_values", "metas")

    def __init__(self, metas: list[dict[str, Any]]) -> None:
        self.metas = metas
        self._recipe = _recipe_of(metas)
        self._recipe_values = [] if self._recipe is None else list(vars(self._recipe).values())

    @classmethod
    def of(cls, module: Any, before: ModuleLook | None) -> ModuleLook:
        """The look at a module now: ``before`` itself if nothing is another object than then."""
        metas = metas_of(module)
        return before if before is not None and before._is_at(metas) else cls(metas)

    def _is_at(self, metas: list[dict[str, Any]]) -> bool:
        if len(metas) != len(self.metas) or not all(map(operator.is_, metas, self.metas)):
            return False
        if _recipe_of(metas) is not self._recipe:
            return False
        return self._recipe is None or are_same(vars(self._recipe), self._recipe_values)


def is_like(tensor: torch.Tensor | None, looks: Looks) -> bool:
    """Same shape, dtype and device, contiguous, in memory that is there."""
    return tensor is not None and looks_like(tensor, looks) and has_memory(tensor)


def are_same(attributes: Mapping[str, Any], values: list[Any]) -> bool:
    """Whether every attribute is the very object that it was; equality might synchronise."""
    return len(attributes) == len(values) and all(map(operator.is_, attributes.values(), values))


def _recipe_of(metas: list[dict[str, Any]]) -> Any:
    for meta in metas:
        recipe = meta.get("recipe")
        if recipe is not None:
            return recipe
    return None
