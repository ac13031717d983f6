"""Copies of slots into the host tier, beside training.

Training thread. On CUDA they run on a side stream of low priority into page-locked memory; nobody waits for them, and
the ring does not either: a slot may be given to a new iteration while it is copied. So the last thing that is copied is
the word of the device's slot table that says which iteration the slot holds, after all the bytes: if it still names the
iteration, no byte of it was overwritten before. On the CPU a copy is done when it was begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flightrec.kernels.pinned import HostBuffer
from flightrec.ring.ring import Ring

MAX_UNDER_WAY = 2
"""Copies that may be under way; while there are more, iterations are left out."""


@dataclass(slots=True)
class Copy:
    """One iteration on its way.

    Attributes:
        tick: which.
        entry: row of the tier's table that it goes to.
    """

    tick: int
    entry: int
    _place: int
    _event: torch.cuda.Event | None


class HostCopies:
    """See the module.

    Args:
        ring: whose slots are read.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._under_way: list[Copy] = []
        self._on_cuda = ring.device.type == "cuda"
        self._stream = torch.cuda.Stream(ring.device, priority=0) if self._on_cuda else None
        self._events = [torch.cuda.Event() for _ in range(MAX_UNDER_WAY)] if self._on_cuda else []
        self._memory = HostBuffer(ring.device, MAX_UNDER_WAY * 8)
        self._ticks = self._memory.tensor.view(torch.int64)

    @property
    def full(self) -> bool:
        """As many are under way as may be."""
        return len(self._under_way) >= MAX_UNDER_WAY

    def begin(self, tick: int, slot: int, entry: int, parts: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """Queue the copy of an iteration; no synchronisation.

        Args:
            tick: which; its verdict has come, so that all of it is in the slot.
            slot: that holds it.
            entry: of the tier's table.
            parts: segment, start in the slot's area, and uint8 [n] on the CPU that takes as many bytes.
        """
        assert not self.full
        place = next(n for n in range(MAX_UNDER_WAY) if all(copy._place != n for copy in self._under_way))
        with torch.no_grad():
            if self._stream is None:
                self._copy(slot, place, parts)
                event = None
            else:
                event = self._events[place]
                with torch.cuda.stream(self._stream):
                    self._copy(slot, place, parts)
                    event.record(self._stream)
        self._under_way.append(Copy(tick, entry, place, event))

    def arrived(self) -> list[tuple[Copy, bool]]:
        """The copies that have ended, in order, and whether they are whole.

        Raises:
            RuntimeError: the CUDA context is dead.
        """
        found = []
        while self._under_way and (self._under_way[0]._event is None or self._under_way[0]._event.query()):
            copy = self._under_way.pop(0)
            found.append((copy, int(self._ticks[copy._place].item()) == copy.tick))
        return found

    def wait(self) -> None:
        """Wait until no copy is under way: their memory is about to go. Never raises."""
        events = [copy._event for copy in self._under_way if copy._event is not None]
        self._under_way.clear()
        with contextlib.suppress(RuntimeError):  # a dead context copies nothing any more
            for event in events:
                event.synchronize()

    def _copy(self, slot: int, place: int, parts: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        areas = dict(self._ring.read_slot(slot))
        for segment, start, target in parts:
            target.copy_(areas[segment][start : start + target.numel()], non_blocking=True)
        self._ticks[place : place + 1].copy_(self._ring.slots.slot_tick[slot : slot + 1], non_blocking=True)
