"""The callables that are hung on tensors, and on modules that carry hooks of the user's (see ``watched``).

They hold a target and names, never a tensor. Copying or pickling a model while it is observed copies hooks that do
nothing, so that neither an averaged copy of the model is mistaken for it nor a checkpoint carries our objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from flightrec.sources import compiled
from flightrec.sources.stamps import must_not_record


def inert(*_args: object, **_kwargs: object) -> None:
    """Stand in for a hook in a copy of a model."""


def _revive() -> Callable[..., None]:
    return inert


class _Hook:
    """Base: copies and pickles as ``inert``."""

    __slots__ = ()
    __torch_unserializable__ = True  # torch would warn that a tensor's hooks are not saved

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _revive, ()


class EnterHook(_Hook):
    """Forward pre-hook, registered with keyword arguments."""

    __slots__ = ("_target",)

    def __init__(self, target: compiled.Target) -> None:
        self._target = target

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the call; one that is compiled puts an operation into the graph."""
        if torch.compiler.is_compiling():
            compiled.entering(module, args, kwargs)
        elif not must_not_record():
            self._target.entered(module, args, kwargs)


class LeaveHook(_Hook):
    """Forward hook, registered with keyword arguments and ``always_call``."""

    __slots__ = ("_target",)

    def __init__(self, target: compiled.Target) -> None:
        self._target = target

    def __call__(
        self, module: torch.nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: object
    ) -> object | None:
        """Report the result; one that is compiled may be handed on with its gradient observed."""
        if torch.compiler.is_compiling():
            return compiled.leaving(module, output)
        if not must_not_record():
            self._target.left(module, output)
        return None


class GradientHook(_Hook):
    """Tensor hook: reports a gradient with the names that its forward gave it; always returns None."""

    __slots__ = ("_report", "call", "layer", "microbatch", "part", "tensor")

    def __init__(
        self,
        report: Callable[[GradientHook, torch.Tensor], None],
        layer: str,
        tensor: str,
        part: str,
        microbatch: int,
        call: int,
    ) -> None:
        self._report = report
        self.layer = layer
        self.tensor = tensor
        self.part = part
        self.microbatch = microbatch
        self.call = call

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Report the gradient; autograd passes None for one that is undefined."""
        if gradient is not None and not must_not_record():
            self._report(self, gradient)


class AccumulatedHook(_Hook):
    """Hook that runs after a parameter's gradient was accumulated."""

    __slots__ = ("_report", "layer", "name")

    def __init__(self, report: Callable[[AccumulatedHook, torch.Tensor], None], layer: str, name: str) -> None:
        self._report = report
        self.layer = layer
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        """Report the parameter, whose ``grad`` is up to date."""
        if not must_not_record():
            self._report(self, parameter)


def register_first(tensor: torch.Tensor, hook: GradientHook) -> RemovableHandle:
    """Register a tensor hook so that it runs before those that the tensor has.

    Modules around each other may return the same tensor; its gradient reaches the outer one first, which is hooked
    last. A leaf's hooks stay as they are: another thread may be running them.
    """
    handle: RemovableHandle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1 and not tensor.is_leaf and handle.id in hooks:
        # Autograd reads the underlying dict, whose order OrderedDict.move_to_end does not change.
        own = hooks.pop(handle.id)
        others = list(hooks.items())
        hooks.clear()
        hooks[handle.id] = own
        hooks.update(others)
    return handle
