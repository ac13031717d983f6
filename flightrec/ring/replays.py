"""Records inside captured CUDA graphs: each replay fills a place of its own, is counted, and is found by the host.

``record`` is called while a graph is captured, by whatever thread captures: its launches become nodes of the graph, and
its memory is allocated beside the capture. What a replay does is all on the device (``kernels.replays``): the graph's
first node chooses the virtual slot. The host learns what was replayed from a copy of the graphs' words that goes to it
with the verdict, and from the graph's object, which says in time that a replay is launched and between which other
records. Nothing waits for the device except ``record`` of what is captured for the first time. What takes turns is left
out on the device (``turns``), as the host has told it before the iteration.

The microbatch of a replay is how many replays of graphs with the same records came before it in the iteration: of one
graph replayed for each microbatch, or of a graph for each. A graph that holds several microbatches counts on in theirs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import compress

import torch

from flightrec.kernels import replays as words_of
from flightrec.kernels.driver import allocate
from flightrec.kernels.pinned import HostBuffer
from flightrec.records import NO_MICROBATCH, Key
from flightrec.ring.captured import CapturedGraph, Recorded
from flightrec.ring.memory import format_bytes
from flightrec.ring.registry import Registry
from flightrec.ring.slots import SlotTable
from flightrec.ring.turns import Turns
from flightrec.ring.virtual import VirtualSlots

DEFAULT_REPLAYS = 8
"""Replays of a graph in an iteration that have a place, where no iteration has shown how many microbatches it has."""

MAX_GRAPHS = 2048
MAX_REMEMBERED_TICKS = 256


@dataclass(slots=True)
class Replayed:
    """What the host takes from one tick's words.

    Attributes:
        num_microbatches: that its replays were of, at least; 0 without one.
        dropped: layer and reason of each graph that was replayed too often, more often than ever before.
        advice: what a user should be told once, or empty.
    """

    num_microbatches: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    advice: str = ""


class _Snapshot:
    """Host memory for the words of one tick."""

    def __init__(self, device: torch.device, num_words: int) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._memory = HostBuffer(device, num_words * 8)
        self._words = self._memory.tensor[: num_words * 8].view(torch.int64)
        self._device = device
        self._num_words = 0

    def receive(self, source: torch.Tensor) -> None:
        """Queue the copy of int64 [n]."""
        self._num_words = source.numel()
        self._words[: self._num_words].copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def words(self) -> list[int]:
        """What came; it was queued before the verdict, so that it is there when that is."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        words: list[int] = self._words[: self._num_words].tolist()
        return words


class Replays:
    """See the module.

    Attributes:
        graphs: all graphs that were captured with records in them.
        virtual: their memory; None before the first one.
        turns: which records of theirs have their turn; likewise.
        replayed: replays of the last closed tick that have a place, as far as the host saw them.
        num_dropped: replays that had no place, as far as the host knows.

    Args:
        registry: of the ring: its layouts, rows and memory limit.
        device: of the ring.
        num_planes: slots that the ring will have at most, scrap included.
        num_replays: of one graph in an iteration that get a place; None for as many as there are microbatches.
    """

    def __init__(self, registry: Registry, device: torch.device, num_planes: int, num_replays: int | None) -> None:
        self.graphs: list[CapturedGraph] = []
        self.virtual: VirtualSlots | None = None
        self.turns: Turns | None = None
        self.replayed: Mapping[CapturedGraph, int] = {}
        self.num_dropped = 0
        self._registry, self._device = registry, device
        self._num_planes, self._asked = num_planes, num_replays
        self._words: torch.Tensor | None = None  # the head, then a row a graph
        self._tick = -1
        self._noted: list[tuple[CapturedGraph, int]] = []  # replays of this tick, and the records before each
        self._counts: Counter[CapturedGraph] = Counter()
        self._families: Counter[tuple[str, ...]] = Counter()
        self._snapshots: OrderedDict[int, tuple[_Snapshot, list[tuple[CapturedGraph, int]], list[bool]]] = OrderedDict()
        self._free: list[_Snapshot] = []
        self._most_replays = 0
        self._told_apart: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._others: dict[tuple[int, Key], int] = {}
        self._num_taken = 0  # ticks with replays

    # -- while a graph is captured

    def open_graph(
        self,
        tick: int,
        slots: SlotTable,
        num_microbatches: int | None,
        allocating: Callable[[], AbstractContextManager[None]],
        num_units: int = 0,
    ) -> CapturedGraph | None:
        """A graph that begins to record; the caller launches ``CapturedGraph.begin`` into its capture. Under the lock.

        Args:
            tick: the current one.
            slots: the table that says where it goes.
            num_microbatches: of an iteration, None if not known yet.
            allocating: context in which memory may be allocated and initialised.
            num_units: of turns that it may have.

        Returns:
            None for a graph too many.
        """
        if len(self.graphs) >= MAX_GRAPHS:
            return None
        with allocating():
            if self.turns is None:
                self._open(tick, slots, num_microbatches)
            assert self.turns is not None
            groups = self.turns.groups(num_units)
        assert self.virtual is not None
        assert self._words is not None
        words = self._words[len(self.graphs) + 1]
        graph = CapturedGraph(self._words[0], words, groups, self.virtual.num_replays, self.virtual.overflow)
        graph.keep.append(self._words)
        self.graphs.append(graph)
        return graph

    def _open(self, tick: int, slots: SlotTable, num_microbatches: int | None) -> None:
        num_replays = self._asked or num_microbatches or DEFAULT_REPLAYS
        used_bytes = self._registry.segments.used_bytes
        if self._asked is None and num_microbatches is None and used_bytes:  # what eager showed should fit
            whole = self._registry.segments.memory_bytes // (self._num_planes * used_bytes)
            num_replays = max(1, min(num_replays, whole - 1))
        self.virtual = VirtualSlots(self._registry, self._device, self._num_planes, num_replays)
        with torch.inference_mode(False):
            size = (1 + MAX_GRAPHS, words_of.ORDERS + num_replays)
            self._words = allocate(self._device, lambda: torch.zeros(size, dtype=torch.int64, device=self._device))
        self._point(slots, tick)
        self.turns = Turns(self._device)

    # -- every iteration

    def begin(self, tick: int) -> None:
        """Replays from here on are of ``tick``, as far as the host sees them. Under the lock."""
        self._tick = tick
        self._noted = []
        self._counts.clear()
        self._families.clear()

    def note(self, graph: CapturedGraph, num_records: int) -> None:
        """A replay is launched now, after ``num_records`` others of this tick. Under the lock.

        At the first one of its number the rules get to know its rows, so that they judge it already.
        """
        replay = self._counts[graph]
        self._counts[graph] += 1
        position = self._families[graph.family]
        self._families[graph.family] += 1
        self._noted.append((graph, num_records))
        if replay >= graph.num_known and replay < graph.num_replays:
            graph.num_known = replay + 1
            self._most_replays = max(self._most_replays, graph.num_known)
            self._ids(graph, replay, position)
            self._registry.announce()

    @property
    def has_news(self) -> bool:
        """Whether a replay was launched in this tick, as far as the host sees."""
        return bool(self._noted)

    def advance(self, tick: int, slots: SlotTable) -> None:
        """Close ``tick``: send its words to the host, zero the counts, and point all graphs to the next slot.

        On ``step``'s stream, after ``slots.advance``. Does not wait.
        """
        if self._words is None or not self.graphs:
            return
        self.replayed = {graph: min(count, graph.num_replays) for graph, count in self._counts.items()}
        words = self._words[: 1 + len(self.graphs)]
        snapshot = self._free.pop() if self._free else _Snapshot(self._device, self._words.numel())
        snapshot.receive(words.view(-1))
        assert self.turns is not None
        self._snapshots[tick] = snapshot, self._noted, [*self.turns.state, True]  # the last one: of ``ALWAYS``
        while len(self._snapshots) > MAX_REMEMBERED_TICKS:
            self._snapshots.popitem(last=False)
        words[:, words_of.COUNT].zero_()
        self._point(slots, tick + 1)

    def choose_turns(self, in_turn: Sequence[bool]) -> bool:
        """See ``Turns.choose``; after ``advance``."""
        return self.turns is not None and self.turns.choose(in_turn)

    def _point(self, slots: SlotTable, tick: int) -> None:
        assert self._words is not None
        head = self._words[0]
        head[words_of.SLOT : words_of.SLOT + 1].copy_(slots.table_entry(tick))
        head[words_of.TICK : words_of.TICK + 1].fill_(tick)

    # -- on the host, when the verdict has come

    def take(self, tick: int, layout_ids: list[int]) -> Replayed:
        """Put what was replayed in ``tick`` among its records, in the order in which it ran. Under the lock.

        Args:
            tick: whose verdict has come.
            layout_ids: of the records that the host saw; changed in place.
        """
        result = Replayed()
        found = self._snapshots.pop(tick, None)
        if found is None:
            return result
        snapshot, noted, in_turn = found
        words = snapshot.words()
        self._free.append(snapshot)
        runs = self._runs(words, result)
        if not runs:
            return result
        before = self._positions(noted)
        families: Counter[tuple[str, ...]] = Counter()
        placed: list[tuple[int, int, list[int]]] = []
        for order, graph, replay in runs:
            position = families[graph.family]
            families[graph.family] += 1
            ids, units = self._ids(graph, replay, position)
            ids = list(compress(ids, map(in_turn.__getitem__, units)))
            placed.append((before.get((graph, replay), len(layout_ids)), order, ids))
            result.num_microbatches = max(result.num_microbatches, (position + 1) * graph.num_microbatches)
            self._most_replays = max(self._most_replays, replay + 1)
        _insert(layout_ids, placed)
        self._tell_apart(layout_ids)
        self._registry.announce()
        self._num_taken += 1
        result.advice = self._advice() if self._num_taken == 2 else ""
        return result

    def _tell_apart(self, layout_ids: list[int]) -> None:
        """Give the later of two records of one key, as of an eager microbatch and a replay, the next free ``call``.

        Worked out once for each list of records.
        """
        before = tuple(layout_ids)
        told_apart = self._told_apart.get(before)
        if told_apart is None:
            if len(self._told_apart) >= MAX_REMEMBERED_TICKS:
                self._told_apart.clear()
            told_apart = self._told_apart[before] = self._with_keys_of_their_own(before)
        if told_apart is not before:
            layout_ids[:] = told_apart

    def _with_keys_of_their_own(self, layout_ids: tuple[int, ...]) -> tuple[int, ...]:
        layouts = self._registry.layouts
        keys = {layouts[number].key for number in layout_ids}
        if len(keys) == len(layout_ids):
            return layout_ids
        seen: set[Key] = set()
        told_apart = list(layout_ids)
        for at, number in enumerate(layout_ids):
            key = layouts[number].key
            if key in seen:
                while key in keys:
                    key = dataclasses.replace(key, call=key.call + 1)
                keys.add(key)
                told_apart[at] = self._raised(number, key)
            seen.add(key)
        return tuple(told_apart)

    def _raised(self, number: int, key: Key) -> int:
        """The layout ``number`` under another key; made at first sight."""
        raised = self._others.get((number, key))
        if raised is None:
            layouts = self._registry.layouts
            raised = self._others[number, key] = len(layouts)
            layouts.append(dataclasses.replace(layouts[number], layout_id=raised, key=key))
        return raised

    def _advice(self) -> str:
        """More room than is used, in the second iteration with replays: nobody knew it when the memory was taken."""
        assert self.virtual is not None
        most, room = max(self._most_replays, 1), self.virtual.num_replays
        if self._asked is not None or most >= room:
            return ""
        spare = format_bytes(self.num_bytes * (room - most) // room)
        return (
            f"no CUDA graph is replayed more than {most} times in an iteration, and memory is reserved for {room} "
            f"replays of each. Set ring.graph_replays: {most}, which frees {spare} for other records"
        )

    def _runs(self, words: list[int], result: Replayed) -> list[tuple[int, CapturedGraph, int]]:
        """(order, graph, replay) of every replay that has a place, in order."""
        assert self._words is not None
        width = self._words.shape[1]
        runs = []
        for at in range(width, len(words), width):
            graph = self.graphs[at // width - 1]
            count = words[at + words_of.COUNT]
            orders = words[at + words_of.ORDERS : at + width]
            runs += [(orders[replay], graph, replay) for replay in range(min(count, graph.num_replays))]
            if count > graph.num_replays:
                self.num_dropped += count - graph.num_replays
                if count > graph.most_replays:  # told once, and again when it becomes more
                    graph.most_replays = count
                    result.dropped.append((graph.name, _too_many(count, graph)))
        return sorted(runs, key=lambda run: run[0])

    @staticmethod
    def _positions(noted: Iterable[tuple[CapturedGraph, int]]) -> dict[tuple[CapturedGraph, int], int]:
        seen: Counter[CapturedGraph] = Counter()
        positions = {}
        for graph, num_records in noted:
            positions[graph, seen[graph]] = num_records
            seen[graph] += 1
        return positions

    def _ids(self, graph: CapturedGraph, replay: int, position: int) -> tuple[list[int], list[int]]:
        """Layouts of a replay, the ``position``-th of its family in the iteration, and their units.

        Made at first sight.
        """
        found = graph.ids.get((replay, position))
        if found is None:
            offset = position * graph.num_microbatches - graph.first_microbatch
            ids = [number for one in graph.records for number in self._layouts_of(one, replay, offset)]
            units = [one.unit for one in graph.records for _ in one.templates]
            found = graph.ids[replay, position] = ids, units
        return found

    def _layouts_of(self, recorded: Recorded, replay: int, offset: int) -> list[int]:
        layouts, rows, place = self._registry.layouts, recorded.rows, recorded.place
        assert self.virtual is not None
        ids = []
        for number, template in enumerate(recorded.templates):
            key = template.key
            if key.microbatch != NO_MICROBATCH:
                key = dataclasses.replace(key, microbatch=key.microbatch + offset)
            layout = dataclasses.replace(
                template, layout_id=len(layouts), key=key, row=rows.first_row + replay * rows.stride + number
            )
            if place is not None and number == 0:
                segment = self.virtual.number(place, replay)
                layout = dataclasses.replace(layout, segment=segment, offset_bytes=place.offset_bytes)
            ids.append(layout.layout_id)
            layouts.append(layout)
        return ids

    # -- reading

    def read(self, slot: int) -> Iterable[tuple[int, torch.Tensor]]:
        """As ``Ring.read_slot``, of the replays that there have been in any iteration."""
        return () if self.virtual is None else self.virtual.read(slot, self._most_replays)

    @property
    def num_bytes(self) -> int:
        """Device memory of all replayed records, without their statistics."""
        return 0 if self.virtual is None else self.virtual.num_bytes

    def describe(self) -> list[str]:
        """What the graphs hold, as lines of text; none without a graph."""
        if self.virtual is None:
            return []
        replays, size = self.virtual.num_replays, format_bytes(self.virtual.bytes_per_replay)
        line = f"{len(self.graphs)} captured CUDA graphs of {size}, {replays} replays of each an iteration"
        return [f"{line}: {format_bytes(self.num_bytes)}"]

    @property
    def bytes_per_iteration(self) -> int:
        """Bytes of a slot that are given to replayed records, for as many replays as there were in any iteration."""
        return 0 if self.virtual is None else self.virtual.bytes_per_replay * max(self._most_replays, 1)


def _insert(layout_ids: list[int], placed: list[tuple[int, int, list[int]]]) -> None:
    """Put each replay's records where the host had launched it; those it did not see go to the end."""
    seen = list(layout_ids)
    layout_ids.clear()
    taken = 0
    for position, _, ids in sorted(placed, key=lambda one: one[:2]):
        layout_ids += seen[taken:position]
        taken = max(taken, position)
        layout_ids += ids
    layout_ids += seen[taken:]


def _too_many(count: int, graph: CapturedGraph) -> str:
    return (
        f"its CUDA graph was replayed {count} times in an iteration, and {graph.num_replays} have a place; the others "
        f"were not recorded. Set ring.graph_replays: {count}"
    )
