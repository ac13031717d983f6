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

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flightrec.errors import AttachError
from flightrec.records import Phase, Stage
from flightrec.sources.base import Keeper
from flightrec.sources.hooks import EnterHook, GradientHook, LeaveHook, register_first
from flightrec.sources.parameters import Parameters
from flightrec.sources.plans import LayerPlan, eval_fast_path, plan_layers, why_unseen
from flightrec.sources.sink import Sink, quiet
from flightrec.sources.stamps import Stamp, Stamps
from flightrec.sources.traversal import walk, walk_arguments


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
            _Layer(self, plan)
            for plan in plan_layers(model, sink, skip)
            if plan.needs_hooks or plan.module is model or skip.get(plan.layer)
        ]
        self._num_observed = sum(layer.plan.needs_hooks for layer in self._layers)
        fused = eval_fast_path(model)
        self._fused = [layer for layer in self._layers if layer.plan.module in fused]
        self._suspended = False
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
            layer.install()
        self._parameters.attach()

    def detach(self) -> None:
        """Remove every hook; hooks on tensors of a graph that is still alive do nothing from now on."""
        self._attached = False
        self._keeper.armed = False
        for layer in self._layers:
            layer.remove()
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
            self._suspend(False)
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

    def entered(self, plan: LayerPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is about to run: snapshot what enters it."""
        stamp = self.stamps.enter(plan.module, plan.layer)
        if self.stamps.depth == 1:
            self._outermost(plan, stamp)
        phase = stamp.phase
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
        if plan.weight and phase is Phase.TRAIN and plan.weight_iteration != self._iteration:
            plan.weight_iteration = self._iteration
            weight = plan.module._parameters.get("weight")
            if weight is not None and self._keeper.wants(plan.layer, "weight", phase, Stage.FORWARD):
                with quiet():
                    self._keep(weight, "weight", "", stamp, Stage.FORWARD)

    def left(self, plan: LayerPlan, output: object) -> None:
        """A module finished: record its result."""
        stamp = self.stamps.leave(plan.layer)
        if stamp is None or output is None:
            return
        keeps = stamp.phase in plan.output and self._keeper.wants(plan.layer, "output", stamp.phase, Stage.FORWARD)
        gradients = plan.gradient and self._gradients_here(plan, stamp.phase) and self._hooks(plan, "gradient")
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

    def failed(self, plan: LayerPlan, error: Exception) -> None:
        """A hook raised: switch the layer off."""
        self._keeper.fail(plan.layer, error)

    def works(self, plan: LayerPlan) -> bool:
        """Say whether the layer is still observed."""
        return self._keeper.works(plan.layer)

    # -- inside

    def _outermost(self, plan: LayerPlan, stamp: Stamp) -> None:
        """A forward begins from outside, or a recompute does."""
        if stamp.phase is Phase.TRAIN:
            self._suspend(False)
            if not self._started:
                self._started = True
                self._parameters.record(Stage.START)
        elif stamp.phase is Phase.EVAL and self._fused:
            self._suspend(True)
            if any(layer.plan is plan for layer in self._fused):
                self.stamps.leave(plan.layer)  # its leave hook is gone

    def _gradients_here(self, plan: LayerPlan, phase: Phase) -> bool:
        """Say whether the graph that is being built is the one that will be walked backward.

        Checkpointing builds it either in the forward or, the reentrant kind, in the recompute. The other kind's
        recompute starts from tensors of the first graph, whose gradients are hooked already.
        """
        if phase is Phase.TRAIN:
            plan.reentrant = not torch.is_grad_enabled()
            return not plan.reentrant
        return phase is Phase.RECOMPUTE and plan.reentrant

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

    def _suspend(self, suspended: bool) -> None:
        """Take the hooks off modules whose evaluation runs differently with hooks, or put them back."""
        if suspended == self._suspended or not self._attached:
            return
        self._suspended = suspended
        _apply(self._fused, suspended)

    def _drop_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()


def _apply(layers: Iterable[_Layer], removed: bool) -> None:
    for layer in layers:
        if removed:
            layer.remove()
        else:
            layer.install()


class _Layer:
    """The two hooks of one module, and the wall that keeps their troubles from the run."""

    __slots__ = ("_handles", "_source", "plan")

    def __init__(self, source: ModulesSource, plan: LayerPlan) -> None:
        self._source = source
        self.plan = plan
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Hook the module, once."""
        module = self.plan.module
        if not self._handles and not isinstance(module, torch.jit.ScriptModule):
            self._handles = [
                module.register_forward_pre_hook(EnterHook(self), with_kwargs=True),
                module.register_forward_hook(LeaveHook(self), with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        """Unhook the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report to the source; a copy that shares the hooks (a replica) is not the layer."""
        try:
            if module is self.plan.module and self._source.works(self.plan):
                self._source.entered(self.plan, args, kwargs)
        except Exception as error:
            self._source.failed(self.plan, error)

    def left(self, module: nn.Module, output: object) -> None:
        """Report to the source."""
        try:
            if module is self.plan.module and self._source.works(self.plan):
                self._source.left(self.plan, output)
        except Exception as error:
            self._source.failed(self.plan, error)
