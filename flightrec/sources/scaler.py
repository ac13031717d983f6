"""Watches a gradient scaler: which steps it skipped, with which scale, and when gradients are unscaled.

``unscale_``, ``step`` and ``update`` of the instance (not of its class) are wrapped; the wrappers call what was there
with the arguments unchanged. Works with ``torch.amp.GradScaler`` and whatever has its methods and private fields by
name, as FSDP's ``ShardedGradScaler``. A disabled scaler is left alone.

Training thread only, on its current CUDA stream; never waits for the device. Owns two words on the scale's device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from flightrec.records import LOSS_SCALE, SKIPPED_STEP
from flightrec.sources.sink import Sink, quiet

_METHODS = ("unscale_", "step", "update")
_PART = "the watch over the gradient scaler"


class Listener(Protocol):
    """Who is told of what the scaler does with an optimizer; must not raise an ``Exception``."""

    def before_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients are reduced and still scaled."""

    def after_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients were unscaled in place."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The scaler is going to unscale the gradients if need be, and to call or to skip ``optimizer.step``."""


class ScalerWatch:
    """See the module.

    Args:
        scaler: the user's.
        sink: told of what cannot be seen.

    Attributes:
        is_enabled: whether it scales at all; a disabled one is not watched.
        listener: told of unscaling, if there is one.
    """

    def __init__(self, scaler: object, sink: Sink) -> None:
        self._scaler: Any = scaler
        self._sink = sink
        self.listener: Listener | None = None
        self._taps: list[_Tap] = []
        self._awaits_update = False
        self._seen = False  # whether this iteration's words are there
        self._scale: torch.Tensor | None = None
        self._found: torch.Tensor | None = None
        enabled = getattr(scaler, "is_enabled", None)
        self.is_enabled: bool = bool(enabled()) if callable(enabled) else True

    def attach(self) -> None:
        """Wrap the methods; tells once what the scaler does not have. An enabled scaler only. Never raises."""
        if self._taps or not self.is_enabled:
            return
        kind = f"a scaler of type {type(self._scaler).__qualname__}"
        with self._sink.guard(_PART), quiet():
            missing = [name for name in _METHODS if not callable(getattr(self._scaler, name, None))]
            if missing:
                self._sink.blind("", SKIPPED_STEP, f"{kind} has no {', '.join(missing)}: expected a GradScaler")
                return
            if not hasattr(self._scaler, "_per_optimizer_states") or not hasattr(self._scaler, "_scale"):
                lacking = f"{kind} has no _per_optimizer_states or no _scale"
                self._sink.blind("", SKIPPED_STEP, f"{lacking}: the steps that it skips cannot be told from others")
            unscale, step, update = (_Tap(self._scaler, name, self._sink) for name in _METHODS)
            self._taps = [unscale, step, update]
            unscale.before, unscale.after = self._before_unscale, self._after_unscale
            step.before, step.after = self._before_step, self._after_step
            update.before = self._before_update
            for tap in self._taps:
                tap.install()

    def detach(self) -> None:
        """Give the scaler its methods back; may be called twice."""
        for tap in self._taps:
            tap.remove()
        self._taps = []

    def take(self) -> Mapping[str, torch.Tensor]:
        """This iteration's metrics, on the scale's device: its loss scale, and 1 if a step was skipped, else 0.

        Float32, 0-dim, ours until the next iteration overwrites them. Empty if no optimizer was stepped through the
        scaler. If ``update`` was not called yet in the iteration, the words are read from the scaler now: they are the
        same before it.
        """
        if self._awaits_update:
            self._collect()
        if not self._seen or self._scale is None or self._found is None:
            return {}
        self._seen = False
        with self._sink.guard(_PART), quiet():
            self._found.clamp_(max=1)
        return {LOSS_SCALE: self._scale, SKIPPED_STEP: self._found}

    # -- called by the taps

    def _before_unscale(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        if self.listener is not None:
            self.listener.before_unscale(optimizer)

    def _after_unscale(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        self._awaits_update = True
        if self.listener is not None:
            self.listener.after_unscale(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        if self.listener is not None:
            self.listener.before_step(optimizer)

    def _after_step(self, *_: Any, **__: Any) -> None:
        self._awaits_update = True

    def _before_update(self, *_: Any, **__: Any) -> None:
        if self._awaits_update:
            self._collect()

    def _collect(self) -> None:
        """Copy the scale that was in force and add up what the optimizers found, before ``update`` clears both."""
        self._awaits_update = False
        with self._sink.guard(_PART), quiet():
            scale = getattr(self._scaler, "_scale", None)
            states = getattr(self._scaler, "_per_optimizer_states", {}).values()
            found = [word for state in states for word in state["found_inf_per_device"].values()]
            if not isinstance(scale, torch.Tensor) or not found:
                return
            if self._scale is None or self._found is None or self._scale.device != scale.device:
                self._scale = torch.zeros((), dtype=torch.float32, device=scale.device)
                self._found = torch.zeros((), dtype=torch.float32, device=scale.device)
            if not self._seen:
                self._found.zero_()
            for word in found:
                self._found.add_(word.detach().reshape(()).to(scale.device, non_blocking=True))
            self._scale.copy_(scale.detach().reshape(()))
            self._seen = True


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Tap:
    """Stands before a method of one scaler. Copied or pickled with the scaler it becomes the copy's plain method."""

    def __init__(self, scaler: Any, name: str, sink: Sink) -> None:
        self._scaler = scaler
        self._sink = sink
        self._name = name
        self.original: Callable[..., Any] = getattr(scaler, name)
        self._was_own = name in vars(scaler)
        self.armed = False
        self.before: Callable[..., None] = _nothing
        self.after: Callable[..., None] = _nothing
        functools.update_wrapper(self, self.original)

    def install(self) -> None:
        """Take the method's place."""
        self.armed = True
        setattr(self._scaler, self._name, self)

    def remove(self) -> None:
        """Give the place back, unless somebody else took it since: then only pass through."""
        self.armed = False
        own = vars(self._scaler)
        while isinstance(tap := own.get(self._name), _Tap) and not tap.armed:
            if tap._was_own:
                own[self._name] = tap.original
            else:
                del own[self._name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, and tell around it what optimizer it is for."""
        if not self.armed:
            return self.original(*args, **kwargs)
        with self._sink.guard(_PART):
            self.before(*args, **kwargs)
        result = self.original(*args, **kwargs)
        if self.armed:
            with self._sink.guard(_PART):
                self.after(*args, **kwargs)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, self._name)
