"""Says where the model is: phase, microbatch and call of the module that runs, forward and backward.

Owns a stack of frames for each thread, the call counters of the iteration, and the microbatch of every backward pass
that was seen. Runs on the training thread and on autograd's threads; holds no tensor; launches nothing.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import torch

from flightrec.records import NO_MICROBATCH, Phase
from flightrec.sources.sink import Sink
from flightrec.sources.warmup import is_capturing, is_warming_up

_MAX_FRAMES = 1000
"""More can only be left-overs of forwards that were cut short: Python's own recursion ends there."""


class Stamp(NamedTuple):
    """Where a layer was when it ran."""

    layer: str
    microbatch: int
    phase: Phase
    call: int


ASLEEP = Stamp("\0asleep", NO_MICROBATCH, Phase.TRAIN, 0)
"""Of any module of which nothing is wanted in this iteration."""


class Stamps:
    """Follows the hooked modules of one model.

    Args:
        root: the attached model; its ``training`` flag decides between training and evaluation.
        sink: tells the current microbatch, and is told when an implicit one begins.
    """

    def __init__(self, root: torch.nn.Module, sink: Sink) -> None:
        self._root = root
        self._sink = sink
        self._local = threading.local()
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int, Phase], int] = {}
        self._backward: dict[int, int] = {}  # graph task -> microbatch
        self._last_backward: int | None = None
        self._last_forward = NO_MICROBATCH
        self._seen: set[Phase] = set()
        self._is_warmup = False
        self._captured_calls: dict[tuple[str, int, Phase], int] = {}
        self._captured: dict[str, int] = {}  # captures by their outermost layer, since the last eager forward

    def enter(self, module: torch.nn.Module, layer: str, has_gradients: bool | None = None) -> Stamp:
        """Note that ``module`` starts to run, and say what run it is.

        A forward inside a backward pass is a recompute. Otherwise the outermost hooked module decides for all below
        it: evaluation if the model is in eval mode or gradients were off when it was entered, else training, also
        where checkpointing switches gradients off further in.

        Eager warm-up for a CUDA graph is a phase of its own and begins no microbatch; nor does a capture, in which
        microbatches count from 0: its replays have theirs added. ``has_gradients`` says whether gradients are on where
        this thread's own setting does not, in a compiled region.
        """
        frames = self._frames()
        captured = self._note_capture(len(frames))
        if in_backward():
            if module is self._root:
                self._see_root_again()
            phase, microbatch = Phase.WARMUP if self._is_warmup else Phase.RECOMPUTE, self.backward_microbatch()
        else:
            stale = bool(frames) and (frames[0].phase is Phase.RECOMPUTE or len(frames) > _MAX_FRAMES)
            if module is self._root or stale:
                frames.clear()  # what is left was cut short by an exception that no hook saw
                captured = self._note_capture(0)
            if not frames:
                self._is_warmup = not captured and is_warming_up()
            if frames:
                phase = frames[0].phase
            elif self._is_warmup:
                phase = Phase.WARMUP
            else:
                if has_gradients is None:
                    has_gradients = torch.is_grad_enabled() or _in_function()
                training = self._root.training and has_gradients
                phase = Phase.TRAIN if training else Phase.EVAL
                self._seen.add(phase)
                begins = module is self._root or self._sink.microbatch_index == NO_MICROBATCH
                if training and begins and not captured:
                    self._sink.begin_microbatch_implicit()
            microbatch = self._captured_microbatch(layer) if captured else self._sink.microbatch_index
            if phase is Phase.TRAIN:
                self._last_forward = microbatch
        key = (layer, microbatch, phase)
        calls = self._captured_calls if captured else self._calls
        with self._lock:
            call = calls.get(key, 0)
            calls[key] = call + 1
        stamp = Stamp(layer, microbatch, phase, call)
        frames.append(stamp)
        return stamp

    def leave(self, layer: str) -> Stamp | None:
        """Note that a layer finished, or raised; None if it was not entered on this thread."""
        frames = self._frames()
        for index in range(len(frames) - 1, -1, -1):
            if frames[index].layer == layer:
                stamp = frames[index]
                del frames[index:]
                return stamp
        return None

    def doze(self) -> bool:
        """Note that a module of which nothing is wanted starts to run inside another one; ``wake`` must follow.

        No if it may not pass so lightly: as the outermost one, in a capture, or after a forward that was cut short.
        """
        frames: list[Stamp] | None = getattr(self._local, "frames", None)
        if not frames or len(frames) > _MAX_FRAMES or is_capturing():
            return False
        if frames[0].phase is Phase.RECOMPUTE and not in_backward():
            return False
        frames.append(ASLEEP)
        return True

    def wake(self) -> bool:
        """Note that such a module finished, or raised; no if the innermost one is another."""
        frames = self._frames()
        if not frames or frames[-1] is not ASLEEP:
            return False
        frames.pop()
        return True

    def current(self) -> Stamp | None:
        """Stamp of the innermost hooked module that runs on this thread; ``ASLEEP`` for one that dozes."""
        frames = self._frames()
        return frames[-1] if frames else None

    @property
    def only_evaluated(self) -> bool:
        """Whether the model ran, but never in training as far as could be told."""
        return Phase.EVAL in self._seen and Phase.TRAIN not in self._seen

    @property
    def depth(self) -> int:
        """How many hooked modules are running on this thread."""
        return len(self._frames())

    @property
    def is_warmup(self) -> bool:
        """Whether the latest forward from outside was the eager warm-up for a CUDA graph."""
        return self._is_warmup

    @property
    def is_captured(self) -> bool:
        """Whether the latest module that was entered on this thread, and still runs, is being captured."""
        begins = getattr(self._local, "captured_from", -1)
        return begins >= 0 and begins < len(self._frames())

    def _note_capture(self, depth: int) -> bool:
        """Note where in the stack of this thread's frames a capture began; says whether there is one."""
        local = self._local
        if not is_capturing():
            local.captured_from = -1
            if depth == 0 and self._captured:
                self._captured.clear()
                self._captured_calls.clear()
            return False
        if not 0 <= getattr(local, "captured_from", -1) < depth:
            local.captured_from = depth
        return True

    def _captured_microbatch(self, layer: str) -> int:
        """Microbatch within a capture: how often its outermost layer was captured before."""
        local = self._local
        if local.captured_from == len(self._frames()):
            local.captured_microbatch = self._captured.get(layer, 0)
            self._captured[layer] = local.captured_microbatch + 1
        microbatch: int = local.captured_microbatch
        return microbatch

    def see_backward(self, microbatch: int) -> None:
        """Note which microbatch the backward pass that runs on this thread belongs to."""
        task = torch._C._current_graph_task_id()
        self._last_backward = microbatch
        if task != -1:
            with self._lock:
                self._backward[task] = microbatch

    def _see_root_again(self) -> None:
        """The whole model is recomputed: nothing of this backward pass was seen, so it is the latest forward's."""
        if self._last_forward != NO_MICROBATCH and torch._C._current_graph_task_id() not in self._backward:
            self.see_backward(self._last_forward)

    def backward_of_region(self) -> int:
        """Microbatch of a backward pass through a compiled region; if nothing was seen of it, of the latest forward."""
        with self._lock:
            microbatch = self._backward.get(torch._C._current_graph_task_id(), self._last_forward)
        return self._sink.microbatch_index if microbatch == NO_MICROBATCH else microbatch

    def backward_microbatch(self) -> int:
        """Microbatch of this backward pass; if nothing was seen of it, of the latest one, else the current one."""
        with self._lock:
            microbatch = self._backward.get(torch._C._current_graph_task_id(), self._last_backward)
        return self._sink.microbatch_index if microbatch is None else microbatch

    def next_iteration(self) -> None:
        """Forget the counters of the iteration; called between iterations, on the training thread."""
        with self._lock:
            self._calls.clear()
            self._backward.clear()
            self._last_backward = None
            self._last_forward = NO_MICROBATCH

    def _frames(self) -> list[Stamp]:
        try:
            frames: list[Stamp] = self._local.frames
        except AttributeError:
            frames = self._local.frames = []
        return frames


def _in_function() -> bool:
    """Say whether this is the forward of an autograd function, such as reentrant checkpointing's first forward.

    There forward-mode gradients are off too, which ``torch.no_grad()`` alone leaves on.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def in_backward() -> bool:
    """Say whether this thread runs inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def must_not_record() -> bool:
    """Say whether the code that runs is being traced or transformed, so that its tensors hold no values yet.

    Called first by every hook; under ``torch.compile`` the compiler folds it to True and drops the hook's body. What is
    captured into a CUDA graph is recorded: its replays are the run. Never raises an ``Exception``.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        return _is_traced()
    except Exception:
        global _complained  # noqa: PLW0603  once a process is enough
        if not _complained:
            _complained = True
            _log.exception("flightrec: cannot tell whether torch is tracing, so nothing is recorded")
        return True


_complained = False
_log = logging.getLogger("flightrec")


_num_modes, _get_tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_get_transform = torch._C._functorch.peek_interpreter_stack


def _is_in_tracing_mode() -> bool:
    mode, keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    return mode(keys.FAKE) is not None or mode(keys.PROXY) is not None or mode(keys.FUNCTIONAL) is not None


def _is_traced() -> bool:
    return (_num_modes() > 0 and _is_in_tracing_mode()) or _get_transform() is not None or _get_tracing() is not None
