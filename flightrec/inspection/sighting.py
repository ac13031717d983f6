"""Where in an iteration a feature's call stands: phase, stage, microbatch, and the how-manieth of its kind.

nvdlfw_inspect tells a feature the layer and the tensor, no more. The rest is read off the autograd state of the calling
thread, and counted. Called on the training thread and on autograd's threads; a lock keeps the counts. Holds no tensor
and no reference into the autograd graph; launches nothing.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from flightrec.records import Phase, Stage

_OF_THE_BACKWARD = frozenset({"gradient", "dgrad", "wgrad"})


class Moment(NamedTuple):
    """What the calling thread is doing.

    Attributes:
        phase: train, recompute or eval.
        stage: forward or backward.
        node: identifies the running backward node within the process; None in a forward.
        fc2: the node is LayerNormMLP's and this shape is not what its first product's dgrad has; see ``moment``.
    """

    phase: Phase
    stage: Stage
    node: tuple[int, int] | None
    fc2: bool = False


def moment(tensor: str, shape: tuple[int, ...] = ()) -> Moment:
    """Read the calling thread's state.

    Transformer Engine's modules quantize inside ``autograd.Function.forward`` while they train: there gradients and
    forward-mode gradients are both off. ``torch.no_grad()`` alone leaves the latter on, so that evaluation can be told
    from the first forward of reentrant checkpointing, which is inside a Function too. A forward inside a graph task is
    a recompute; a backward may quantize an activation once more, for its weight gradient: that is no recompute.

    LayerNormMLP (2.20.2) shows the dgrad of its second product under the name of the first, before the first one's
    own: told by its last dimension, which is that of the module's input for the first product only.

    Args:
        tensor: one of Transformer Engine's six names.
        shape: of the tensor.
    """
    in_forward = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
    task = torch._C._current_graph_task_id()
    if task == -1:
        is_eval = not in_forward and not torch.is_grad_enabled()
        stage = Stage.BACKWARD if tensor in _OF_THE_BACKWARD else Stage.FORWARD
        return Moment(Phase.EVAL if is_eval else Phase.TRAIN, stage, None)
    if in_forward and tensor not in _OF_THE_BACKWARD:
        return Moment(Phase.RECOMPUTE, Stage.FORWARD, None)
    node = torch._C._current_autograd_node()
    fc2 = tensor == "dgrad" and type(node).__name__ == "_LayerNormMLPBackward" and _is_wider(node, shape)
    return Moment(Phase.TRAIN, Stage.BACKWARD, (task, id(node)), fc2)


def _is_wider(node: Any, shape: tuple[int, ...]) -> bool:
    """Whether this is not the gradient of the module's input: another last dimension. False where nobody can tell."""
    of_input: tuple[int, ...] | None = getattr(node, "inp_shape", None)
    return len(shape) > 0 and of_input is not None and shape[-1:] != tuple(of_input)[-1:]


class Position(NamedTuple):
    """The countable part of a record's key."""

    microbatch: int
    call: int


class _Count:
    """Of one (layer, tensor, part, phase, stage) in one iteration."""

    __slots__ = ("calls", "node", "passes")

    def __init__(self) -> None:
        self.passes = 0
        self.node: tuple[int, int] | None = None
        self.calls: dict[int, int] = {}


class Counter:
    """Numbers the sightings of an iteration, so that a later one never overwrites an earlier one.

    The n-th time that a layer shows a tensor in a phase is microbatch n: sightings of the backward within one node are
    calls of the same microbatch. Where the user names microbatches, what is seen in a forward belongs to the named
    one; and the n-th backward of a layer to the microbatch of its n-th forward, which is the order of 1F1B and of any
    loop that runs one backward after each forward.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str, Phase, Stage], _Count] = {}
        self._forwards: dict[tuple[str, str], list[int]] = {}

    def place(self, layer: str, tensor: str, part: str, moment: Moment, named: int | None) -> Position:
        """Number one sighting.

        Args:
            layer: as nvdlfw_inspect names it.
            tensor: one of Transformer Engine's six names.
            part: tells several apart.
            moment: of the sighting.
            named: the microbatch that the user named, if any.
        """
        key = (layer, tensor, part, moment.phase, moment.stage)
        with self._lock:
            count = self._counts.get(key)
            if count is None:
                count = self._counts[key] = _Count()
            if moment.node is None or moment.node != count.node:
                count.passes += 1
                count.node = moment.node
            microbatch = count.passes - 1
            if named is not None:
                microbatch = self._named(layer, tensor, moment, named, microbatch)
            call = count.calls.get(microbatch, 0)
            count.calls[microbatch] = call + 1
            return Position(microbatch, call)

    def _named(self, layer: str, tensor: str, moment: Moment, named: int, number: int) -> int:
        if moment.phase is not Phase.TRAIN or moment.stage is Stage.FORWARD:
            if moment.phase is Phase.TRAIN:
                self._forwards.setdefault((layer, tensor), []).append(named)
            return named if moment.phase is not Phase.RECOMPUTE else self._of_forward(layer, number, named)
        return self._of_forward(layer, number, named)

    def _of_forward(self, layer: str, number: int, otherwise: int) -> int:
        """The microbatch of the layer's ``number``-th forward, by whichever of its tensors was seen there."""
        for tensor in ("activation", "output"):
            forwards = self._forwards.get((layer, tensor))
            if forwards:
                return forwards[number] if number < len(forwards) else otherwise
        return otherwise

    def begin(self) -> None:
        """Forget the last iteration."""
        with self._lock:
            self._counts.clear()
            self._forwards.clear()
