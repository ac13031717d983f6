"""Takes an operand in blocks (FP8 blocks, MXFP8, NVFP4) apart as ``parts_of`` does, from what it found of the last one.

As ``te_template`` for per-tensor FP8: all but the tensors' values is compared, and the views into the operand's buffers
are made again by their sizes, strides and offsets. What differs in anything is looked at in full again. Owns
references to a quantizer's attributes, no operand. Launches the one multiplication for NVFP4's second scale that
``extract_te_blocks`` launches too; never synchronises.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from flightrec.ring.layout import QuantizedParts
from flightrec.ring.looks import looks_of
from flightrec.sources.extract_te import QuantizerState
from flightrec.sources.te_classes import te_classes
from flightrec.sources.te_template import Facts, ModuleLook, are_same, is_like

_CLASSES = (
    "Float8BlockwiseQTensorStorage",
    "Float8BlockwiseQTensorBase",
    "MXFP8TensorStorage",
    "MXFP8TensorBase",
    "NVFP4TensorStorage",
)
_SECOND_SCALE = "tensor_scale_inv"
_MUTABLE = (list, dict, set)


class _View(NamedTuple):
    """Where a component lies in one of the operand's buffers; ``is_whole`` if it is that buffer as it is."""

    field: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool


class BlockTemplate:
    """What was found of one operand in blocks, and how it is known that the next one is the same but for its values."""

    __slots__ = (
        "_attributes",
        "_class",
        "_facts",
        "_fields",
        "_module",
        "_names",
        "_parts",
        "_quantizer_class",
        "_second_scale",
        "_views",
        "_words",
    )

    def __init__(
        self, operand: Any, look: ModuleLook, parts: QuantizedParts, views: dict[str, _View | None], facts: Facts
    ) -> None:
        quantizer, held = operand._quantizer, vars(operand)
        self._class, self._quantizer_class = type(operand), type(quantizer)
        self._attributes = [] if quantizer is None else list(vars(quantizer).values())
        self._names = list(held)
        self._fields = [(name, looks_of(value)) for name, value in held.items() if isinstance(value, torch.Tensor)]
        tensors = dict(self._fields)
        self._words = [(name, held[name]) for name in held if name != "_quantizer" and name not in tensors]
        self._module, self._facts = look, facts
        self._views = views
        self._second_scale = 1.0 / (6.0 * int(getattr(operand, "_nvfp4_e4m3_max", 448)))
        self._parts = dataclasses.replace(parts, components={}, template=self)

    @classmethod
    def of(
        cls, operand: Any, look: ModuleLook, parts: QuantizedParts, state: QuantizerState, facts: Facts
    ) -> BlockTemplate | None:
        """A template of an operand that ``parts_of`` took apart; None for one that has to be looked at each time."""
        if te_classes(type(operand)).isdisjoint(_CLASSES) or not hasattr(operand, "__dict__"):
            return None
        if state.scale is not None or state.amax is not None or state.amax_history is not None:
            return None
        quantizer, held = getattr(operand, "_quantizer", None), vars(operand)
        attributes: list[Any] = []
        if quantizer is not None:
            if not hasattr(quantizer, "__dict__"):
                return None
            attributes = list(vars(quantizer).values())
        if "_quantizer" not in held or any(isinstance(value, _MUTABLE) for value in (*attributes, *held.values())):
            return None
        views: dict[str, _View | None] = {}
        for name, tensor in parts.components.items():
            views[name] = None if name == _SECOND_SCALE else _find(held, tensor)
            if views[name] is None and not (name == _SECOND_SCALE and "amax" in views):
                return None
        return cls(operand, look, parts, views, facts)

    def parts(self, operand: Any, look: ModuleLook, _is_current: bool, facts: Facts) -> QuantizedParts | None:
        """The operand's parts; None if anything is not as it was. Whether its scales are current changes nothing."""
        if type(operand) is not self._class or look is not self._module or facts != self._facts:
            return None
        held = vars(operand)
        if list(held) != self._names:
            return None
        for name, value in self._words:
            if held[name] is not value:
                return None
        for name, looks in self._fields:
            if not is_like(held[name], looks):
                return None
        quantizer = operand._quantizer
        if type(quantizer) is not self._quantizer_class:
            return None
        if quantizer is not None and not are_same(vars(quantizer), self._attributes):
            return None
        components: dict[str, torch.Tensor] = {}
        for name, view in self._views.items():
            if view is None:
                components[name] = components["amax"] * self._second_scale
            elif view.is_whole:
                components[name] = held[view.field]
            else:
                field = held[view.field]
                components[name] = field.as_strided(view.size, view.stride, field.storage_offset() + view.offset)
        known = self._parts
        return QuantizedParts(known.info, components, known.formats, known.pair_codes, template=self)


def _find(held: dict[str, Any], tensor: torch.Tensor) -> _View | None:
    """Where a component lies; None if that is in no buffer of the operand's, or it is no plain view of one."""
    for name, field in held.items():
        if not isinstance(field, torch.Tensor):
            continue
        if tensor is field:
            return _View(name, (), (), 0, True)
        offset_bytes = tensor.data_ptr() - field.data_ptr()
        if field.dtype == tensor.dtype and tensor.numel() and 0 <= offset_bytes < field.nbytes:
            return _View(name, tuple(tensor.shape), tensor.stride(), offset_bytes // field.element_size(), False)
    return None
