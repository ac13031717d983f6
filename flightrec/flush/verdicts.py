"""Verdicts on their way from the device to the host: copied to pinned memory in one piece, read when complete.

Runs on the training thread; ``push`` launches one copy on the current stream, which may be one beside the training, and
never waits; ``poll`` reads what has arrived. A buffer is kept for the iterations that the ring may still hold, so that
an incident finds their statistics without another copy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.kernels.pinned import HostBuffer
from flightrec.rules.verdict import RowFiring, VerdictFormat


@dataclass(frozen=True, slots=True)
class VerdictView:
    """One tick's verdict on the host; arrays are views of a pinned buffer, valid while the ring may hold the tick.

    Attributes:
        tick: which ``step()``.
        slots: whole numbers, the slot table's state after this step, as ``SlotTable.decode`` takes it.
        statistics: float64 [R, C], all rows; those not recorded in this tick hold older values.
        firings: rows on which a rule fired or watches.
    """

    tick: int
    slots: NDArray[np.float64]
    statistics: NDArray[np.float64]
    firings: tuple[RowFiring, ...] = ()


class _Buffer:
    """Pinned bytes and the event that says when they are there."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._memory = HostBuffer(device, num_bytes)
        self._host = self._memory.tensor
        self.data: NDArray[np.uint8] = self._host.numpy()

    def receive(self, source: torch.Tensor) -> None:
        """Queue the copy of uint8 [n] into the first n bytes."""
        self._host[: source.numel()].copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def ready(self, wait: bool) -> bool:
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())


@dataclass(slots=True)
class _Pending:
    tick: int
    form: VerdictFormat
    buffer: _Buffer
    num_bytes: int


class VerdictQueue:
    """Pinned buffers, one a tick in flight or in the ring.

    Args:
        device: where verdicts are made.
        depth: ticks whose verdicts are kept after they were read.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._pending: deque[_Pending] = deque()
        self._kept: OrderedDict[int, tuple[_Buffer, VerdictView]] = OrderedDict()
        self._free: list[_Buffer] = []

    @torch.no_grad()
    def push(self, tick: int, packed: torch.Tensor, form: VerdictFormat) -> None:
        """Queue the copy of one verdict; no synchronisation. Allocates pinned memory only while rows still appear.

        Args:
            tick: which ``step()``.
            packed: uint8 [n] on the device, what ``Verdict.pack`` gave; free for reuse by what follows on this stream.
            form: how it is read.
        """
        buffer = self._take(packed.numel())
        buffer.receive(packed)
        self._pending.append(_Pending(tick, form, buffer, packed.numel()))

    @property
    def oldest_tick(self) -> int:
        """The oldest tick that is still on its way; a large number for none."""
        return self._pending[0].tick if self._pending else 1 << 62

    def poll(self, *, wait: bool = False) -> list[VerdictView]:
        """The verdicts that have arrived since the last call, oldest first.

        Args:
            wait: wait for the device until all are there; only for the end of a run and for exceptions.
        """
        arrived: list[VerdictView] = []
        while self._pending and self._pending[0].buffer.ready(wait):
            pending = self._pending.popleft()
            view = _unpack(pending)
            self._kept[pending.tick] = (pending.buffer, view)
            arrived.append(view)
        return arrived

    def get(self, tick: int) -> VerdictView | None:
        """A verdict that was read before and is still kept."""
        kept = self._kept.get(tick)
        return kept[1] if kept else None

    def _take(self, num_bytes: int) -> _Buffer:
        while len(self._kept) > self._depth:
            self._free.append(self._kept.popitem(last=False)[1][0])
        if self._free and len(self._free[0].data) >= num_bytes:
            return self._free.pop(0)
        self._free.clear()  # rows were added: the old buffers are too small
        return _Buffer(self._device, num_bytes + num_bytes // 4)


def _unpack(pending: _Pending) -> VerdictView:
    form, data = pending.form, pending.buffer.data[: pending.num_bytes]
    words = data[: form.num_words * 8].view(np.float64)
    start = 1 + form.num_slot_words
    return VerdictView(pending.tick, words[1:start], words[start:].reshape(form.shape), form.firings(data))
