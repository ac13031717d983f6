"""Source ``te``: taps the products of Transformer Engine's layers, outside debug mode.

Records exactly what the tensor cores read and made, for ``Linear``, ``LayerNormLinear``, ``LayerNormMLP`` (as ``.fc1``
and ``.fc2``), ``GroupedLinear`` (as ``.gemm_<i>``) and the linear operations of ``te.ops``: ``activation``, ``weight``
(once an iteration, at its first training forward) and ``output`` in the forward, ``gradient``, ``dgrad`` and ``wgrad``
in the backward. Quantized operands come with the tensor that the quantizer read, where that exists: what a norm or an
activation quantized inside its own kernel never does, and the metadata say so. Codes of the other direction that the
forward's operand lacked are recorded at stage ``backward``. A weight gradient that the kernel adds to ``main_grad`` is
a running sum: part ``main_grad``.

While attached, functions of Transformer Engine are replaced for the whole process (see ``te_patch``). Runs on the
training thread and on autograd's threads; holds operands only while the product runs, and what ``te_template`` keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flightrec.records import Phase, Stage
from flightrec.sources import te_patch
from flightrec.sources.base import Keeper
from flightrec.sources.extract_te import QuantizerState
from flightrec.sources.observe import observe
from flightrec.sources.sink import Sightings, Sink
from flightrec.sources.stamps import ASLEEP, Stamp, Stamps
from flightrec.sources.te_block_template import BlockTemplate
from flightrec.sources.te_classes import is_storage
from flightrec.sources.te_layers import Kind, TeLayer, find_layers, unseen_parts
from flightrec.sources.te_parts import parts_of
from flightrec.sources.te_products import rows_of
from flightrec.sources.te_run import Listener, Run
from flightrec.sources.te_state import has_columnwise, state_of
from flightrec.sources.te_template import ModuleLook, Template
from flightrec.sources.warmup import is_capturing

_PHASES = (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)
_FORWARD_TENSORS = ("activation", "weight", "output")
_BACKWARD_TENSORS = ("activation", "weight", "gradient", "wgrad", "dgrad")
_PRODUCT_TENSORS = ("activation", "weight", "gradient", "output", "wgrad", "dgrad")
_NO_PARTNER = "not there: quantized inside another kernel, before this pass, or freed before the product"


class TeSource:
    """Records the operands and results of a model's Transformer Engine products.

    Args:
        model: the model; may hold none, then nothing happens.
        sink: where tensors go.
        stamps: shared with the ``ModulesSource`` of the same model, which must be built with ``skip=source.claims``
            and be attached: its hooks say which layer runs.
    """

    def __init__(self, model: nn.Module, sink: Sink, stamps: Stamps) -> None:
        self.stamps = stamps
        self._keeper = Keeper(sink, "te")
        self._attached = False
        self._iteration = 0
        self._layers: dict[str, TeLayer] = {}
        self._operations: dict[int, TeLayer] = {}
        found = find_layers(model)
        problem = te_patch.problem() if found else ""
        lacking = te_patch.lacking() if found and not problem else {}
        for layer in found:
            reason = problem or lacking.get(layer.kind, "")
            if reason:
                self._keeper.blind(layer.layer, "", reason)
                continue
            self._layers[layer.layer] = layer
            if layer.kind.is_op:
                self._operations[id(layer.module)] = layer
        self._wanted = {
            (name, tensor, phase)
            for layer in self._layers.values()
            for name in (*layer.products, *((layer.all_experts,) if layer.kind.is_grouped else ()))
            for tensor in _PRODUCT_TENSORS
            for phase in _PHASES
            if sink.selects(name, tensor, phase) is not None
        }
        self._forwards, self._backwards = self._sightings()
        self._owned = self._weight_owners()
        self._weights: dict[tuple[str, Stage], int] = {}  # iteration of the last record
        self._rowwise_only: set[str] = set()
        self._templates: dict[tuple[str, str, str, Phase, Stage], Template | BlockTemplate] = {}
        self._looks: dict[str, ModuleLook] = {}
        self._unseen = unseen_parts(model) if self._layers else {}

    @property
    def claims(self) -> Mapping[str, frozenset[str]]:
        """By layer, what this source records; give it to ``ModulesSource`` as ``skip``."""
        return {name: layer.claims() for layer in self._layers.values() for name in (layer.layer, layer.inner)}

    def attach(self) -> None:
        """Replace Transformer Engine's functions, if the model has layers of interest."""
        if self._attached or not self._wanted:
            return
        self._attached = self._keeper.armed = True
        for what, reason in {**self._unseen, **te_patch.register(self)}.items():
            self._keeper.blind("", what, reason)

    def detach(self) -> None:
        """Put the functions back unless another source still needs them; may be called twice."""
        if self._attached:
            self._attached = self._keeper.armed = False
            te_patch.unregister(self)
            self._templates.clear()
            self._looks.clear()

    def after_step(self) -> None:
        """Begin the next iteration."""
        self._iteration += 1
        self._rowwise_only.clear()

    def describe(self) -> str:
        """Say in a few words what it observes."""
        count = sum(len(layer.products) for layer in self._layers.values())
        unseen = f", not seen: {', '.join(sorted(self._unseen))}" if self._unseen else ""
        return f"Transformer Engine ({count} products{unseen})"

    @property
    def has_work(self) -> bool:
        """Whether anything that it could record is selected."""
        return bool(self._wanted)

    # -- called by the patch

    def listen(self, kind: Kind) -> Listener | None:
        """The layer of ours that runs on this thread, if it is of this kind; None outside of our model."""
        stamp = self.stamps.current()
        if stamp is None or stamp is ASLEEP or stamp.phase is Phase.WARMUP:
            return None
        layer = self._layers.get(stamp.layer)
        if layer is None or layer.kind is not kind:
            self.unknown(
                f"products of a {kind.value.rpartition('.')[2]} inside {stamp.layer!r}",
                "it is no module of the attached model, or was run without its hooks",
            )
            return None
        return Listener(self, stamp, layer)

    def enter_operation(self, operation: Any) -> tuple[Listener, bool] | None:
        """An operation of ``te.ops`` runs, mostly without hooks; also whether ``leave_operation`` must follow."""
        layer = self._operations.get(id(operation))
        if layer is None:
            return None
        stamp = self.stamps.current()
        if stamp is not None and stamp.layer == layer.layer:
            return None if stamp.phase is Phase.WARMUP else (Listener(self, stamp, layer), False)
        entered = self.stamps.enter(layer.module, layer.layer)
        if entered.phase is Phase.WARMUP:
            self.stamps.leave(layer.layer)
            return None
        return Listener(self, entered, layer), True

    def is_awake(self, listener: Listener, *, backward: bool) -> bool:
        """Whether anything of a pass through a layer is wanted in this iteration. Never raises an ``Exception``."""
        name = listener.layer.layer
        try:
            return self._keeper.wants_any(
                self._backwards[name] if backward else self._forwards[listener[1].phase][name]
            )
        except Exception as error:
            self._keeper.fail(name, error)
            return False

    def leave_operation(self, listener: Listener) -> None:
        """The operation returned, or raised."""
        self.stamps.leave(listener.layer.layer)

    def backward_begins(self, stamp: Stamp) -> None:
        """A layer's backward starts."""
        self.stamps.see_backward(stamp.microbatch)

    def failed(self, layer: str, error: Exception) -> None:
        """Something of ours raised beside this layer's product. Never raises."""
        self._keeper.fail(layer, error)

    def unknown(self, what: str, reason: str) -> None:
        """Something ran that is not recorded and belongs to no layer."""
        self._keeper.blind("", what, reason)

    def weight(self, listener: Listener, run: Run, index: int, operand: Any, phase: Phase, stage: Stage) -> None:
        """A product reads its weight: record it once an iteration, at the first layer that holds it.

        In the backward only if the forward's operand lacked the codes that this product reads.
        """
        name = listener.layer.products[index]
        if phase is not Phase.TRAIN or name not in self._owned:
            return
        if stage is Stage.BACKWARD and name not in self._rowwise_only:
            return
        if not self._is_weight_due(name, stage, listener.stamp):
            return
        if stage is Stage.FORWARD and not has_columnwise(operand):
            self._rowwise_only.add(name)
        self.operand(listener, run, index, "weight", operand, phase, stage)

    def operand(
        self, listener: Listener, run: Run, index: int, tensor: str, operand: Any, phase: Phase, stage: Stage,
        part: str = "",
    ) -> None:  # fmt: skip
        """A product reads or made a tensor; call it inside ``quiet``. Never raises an ``Exception``."""
        name = listener.layer.products[index]
        if (name, tensor, phase) not in self._wanted or not self._keeper.works(name):
            return
        try:
            if not self._keeper.wants(name, tensor, phase, stage):
                return
            if not is_storage(operand):
                self._plain(name, tensor, operand, listener.stamp, phase, stage, part)
            else:
                is_gathered = tensor in listener.layer.gathered[index]
                self._quantized(listener, run, name, tensor, operand, phase, stage, part, is_gathered)
        except Exception as error:
            self._keeper.fail(name, error)

    def buffer(self, listener: Listener, tensor: str, operand: Any, phase: Phase, stage: Stage, part: str) -> None:
        """A product reads or made one buffer for all experts of a layer; inside ``quiet``. Raises no ``Exception``."""
        name = listener.layer.all_experts
        if (name, tensor, phase) not in self._wanted or not self._keeper.works(name):
            return
        if tensor == "weight" and (phase is not Phase.TRAIN or not self._is_weight_due(name, stage, listener.stamp)):
            return
        try:
            if not self._keeper.wants(name, tensor, phase, stage):
                return
            plain, splits = rows_of(operand)
            parts = None
            if plain is None:
                parts, reason = parts_of(operand, QuantizerState())
                if parts is None:
                    self._keeper.blind(name, tensor, reason)
                    return
            self._keeper.sink.capture(
                name, tensor, part=part, microbatch=listener.stamp.microbatch, phase=phase,
                call=listener.stamp.call, stage=stage, high_precision=plain, quantized=parts, splits=splits,
            )  # fmt: skip
        except Exception as error:
            self._keeper.fail(name, error)

    def unseen(self, listener: Listener, index: int, tensor: str, phase: Phase, reason: str) -> None:
        """A tensor of a product is in a form that is not recorded."""
        name = listener.layer.products[index]
        if (name, tensor, phase) in self._wanted:
            self._keeper.blind(name, tensor, reason)

    # -- inside

    def _is_weight_due(self, name: str, stage: Stage, stamp: Stamp) -> bool:
        """Say yes once an iteration; in a capture, whose replays are in others, in its first microbatch."""
        if is_capturing():
            return stamp.microbatch == 0
        due = self._weights.get((name, stage)) != self._iteration
        self._weights[name, stage] = self._iteration
        return due

    def _plain(
        self, name: str, tensor: str, operand: torch.Tensor, stamp: Stamp, phase: Phase, stage: Stage, part: str
    ) -> None:
        self._keeper.keep(
            operand,
            name,
            tensor,
            part=part,
            microbatch=stamp.microbatch,
            phase=phase,
            call=stamp.call,
            stage=stage,
        )

    def _quantized(
        self, listener: Listener, run: Run, name: str, tensor: str, operand: Any, phase: Phase, stage: Stage,
        part: str, is_gathered: bool,
    ) -> None:  # fmt: skip
        is_current = run.was_quantized_here(operand) or ((tensor, stage) in _MADE_IN_THEIR_PASS and not run.is_delayed)
        layer, module = listener.layer.layer, listener.layer.module
        partner = run.partner(operand)
        plain = None
        if partner is not None:
            plain = observe(partner).plain
            if plain is not None and plain.shape != operand.shape:
                plain = plain.reshape(operand.shape) if plain.numel() == operand.shape.numel() else None
        facts = _FACTS[plain is None, is_gathered]
        place = (name, tensor, part, phase, stage)
        template = self._templates.get(place)
        look = run.looks.get(layer)
        if look is None:
            look = self._looks[layer] = run.looks[layer] = ModuleLook.of(module, self._looks.get(layer))
        parts = None if template is None else template.parts(operand, look, is_current, facts)
        if parts is None:
            state = state_of(module, operand, at_quantizing=is_current)
            parts, reason = parts_of(operand, state, facts)
            if parts is None:
                self._keeper.blind(name, tensor, reason)
                return
            template = Template.of(operand, look, parts, state, is_current, facts)
            template = template or BlockTemplate.of(operand, look, parts, state, facts)
            if template is not None:
                self._templates[place] = template
        self._keeper.sink.capture(
            name,
            tensor,
            part=part,
            microbatch=listener.stamp.microbatch,
            phase=phase,
            call=listener.stamp.call,
            stage=stage,
            high_precision=plain,
            quantized=parts,
        )

    def _sightings(self) -> tuple[dict[Phase, dict[str, Sightings]], dict[str, Sightings]]:
        """What a forward of each phase through each layer may show, and what a backward pass may."""
        forwards: dict[Phase, dict[str, Sightings]] = {phase: {} for phase in _PHASES}
        backwards: dict[str, Sightings] = {}
        for layer in self._layers.values():
            names = dict.fromkeys((*layer.products, layer.all_experts))
            for phase, known in forwards.items():
                known[layer.layer] = Sightings(self._wanted_of(names, _FORWARD_TENSORS, phase, Stage.FORWARD))
            again = forwards[Phase.RECOMPUTE][layer.layer].of  # a backward pass may run a product of the forward again
            of_backward = self._wanted_of(names, _BACKWARD_TENSORS, Phase.TRAIN, Stage.BACKWARD)
            backwards[layer.layer] = Sightings((*again, *of_backward))
        return forwards, backwards

    def _wanted_of(
        self, names: Iterable[str], tensors: Iterable[str], phase: Phase, stage: Stage
    ) -> list[tuple[str, str, Phase, Stage]]:
        return [
            (name, tensor, phase, stage)
            for name in names
            for tensor in tensors
            if (name, tensor, phase) in self._wanted
        ]

    def _weight_owners(self) -> set[str]:
        """Products whose weight is selected, each weight's first."""
        owners: dict[int, str] = {}
        owned: set[str] = set()
        for layer in self._layers.values():
            for name, weights in zip(layer.products, layer.weights, strict=True):
                parameter = layer.module._parameters.get(weights[0])
                if (name, "weight", Phase.TRAIN) not in self._wanted:
                    continue
                if parameter is None:
                    owned.add(name)
                    continue
                owner = owners.setdefault(id(parameter), name)
                if owner == name or (weights == ("weight",) and layer.kind.is_grouped):  # one parameter for all experts
                    owned.add(name)
                else:
                    self._keeper.blind(name, "weight", f"the same parameter as that of {owner}, recorded there")
        return owned


_FACTS: dict[tuple[bool, bool], tuple[tuple[str, Any], ...]] = {
    (alone, gathered): (
        *((("high_precision", _NO_PARTNER),) if alone else ()),
        *((("gathered", True),) if gathered else ()),
    )
    for alone in (True, False)
    for gathered in (True, False)
}
"""What metadata say beside the quantizer's own: by whether there is no partner, and whether it is gathered."""

_MADE_IN_THEIR_PASS = frozenset(
    {
        ("activation", Stage.FORWARD),
        ("output", Stage.FORWARD),
        ("gradient", Stage.BACKWARD),
        ("dgrad", Stage.BACKWARD),
    }
)
"""Quantized in the pass in which their product runs, be it inside a norm's, an activation's or the product's kernel."""
