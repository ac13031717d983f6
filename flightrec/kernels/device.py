"""Copy and statistics on the GPU by Triton kernels: the same results as ``reference``, in one launch.

For dense tensors of the formats that training uses: bfloat16, float16 and float32 values, FP8 codes with float32 scales
for a tensor or for blocks, MXFP8, MXFP4 and NVFP4. Everything else goes to ``reference``. Launches on the caller's
current stream and waits for nothing. What a place in the ring needs is worked out at its first record and kept on its
``Destination``; from then on a record is a look at its tensors' layout and a launch.

A kernel that cannot be compiled or launched (no compiler on the machine) ends the use of all of them, once and for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from flightrec.hosthooks import describe
from flightrec.kernels import reference
from flightrec.kernels.arguments import Part, copying
from flightrec.kernels.known import Known
from flightrec.kernels.launch import Launch, stream_of
from flightrec.kernels.packed_arguments import PackedPart
from flightrec.kernels.plan import CapturePlan, Destination

_Given = TypeVar("_Given", torch.Tensor, torch.Tensor | None)
_MAX_DENSE_BYTES = 256 << 20
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
            given = high_precision if high_precision is not None or plan.codes < 0 else parts[plan.codes]
            if given is not None and isinstance(valid_rows, int):  # any number, and a kernel's arguments have 64 bits
                valid_rows = min(max(valid_rows, 0), given.shape[0] if given.dim() else 1)
            high_precision = _dense(high_precision)
            if plan.codes >= 0 and not parts[plan.codes].is_contiguous():
                parts = [_dense(part) if at == plan.codes else part for at, part in enumerate(parts)]
            tensors = (high_precision, *parts)
            prepared: Prepared | None = destination.cache.get(_PREPARED)
            places = None if prepared is None else prepared.places_of(plan, tensors, valid_rows)
            if prepared is None or places is None:
                prepared = prepare(plan, destination, high_precision, parts, valid_rows)
                places = prepared.places_of(plan, tensors, valid_rows)
            if prepared.is_known and places is not None:
                prepared(tensors, places, slot, tick, valid_rows)
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

    The result may be called in the place of ``capture`` as long as ``places_of`` finds places and ``is_known`` is true.
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


def _dense(tensor: _Given) -> _Given:
    """The same values in order, such as those of a query that is a view of a wider product; as it is if that is large.

    One copy from torch's own pool, which is much less than what ``reference`` does. Nothing of an expanded tensor.
    """
    if tensor is None or tensor.is_contiguous() or tensor.nbytes > _MAX_DENSE_BYTES:
        return tensor
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor
    return tensor.contiguous()


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

    __slots__ = (
        "_device",
        "_is_cuda",
        "_launches",
        "_layouts",
        "_num_tensors",
        "_others",
        "_plan",
        "_valid_rows",
        "_without_values",
        "is_known",
    )

    def __init__(
        self,
        plan: CapturePlan,
        destination: Destination,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        valid_rows: int | torch.Tensor | None,
    ) -> None:
        self._plan, self._device, self._valid_rows = plan, destination.stamp.device, _kind_of(valid_rows)
        self._is_cuda = self._device.type == "cuda"
        self._num_tensors, self._without_values = 1 + len(parts), x is None
        self._layouts = [_layout_of(at, tensor) for at, tensor in enumerate((x, *parts)) if tensor is not None]
        self._launches: list[Part] = []
        self._others: list[tuple[int, torch.Tensor, Launch | None]] = []
        known = Known(plan, destination, x, parts, valid_rows)
        self.is_known = known.is_known()
        if not self.is_known:
            return
        both = x is None or known.codes is None or known.is_pair
        if known.is_packed:
            alone = [] if both else [Part(known, with_values=True, with_codes=False)]
            self._launches = [*alone, PackedPart(known, with_values=known.is_pair)]
        else:
            wholes = [(True, True)] if both else [(True, False), (False, True)]
            self._launches = [Part(known, with_values=values, with_codes=codes) for values, codes in wholes]
        for at in known.others:
            target = destination.parts[at]
            assert target is not None
            self._others.append((at, target, copying(target, parts[at])))

    def places_of(
        self, plan: CapturePlan, tensors: Sequence[torch.Tensor | None], valid_rows: int | torch.Tensor | None
    ) -> list[int] | None:
        """Where values and parts lie, 0 for what is absent; None if not as those did that it was made for."""
        if plan is not self._plan or len(tensors) != self._num_tensors or _kind_of(valid_rows) is not self._valid_rows:
            return None
        places = [0] * self._num_tensors
        for at, dtype, shape, stride, below, may_be_negative in self._layouts:
            tensor = tensors[at]
            if tensor is None:
                return None
            places[at] = place = tensor.data_ptr()
            if (
                tensor.dtype is not dtype
                or place & below
                or tensor.shape != shape
                or (not tensor.is_contiguous() if stride is None else tensor.stride() != stride)
                or (may_be_negative and tensor.is_neg())
            ):
                return None
        return places if self._without_values is (tensors[0] is None) else None

    def __call__(
        self,
        tensors: Sequence[torch.Tensor | None],
        places: list[int],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None = None,
    ) -> None:
        """Queue the record on the current stream: ``tensors`` are the values, or None, and the parts."""
        device = self._device
        if self._is_cuda and device.index != _current_device():
            with torch.cuda.device(device):
                self._queue(tensors, places, slot, tick, valid_rows)
        else:
            self._queue(tensors, places, slot, tick, valid_rows)

    def _queue(
        self,
        tensors: Sequence[torch.Tensor | None],
        places: list[int],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None,
    ) -> None:
        stream = stream_of(self._device)
        captures = self._is_cuda and _is_capturing()
        for launch in self._launches:
            launch(tensors, places, slot, tick, valid_rows, stream, captures)
        for at, target, copy in self._others:
            part = tensors[at + 1]
            assert part is not None
            if copy is None:
                reference.copy_one(target, part, slot)
            elif copy.is_ready:
                copy.again([places[at + 1], slot.data_ptr()], stream, captures)
            else:
                copy.first([part, slot], stream, captures)


_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
_is_capturing: Callable[[], bool] = (
    getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or torch.cuda.is_current_stream_capturing
)
_Layout = tuple[int, torch.dtype, torch.Size, tuple[int, ...] | None, int, bool]


def _layout_of(at: int, tensor: torch.Tensor) -> _Layout:
    """Its number, type, shape, strides unless contiguous, zero bits of its address, whether a view may negate it."""
    stride = None if tensor.is_contiguous() else tensor.stride()
    below = 0 if tensor.data_ptr() % 16 else 15
    return at, tensor.dtype, tensor.shape, stride, below, tensor.dtype in (torch.float16, torch.float32)


def _kind_of(valid_rows: int | torch.Tensor | None) -> object:
    return valid_rows.dtype if isinstance(valid_rows, torch.Tensor) else type(valid_rows)
