"""Verdicts on their way from the device to the host: copied to pinned memory, read when complete.

Runs on the training thread and the current CUDA stream. ``VerdictQueue.push`` launches one packing and one copy and
never waits; ``poll`` reads what has arrived. Only after a rule was seen to fire are the verdict's matrices copied too.
A buffer is kept for the iterations that the ring may still hold, so that an incident finds their statistics without
another copy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.kernels.pinned import HostBuffer
from flightrec.records import NUM_STATISTICS
from flightrec.rules.evaluate import RowFiring

if TYPE_CHECKING:
    from flightrec.rules.evaluate import Verdict


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
    """Pinned float64 words and the event that says when they are there."""

    def __init__(self, device: torch.device, num_words: int) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._event = torch.cuda.Event() if on_gpu else None
        self._memory = HostBuffer(device, num_words * 8)
        self._host = self._memory.tensor.view(torch.float64)
        self.words: NDArray[np.float64] = self._host.numpy()

    def receive(self, source: torch.Tensor) -> None:
        """Queue the copy of float64 [n] into the first n words."""
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
    verdict: Verdict
    buffer: _Buffer
    num_slot_words: int
    num_rows: int
    matrices: _Buffer | None = None


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
    def push(self, tick: int, verdict: Verdict, slots: torch.Tensor, statistics: torch.Tensor) -> None:
        """Queue the copy of one verdict; no synchronisation. Allocates pinned memory only while rows still appear.

        Args:
            tick: which ``step()``.
            verdict: of this tick, on the device.
            slots: int64 state of the slot table on the device, after this tick's ``advance``.
            statistics: float64 [R, C] on the device.
        """
        packed = torch.cat([verdict.any.to(torch.float64).reshape(1), slots.to(torch.float64), statistics.flatten()])
        buffer = self._take(packed.numel())
        buffer.receive(packed)
        self._pending.append(_Pending(tick, verdict, buffer, slots.numel(), statistics.shape[0]))

    def poll(self, *, wait: bool = False) -> list[VerdictView]:
        """The verdicts that have arrived since the last call, oldest first.

        Args:
            wait: wait for the device until all are there; only for the end of a run and for exceptions.
        """
        arrived: list[VerdictView] = []
        while self._pending and self._arrived(self._pending[0], wait):
            pending = self._pending.popleft()
            view = _unpack(pending)
            self._kept[pending.tick] = (pending.buffer, view)
            arrived.append(view)
        return arrived

    def get(self, tick: int) -> VerdictView | None:
        """A verdict that was read before and is still kept."""
        kept = self._kept.get(tick)
        return kept[1] if kept else None

    def _arrived(self, pending: _Pending, wait: bool) -> bool:
        if not pending.buffer.ready(wait):
            return False
        if not pending.buffer.words[0]:
            return True
        if pending.matrices is None:
            pending.matrices = self._request_matrices(pending.verdict)
        return pending.matrices.ready(wait)

    @torch.no_grad()
    def _request_matrices(self, verdict: Verdict) -> _Buffer:
        planes = [verdict.fired.to(torch.float64), verdict.watch.to(torch.float64), verdict.value, verdict.threshold]
        packed = torch.stack(planes).flatten()
        buffer = _Buffer(self._device, packed.numel())
        buffer.receive(packed)
        return buffer

    def _take(self, size: int) -> _Buffer:
        while len(self._kept) > self._depth:
            self._free.append(self._kept.popitem(last=False)[1][0])
        if self._free and len(self._free[0].words) >= size:
            return self._free.pop(0)
        self._free.clear()  # rows were added: the old buffers are too small
        return _Buffer(self._device, size + size // 4)


def _unpack(pending: _Pending) -> VerdictView:
    words = pending.buffer.words
    start = 1 + pending.num_slot_words
    statistics = words[start : start + pending.num_rows * NUM_STATISTICS].reshape(pending.num_rows, NUM_STATISTICS)
    firings: tuple[RowFiring, ...] = ()
    if pending.matrices is not None:
        shape = (4, *pending.verdict.fired.shape)
        fired, watch, value, threshold = pending.matrices.words.reshape(shape)
        firings = tuple(
            RowFiring(int(rule), int(row), float(value[rule, row]), float(threshold[rule, row]), not fired[rule, row])
            for rule, row in np.argwhere((fired != 0) | (watch != 0))
        )
    return VerdictView(pending.tick, words[1:start], statistics, firings)
