"""Copies of slots into the host tier, beside training.

Training thread. On CUDA they run on a side stream into page-locked memory; nobody waits for them, and the ring does not
either: a slot may be given to a new iteration while it is copied. So the last thing that is copied is the word of the
device's slot table that says which iteration the slot holds, after all the bytes: if it still names the iteration, no
byte of it was overwritten before.

A step begins only what takes a part of the step to copy: the verdict comes over the same engine of the GPU, in order,
and training's stream would wait behind a longer copy. A large iteration is spread over several steps. On the CPU a copy
is done when it was begun.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flightrec.kernels import driver
from flightrec.kernels.pinned import HostBuffer
from flightrec.ring.ring import Ring

MAX_UNDER_WAY = 4
"""Copies that may be under way, and at most one for two slots of the ring; beyond that iterations are left out."""

SHARE_OF_STEP = 0.5
"""Part of a step in which the GPU may copy for the tier."""

FIRST_BYTES_PER_S = 10e9
FIRST_STEP_S = 0.02
"""What is assumed until it was measured."""

MEASURABLE_BYTES = 16 << 20

RETRY_AFTER = 500
"""Iterations that are refused as too slow to copy, before one is tried and measured again."""

Part = tuple[int, int, torch.Tensor]
"""Segment, start in the slot's area, and uint8 [n] on the CPU that takes as many bytes."""


@dataclass(slots=True)
class Copy:
    """One iteration on its way.

    Attributes:
        tick: which.
        entry: row of the tier's table that it goes to.
        slot: of the ring that held it.
        place: which events and which word are its.
        todo: what was not begun yet.
        is_begun: all of it was begun.
        batch_bytes: what was begun last, between the two events.
    """

    tick: int
    entry: int
    slot: int
    place: int
    todo: deque[Part] = field(default_factory=deque)
    is_begun: bool = False
    batch_bytes: int = 0


class HostCopies:
    """See the module.

    Args:
        ring: whose slots are read.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._under_way: list[Copy] = []
        self._stream = driver.own_stream(ring.device, "host tier") if ring.device.type == "cuda" else None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._stream is not None:
            made = [torch.cuda.Event(enable_timing=True) for _ in range(2 * MAX_UNDER_WAY)]
            self._events = list(zip(made[::2], made[1::2], strict=True))
        self._memory = HostBuffer(ring.device, MAX_UNDER_WAY * 8)
        self._ticks = self._memory.tensor.view(torch.int64)
        self._bytes_per_s, self._is_measured = FIRST_BYTES_PER_S, False
        self._num_refused = 0
        self._step_bytes = FIRST_BYTES_PER_S * FIRST_STEP_S * SHARE_OF_STEP
        self._room_bytes = math.inf if self._stream is None else self._step_bytes

    @property
    def full(self) -> bool:
        """As many are under way as may be, or the last one was not begun whole: another would lose its slot waiting."""
        if self._under_way and not self._under_way[-1].is_begun:
            return True
        return len(self._under_way) >= max(1, min(MAX_UNDER_WAY, self._ring.num_slots // 2))

    def too_slow(self, num_bytes: int) -> bool:
        """Whether the copy of so much takes more steps than a slot keeps its iteration, as far as is known."""
        if self._stream is None or not self._is_measured:
            return False
        if math.ceil(num_bytes / self._step_bytes) <= max(1, self._ring.num_slots - 3):
            return False
        self._num_refused += 1
        return self._num_refused % RETRY_AFTER != 0

    def begin(self, tick: int, slot: int, entry: int, parts: Sequence[Part]) -> None:
        """Queue the copy of an iteration; no synchronisation.

        Args:
            tick: which; its verdict has come, so that all of it is in the slot.
            slot: that holds it.
            entry: of the tier's table.
            parts: what goes where.
        """
        assert not self.full
        taken = {copy.place for copy in self._under_way}
        place = next(number for number in range(MAX_UNDER_WAY) if number not in taken)
        self._under_way.append(Copy(tick, entry, slot, place, deque(parts)))
        self._issue()

    def advance(self, step_s: float) -> None:
        """Begin what another step has time for; once a step.

        Args:
            step_s: how long a step takes.

        Raises:
            RuntimeError: the CUDA context is dead.
        """
        if self._stream is None:
            return
        self._step_bytes = max(1.0, self._bytes_per_s * step_s * SHARE_OF_STEP)
        begun = [copy for copy in self._under_way if copy.batch_bytes]
        is_busy = any(not self._events[copy.place][1].query() for copy in begun)  # the GPU is behind the host
        self._room_bytes = 0 if is_busy else self._step_bytes
        self._issue()

    def arrived(self) -> list[tuple[Copy, bool]]:
        """The copies that have ended, in order, and whether they are whole.

        Raises:
            RuntimeError: the CUDA context is dead.
        """
        found = []
        while self._under_way and self._under_way[0].is_begun and self._has_ended(self._under_way[0]):
            copy = self._under_way.pop(0)
            found.append((copy, int(self._ticks[copy.place].item()) == copy.tick))
        return found

    def wait(self) -> None:
        """Wait until no copy is under way: their memory is about to go. Never raises."""
        self._under_way.clear()
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # a dead context copies nothing any more
                self._stream.synchronize()

    def _has_ended(self, copy: Copy) -> bool:
        if not self._events:
            return True
        begun, ended = self._events[copy.place]
        if not ended.query():
            return False
        if copy.batch_bytes >= MEASURABLE_BYTES:
            self._bytes_per_s = copy.batch_bytes / max(1e-6, begun.elapsed_time(ended) / 1000)
            self._is_measured = True
        return True

    def _issue(self) -> None:
        with torch.no_grad():
            for copy in self._under_way:
                if not copy.is_begun and self._room_bytes > 0:
                    if self._stream is None:
                        self._batch(copy)
                        continue
                    begun, ended = self._events[copy.place]
                    with torch.cuda.stream(self._stream):
                        begun.record(self._stream)
                        self._batch(copy)
                        ended.record(self._stream)

    def _batch(self, copy: Copy) -> None:
        areas = dict(self._ring.read_slot(copy.slot))
        copy.batch_bytes = 0
        while copy.todo and self._room_bytes > 0:
            segment, start, target = copy.todo.popleft()
            target.copy_(areas[segment][start : start + target.numel()], non_blocking=True)
            copy.batch_bytes += target.numel()
            self._room_bytes -= target.numel()
        if not copy.todo:
            copy.is_begun = True
            word = self._ticks[copy.place : copy.place + 1]
            word.copy_(self._ring.slots.slot_tick[copy.slot : copy.slot + 1], non_blocking=True)
