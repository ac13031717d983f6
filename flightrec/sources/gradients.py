"""Records parameters' gradients between the backward pass and the optimizer: ``wgrad`` at stages of its own.

``reduced``: after all communication, before anything changes them: at the first of ``scaler.unscale_``, torch's
gradient clipping and ``optimizer.step``. ``unscaled``: after ``scaler.unscale_``. ``clipped``: at ``optimizer.step``,
what the optimizer is about to use; absent when a scaler skips the step. Layers and parts are those of ``parameters``,
without a microbatch; each once for every step of the optimizer, and only for parameters that the optimizer holds.

Installs only what a selected stage needs: pre-hooks of the optimizers, the tap on clipping; the scaler's watch reports
here. Training thread only, on its current CUDA stream, which the user's own clipping and step use too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flightrec.records import NO_MICROBATCH, Phase, Stage
from flightrec.sources import clipping
from flightrec.sources.accumulated import gradient_of
from flightrec.sources.base import Keeper
from flightrec.sources.parameters import Slot, at_stage, part_of, slots
from flightrec.sources.sink import Sink, quiet
from flightrec.sources.stamps import must_not_record

STAGES = (Stage.REDUCED, Stage.UNSCALED, Stage.CLIPPED)
"""Stages of gradients after the backward pass."""


class GradientStages:
    """A source; see the module.

    Args:
        model: whose parameters.
        sink: where gradients go.
        optimizers: those that were given to ``attach``; a scaler tells of further ones.
        has_scaler: an enabled scaler reports to ``before_unscale``, ``after_unscale`` and ``before_step``.
    """

    def __init__(self, model: nn.Module, sink: Sink, optimizers: Sequence[Any], has_scaler: bool) -> None:
        self._keeper = Keeper(sink, "gradients")
        found = slots(model, sink, "wgrad", {})
        self._places = {stage: at_stage(found, sink, "wgrad", stage) for stage in STAGES}
        self._done: dict[Stage, set[int]] = {stage: set() for stage in STAGES}  # ids of parameters since their step
        self._optimizers = list(optimizers)
        self._handles: dict[int, RemovableHandle] = {}
        self._has_scaler = has_scaler
        self._attached = False
        self._was_stepped = False

    @property
    def has_work(self) -> bool:
        """Whether a stage of a gradient is selected."""
        return any(self._places.values())

    def attach(self) -> None:
        """Hook the optimizers and tap the clipping, as far as a selected stage needs it."""
        if self._attached:
            return
        self._attached = True
        if self._places[Stage.REDUCED]:
            clipping.listen(self)
        for optimizer in self._optimizers:
            self._hook(optimizer)
        self._tell_what_is_unseen()

    def detach(self) -> None:
        """Remove all hooks; may be called twice."""
        if self._attached:
            clipping.stop_listening(self)
        self._attached = self._keeper.armed = False
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def after_step(self) -> None:
        """Begin the next iteration."""
        if self._handles and not self._was_stepped and not self._has_scaler:
            self._blind(Stage.CLIPPED, "an iteration passed in which no step of the optimizer was seen")
        self._was_stepped = False
        for done in self._done.values():
            done.clear()

    def describe(self) -> str:
        """Say in a few words what it observes."""
        return f"gradients {', '.join(stage.value for stage in STAGES if self._places[stage])}"

    # -- called around the user's calls; never raise

    def before_clipping(self, parameters: Collection[torch.Tensor]) -> None:
        """Gradients are about to be clipped: until now they are as reduced."""
        with self._keeper.sink.guard(self._keeper.part):
            self._take(Stage.REDUCED, parameters)

    def before_unscale(self, optimizer: Any) -> None:
        """Gradients are about to be unscaled."""
        self._take(Stage.REDUCED, _parameters(optimizer))

    def after_unscale(self, optimizer: Any) -> None:
        """Gradients were unscaled."""
        self._take(Stage.UNSCALED, _parameters(optimizer))

    def before_step(self, optimizer: Any) -> None:
        """The scaler handles this optimizer: hook it if ``attach`` was not told of it."""
        if self._attached and not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._hook(optimizer)

    # -- inside

    def _hook(self, optimizer: Any) -> None:
        """Hook one optimizer's step, or tell why its gradients are not seen there."""
        if not (self._places[Stage.REDUCED] or self._places[Stage.CLIPPED]):
            return
        kind = type(optimizer).__qualname__
        try:
            self._handles[id(optimizer)] = optimizer.register_step_pre_hook(self._before_optimizer)
        except Exception as error:
            self._blind(Stage.CLIPPED, f"the step of {kind} cannot be hooked ({type(error).__name__}: {error})")
            return
        ids = {id(parameter) for parameter in _parameters(optimizer)}
        if not any(id(slot.parameter) in ids for stage in STAGES for slot in self._places[stage]):
            self._blind(Stage.CLIPPED, f"{kind} holds none of the model's parameters that are selected (copies?)")

    def _tell_what_is_unseen(self) -> None:
        if not self._optimizers and not self._has_scaler:
            self._blind(Stage.CLIPPED, "attach was given no optimizer: attach(model, optimizer=optimizer)")
            self._blind(Stage.REDUCED, "attach was given no optimizer: it is seen only where torch's clipping is used")
        if not self._has_scaler:
            self._blind(Stage.UNSCALED, "attach was given no enabled scaler, so that nothing is unscaled")

    def _blind(self, stage: Stage, reason: str) -> None:
        if self._places[stage]:
            with self._keeper.sink.guard(self._keeper.part):
                self._keeper.blind("", f"wgrad at {stage.value}", reason)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pre-hook of ``optimizer.step``; the gradients of a closure are there only after its first call."""
        if not self._attached or must_not_record():
            return None
        self._was_stepped = True
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._after_first_call(kwargs["closure"], optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._after_first_call(args[1], optimizer), *args[2:]), kwargs
        self._about_to_step(optimizer)
        return None

    def _after_first_call(self, closure: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        called = False

        @functools.wraps(closure)
        def seen(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            result = closure(*args, **kwargs)
            if not called:
                called = True
                self._about_to_step(optimizer)
            return result

        return seen

    def _about_to_step(self, optimizer: Any) -> None:
        with self._keeper.sink.guard(self._keeper.part):
            parameters = _parameters(optimizer)
            self._take(Stage.REDUCED, parameters)
            if getattr(optimizer, "grad_scale", None) is not None:
                reason = "a fused optimizer unscales inside its own kernel; call scaler.unscale_(optimizer) before"
                self._blind(Stage.UNSCALED, reason)
                self._blind(Stage.CLIPPED, reason)
            else:
                self._take(Stage.CLIPPED, parameters)
            ids = {id(parameter) for parameter in parameters}  # the next gradients of these are other ones
            for done in self._done.values():
                done -= ids

    def _take(self, stage: Stage, parameters: Iterable[torch.Tensor]) -> None:
        places, done = self._places[stage], self._done[stage]
        if not self._attached or not places or must_not_record():
            return
        ids = {id(parameter) for parameter in parameters} - done
        for slot in places:
            parameter = slot.parameter
            if parameter is None or id(parameter) not in ids:
                continue
            gradient, place, _ = gradient_of(parameter)
            if gradient is not None:
                done.add(id(parameter))
                if self._keeper.works(slot.layer):
                    self._keep(slot, gradient, place, stage)

    def _keep(self, slot: Slot, gradient: torch.Tensor, place: str, stage: Stage) -> None:
        try:
            if not self._keeper.wants(slot.layer, "wgrad", Phase.TRAIN, stage):
                return
            with quiet():
                self._keeper.keep(
                    gradient,
                    slot.layer,
                    "wgrad",
                    part=".".join(word for word in (part_of(slot.name), place) if word),
                    microbatch=NO_MICROBATCH,
                    phase=Phase.TRAIN,
                    call=0,
                    stage=stage,
                )
        except Exception as error:
            self._keeper.fail(slot.layer, error)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    """What the optimizer holds; nothing of one that has no groups."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        return []
    return [parameter for group in groups for parameter in group.get("params", ())]
