"""All that the records of one place in the ring have in common: its launches, and how its tensors must lie.

The way of an ordinary record is ``Prepared.__call__``: it looks at the tensors, writes their addresses into the
parameters that the driver reads, and has each kernel launched. It allocates nothing and knows nothing of how the
parameters came about. Any thread, under a lock of its own; waits for nothing.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import torch

from flightrec.kernels import reference
from flightrec.kernels.arguments import CopyPart, Part
from flightrec.kernels.known import Known
from flightrec.kernels.launch import Cells, Direct, Scratch, raw_stream, scratch_of
from flightrec.kernels.lying import MAX_DENSE_BYTES, Way, way_of
from flightrec.kernels.packed_arguments import PackedPart
from flightrec.kernels.pieces import is_expanded
from flightrec.kernels.plain_arguments import PlainPart
from flightrec.kernels.plan import CapturePlan, Destination

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
_is_capturing: Callable[[], bool] = (
    getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or torch.cuda.is_current_stream_capturing
)
_MAY_BE_NEGATIVE = (torch.float16, torch.float32, torch.float64)  # as parts of complex numbers
_Looks = tuple[torch.dtype, torch.Size, "tuple[int, ...] | None", int, bool]


class Prepared:
    """The launches of one place in the ring, for tensors of one layout.

    Attributes:
        is_known: the kernels know such records; otherwise there is nothing to launch.
    """

    __slots__ = (
        "_asked", "_cells", "_copied", "_device", "_directs", "_index", "_kept", "_lock", "_looks", "_memory",
        "_num_parts", "_num_rows", "_others", "_pack", "_plan", "_rows_kind", "_scratch", "_stream", "_units",
        "_x_looks", "is_known",
    )  # fmt: skip

    def __init__(
        self,
        plan: CapturePlan,
        destination: Destination,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        valid_rows: int | torch.Tensor | None,
    ) -> None:
        self._plan, self._device, self._rows_kind = plan, destination.stamp.device, _kind_of(valid_rows)
        self._index = self._device.index if self._device.type == "cuda" else -1
        given = x if x is not None or plan.codes < 0 else parts[plan.codes]
        self._num_rows = 1 if given is None or not given.dim() else given.shape[0]
        self._num_parts = len(parts)
        self._copied = _to_be_copied(plan, x, parts, valid_rows)
        x_is_copied = 0 in self._copied
        as_read = [_dense_like(t) if at in self._copied else t for at, t in enumerate(parts, start=1)]
        known = Known(plan, destination, _dense_like(x) if x is not None and x_is_copied else x, as_read, valid_rows)
        self._x_looks = None if x is None else _looks_of(x, anywhere=x_is_copied or known.way is Way.PLAIN)
        self._looks = [_looks_of(part, anywhere=at in self._copied) for at, part in enumerate(parts, start=1)]
        self.is_known = known.is_known()
        self._units = _units_of(known) if self.is_known else []
        self._others: list[tuple[int, torch.Tensor]] = []
        for at in known.others if self.is_known else ():
            target = destination.parts[at]
            assert target is not None
            if CopyPart.can_copy(target, parts[at]):
                self._units.append(CopyPart(target, parts[at], at))
            else:
                self._others.append((at, target))
        self._cells = Cells(1 + len(parts))
        self._memory = self._cells.memory
        self._pack = struct.Struct(f"<{len(parts) + 4}q").pack_into
        self._lock = threading.Lock()
        self._directs: list[tuple[Callable[..., int], int, int, int]] | None = None
        self._kept: list[Direct] = []
        self._asked, self._stream = False, -1
        self._scratch: Scratch | None = None

    def __call__(
        self,
        plan: CapturePlan,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None = None,
    ) -> bool | None:
        """Queue the record on the current stream.

        Returns:
            whether it was; None if plan or tensors are not as those that this was made for.
        """
        if plan is not self._plan or len(parts) != self._num_parts:
            return None
        looks, place, rows = self._x_looks, 0, 0
        if x is not None:
            if looks is None:
                return None
            dtype, shape, stride, below, may_be_negative = looks
            place = x.data_ptr()
            if (
                x.dtype is not dtype
                or place & below
                or x.shape != shape
                or (not x.is_contiguous() if stride is None else x.stride() != stride)
                or (may_be_negative and x.is_neg())
            ):
                return None
        elif looks is not None:
            return None
        places = []
        for part, (dtype, shape, stride, below, may_be_negative) in zip(parts, self._looks):  # noqa: B905  counted
            where = part.data_ptr()
            places.append(where)
            if (
                part.dtype is not dtype
                or where & below
                or part.shape != shape
                or (not part.is_contiguous() if stride is None else part.stride() != stride)
                or (may_be_negative and part.is_neg())
            ):
                return None
        if valid_rows is not None or self._rows_kind is not _NO_ROWS:
            if _kind_of(valid_rows) is not self._rows_kind:
                return None
            rows = self._rows_of(valid_rows)
        if not self.is_known:
            return False
        if self._copied:
            x, parts = self._dense(x, parts)
            place, places = 0 if x is None else x.data_ptr(), [part.data_ptr() for part in parts]
        if self._index >= 0:
            if _current_device() != self._index:
                with torch.cuda.device(self._device):
                    return self._queue([place, *places], x, parts, slot, tick, rows, valid_rows)
            directs = self._directs
            if directs is not None and not _is_capturing():
                stream = raw_stream(self._index)
                with self._lock:  # the driver copies the parameters before it returns
                    self._pack(self._memory, 0, place, *places, slot.data_ptr(), tick.data_ptr(), rows)
                    if stream != self._stream:
                        self._change_stream(stream)
                    for launch, config, function, parameters in directs:
                        if launch(config, function, parameters, None):
                            break
                    else:
                        if self._others:
                            self._copy_others(parts, slot)
                        return True
        return self._queue([place, *places], x, parts, slot, tick, rows, valid_rows)

    def _queue(
        self,
        places: list[int],
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        slot: torch.Tensor,
        tick: torch.Tensor,
        rows: int,
        valid_rows: int | torch.Tensor | None,
    ) -> bool:
        """By way of Triton: the first time, into a graph, and wherever the driver is not asked."""
        stream = raw_stream(self._index) if self._index >= 0 else 0
        captures = self._index >= 0 and _is_capturing()
        values = [*places, slot.data_ptr(), tick.data_ptr(), rows, 0]
        for unit in self._units:
            if unit.launch.is_ready:
                given = [values[cell] for cell in unit.cells(self._cells, valid_rows)]
                unit.launch.again(given, stream, captures)
            else:
                counted = rows if isinstance(valid_rows, int) else valid_rows
                unit.first((x, *parts), slot, tick, counted, stream, captures)
        self._copy_others(parts, slot)
        if not self._asked and all(unit.launch.is_ready for unit in self._units):
            self._bind(valid_rows)
        return True

    def _bind(self, valid_rows: object) -> None:
        """From the next record on the driver itself is asked, if it takes all of them."""
        self._asked = True
        found = [unit.launch.direct(self._cells, unit.cells(self._cells, valid_rows)) for unit in self._units]
        directs = [direct for direct in found if direct is not None]
        if len(directs) == len(found):
            with self._lock:
                self._kept, self._stream = directs, -1
                self._directs = [(direct.launch, *direct.arguments) for direct in directs]

    def _change_stream(self, stream: int) -> None:
        self._scratch = scratch_of(self._device, stream, max((unit.launch.num for unit in self._units), default=1))
        self._memory[self._cells.partial], self._memory[self._cells.counters] = self._scratch.pointers
        for direct in self._kept:
            direct.config.stream = stream
        self._stream = stream

    def _rows_of(self, valid_rows: int | torch.Tensor | None) -> int:
        if isinstance(valid_rows, torch.Tensor):
            return valid_rows.data_ptr()
        return min(max(valid_rows or 0, 0), self._num_rows)  # any number, and a kernel's arguments have 64 bits

    def _dense(
        self, x: torch.Tensor | None, parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor]]:
        """With what the kernels do not read as it lies put in order, in memory of torch's own pool."""
        if x is not None and 0 in self._copied:
            x = x.contiguous()
        return x, [part.contiguous() if at in self._copied else part for at, part in enumerate(parts, start=1)]

    def _copy_others(self, parts: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        for at, target in self._others:
            reference.copy_one(target, parts[at], slot)


def _units_of(known: Known) -> list[Part]:
    """The launches of values and codes."""
    codes, is_apart = known.codes, known.x is not None and not known.is_pair
    if known.way is Way.PLAIN:
        alone: list[Part] = [PlainPart(known)]
    else:
        alone = [Part(known, with_values=True, with_codes=codes is None)] if is_apart else []
    if codes is None:
        return alone
    if known.is_packed:
        return [*alone, PackedPart(known, with_values=known.is_pair)]
    return [*alone, Part(known, with_values=known.is_pair, with_codes=True)]


def _to_be_copied(
    plan: CapturePlan, x: torch.Tensor | None, parts: Sequence[torch.Tensor], valid_rows: object
) -> frozenset[int]:
    """Which tensors are put in order first: the values are 0, parts count from 1."""
    found = set()
    is_pair = plan.pairs and plan.codes >= 0
    if x is not None and way_of(x, is_pair=is_pair, is_masked=valid_rows is not None) is Way.COPIED:
        found.add(0)
    codes = parts[plan.codes] if plan.codes >= 0 else None
    if codes is not None and not codes.is_contiguous() and codes.nbytes <= MAX_DENSE_BYTES and not is_expanded(codes):
        found.add(1 + plan.codes)
    return frozenset(found)


def _dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Of its shape, dense and without memory: what the copy will look like."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _looks_of(tensor: torch.Tensor, *, anywhere: bool) -> _Looks:
    """Type, shape, strides unless dense, zero bits of its address, whether a view may negate it."""
    stride = None if tensor.is_contiguous() else tensor.stride()
    below = 0 if anywhere or tensor.data_ptr() % 16 else 15
    return tensor.dtype, tensor.shape, stride, below, tensor.dtype in _MAY_BE_NEGATIVE


_NO_ROWS = type(None)


def _kind_of(valid_rows: int | torch.Tensor | None) -> object:
    return valid_rows.dtype if isinstance(valid_rows, torch.Tensor) else type(valid_rows)
