"""The host tier: whole past iterations in shared memory of the host, copied there beside training.

Training thread only. Each iteration whose verdict has come is copied from its slot of the ring, with its records'
statistics, as long as the copies keep up; what is left out is counted by reason and told. The oldest iterations make
room for new ones, except landmarks and what an open incident needs. Nothing waits for a copy, and nothing here raises
into ``step``: after a failure no more is copied, and what is there stays usable.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.flush.history import TickInfo
from flightrec.flush.host_copies import FIRST_STEP_S, Copy, HostCopies
from flightrec.flush.host_growth import growth_for
from flightrec.flush.host_plan import Plan, Plans
from flightrec.flush.landmarks import AGES, CANDIDATES_PER_AGE, Landmarks
from flightrec.flush.verdicts import VerdictView
from flightrec.ring.memory import format_bytes
from flightrec.ring.ring import Ring
from flightrec.writer.arena import Arena
from flightrec.writer.host_memory import MAX_RANGES, NUM_ENTRIES, HostMemory, Range

logger = logging.getLogger("flightrec")

PAUSED = "an incident was being copied"
"""Why an iteration was left out that every incident leaves out: incidents do not tell it."""

NUM_TIMED_STEPS = 32
"""Steps after which the tier says what it holds and what it costs."""


@dataclass(frozen=True, slots=True)
class HostIteration:
    """One iteration of the tier as an incident tells it.

    Attributes:
        info: which iteration it was.
        layout_ids: int32 [n], its records.
        statistics: float64 [n, NUM_STATISTICS].
    """

    info: TickInfo
    layout_ids: NDArray[np.int32]
    statistics: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Kept:
    info: TickInfo
    entry: int
    offset: int
    is_good: bool


class HostTier:
    """See the module.

    Args:
        ring: whose slots are copied.
        memory: shared with the writer; stays the caller's.
        older: iterations beyond the ring's that an incident gets.
        on_failure: told once if something of the tier raised.
    """

    def __init__(
        self, ring: Ring, memory: HostMemory, *, older: int, on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._ring = ring
        self._memory = memory
        self._older = older
        self._on_failure = on_failure
        self._growth = growth_for(memory, ring.device)
        self._arena = Arena(memory.data.nbytes)
        self._pieces = deque[tuple[int, int]]()  # offset and end of what is not ready yet, taken from the arena
        if self._growth.ready_bytes == 0:
            for start, end in self._growth.split(0, self._arena.capacity_bytes):
                self._arena.allocate(end - start)
                self._pieces.append((start, end))
        self._copies = HostCopies(ring)
        self._plans = Plans(ring.layouts)
        self._kept: dict[int, _Kept] = {}  # by tick, oldest first
        self._coming: dict[int, _Kept] = {}
        self._free_entries = list(range(NUM_ENTRIES))
        self._landmarks = Landmarks()
        self._holds: dict[int, set[int]] = {}  # by incident
        self._num_seen = 0
        self._dropped: Counter[str] = Counter()
        self._bytes_per_iteration = 0
        self._step_times_s: deque[float] = deque(maxlen=NUM_TIMED_STEPS)
        self._last_step_s = 0.0
        self._said = self._off = False

    # -- every step --------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take the copies that have ended, and page-lock another piece of memory. Never waits for the device."""
        if self._off:
            return
        try:
            self._collect()
            if self._growth.advance():
                while self._pieces and self._pieces[0][1] <= self._growth.ready_bytes:
                    self._arena.release(self._pieces.popleft()[0])
            self._time()
            self._copies.advance(statistics.median(self._step_times_s) if self._step_times_s else FIRST_STEP_S)
        except Exception as error:
            self._fail(error)

    def on_verdict(
        self, view: VerdictView, info: TickInfo, layout_ids: Sequence[int], *, is_good: bool, paused: bool
    ) -> None:
        """Begin to copy a tick whose verdict has come.

        Args:
            view: the verdict.
            info: which iteration it was.
            layout_ids: its records.
            is_good: no rule fired in it: it may become a landmark.
            paused: an incident's copies go first.
        """
        if self._off:
            return
        try:
            self._num_seen += 1
            reason = self._begin(view, info, layout_ids, is_good, paused)
            if reason:
                self._drop(reason)
            self._collect()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Wait for copies that are under way and unlock the memory; never raises."""
        try:
            self._off = True
            self._copies.wait()
            self._growth.close()
        except Exception as error:
            self._on_failure("the host tier", error)

    # -- for incidents -----------------------------------------------------------------------------------------------

    @property
    def num_iterations(self) -> int:
        """Iterations that are held whole."""
        return len(self._kept)

    @property
    def ticks(self) -> list[int]:
        """Those iterations' ticks, oldest first."""
        return list(self._kept)

    def get(self, tick: int) -> HostIteration | None:
        """An iteration that is held whole; its statistics are a copy."""
        kept = self._kept.get(tick)
        if kept is None:
            return None
        return HostIteration(kept.info, self._memory.ids(kept.entry), self._memory.statistics(kept.entry).copy())

    def choose(self, before: int, now: int, more: int = 0) -> list[int]:
        """Ticks that an incident at ``now`` gets beyond those from ``before`` on: the newest ones, and landmarks.

        Args:
            before: first tick that the incident has already.
            now: tick of the trigger.
            more: iterations beyond ``incident.older_iterations``.
        """
        older = [tick for tick in self._kept if tick < before]
        count = self._older + more
        chosen = set(older[-count:] if count > 0 else ())
        return sorted(chosen | {tick for tick in self._landmarks.at(now) if tick in self._kept and tick < before})

    def landmark(self, tick: int, now: int) -> int:
        """The age that a tick stands for at ``now``, 0 if it is no landmark."""
        return self._landmarks.at(now).get(tick, 0)

    def hold(self, incident: int, tick: int) -> None:
        """An incident needs this tick until ``release``."""
        self._holds.setdefault(incident, set()).add(tick)

    def release(self, incident: object) -> None:
        """The incident is written, or given up."""
        if isinstance(incident, int):
            self._holds.pop(incident, None)

    def told(self) -> str:
        """How many iterations are not in the tier and why, for incidents; empty if there is nothing to tell."""
        told = [(reason, count) for reason, count in self._dropped.most_common() if reason != PAUSED]
        reasons = ", ".join(f"{count} because {reason}" for reason, count in told)
        count = sum(count for _, count in told)
        text = f"{count} of {self._num_seen} iterations were not copied to the host tier: {reasons}" if told else ""
        return "; ".join(filter(None, (text, self._growth.problem)))

    def summary(self) -> str:
        """What the tier holds and what it costs, as one line."""
        total, ready = self._memory.data.nbytes, min(self._growth.ready_bytes, self._memory.data.nbytes)
        words = [f"host tier: {format_bytes(total)}" + (f" ({format_bytes(ready)} ready)" if ready < total else "")]
        if self._bytes_per_iteration:
            depth = self._depth
            words.append(f"{depth} iterations of {format_bytes(self._bytes_per_iteration)}")
            ages = AGES[: min(len(AGES), depth // 2 // CANDIDATES_PER_AGE)]
            words.append(f"landmarks about {', '.join(map(str, ages))} iterations old" if ages else "no landmarks")
        if self._step_times_s and self._bytes_per_iteration:
            step_s = statistics.median(self._step_times_s)
            rate = self._bytes_per_iteration / step_s / 1e9
            words.append(f"{rate:.3g} GB/s from the device at {step_s * 1000:.3g} ms a step")
        if self._dropped:
            reasons = ", ".join(f"{count} because {reason}" for reason, count in self._dropped.most_common())
            words.append(f"{self._dropped.total()} of {self._num_seen} left out: {reasons}")
        return ", ".join(words)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        return min(NUM_ENTRIES, self._arena.capacity_bytes // max(1, self._bytes_per_iteration))

    def _begin(self, view: VerdictView, info: TickInfo, layout_ids: Sequence[int], is_good: bool, paused: bool) -> str:
        """Begin a copy; why not, or empty."""
        tick = view.tick
        slot = self._ring.slots.decode(torch.from_numpy(view.slots.astype(np.int64))).slot_of(tick)
        if slot is None:
            return "no slot of the ring had recorded them"
        if paused:
            return PAUSED
        if self._copies.full:
            return "the copies were behind"
        plan = self._plans.of(layout_ids)
        if plan.num_bytes > self._growth.ready_bytes or len(plan.ranges) > MAX_RANGES:
            still = self._growth.ready_bytes < self._memory.data.nbytes and not self._growth.problem
            return "the memory was not ready yet" if still else "ring.host_memory does not hold one of them"
        self._bytes_per_iteration = plan.num_bytes
        if self._copies.too_slow(plan.num_bytes):
            return "copying one takes longer than the ring keeps it"
        self._landmarks.limit(self._depth)
        offset = self._make_room(plan.num_bytes, tick)
        if offset is None:
            return "open incidents or copies under way needed all of the memory"
        kept = self._coming[tick] = _Kept(info, self._free_entries.pop(), offset, is_good)
        self._describe(kept.entry, plan, offset, view.statistics)
        self._copies.begin(tick, slot, kept.entry, self._targets(plan, offset))
        return ""

    def _describe(self, entry: int, plan: Plan, offset: int, values: NDArray[np.float64]) -> None:
        ranges = [Range(segment, start, count, offset + at) for segment, start, count, at in plan.ranges]
        self._memory.describe(entry, plan.ids, offset + plan.records_offset, ranges)
        rows = self._memory.statistics(entry)
        known = plan.rows < len(values)
        rows[known] = values[plan.rows[known]]
        rows[~known] = np.nan

    def _targets(self, plan: Plan, offset: int) -> list[tuple[int, int, torch.Tensor]]:
        targets = []
        for segment, start, count, at in plan.ranges:
            first = offset + at
            for part, end in self._growth.split(first, first + count):
                targets.append((segment, start + part - first, self._growth.tensor[part:end]))
        return targets

    def _make_room(self, num_bytes: int, now: int) -> int | None:
        landmarks = self._landmarks.kept(now)
        while True:
            offset = self._arena.allocate(num_bytes) if self._free_entries else None
            if offset is not None:
                return offset
            victim = self._oldest(landmarks)
            if victim is None:
                return None
            self._landmarks.forget(victim)
            self._give_back(self._kept.pop(victim))

    def _oldest(self, landmarks: set[int]) -> int | None:
        """The oldest iteration that nobody needs; without one a landmark."""
        held = set[int]().union(*self._holds.values())
        landmark = None
        for tick in self._kept:
            if tick not in held:
                if tick not in landmarks:
                    return tick
                landmark = tick if landmark is None else landmark
        return landmark

    def _give_back(self, kept: _Kept) -> None:
        self._memory.clear(kept.entry)
        self._free_entries.append(kept.entry)
        self._arena.release(kept.offset)

    def _collect(self) -> None:
        for copy, is_whole in self._copies.arrived():
            self._take(copy, is_whole)

    def _take(self, copy: Copy, is_whole: bool) -> None:
        kept = self._coming.pop(copy.tick)
        if not is_whole:
            self._give_back(kept)
            self._drop("their slot was overwritten while it was copied")
            return
        self._memory.complete(copy.entry, copy.tick)
        self._kept[copy.tick] = kept
        if kept.is_good:
            self._landmarks.add(copy.tick)

    def _drop(self, reason: str) -> None:
        if not self._dropped[reason]:
            logger.info("flightrec: an iteration was not copied to the host tier (others may follow): %s", reason)
        self._dropped[reason] += 1

    def _time(self) -> None:
        now_s = time.perf_counter()
        if self._last_step_s:
            self._step_times_s.append(now_s - self._last_step_s)
        self._last_step_s = now_s
        if not self._said and self._kept and len(self._step_times_s) == NUM_TIMED_STEPS:
            self._said = True
            logger.info("flightrec: %s", self.summary())

    def _fail(self, error: Exception) -> None:
        self._off = True
        self._on_failure("the host tier", error)
