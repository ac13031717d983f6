"""What a source needs from whoever keeps its tensors: the ``Sink`` protocol, which the recorder implements.

And how to touch the run's tensors without leaving a trace: ``quiet``, ``is_plain``. Owns nothing. A sink is called from
the training thread and from autograd's threads, on whatever CUDA stream is current there, always inside ``quiet``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flightrec.records import Phase, Stage


class Sightings:
    """What a layer may show in one place, of which is asked as a whole whether any is wanted now.

    Args:
        of: (layer, tensor, phase, stage) of each.

    Attributes:
        layers: those among them.
        known: where a sink notes its answer, and what that holds for.
    """

    __slots__ = ("known", "layers", "of")

    def __init__(self, of: Iterable[tuple[str, str, Phase, Stage]]) -> None:
        self.of = tuple(of)
        self.layers = tuple(dict.fromkeys(layer for layer, *_ in self.of))
        self.known: tuple[object, int, bool] = (None, 0, False)


class Sink(Protocol):
    """Takes what the sources see."""

    @property
    def microbatch_index(self) -> int:
        """The current microbatch; ``NO_MICROBATCH`` before the first one of an iteration."""

    @property
    def epoch(self) -> object:
        """Another object in each iteration: what ``sleeps`` said holds as long as it is the same."""

    def sleeps(self, layer: str) -> bool:
        """Say whether it is not this layer's turn, so that ``wants`` says no to all of it; a no says nothing."""

    def selects(self, layer: str, tensor: str, phase: Phase, stage: Stage | None = None) -> object | None:
        """Say whether this tensor is wanted (at this stage, or at any): anything but None is yes.

        Sources ask once, when they attach, and install no hook for a no. An answer must not change while attached.
        """

    def wants(self, layer: str, tensor: str, phase: Phase, stage: Stage) -> bool:
        """Say whether ``capture`` would keep such a sighting in this iteration: not so if it is not its turn.

        Cheap, and without an effect; sources ask before they look at a tensor. The answer holds for the iteration. What
        is left out so is known to whoever leaves it out: nothing needs to be told.
        """

    def wants_any(self, sightings: Sightings) -> bool:
        """Say whether ``wants`` says yes to any of them; after the first time in an iteration from memory.

        A layer that is not in its turn asks this once a pass, and nothing else.
        """

    def capture(
        self,
        layer: str,
        tensor: str,
        *,
        part: str = "",
        microbatch: int,
        phase: Phase,
        call: int,
        stage: Stage,
        high_precision: torch.Tensor | None = None,
        quantized: object | None = None,
        columnwise: object | None = None,
        splits: torch.Tensor | None = None,
    ) -> None:
        """Keep one sighting of a tensor; called after ``selects`` said yes for (layer, tensor, phase).

        Args:
            layer: qualified module name.
            tensor: one of ``records.TENSORS``.
            part: path or parameter name, empty for the only one.
            microbatch: that of the sighting; ``NO_MICROBATCH`` for parameters.
            phase: of the sighting.
            call: how often the layer ran before in this microbatch and phase.
            stage: where in the iteration.
            high_precision: a plain strided tensor, detached, any strides. It is the run's own memory: it must be copied
                during the call and not referenced afterwards.
            quantized: what ``extract`` takes (a quantized tensor, a ``Quantized`` or finished ``QuantizedParts``).
            columnwise: a second quantized tensor of the same values for the other direction of the product, or None.
            splits: integers ``[E]``, how many rows belong to each expert where one buffer serves several, or None.
        """

    def blind(self, layer: str, tensor: str, reason: str) -> None:
        """Note that this tensor is selected but is not recorded, and why. Told once for each (layer, tensor)."""

    def begin_microbatch_implicit(self) -> None:
        """Begin the next microbatch, unless the user counts them: a training forward of the attached model starts."""

    def guard(self, part: str) -> AbstractContextManager[object]:
        """Make a context that swallows an ``Exception`` raised in it, logs it once and counts ``part`` as disarmed."""


def is_plain(tensor: object) -> bool:
    """Say whether this is an ordinary dense tensor with real memory, which can be copied as it is."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
    )


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class quiet:  # noqa: N801  used like a function: ``with quiet():``
    """Context in which our own operations leave no trace in the run.

    No autograd history, no autocast (it would change what we compute), no inference tensors (the ring's memory must
    stay writable), no function modes. Selective checkpointing's caching modes are switched off too: an operation of
    ours in its cache would be handed to the model in the recompute. Other dispatch modes still see what we do.
    """

    __slots__ = ("_autocast", "_functions", "_gradients", "_rare")

    def __enter__(self) -> quiet:
        self._functions = _no_functions()
        self._functions.__enter__()
        self._rare: ExitStack | None = None
        if _is_inference() or _num_modes() > 0:
            try:
                self._rare = _enter_rare()
            except BaseException:
                self._functions.__exit__(None, None, None)
                raise
        # Set directly: a context manager object for each record would be most of a hook's cost.
        self._gradients = _has_gradients()
        _set_gradients(False)
        self._autocast: tuple[str, ...] = ()
        if _is_any_autocast_enabled():
            self._autocast = tuple(kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind))
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._autocast:
            for kind in self._autocast:
                torch.set_autocast_enabled(kind, True)
        _set_gradients(self._gradients)
        if self._rare is not None:
            self._rare.close()
        self._functions.__exit__(None, None, None)


_no_functions, _num_modes = torch._C.DisableTorchFunction, torch._C._len_torch_dispatch_stack
_is_inference, _has_gradients, _set_gradients = (
    torch.is_inference_mode_enabled,
    torch.is_grad_enabled,
    torch._C._set_grad_enabled,
)  # looked up once: they are called around every record


def _autocasts_somewhere() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


_is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _autocasts_somewhere)


def _enter_rare() -> ExitStack:
    """Leave the modes that the thread is in; closing the result goes back."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if _is_caching():
            stack.enter_context(_disable_current_modes())
        return stack.pop_all()


def _is_caching() -> bool:
    """Say whether selective checkpointing records or replays the operations of this thread."""
    modes = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())
