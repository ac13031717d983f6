"""Source ``torchao``: taps the products of torchao's Float8 training.

Records exactly the operands that ``Float8Linear`` quantizes, each as the high-precision tensor together with its Float8
tensor: ``activation`` and ``weight`` (once an iteration, in the weight's own orientation) in the forward, ``gradient``
(as the product read it, two-dimensional) and ``dgrad`` in the backward. With axiswise scales the other direction's
codes differ: the gradient's come as ``columnwise``, those of activation and weight as records of their own at stage
``backward``. ``wgrad`` is left to the ``modules`` source.

While attached, two names of ``torchao.float8.float8_linear`` are replaced for the whole process; they are put back when
the last source detaches. If torchao does not look as expected nothing is replaced and the layers are told as blind.
Runs on the training thread and on autograd's threads; holds operands only while the product runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flightrec.records import Phase, Stage
from flightrec.sources import torchao_patch
from flightrec.sources.base import Keeper
from flightrec.sources.extract import is_torchao_axiswise, is_torchao_float8
from flightrec.sources.observe import observe
from flightrec.sources.sink import Sink, quiet
from flightrec.sources.stamps import Stamp, Stamps

_PHASES = (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)
TENSORS = ("activation", "weight", "gradient", "dgrad")
"""What this source records of a layer whose casts are all switched on."""


class TorchaoSource:
    """Records the operands of a model's ``Float8Linear`` modules.

    Args:
        model: the model; may hold none, then nothing happens.
        sink: where tensors go.
        stamps: shared with the ``ModulesSource`` of the same model, which must be built with ``skip=source.claims``
            and be attached: its hooks say which layer runs.
    """

    def __init__(self, model: nn.Module, sink: Sink, stamps: Stamps) -> None:
        self.stamps = stamps
        self._keeper = Keeper(sink, "torchao")
        self._attached = False
        self._iteration = 0
        self._weight_iteration: dict[tuple[str, Stage], int] = {}
        self._claims: dict[str, frozenset[str]] = {}
        layers = _float8_layers(model)
        problem = torchao_patch.problem() if layers else ""
        for layer, module in layers:
            if problem:
                self._keeper.blind(layer, "", problem)
            else:
                self._claims[layer] = _cast_tensors(module.config)
        owners: dict[int, str] = {}
        for layer, module in layers:
            if self._selected(layer, "weight", Phase.TRAIN):
                owners.setdefault(id(module.weight), layer)
        self._owned = set(owners.values())
        self._wanted = {
            (layer, tensor, phase)
            for layer in self._claims
            for tensor in self._claims[layer]
            for phase in _PHASES
            if self._selected(layer, tensor, phase)
        }

    @property
    def claims(self) -> Mapping[str, frozenset[str]]:
        """By layer, the tensors that this source records; give it to ``ModulesSource`` as ``skip``."""
        return self._claims

    def attach(self) -> None:
        """Replace torchao's functions, if the model has layers of interest."""
        if not self._attached and self._wanted:
            self._attached = self._keeper.armed = True
            torchao_patch.register(self)

    def detach(self) -> None:
        """Put torchao's functions back unless another source still needs them; may be called twice."""
        if self._attached:
            self._attached = self._keeper.armed = False
            torchao_patch.unregister(self)

    def after_step(self) -> None:
        """Begin the next iteration."""
        self._iteration += 1

    def describe(self) -> str:
        """Say in a few words what it observes."""
        return f"torchao Float8 ({len(self._claims)} products)"

    @property
    def has_work(self) -> bool:
        """Whether anything that it could record is selected."""
        return bool(self._wanted)

    # -- called by the patch

    def current(self) -> Stamp | None:
        """Stamp of the layer of ours that runs on this thread, or None."""
        stamp = self.stamps.current()
        is_ours = stamp is not None and stamp.layer in self._claims and stamp.phase is not Phase.WARMUP
        return stamp if is_ours else None

    def forward_begins(self, stamp: Stamp, activation: torch.Tensor, weight: torch.Tensor) -> None:
        """A product starts: operands that come as Float8 tensors already will not be cast, so take them here."""
        if is_torchao_float8(activation):
            self._operand(stamp, "activation", None, activation, Stage.FORWARD)
        if is_torchao_float8(weight):
            self._operand(stamp, "weight", None, weight, Stage.FORWARD)

    def cast(self, stamp: Stamp, role: str, original: torch.Tensor, result: torch.Tensor, stage: Stage) -> None:
        """An operand of a product was quantized; ``role`` is ``activation`` or ``weight``."""
        self._operand(stamp, role, original, result, stage)

    def failed(self, layer: str, error: Exception) -> None:
        """Something of ours raised beside this layer's product. Never raises."""
        self._keeper.fail(layer, error)

    def unseen(self, stamp: Stamp, reason: str) -> None:
        """An operand came in a form that is not recorded."""
        try:
            self._keeper.blind(stamp.layer, "", reason)
        except Exception as error:
            self._keeper.fail(stamp.layer, error)

    def backward_begins(self, stamp: Stamp) -> None:
        """A product's backward starts."""
        self.stamps.see_backward(stamp.microbatch)

    def backward_ends(
        self, stamp: Stamp, casts: list[tuple[torch.Tensor, torch.Tensor]], dgrad: torch.Tensor | None
    ) -> None:
        """A product's backward is done, or raised.

        Args:
            stamp: of its forward.
            casts: (original, quantized) of the gradient for the dgrad product, then for the wgrad product.
            dgrad: what it returns for its input; None if nobody needs it.
        """
        layer = stamp.layer
        try:
            if not self._keeper.works(layer):
                return
            if casts and self._wants(layer, "gradient", Phase.TRAIN, Stage.BACKWARD):
                original, quantized = casts[0]
                columnwise = casts[1][1] if len(casts) > 1 and is_torchao_axiswise(casts[1][1]) else None
                self._capture(stamp, "gradient", original, quantized, columnwise, Stage.BACKWARD)
            if dgrad is not None and self._wants(layer, "dgrad", Phase.TRAIN, Stage.BACKWARD):
                self._capture(stamp, "dgrad", dgrad, None, None, Stage.BACKWARD)
        except Exception as error:
            self._keeper.fail(layer, error)

    # -- inside

    def _selected(self, layer: str, tensor: str, phase: Phase) -> bool:
        return (
            tensor in self._claims.get(layer, frozenset())
            and self._keeper.sink.selects(layer, tensor, phase) is not None
        )

    def _wants(self, layer: str, tensor: str, phase: Phase, stage: Stage) -> bool:
        return (layer, tensor, phase) in self._wanted and self._keeper.wants(layer, tensor, phase, stage)

    def _operand(
        self, stamp: Stamp, tensor: str, original: torch.Tensor | None, quantized: torch.Tensor, stage: Stage
    ) -> None:
        """Record an operand; a forward's codes as the tensor's own, a backward's as those of the other direction."""
        layer = stamp.layer
        phase = Phase.TRAIN if stage is Stage.BACKWARD else stamp.phase
        try:
            if not self._keeper.works(layer) or not self._wants(layer, tensor, phase, stage):
                return
            if tensor == "weight":
                if not self._weight_is_due(layer, phase, stage):
                    return
                with quiet():
                    original = original.t() if original is not None else None
                    quantized = quantized.t()
            if stage is Stage.BACKWARD:
                self._capture(stamp, tensor, None, None, quantized, stage)
            else:
                self._capture(stamp, tensor, original, quantized, None, stage)
        except Exception as error:
            self._keeper.fail(layer, error)

    def _weight_is_due(self, layer: str, phase: Phase, stage: Stage) -> bool:
        """Say yes once an iteration, stage and layer, and never for a weight that another layer owns."""
        if phase is not Phase.TRAIN or layer not in self._owned:
            return False
        due = self._weight_iteration.get((layer, stage)) != self._iteration
        self._weight_iteration[layer, stage] = self._iteration
        return due

    def _capture(
        self,
        stamp: Stamp,
        tensor: str,
        original: torch.Tensor | None,
        quantized: torch.Tensor | None,
        columnwise: torch.Tensor | None,
        stage: Stage,
    ) -> None:
        with quiet():
            plain = None
            if original is not None:
                observed = observe(original)
                plain = observed.plain
                if plain is None and quantized is None:
                    self._keeper.blind(stamp.layer, tensor, observed.reason)
                    return
            self._keeper.sink.capture(
                stamp.layer,
                tensor,
                microbatch=stamp.microbatch,
                phase=Phase.TRAIN if stage is Stage.BACKWARD else stamp.phase,
                call=stamp.call,
                stage=stage,
                high_precision=plain,
                quantized=quantized,
                columnwise=columnwise,
            )


def _float8_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The model's ``Float8Linear`` modules with their first names; none if torchao is not loaded."""
    loaded = sys.modules.get(torchao_patch.MODULE)
    kind = getattr(loaded, "Float8Linear", None)
    if kind is None:
        return []
    return [(layer, module) for layer, module in model.named_modules() if isinstance(module, kind)]


def _cast_tensors(config: Any) -> frozenset[str]:
    """Tensors that a layer of this configuration quantizes; dgrad is there in any case."""
    tensors = {"dgrad"}
    if config.cast_config_input.scaling_type.value != "disabled":
        tensors |= {"activation", "weight"}
    if config.cast_config_grad_output.scaling_type.value != "disabled":
        tensors.add("gradient")
    return frozenset(tensors)
