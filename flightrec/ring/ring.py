"""The ring: the last iterations of the selected tensors and their statistics, in memory of the training device.

``record`` is called from hooks, on the main thread and on autograd's, under one lock for the bookkeeping; it launches
on the caller's current stream. ``begin``, ``join``, ``commit``, ``gather``, ``advance`` are ``step``'s, on its thread
and stream. On CUDA nothing here waits for the device, and what is on the device is never read on the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flightrec.errors import RingMemoryError
from flightrec.kernels import driver, ops
from flightrec.records import NO_MICROBATCH, Key, QuantizerInfo, RecordLayout
from flightrec.ring.captured import CapturedGraph
from flightrec.ring.experts import Experts
from flightrec.ring.graph_records import GraphRecords
from flightrec.ring.layout import QuantizedParts, Segments
from flightrec.ring.memory import Contributor, Decision, decide, default_memory_bytes, format_bytes, format_table
from flightrec.ring.registry import Placed, Registry
from flightrec.ring.replays import Replayed, Replays
from flightrec.ring.slots import TABLE_SIZE, SlotTable
from flightrec.ring.statistics import StatisticsMatrix
from flightrec.ring.streams import Streams
from flightrec.ring.turns import NO_TURNS, Turn

POLICIES = ("fewer_microbatches", "fewer_iterations", "statistics_only", "error")
MICROBATCHES = ("all", "first", "last", "rotate")
KEEP_BYTES = frozenset({"high_precision", "quantized"})
_SUMMARY_ROWS = 10


@dataclass(slots=True)
class IterationIndex:
    """What was recorded in one tick: ids of ``Ring.layouts``, a record's position is its sequence number."""

    tick: int
    layout_ids: list[int] = field(default_factory=list)


class Ring:
    """Slots for whole iterations, filled by ``record``.

    Until ``commit``, which ends the first iteration, there is one slot beside scrap, because what an iteration holds is
    not known yet. Afterwards nothing moves; new keys and larger shapes get places of their own.

    Attributes:
        layouts: every layout by its id; grows at first sights only.
        quantizers: metadata by ``RecordLayout.quantizer``.
        slots: the device's slot table; ``slots.state`` goes to the host with the verdict, ``slots.decode`` reads it.
            ``commit`` replaces it.
        iterations: N, the complete iterations up to a fault that are really held.
        committed: whether ``commit`` was called.
        graphs: the captured CUDA graphs that record.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        iterations: int,
        after: int = 1,
        latency: int = 2,
        memory_bytes: int | None = None,
        on_out_of_memory: str = "statistics_only",
        microbatches: str = "all",
        on_layout: Callable[[RecordLayout], None] | None = None,
        graph_replays: int | None = None,
    ) -> None:
        """Nothing is allocated yet.

        Args:
            device: where the recorded tensors live.
            iterations: complete iterations to hold up to and including a fault, at least 1.
            after: iterations to hold beyond it.
            latency: slots that go on recording while others are held.
            memory_bytes: for the recorded bytes (statistics come on top); None for 5% of what is free now.
            on_out_of_memory: one of ``POLICIES``.
            microbatches: whose bytes are kept, one of ``MICROBATCHES``.
            on_layout: told every new layout, under the ring's lock.
            graph_replays: replays of one captured graph in an iteration that have a place, None for as many as there
                are microbatches.
        """
        assert iterations >= 1
        assert after >= 0
        assert latency >= 1
        assert on_out_of_memory in POLICIES
        assert microbatches in MICROBATCHES
        self.device = _with_index(torch.device(device))
        self.iterations, self.committed = iterations, False
        self._after, self._latency = after, latency
        self._policy, self._microbatches = on_out_of_memory, microbatches
        self._asked = (iterations, microbatches)
        memory_bytes = default_memory_bytes(self.device) if memory_bytes is None else memory_bytes
        self._streams = Streams(self.device)
        self._registry = Registry(
            self.device,
            Segments(self.device, 1, memory_bytes),
            StatisticsMatrix(self.device, 2),
            on_layout,
            self._streams.allocating,
        )
        self._new_slot_table(1, 0)
        self._num_microbatches: int | None = None  # known once committed
        self._capture = ops.choose(self.device)
        self._experts = Experts(self._registry, self.device)
        num_planes = iterations + after + latency + 1
        self.graphs = self._replays = Replays(self._registry, self.device, num_planes, graph_replays)
        self._graph_records = GraphRecords(self._replays, self._registry, self._streams, self._experts, self.device)
        self.without_experts: set[tuple[str, str]] = set()
        """(layer, tensor) of records whose experts could not be told apart."""
        self._lock = threading.RLock()
        self._tick = -1
        self._indexes: dict[int, IterationIndex] = {}
        self._layout_ids: list[int] = []
        self._entries: tuple[torch.Tensor, torch.Tensor] | None = None  # the tick's slot and number, made once a tick

    # -- every iteration

    def begin(self, tick: int) -> None:
        """Records from here on belong to ``tick``, one more than the last; ``advance`` has chosen its slot."""
        with self._lock, torch.no_grad():
            if not self._indexes:
                self._new_slot_table(1, tick)
            elif not self.committed:
                self.commit()
            self._tick, self._entries = tick, None
            index = self._indexes[tick] = IterationIndex(tick)
            self._layout_ids = index.layout_ids
            self._replays.begin(tick)
            oldest = tick - self._remembered_ticks
            for old in [known for known in self._indexes if known <= oldest]:
                del self._indexes[old]

    def record(
        self,
        key: Key,
        *,
        high_precision: torch.Tensor | None = None,
        quantized: QuantizedParts | None = None,
        keep: frozenset[str] = KEEP_BYTES,
        valid_rows: int | torch.Tensor | None = None,
        splits: torch.Tensor | None = None,
    ) -> RecordLayout | None:
        """Copy a tensor into the current tick's slot and write its statistics, launched on the current stream.

        Any shape, dtype and strides on the ring's device; the copy is deep, contiguous and in logical order. What
        cannot be copied (another device, no memory) gets a layout that says why. Does not synchronise.

        Args:
            key: constant from iteration to iteration. Recorded again in the same tick, it gets the next free ``call``.
            high_precision: the tensor before quantization, or None.
            quantized: its quantized form, or None.
            keep: ``high_precision``, ``quantized``: which bytes to keep; statistics always are.
            valid_rows: only rows ``[0, n)`` of dimension 0 count in the statistics; an int or a one-element tensor.
            splits: integers ``[E]`` on the ring's device: the rows of each expert, which gets statistics of its own
                under the part ``expert.<i>``; rows beyond their sum are padding.

        Returns:
            the record's layout; None when there are too many calls in this tick, or too many keys.
        """
        if torch.is_grad_enabled():  # sources have switched it off already
            with torch.no_grad():
                return self.record(
                    key, high_precision=high_precision, quantized=quantized, keep=keep, valid_rows=valid_rows,
                    splits=splits,
                )  # fmt: skip
        with self._lock:
            assert self._tick >= 0, "begin() comes first"
            entry = self._registry.claim(key, self._tick)
            if entry is None:
                return None
            left_out = "" if self._microbatches == "all" else self._left_out_by(self._microbatches, key)
            placed = self._registry.find(entry, high_precision, quantized, keep, left_out)
            self._layout_ids.append(placed.layout.layout_id)
            slot, tick = self._entries or self._tick_entries()
            self._streams.enter()
            experts = None if splits is None else self._claim_experts(placed, len(splits))
        if placed.destination is not None:
            parts = () if quantized is None else tuple(quantized.components.values())
            if isinstance(valid_rows, torch.Tensor) and valid_rows.device != self.device:
                valid_rows = int(valid_rows.numpy().reshape(-1)[0]) if valid_rows.device.type == "cpu" else None
            valid_rows = splits.sum() if splits is not None and valid_rows is None else valid_rows
            self._capture(placed.plan, placed.destination, high_precision, parts, slot, tick, valid_rows)
            if experts is not None and splits is not None:
                self._experts.write(experts, placed.plan, high_precision, parts, splits, slot, tick)
        return placed.layout

    def _tick_entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._entries = self.slots.table_entry(self._tick), self.slots.tick_entry(self._tick)
        return self._entries

    def record_captured(
        self,
        key: Key,
        *,
        high_precision: torch.Tensor | None = None,
        quantized: QuantizedParts | None = None,
        keep: frozenset[str] = KEEP_BYTES,
        valid_rows: int | torch.Tensor | None = None,
        splits: torch.Tensor | None = None,
        turn: Turn = NO_TURNS,
    ) -> str:
        """As ``record``, while the current stream captures a CUDA graph: each replay in its ``turn`` fills a place.

        Returns:
            why it is not recorded, or only its statistics; empty if it is whole.
        """
        with self._lock, torch.no_grad():
            return self._graph_records.record(
                key, high_precision, quantized, keep, valid_rows, splits, tick=self._tick, slots=self.slots,
                num_microbatches=self._num_microbatches, on_replay=weakref.WeakMethod(self._on_replay), turn=turn,
            )  # fmt: skip

    def _on_replay(self, graph: CapturedGraph) -> None:
        """A graph is about to be replayed on the current stream."""
        with self._lock:
            if not driver.is_capturing(self.device):
                self._streams.enter()
            self._replays.note(graph, len(self._layout_ids))

    def choose_turns(self, in_turn: Sequence[bool]) -> None:
        """Which units replays record from here on, after ``advance``; those beyond are. Does not wait."""
        with self._lock, torch.no_grad():
            if self._replays.choose_turns(in_turn):
                self._streams.stepped()

    def take_replays(self, tick: int) -> Replayed:
        """The verdict of ``tick`` has come: put what graphs recorded in it into ``index``. Does not wait."""
        with self._lock:
            return self._replays.take(tick, self.index(tick).layout_ids)

    def has_records(self, tick: int) -> bool:
        """Whether the host saw a record, or a replay, of the current tick."""
        return bool(self._indexes[tick].layout_ids) or self._replays.has_news

    def _claim_experts(self, placed: Placed, num_experts: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows = None
        if placed.destination is not None:
            rows = self._experts.claim(placed.layout.key, placed.layout.dtype, num_experts, self._tick)
        if rows is None:
            self.without_experts.add((placed.layout.key.layer, placed.layout.key.tensor))
            return None
        self._layout_ids.extend(rows.layout_ids)
        return self._experts.bind(rows)

    def join(self) -> None:
        """The current stream waits for every stream that recorded in this tick; the host does not wait."""
        with self._lock:
            self._streams.join()

    def gather(self, tick: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One tick's statistics, fresh tensors on the device: float64 ``[R, C]``, and bool ``[R]`` which rows count.

        ``R`` is the number of rows rounded up to whole blocks. Does not synchronise.
        """
        with torch.no_grad():
            statistics = self._registry.statistics
            return statistics.gather(self.slots.table_entry(tick), self.slots.tick_entry(tick))

    def turn(self, release: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``gather`` of the current tick, then choose the next one's slot before this one is judged.

        By the device's own count of ticks, so that all of it can be replayed. Wants one more slot of ``latency``; see
        ``SlotTable.turn``. ``slots.hold_closed`` takes the verdict, ``advance(turned=True)`` ends the tick on the host.
        """
        gathered = self._registry.statistics.gather(self.slots.current_slot(), self.slots.tick)
        self.slots.turn(release)
        return gathered

    def advance(
        self,
        tick: int,
        fired: torch.Tensor | None = None,
        release: torch.Tensor | None = None,
        hold_request: torch.Tensor | None = None,
        *,
        turned: bool = False,
    ) -> None:
        """Close ``tick``: release slots, hold the evidence, choose the slot of ``tick + 1``. Does not synchronise.

        Args:
            tick: the tick that was recorded last.
            fired: bool scalar on the device: hold the last N ticks and the ``after`` to come; None for no.
            release: int64 ``[num_slots]`` on the device: by slot the tick that was staged, -1 for none; a slot that
                holds another tick by now stays held. None for none. Applied first.
            hold_request: bool scalar on the device, as ``fired``.
            turned: ``turn`` has chosen the slot already.
        """
        with self._lock, torch.no_grad():
            assert self.committed, "commit() comes before the first advance()"
            if not turned:
                self.slots.advance(tick, fired, release, hold_request)
            self._replays.advance(tick, self.slots)
            self._streams.stepped()

    def slot_view(self, tick: int) -> torch.Tensor:
        """int64 ``[1]`` on the device, a view: the slot of one of the last 64 ticks, ``num_slots`` for scrap."""
        return self.slots.table_entry(tick)

    def index(self, tick: int) -> IterationIndex:
        """What was recorded in a recent tick (64 at least).

        Raises:
            KeyError: the tick is too old, or was never begun.
        """
        return self._indexes[tick]

    def read_slot(self, slot: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(segment number, uint8 ``[area_bytes]``, a view of device memory) of each segment."""
        for segment in self._registry.segments.items:
            yield segment.index, segment.buffer[slot]
        yield from self._replays.read(slot)

    # -- the end of the first iteration

    def commit(self) -> None:
        """Fix slots and places, now that an iteration has shown what it holds; called once, before ``gather``.

        Whatever does not fit is left out as ``on_out_of_memory`` says. Layouts that change get new ids, in ``layouts``
        and in the first tick's index. Allocates; the host does not wait for the device.

        Raises:
            RingMemoryError: it does not fit and ``on_out_of_memory`` is ``error``.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.committed:
                return
            keys = self._registry.entries
            self._num_microbatches = 1 + max((key.microbatch for key in keys if key.microbatch >= 0), default=0)
            budget_bytes = self._registry.segments.memory_bytes
            self._streams.join()
            with self._streams.allocating():
                while not self._try_commit(budget_bytes):
                    budget_bytes //= 2
                    self._registry.segments.memory_bytes = budget_bytes  # what was refused is not asked for again
            self._registry.announce()
            self.committed = True

    def _try_commit(self, budget_bytes: int) -> bool:
        """One attempt; False when the device refused the memory."""
        asked, microbatches = self._asked
        decision = decide(
            self._bytes_by_group,
            budget_bytes=budget_bytes,
            policy=self._policy,
            iterations=asked,
            more_slots=self._after + self._latency + 1,
            microbatches=microbatches,
        )
        if decision is None:
            raise RingMemoryError(self._does_not_fit(budget_bytes))
        num_slots = decision.iterations + self._after + self._latency
        registry, first_tick = self._registry, max(self._tick, 0)
        left_out = self._choose_left_out(decision)
        try:
            registry.statistics.resize(num_slots + 1)
            if left_out or decision.microbatches == "rotate":
                segments = Segments(self.device, num_slots, registry.segments.memory_bytes)
                registry.shares_places = decision.microbatches == "rotate"
                changed = registry.replace(segments, left_out)
                self._layout_ids[:] = [changed.get(number, number) for number in self._layout_ids]
            else:
                registry.resize(num_slots)
        except (RuntimeError, MemoryError) as error:
            if budget_bytes == 0:
                raise
            if self._policy == "error":
                raise RingMemoryError(self._does_not_fit(budget_bytes)) from error
            return False
        self.iterations, self._microbatches = decision.iterations, decision.microbatches
        self._new_slot_table(num_slots, first_tick)
        return True

    def _choose_left_out(self, decision: Decision) -> Mapping[Key, str]:
        """Keys whose bytes the first tick loses, and why."""
        reason = f"ring.memory of {format_bytes(self._registry.segments.memory_bytes)} does not hold it"
        entries = [entry for entry in self._registry.entries.values() if entry.places]
        self._registry.dropped = {entry.group: reason for entry in entries if entry.group in decision.dropped}
        left_out = {}
        for entry in entries:
            why = self._left_out_by(decision.microbatches, entry.key) or self._registry.dropped.get(entry.group, "")
            if why:
                left_out[entry.key] = why
        return left_out

    def _bytes_by_group(self, microbatches: str) -> Mapping[Hashable, int]:
        sizes: dict[Hashable, int] = {}
        for entry in self._registry.entries.values():
            if entry.places and not self._left_out_by(microbatches, entry.key):
                sizes[entry.group] = sizes.get(entry.group, 0) + entry.places[-1].capacity_bytes
        return sizes

    def _new_slot_table(self, num_slots: int, first_tick: int) -> None:
        self._entries = None
        with self._streams.allocating():
            self.slots = SlotTable(
                self.device, num_slots, iterations=self.iterations, after=self._after, first_tick=first_tick
            )

    def _left_out_by(self, microbatches: str, key: Key) -> str:
        """Why a setting of ``microbatches`` keeps no bytes of this key in the current tick, or empty."""
        if microbatches == "all" or key.microbatch == NO_MICROBATCH:
            return ""
        count = self._num_microbatches
        if microbatches == "first":
            kept = key.microbatch == 0
        elif count is None:
            kept = True  # which is the last, and how many take turns, shows at the end of the first iteration
        else:
            kept = key.microbatch == (count - 1 if microbatches == "last" else self._tick % count)
        return "" if kept else f"ring.microbatches is '{microbatches}'"

    # -- facts about itself

    @property
    def layouts(self) -> list[RecordLayout]:
        """All layouts by id."""
        return self._registry.layouts

    @property
    def quantizers(self) -> list[QuantizerInfo]:
        """All quantizers by id."""
        return self._registry.quantizers

    @property
    def num_slots(self) -> int:
        """Slots without scrap; 1 before ``commit``."""
        return self.slots.num_slots

    @property
    def shape(self) -> tuple[SlotTable, int, int]:
        """Changes whenever ``turn`` would use other memory."""
        statistics = self._registry.statistics
        return self.slots, statistics.generation, statistics.num_allocated_rows

    @property
    def bytes_per_iteration(self) -> int:
        """Bytes of a slot's areas that are given to keys."""
        return self._registry.segments.used_bytes + self._replays.bytes_per_iteration

    @property
    def num_bytes(self) -> int:
        """Device memory of segments and statistics."""
        graphs = self._replays.num_bytes
        return self._registry.segments.num_bytes + self._registry.statistics.num_bytes + graphs

    @property
    def _remembered_ticks(self) -> int:
        return max(TABLE_SIZE, self.slots.num_slots + self._latency + 4)

    def quantizer_id(self, info: QuantizerInfo) -> int:
        """Dense number of a quantizer's metadata, equal for equal metadata."""
        with self._lock:
            return self._registry.quantizer_id(info)

    def contributors(self) -> list[Contributor]:
        """Bytes an iteration by (layer, tensor, part), the largest first, kept or not."""
        with self._lock:
            return self._registry.contributors()

    def summary(self) -> str:
        """The start-up table as plain text: what the ring holds, and the largest contributors."""
        asked, microbatches = self._asked
        segments, statistics = self._registry.segments, self._registry.statistics
        first = (
            f"ring on {self.device}: {self.num_slots} slots ({self.iterations} iterations, {self._after} after a "
            f"fault, {self._latency} to go on) and scrap, {format_bytes(self.bytes_per_iteration)} each: "
            f"{format_bytes(segments.num_bytes)} of {format_bytes(segments.memory_bytes)}; "
            f"statistics of {statistics.num_rows} tensors: {format_bytes(statistics.num_bytes)}"
        )
        lines = [first, *self._replays.describe()]
        if self.iterations < asked:
            lines.append(f"{self.iterations} instead of {asked} iterations, because ring.memory does not hold more")
        if self._microbatches != microbatches:
            lines.append(f"microbatches: {self._microbatches}, because ring.memory does not hold all")
        if self._registry.dropped:
            lines.append(f"{len(self._registry.dropped)} tensors are kept as statistics only, the largest first")
        return "\n".join(lines + format_table(self.contributors(), _SUMMARY_ROWS))

    def _does_not_fit(self, budget_bytes: int) -> str:
        slots = self._asked[0] + self._after + self._latency + 1
        wanted = sum(self._bytes_by_group(self._asked[1]).values())
        table = "\n".join(format_table(self.contributors(), _SUMMARY_ROWS))
        return (
            f"ring.memory: {slots} slots of {format_bytes(wanted)} do not fit into {format_bytes(budget_bytes)} on "
            f"{self.device}. Select fewer tensors, lower ring.iterations, raise ring.memory, or set "
            f"ring.on_out_of_memory to another value than error. The largest contributors:\n{table}"
        )


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:0``, so that it equals a tensor's device."""
    return torch.empty((), device=device).device
