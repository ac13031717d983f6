"""Small facts of each iteration: times, optimizer settings, and the random number generators' states at its start.

Training thread only. Reads what lies on the host and never waits for the device: a learning rate that is a tensor on
the GPU is left out, and says so. Each fact stands behind a guard of its own, so that one that fails costs no other.
Holds the optimizer and the scheduler until ``stop``.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.sources.sink import quiet

MAX_GROUPS = 64
"""Groups of parameters whose settings are kept."""

MAX_ITEMS = 8
"""Longest tuple among an optimizer's settings that is kept (betas have 2)."""

MAX_SETTINGS = 64

States = dict[str, Any]
Bytes = NDArray[np.uint8]
Guard = Callable[[str], AbstractContextManager[object]]


class RunFacts:
    """What the recorder asks at the seams of an iteration.

    Args:
        guard: makes the context behind which each fact is read.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._optimizers: Sequence[object] = ()
        self._scheduler: object | None = None
        self._hooks: list[Any] = []
        self._settings: dict[int, dict[str, Any]] = {}
        self._device: torch.device | None = None
        self._states: States = {}
        self._stepped_s: float | None = None
        self._began_s: float | None = None
        self._forward_s: float | None = None

    def watch(self, device: torch.device, optimizers: Sequence[object], scheduler: object | None) -> None:
        """Take what ``attach`` was given, if it is called; the first iteration begins.

        Args:
            device: where tensors are recorded.
            optimizers: anything with ``param_groups``; with step hooks the settings are those that the step used.
            scheduler: anything.
        """
        self._optimizers, self._scheduler = optimizers, scheduler
        for optimizer in optimizers:
            with contextlib.suppress(Exception):  # one that cannot be hooked is read in `end`
                self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))  # type: ignore[attr-defined]
        self._device = device
        self.begin()

    def begin(self) -> None:
        """An iteration begins: ``attach`` or ``step`` is about to return."""
        self._forward_s = None
        self._settings = {}
        self._states = {}
        self._read_states("")
        self._began_s = time.perf_counter()

    def first_forward(self) -> None:
        """The first microbatch of the iteration begins."""
        if self._began_s is None or self._forward_s is not None:
            return
        self._forward_s = time.perf_counter()
        if not torch.compiler.is_compiling():
            self._read_states("_at_forward")

    def end(self) -> tuple[dict[str, Any], Callable[[], dict[str, Bytes]]]:
        """``step`` was called.

        Returns:
            facts of the iteration, JSON-able; and what gives the states as bytes when somebody asks.
        """
        now = time.perf_counter()
        facts: dict[str, Any] = {}
        if self._stepped_s is not None:
            facts["step_time_s"] = now - self._stepped_s
        if self._stepped_s is not None and self._began_s is not None and self._forward_s is not None:
            facts["data_time_s"] = self._forward_s - self._began_s
        self._stepped_s = now
        with self._guard("the optimizer's settings"):
            if self._optimizers:
                every = [self._settings.get(id(one)) or settings_of(one) for one in self._optimizers]
                facts["optimizer"] = every[0] if len(every) == 1 else _settings_together(every)
        with self._guard("the scheduler's position"):
            if self._scheduler is not None:
                facts.setdefault("optimizer", {})["scheduler"] = _scheduler_facts(self._scheduler)
        states = self._states
        return facts, lambda: encode(states)

    def stop(self) -> None:
        """Remove the hook. Never raises."""
        with self._guard("the optimizer's settings"):
            for hook in self._hooks:
                hook.remove()
        self._hooks, self._optimizers, self._scheduler = [], (), None

    def _before_optimizer_step(self, optimizer: object, *_: object) -> None:
        """The settings that this step uses: a scheduler may change them before ``Recorder.step`` is called."""
        if torch.compiler.is_compiling():
            return
        with self._guard("the optimizer's settings"):
            self._settings[id(optimizer)] = settings_of(optimizer)

    def _read_states(self, suffix: str) -> None:
        """Keep the states; with a suffix only those that are no longer what they were when the iteration began."""
        for name, read in _READERS.items():
            with self._guard(f"the state of {name}"), quiet():
                state = read(self._device)
                if state is not None and not (suffix and same(state, self._states.get(name))):
                    self._states[name + suffix] = state


# -- random number generators ------------------------------------------------------------------------------------------


def _torch_cpu(device: torch.device | None) -> Bytes:
    del device
    return torch.get_rng_state().numpy()


def _torch_cuda(device: torch.device | None) -> Bytes | None:
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.get_rng_state(device).numpy()


def _transformer_engine(device: torch.device | None) -> dict[str, Bytes] | None:
    """The states that Transformer Engine's tracker holds, if the run has loaded it; it is never imported for this."""
    get_all = getattr(sys.modules.get("transformer_engine.pytorch.distributed"), "get_all_rng_states", None)
    if get_all is None or (device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    held: dict[str, Any] = {}
    for name, one in get_all().items():
        get_states = getattr(one, "get_states", None)
        held |= {name: one} if get_states is None else {f"{name}.{key}": state for key, state in get_states().items()}
    found = {name: _host_state(state) for name, state in held.items()}
    return {name: state for name, state in found.items() if state is not None}


def _host_state(state: Any) -> Bytes | None:
    """A generator's state (for CUDA graphs), or one that lies on the host; one on the device is left out."""
    if isinstance(state, torch.Generator):
        return state.get_state().numpy()
    is_here = isinstance(state, torch.Tensor) and state.device.type == "cpu"
    return state.detach().numpy().copy() if is_here else None


def _python(device: torch.device | None) -> tuple[Any, ...]:
    del device
    return random.getstate()


def _numpy(device: torch.device | None) -> tuple[Any, ...]:
    del device
    return tuple(np.random.get_state())


_READERS: dict[str, Callable[[torch.device | None], Any]] = {
    "torch_cpu": _torch_cpu,
    "torch_cuda": _torch_cuda,
    "transformer_engine": _transformer_engine,
    "python": _python,
    "numpy": _numpy,
}
"""What gives the state of each generator, None where there is none. Nothing here waits for the device."""


def same(one: Any, other: Any) -> bool:
    """Whether two states of one generator are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one[1], np.ndarray):  # numpy's
        return bool(one[0] == other[0] and one[2:] == other[2:] and np.array_equal(one[1], other[1]))
    return bool(one == other)


def encode(states: Mapping[str, Any]) -> dict[str, Bytes]:
    """States as uint8 arrays, in the forms that ``docs/format.md`` says how to restore."""
    found: dict[str, Bytes] = {}
    for name, state in states.items():
        if isinstance(state, dict):
            found |= {f"{name}.{key}": one.view(np.uint8).reshape(-1) for key, one in state.items()}
        elif isinstance(state, np.ndarray):
            found[name] = state
        elif name.startswith("python"):
            last = np.array(np.nan if state[2] is None else state[2], "<f8")
            found[name] = _joined(np.array(state[1], "<u4"), last)
        elif state[0] == "MT19937":
            found[name] = _joined(state[1].astype("<u4"), np.array(state[2:4], "<i4"), np.array(state[4], "<f8"))
    return found


def _joined(*arrays: NDArray[Any]) -> Bytes:
    return np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)


# -- optimizers --------------------------------------------------------------------------------------------------------


def settings_of(optimizer: object) -> dict[str, Any]:
    """Class, and the numbers and small tuples of each group of parameters. Never reads from a device."""
    groups: list[Mapping[str, Any]] = list(getattr(optimizer, "param_groups", ()))
    facts: dict[str, Any] = {
        "class": type(optimizer).__name__,
        "groups": [_group(group) for group in groups[:MAX_GROUPS]],
    }
    if len(groups) > MAX_GROUPS:
        facts["num_groups"] = len(groups)
    return facts


def _settings_together(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of several optimizers: one list of groups, each with the number of its optimizer."""
    groups = [{"optimizer": number, **group} for number, one in enumerate(every) for group in one["groups"]]
    return {"class": ", ".join(one["class"] for one in every), "groups": groups}


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"num_parameters": len(group.get("params", ()))}
    for name, value in list(group.items())[:MAX_SETTINGS]:
        plain = _plain(value)
        if plain is not None and name != "params":
            found[str(name)] = plain
    return found


def _plain(value: Any) -> Any:
    """A number or a small tuple of them; a text for a tensor that cannot be read without waiting; None for the rest."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        if value.device.type != "cpu":
            return f"not read: a tensor on {value.device}"
        return value.detach().reshape(()).item()  # on the CPU: nothing to wait for
    if isinstance(value, (tuple, list)) and len(value) <= MAX_ITEMS:
        items = [_plain(item) for item in value]
        return None if any(item is None for item in items) else items
    return None


def _scheduler_facts(scheduler: object) -> dict[str, Any]:
    facts: dict[str, Any] = {"class": type(scheduler).__name__}
    epoch = getattr(scheduler, "last_epoch", None)
    if isinstance(epoch, int):
        facts["last_epoch"] = epoch
    return facts
