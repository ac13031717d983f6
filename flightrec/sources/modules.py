"""Source ``modules``: hooks on any ``nn.Module``.

Of a product (a module that multiplies what enters it by a weight of its own): ``activation`` (what entered), ``weight``
(once an iteration, at its first training forward), ``output``, ``gradient`` (of the output), ``dgrad``. Of any other
module ``input`` instead of ``activation``, no ``weight``. Of an embedding: ``weight``, ``output``, ``gradient``.
Parameters: see ``parameters``.

``dgrad`` is the gradient of the tensor that entered, summed over everything that read it: where three projections read
one tensor, each has the same ``dgrad``. Gradients are taken by tensor hooks, so that modules may work in place; a view
that is changed in place loses its gradient record.

Owns its hooks and their handles; holds no tensor of the run. Runs on the training thread and on autograd's threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flightrec.errors import AttachError
from flightrec.records import Phase, Stage
from flightrec.sources import compiled
from flightrec.sources.base import Keeper
from flightrec.sources.hooks import GradientHook, register_first
from flightrec.sources.parameters import Parameters
from flightrec.sources.plans import LayerPlan, plan_layers, why_unseen
from flightrec.sources.sink import Sightings, Sink, quiet
from flightrec.sources.stamps import Stamp, Stamps
from flightrec.sources.traversal import walk, walk_arguments
from flightrec.sources.warmup import graphed_for, is_capturing, replays
from flightrec.sources.watched import Watch


class ModulesSource:
    """Records what the modules of a model read, write and hand back in the backward pass.

    Args:
        model: the model; its own name is the empty text.
        sink: where tensors go.
        skip: by layer, tensors that another source records. Such layers are hooked all the same, so that their
            stamps are there for that source.
        stamps: shared with the other sources of the same model; a new one if None.

    Raises:
        AttachError: ``model`` is not a module.
    """

    def __init__(
        self,
        model: nn.Module,
        sink: Sink,
        skip: Mapping[str, frozenset[str]] | None = None,
        stamps: Stamps | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AttachError(f"attach: expected a torch.nn.Module, got {type(model).__qualname__}")
        skip = skip or {}
        self.stamps = stamps if stamps is not None else Stamps(model, sink)
        self._model = model
        self._keeper = Keeper(sink, "modules")
        self._parameters = Parameters(model, self._keeper, self.stamps, skip)
        self._layers = [
            _Layer(self, plan, bool(skip.get(plan.layer)))
            for plan in plan_layers(model, sink, skip)
            if plan.needs_hooks or plan.module is model or skip.get(plan.layer)
        ]
        self._num_observed = sum(layer.plan.needs_hooks for layer in self._layers)
        self._attached = False
        self._started = False
        self._is_root_hooked = False
        self._iteration = 0
        self._leaf_handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Install the hooks: none on modules of which nothing is selected, except the model itself."""
        if self._attached:
            return
        self._attached = self._keeper.armed = True
        for layer in self._layers:
            reason = why_unseen(layer.plan.module)
            if reason:
                self._keeper.blind(layer.plan.layer, "", reason)
            else:
                layer.watch.begin()
        self._tell_what_was_captured()
        compiled.compile_anew()
        self._parameters.attach()

    def detach(self) -> None:
        """Remove every hook; hooks on tensors of a graph that is still alive do nothing from now on."""
        self._attached = False
        self._keeper.armed = False
        for layer in self._layers:
            layer.watch.end()
        self._parameters.detach()
        self._drop_leaf_hooks()

    def after_step(self) -> None:
        """Record the parameters at stage ``after_step`` and begin the next iteration. Never raises."""
        if not self._attached:
            return
        self._parameters.record(Stage.AFTER_STEP)
        self._started = True
        self._iteration += 1
        self.stamps.next_iteration()
        self._drop_leaf_hooks()
        try:
            self._parameters.attach()
        except Exception as error:
            self._keeper.fail("", error)

    def describe(self) -> str:
        """Say in a few words what it observes."""
        return f"modules ({self._num_observed} layers)"

    @property
    def has_work(self) -> bool:
        """Whether anything that it could record is selected."""
        return self._num_observed > 0 or self._parameters.has_work

    # -- called by the layers' hooks

    def dozes(self, plan: LayerPlan) -> bool:
        """A module is about to run: say whether it may pass unnoticed, which most do that are not in their turn."""
        if not self._is_root_hooked:
            return False
        epoch = self._keeper.sink.epoch
        if plan.epoch is not epoch:
            plan.epoch = epoch
            plan.sleeps = plan.module is not self._model and self._keeper.sink.sleeps(plan.layer)
        return plan.sleeps and self.stamps.doze()

    def entered(self, plan: LayerPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is about to run: snapshot what enters it."""
        stamp = self.stamps.enter(plan.module, plan.layer)
        if not self._started and self.stamps.depth == 1:
            self._outermost(stamp)
        if self.stamps.is_captured:
            plan.was_captured = True
        elif plan.was_captured and replays(plan.module):
            return  # the graph records what the module reads
        phase = stamp.phase
        if self._sleeps(plan, plan.on_entry, phase):
            return
        gradients = plan.dgrad and self._gradients_here(plan, phase) and self._hooks(plan, "dgrad")
        name = plan.entering.get(phase)
        if name is not None and not self._keeper.wants(plan.layer, name, phase, Stage.FORWARD):
            name = None
        if name is not None or gradients:
            with quiet():
                for path, tensor in walk_arguments(args, kwargs):
                    if name is not None:
                        self._keep(tensor, name, path, stamp, Stage.FORWARD)
                    if gradients and tensor.requires_grad:
                        self._hook_gradient(tensor, "dgrad", path, stamp)
        if plan.weight:
            self._weight(plan, stamp)

    def left(self, plan: LayerPlan, output: object) -> None:
        """A module finished: record its result."""
        stamp = self.stamps.leave(plan.layer)
        if stamp is None or output is None:
            return
        if plan.module is not self._model and self._sleeps(plan, plan.on_return, stamp.phase):
            return
        keeps = stamp.phase in plan.output and self._keeper.wants(plan.layer, "output", stamp.phase, Stage.FORWARD)
        gradients = plan.gradient and self._gradients_here(plan, stamp.phase) and self._hooks(plan, "gradient")
        if plan.was_captured and not self.stamps.is_captured and replays(plan.module):
            keeps = gradients = False  # the graph records them
        # Without a gradient record the model's own output still tells which microbatch a backward pass is of.
        stamps = plan.module is self._model and stamp.phase is Phase.TRAIN and not gradients
        if not (keeps or gradients or stamps):
            return
        if plan.module is self._model:
            self._is_root_hooked = False
        with quiet():
            for path, tensor in walk(output):
                if keeps:
                    self._keep(tensor, "output", path, stamp, Stage.FORWARD)
                if (gradients or stamps) and tensor.requires_grad:
                    self._is_root_hooked |= plan.module is self._model
                    self._hook_gradient(tensor, "gradient" if gradients else "", path, stamp)

    def entered_compiled(self, plan: LayerPlan, found: Sequence[tuple[str, torch.Tensor]], has_gradients: bool) -> None:
        """A module inside a compiled region is about to run."""
        stamp = self.stamps.enter(plan.module, plan.layer, has_gradients)
        if self.stamps.depth == 1:
            self._outermost(stamp)
        name = plan.entering.get(stamp.phase)
        if name is not None:
            with quiet():
                for path, tensor in found:
                    self._keep(tensor, name, path, stamp, Stage.FORWARD)
        if plan.weight and found:
            self._weight(plan, stamp)

    def left_compiled(self, plan: LayerPlan, found: Sequence[tuple[str, torch.Tensor]]) -> Stamp | None:
        """A module inside a compiled region finished; says which call it was."""
        stamp = self.stamps.leave(plan.layer)
        if stamp is not None and stamp.phase in plan.output:
            with quiet():
                for path, tensor in found:
                    self._keep(tensor, "output", path, stamp, Stage.FORWARD)
        return stamp

    def gradient_compiled(
        self, plan: LayerPlan, found: Sequence[tuple[str, torch.Tensor]], stamps: Mapping[int, Stamp]
    ) -> None:
        """The gradient of a result inside a compiled region; a backward pass of which nothing is known is the latest's.

        A region that is captured was so in its forward too, whose numbers count.
        """
        microbatch = self.stamps.backward_of_region()
        if is_capturing() and stamps:
            microbatch = list(stamps)[-1]
        self.stamps.see_backward(microbatch)
        if not plan.gradient:
            return
        call = stamps[microbatch].call if microbatch in stamps else 0
        stamp = Stamp(plan.layer, microbatch, Phase.TRAIN, call)
        with quiet():
            for path, tensor in found:
                self._keep(tensor, "gradient", path, stamp, Stage.BACKWARD)

    def tell(self, what: str, reason: str) -> None:
        """Something is not observed anywhere in a compiled region."""
        self._keeper.blind("", what, reason)

    def unobserved(self, plan: LayerPlan, tensor: str, reason: str) -> None:
        """A compiled region hides a layer, or a tensor of it."""
        self._keeper.blind(plan.layer, tensor, reason)

    def failed(self, plan: LayerPlan, error: Exception) -> None:
        """A hook raised: switch the layer off."""
        self._keeper.fail(plan.layer, error)

    def is_root(self, plan: LayerPlan) -> bool:
        """Say whether this is the attached model itself."""
        return plan.module is self._model

    def works(self, plan: LayerPlan) -> bool:
        """Say whether the layer is still observed."""
        return self._keeper.works(plan.layer)

    # -- inside

    def _outermost(self, stamp: Stamp) -> None:
        """A forward begins from outside, or a recompute does."""
        if stamp.phase is Phase.TRAIN and not self._started and not self.stamps.is_captured:
            self._started = True
            self._parameters.record(Stage.START)

    def _weight(self, plan: LayerPlan, stamp: Stamp) -> None:
        """Record the weight once an iteration; in a capture, whose replays are in others, in its first microbatch."""
        captured = self.stamps.is_captured
        due = stamp.microbatch == 0 if captured else plan.weight_iteration != self._iteration
        if stamp.phase is not Phase.TRAIN or not due:
            return
        if not captured:
            plan.weight_iteration = self._iteration
        weight = plan.module._parameters.get("weight")
        if weight is not None and self._keeper.wants(plan.layer, "weight", stamp.phase, Stage.FORWARD):
            with quiet():
                self._keep(weight, "weight", "", stamp, Stage.FORWARD)

    def _tell_what_was_captured(self) -> None:
        """Name, module by module, what replays hide: graphs that were captured before anybody watched."""
        for layer in self._layers:
            if graphed_for(layer.plan.module) is None:
                continue
            inside = [name for name, _ in layer.plan.module.named_modules() if name]
            hidden = f": {', '.join(inside)}" if inside else ""
            self._keeper.blind(
                layer.plan.layer,
                "inside of a CUDA graph",
                "make_graphed_callables captured it before attach; what enters and leaves it is recorded, not what is "
                f"inside{hidden}. Attach first to see it",
            )

    def _gradients_here(self, plan: LayerPlan, phase: Phase) -> bool:
        """Say whether the graph that is being built is the one that will be walked backward.

        Checkpointing builds it either in the forward or, the reentrant kind, in the recompute. The other kind's
        recompute starts from tensors of the first graph, whose gradients are hooked already.
        """
        if phase is Phase.TRAIN:
            plan.reentrant = not torch.is_grad_enabled()
            return not plan.reentrant
        return phase is Phase.RECOMPUTE and plan.reentrant

    def _sleeps(self, plan: LayerPlan, sightings: Sightings, phase: Phase) -> bool:
        """Say whether nothing of these is recorded now, nor hooked."""
        if not self._is_root_hooked or self._keeper.wants_any(sightings):
            return False
        if phase is Phase.TRAIN:
            plan.reentrant = not torch.is_grad_enabled()
        return True

    def _hooks(self, plan: LayerPlan, tensor: str) -> bool:
        """Say whether gradients are hooked: not if it is not their turn.

        A hook also tells which microbatch a backward pass is of. So they may only be missing where the model's own
        output has one, which it had in its latest forward.
        """
        return not self._is_root_hooked or self._keeper.wants(plan.layer, tensor, Phase.TRAIN, Stage.BACKWARD)

    def _keep(self, tensor: torch.Tensor, name: str, part: str, stamp: Stamp, stage: Stage) -> None:
        self._keeper.keep(
            tensor,
            stamp.layer,
            name,
            part=part,
            microbatch=stamp.microbatch,
            phase=stamp.phase,
            call=stamp.call,
            stage=stage,
        )

    def _hook_gradient(self, tensor: torch.Tensor, name: str, part: str, stamp: Stamp) -> None:
        report = self._on_leaf_gradient if tensor.is_leaf else self._on_gradient
        hook = GradientHook(report, stamp.layer, name, part, stamp.microbatch, stamp.call)
        handle = register_first(tensor, hook)
        if tensor.is_leaf:  # it lives on, and would gather a hook in each forward
            self._leaf_handles.append(handle)

    def _on_leaf_gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        """A leaf that several microbatches read has a hook of each: only that of this backward pass speaks."""
        try:
            speaks = self.stamps.backward_microbatch() == hook.microbatch
        except Exception as error:
            self._keeper.fail(hook.layer, error)
            return
        if speaks:
            self._on_gradient(hook, gradient)

    def _on_gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        try:
            if not self._keeper.works(hook.layer):
                return
            self.stamps.see_backward(hook.microbatch)
            if hook.tensor and self._keeper.wants(hook.layer, hook.tensor, Phase.TRAIN, Stage.BACKWARD):
                with quiet():
                    self._keeper.keep(
                        gradient,
                        hook.layer,
                        hook.tensor,
                        part=hook.part,
                        microbatch=hook.microbatch,
                        phase=Phase.TRAIN,
                        call=hook.call,
                        stage=Stage.BACKWARD,
                    )
        except Exception as error:
            self._keeper.fail(hook.layer, error)

    def _drop_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()


class _Layer:
    """What is told of one module, and the wall that keeps their troubles from the run."""

    __slots__ = ("_has_tap", "_source", "_works", "plan", "watch")

    def __init__(self, source: ModulesSource, plan: LayerPlan, has_tap: bool) -> None:
        self._source = source
        self._has_tap = has_tap  # another source records its operands
        self._works = source._keeper.works
        self.plan = plan
        self.watch = Watch(plan.module, self)

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report to the source; a copy that shares the hooks (a replica) is not the layer."""
        try:
            source, plan = self._source, self.plan
            if module is plan.module and not source.dozes(plan) and self._works(plan.layer):
                source.entered(plan, args, kwargs)
        except Exception as error:
            self._source.failed(self.plan, error)

    def left(self, module: nn.Module, output: object) -> None:
        """Report to the source."""
        try:
            source, plan = self._source, self.plan
            if module is not plan.module or (plan.sleeps and source.stamps.wake()):
                return
            if self._works(plan.layer):
                source.left(plan, output)
        except Exception as error:
            self._source.failed(self.plan, error)

    # -- inside compiled regions

    def wants(self, kind: str) -> bool:
        """Say whether a compiled region is to tell of this; what it cannot tell is named."""
        plan = self.plan
        if kind == compiled.ENTERING:
            if plan.dgrad:
                self._source.tell("dgrad inside compiled regions", _NO_DGRAD)
            if self._has_tap:
                self._source.unobserved(plan, "quantized operands", _NO_OPERANDS)
            return True
        return kind == compiled.LEAVING or plan.gradient or self._source.is_root(plan)

    def unobserved(self, tensor: str, reason: str) -> None:
        """A compiled region hides this."""
        self._source.unobserved(self.plan, tensor, reason)

    def tell(self, what: str, reason: str) -> None:
        """Something is not observed in any compiled region."""
        self._source.tell(what, reason)

    def entered_compiled(self, found: Sequence[tuple[str, torch.Tensor]], has_gradients: bool) -> None:
        """Report to the source."""
        try:
            if self._source.works(self.plan):
                self._source.entered_compiled(self.plan, found, has_gradients)
        except Exception as error:
            self._source.failed(self.plan, error)

    def left_compiled(self, found: Sequence[tuple[str, torch.Tensor]]) -> Stamp | None:
        """Report to the source."""
        try:
            if self._source.works(self.plan):
                return self._source.left_compiled(self.plan, found)
        except Exception as error:
            self._source.failed(self.plan, error)
        return None

    def gradient_compiled(self, found: Sequence[tuple[str, torch.Tensor]], stamps: Mapping[int, Stamp]) -> None:
        """Report to the source."""
        try:
            if self._source.works(self.plan):
                self._source.gradient_compiled(self.plan, found, stamps)
        except Exception as error:
            self._source.failed(self.plan, error)


_NO_DGRAD = "torch.compile: the gradient of what enters a module is not observed there; that of what leaves one is"
_NO_OPERANDS = "torch.compile: the quantized operands of a product inside a compiled region are not observed"
