"""Records parameters and their gradients.

``parameter``: every parameter at the start of the first iteration and after each step, part = its name.
``wgrad``: ``parameter.grad`` each time autograd has accumulated into it: cumulative over the microbatches of an
iteration, before reduction and clipping (see ``gradients``); part = the parameter's name, empty for ``weight``. Where
a fused kernel adds into ``main_grad`` instead, that (see ``accumulated``); then the part ends in ``main_grad``.

Owns its hooks on the parameters. Runs on the training thread, the hooks on autograd's threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flightrec.config.selection import STAGES_OF
from flightrec.records import NO_MICROBATCH, Phase, Stage
from flightrec.sources.accumulated import gradient_of
from flightrec.sources.base import Keeper
from flightrec.sources.hooks import AccumulatedHook
from flightrec.sources.memory import FREED
from flightrec.sources.observe import is_lazy, observe
from flightrec.sources.sink import Sightings, Sink, quiet
from flightrec.sources.stamps import Stamps

_EVAL_MODE = (
    "gradients arrive although the model is in eval mode: its forwards count as evaluation. Call model.train(), or "
    "select phase eval"
)


class Slot:
    """One place in a module that holds a parameter."""

    __slots__ = ("handle", "hooked", "inside", "layer", "module", "name")

    def __init__(self, layer: str, module: nn.Module, name: str) -> None:
        self.layer = layer
        self.module = module
        self.name = name
        self.handle: RemovableHandle | None = None
        # No weak reference: torch.utils.swap_tensors refuses tensors that have one.
        self.hooked: nn.Parameter | None = None
        self.inside = 0

    @property
    def parameter(self) -> nn.Parameter | None:
        """What the place holds now: a run may replace its parameters."""
        return self.module._parameters.get(self.name)

    @property
    def was_swapped(self) -> bool:
        """Whether ``torch.utils.swap_tensors`` gave the hooked parameter other insides, which no hook reaches."""
        return self.hooked is not None and self.hooked is self.parameter and self.hooked._cdata != self.inside


class Parameters:
    """The parameters of a model, each under its first selected owner.

    Args:
        model: the attached model.
        keeper: takes the tensors.
        stamps: tells a backward pass's microbatch.
        skip: by layer, tensors that another source records; ``wgrad.<name>`` for that of one parameter only.
    """

    def __init__(self, model: nn.Module, keeper: Keeper, stamps: Stamps, skip: Mapping[str, frozenset[str]]) -> None:
        self._keeper = keeper
        self._stamps = stamps
        kept = slots(model, keeper.sink, "parameter", skip)
        self._kept = {stage: at_stage(kept, keeper.sink, "parameter", stage) for stage in STAGES_OF["parameter"]}
        self._accumulated = at_stage(slots(model, keeper.sink, "wgrad", skip), keeper.sink, "wgrad", Stage.BACKWARD)

        self._wgrads = {
            slot.layer: Sightings([(slot.layer, "wgrad", Phase.TRAIN, Stage.BACKWARD)]) for slot in self._accumulated
        }

    @property
    def has_work(self) -> bool:
        """Whether any parameter or its gradient is selected."""
        return bool(self._accumulated or any(self._kept.values()))

    def attach(self) -> None:
        """Hook the parameters that require gradients and are not hooked yet; drop hooks of replaced ones."""
        for slot in self._accumulated:
            hooked, parameter = slot.hooked, slot.module._parameters.get(slot.name)
            if hooked is not None and hooked is parameter and hooked._cdata == slot.inside:
                continue  # in every step, for every parameter: no calls
            if slot.was_swapped:
                self._keeper.blind(slot.layer, "wgrad", "the parameter's tensor was swapped; its hooks no longer run")
            if slot.hooked is not None and slot.hooked is parameter:
                continue
            self._unhook(slot)
            if parameter is None or not parameter.requires_grad or is_lazy(parameter):
                continue  # looked at again after the step
            reason = observe(parameter).reason
            if reason and reason != FREED:  # freed memory comes back
                self._keeper.blind(slot.layer, "wgrad", reason)
                continue
            hook = AccumulatedHook(self._on_accumulated, slot.layer, slot.name)
            slot.handle = parameter.register_post_accumulate_grad_hook(hook)
            slot.hooked, slot.inside = parameter, parameter._cdata

    def detach(self) -> None:
        """Take all hooks off."""
        for slot in self._accumulated:
            self._unhook(slot)

    def record(self, stage: Stage) -> None:
        """Record all selected parameters."""
        for slot in self._kept[stage]:
            parameter = slot.parameter
            if parameter is None or not self._keeper.works(slot.layer):
                continue
            try:
                if not self._keeper.wants(slot.layer, "parameter", Phase.TRAIN, stage):
                    continue
                with quiet():
                    self._keeper.keep(
                        parameter,
                        slot.layer,
                        "parameter",
                        part=slot.name,
                        microbatch=NO_MICROBATCH,
                        phase=Phase.TRAIN,
                        call=0,
                        stage=stage,
                    )
            except Exception as error:
                self._keeper.fail(slot.layer, error)

    def _on_accumulated(self, hook: AccumulatedHook, parameter: torch.Tensor) -> None:
        try:
            if not self._keeper.works(hook.layer) or self._stamps.is_warmup:
                return
            if not self._keeper.wants_any(self._wgrads[hook.layer]):
                return
            if self._stamps.only_evaluated:
                self._keeper.blind("", "", _EVAL_MODE)
            gradient, place, reason = gradient_of(parameter)
            if gradient is None:
                self._keeper.blind(hook.layer, "wgrad", reason)
                return
            with quiet():
                self._keeper.keep(
                    gradient,
                    hook.layer,
                    "wgrad",
                    part=".".join(word for word in (part_of(hook.name), place) if word),
                    microbatch=self._stamps.backward_microbatch(),
                    phase=Phase.TRAIN,
                    call=0,
                    stage=Stage.BACKWARD,
                )
        except Exception as error:
            self._keeper.fail(hook.layer, error)

    @staticmethod
    def _unhook(slot: Slot) -> None:
        if slot.handle is not None:
            slot.handle.remove()
        slot.handle = slot.hooked = None


def slots(model: nn.Module, sink: Sink, tensor: str, skip: Mapping[str, frozenset[str]]) -> list[Slot]:
    """Places of all parameters of which ``tensor`` is selected; a tied parameter's first such place."""
    seen: set[int] = set()
    found: list[Slot] = []
    for layer, module in model.named_modules():
        if tensor in skip.get(layer, frozenset()) or sink.selects(layer, tensor, Phase.TRAIN) is None:
            continue
        for name, parameter in module._parameters.items():
            if f"{tensor}.{name}" in skip.get(layer, frozenset()):
                continue
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(Slot(layer, module, name))
    return found


def at_stage(found: Iterable[Slot], sink: Sink, tensor: str, stage: Stage) -> list[Slot]:
    """Those places whose ``tensor`` is selected at ``stage``."""
    return [slot for slot in found if sink.selects(slot.layer, tensor, Phase.TRAIN, stage) is not None]


def part_of(name: str) -> str:
    """Part under which the gradient of a parameter of this name is recorded."""
    return "" if name == "weight" else name
