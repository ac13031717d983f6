"""Copy and statistics on the GPU by Triton kernels: the same results as ``reference``, in one launch.

For dense tensors of the formats that training uses most: bfloat16, float16 and float32 values, FP8 codes with float32
scales for a tensor or for blocks. Everything else goes to ``reference``. Launches on the caller's current stream and
waits for nothing. What a place in the ring needs is worked out at its first record and kept on its ``Destination``;
from then on a record is a look at its tensors' layout and a launch.

A kernel that cannot be compiled or launched (no compiler on the machine) ends the use of all of them, once and for all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flightrec.hosthooks import describe
from flightrec.kernels import reference
from flightrec.kernels.arguments import Part, copying
from flightrec.kernels.known import Known
from flightrec.kernels.launch import Launch
from flightrec.kernels.plan import CapturePlan, Destination

_PREPARED = -1
"""Key of a destination's ``cache``."""

_log = logging.getLogger("flightrec")
_gave_up = False


def capture(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> None:
    """Copy a record into its slot and write its statistics row and stamp: see ``reference.capture``."""
    if not _gave_up:
        try:
            prepared: Prepared | None = destination.cache.get(_PREPARED)
            if prepared is None or not prepared.fits(plan, high_precision, parts, valid_rows):
                prepared = prepare(plan, destination, high_precision, parts, valid_rows)
            if prepared.is_known:
                prepared(high_precision, parts, slot, tick, valid_rows)
                return
        except Exception as error:
            _give_up(error)
    reference.capture(plan, destination, high_precision, parts, slot, tick, valid_rows)


def prepare(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    valid_rows: int | torch.Tensor | None = None,
) -> Prepared:
    """What all records like this one need, kept on ``destination``; launches and compiles nothing.

    The result may be called in the place of ``capture`` as long as ``fits`` says so and ``is_known`` is true.
    """
    prepared = Prepared(plan, destination, high_precision, parts, valid_rows)
    destination.cache[_PREPARED] = prepared
    return prepared


def warm_up(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> bool:
    """Compile and load what ``capture`` of such a record launches, before a CUDA graph is captured.

    It is a capture: ``slot`` names a place that may be overwritten (scrap). A capture that meets an unknown kernel
    loads it all the same; this only keeps the seconds that compiling takes out of it.

    Returns:
        whether the kernels know the record; otherwise ``reference`` was called.
    """
    capture(plan, destination, high_precision, parts, slot, tick, valid_rows)
    prepared: Prepared | None = destination.cache.get(_PREPARED)
    return not _gave_up and prepared is not None and prepared.is_known


def _give_up(error: Exception) -> None:
    global _gave_up  # noqa: PLW0603  what one kernel lacks, all lack
    _gave_up = True
    why = describe(error)
    _log.warning("flightrec: Triton kernels do not work here, records will cost many times as much: %s", why)


class Prepared:
    """The launches of one place in the ring, for tensors of one layout.

    Attributes:
        is_known: the kernels know such records; otherwise there is nothing to call.
    """

    __slots__ = ("_device", "_launches", "_others", "_plan", "_signature", "_valid_rows", "is_known")

    def __init__(
        self,
        plan: CapturePlan,
        destination: Destination,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        valid_rows: int | torch.Tensor | None,
    ) -> None:
        self._plan, self._device, self._valid_rows = plan, destination.stamp.device, _kind_of(valid_rows)
        self._signature = [_layout_of(tensor) for tensor in (x, *parts)]
        self._launches: list[Part] = []
        self._others: list[tuple[int, torch.Tensor, Launch | None]] = []
        known = Known(plan, destination, x, parts, valid_rows)
        self.is_known = known.is_known()
        if not self.is_known:
            return
        both = x is None or known.codes is None or known.is_pair
        wholes = [(True, True)] if both else [(True, False), (False, True)]
        self._launches = [Part(known, with_values=values, with_codes=codes) for values, codes in wholes]
        for at in known.others:
            target = destination.parts[at]
            assert target is not None
            self._others.append((at, target, copying(target, parts[at])))

    def fits(
        self,
        plan: CapturePlan,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        valid_rows: int | torch.Tensor | None,
    ) -> bool:
        """Whether these tensors lie as those did that it was made for."""
        signature = self._signature
        if plan is not self._plan or len(parts) + 1 != len(signature) or _kind_of(valid_rows) != self._valid_rows:
            return False
        if x is None:
            if signature[0] is not None:
                return False
        elif not _is_like(x, signature[0]):
            return False
        return all(map(_is_like, parts, signature[1:]))

    def __call__(
        self,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None = None,
    ) -> None:
        """Queue the record on the current stream."""
        device = self._device
        is_cuda = device.type == "cuda"
        with _ON_IT if not is_cuda or device.index == torch.cuda.current_device() else torch.cuda.device(device):
            captures = is_cuda and torch.cuda.is_current_stream_capturing()
            for launch in self._launches:
                launch(x, parts, slot, tick, valid_rows, captures)
            for at, target, copy in self._others:
                if copy is None:
                    reference.copy_one(target, parts[at], slot)
                else:
                    copy([parts[at], slot], captures)


_ON_IT = nullcontext()
_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


def _layout_of(tensor: torch.Tensor | None) -> _Layout | None:
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0


def _is_like(tensor: torch.Tensor, layout: _Layout | None) -> bool:
    if layout is None:
        return False
    dtype, shape, stride, aligned = layout
    return (
        tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.stride() == stride
        and (tensor.data_ptr() % 16 == 0 or not aligned)
        and not tensor.is_neg()
    )


def _kind_of(valid_rows: int | torch.Tensor | None) -> object:
    return valid_rows.dtype if isinstance(valid_rows, torch.Tensor) else valid_rows is None
