"""One captured CUDA graph: its words on the device, its records, and all memory that its nodes point to.

Lives as long as the graph's object (``graph_class``), longer than the recorder if need be: it knows the ring only
weakly. Filled on the threads that capture, under the ring's lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch

from flightrec.kernels import replays as words_of
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.kernels.replays import BeginReplay
from flightrec.records import NO_MICROBATCH, Key, RecordLayout
from flightrec.ring.layout import Place
from flightrec.ring.registry import MAX_CALLS
from flightrec.ring.turns import GraphGroups
from flightrec.ring.virtual import Rows


@dataclass(slots=True)
class Recorded:
    """One record of a graph.

    Attributes:
        key: as captured.
        plan, destination: for the kernels; one entry a virtual slot.
        place: of its bytes in every virtual slot, or None.
        unit: what it takes turns with.
        slot: that its launches read: the graph's, or that of its unit.
        rows: its statistics; further ones are its experts'.
        templates: its layout and its experts', but for what a replay decides.
    """

    key: Key
    plan: CapturePlan
    destination: Destination | None
    place: Place | None
    unit: int
    slot: torch.Tensor
    rows: Rows
    templates: list[RecordLayout]


class CapturedGraph:
    """See the module.

    Attributes:
        words: int64 of this graph on the device, as ``kernels.replays`` describes them.
        slot, tick: views of them that the capture kernels read.
        groups: what takes turns in it.
        num_replays: that have a place in an iteration.
        num_known: replays whose rows the rules know.
        most_replays: in one iteration, as far as the host has told.
        records: in the order in which they were captured.
        keep: what must live as long as the graph.
        on_replay: told of each replay, while the recorder lives.
        ids: layouts of a replay and the unit of each, by its number and its position among those of the same family.
        first_microbatch, num_microbatches: that its records were captured with.
    """

    def __init__(
        self, head: torch.Tensor, words: torch.Tensor, groups: GraphGroups, num_replays: int, overflow: int
    ) -> None:
        self.num_replays, self.num_known, self.most_replays = num_replays, 0, num_replays
        self.words, self.groups = words, groups
        self.slot = words[words_of.SLOT : words_of.SLOT + 1]
        self.tick = words[words_of.TICK : words_of.TICK + 1]
        self.records: list[Recorded] = []
        self.keep: list[Any] = []
        self.ids: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self.first_microbatch, self.num_microbatches = 0, 1
        self.on_replay: WeakMethod[Callable[[CapturedGraph], None]] | None = None
        self._head, self._overflow = head, overflow
        self._calls: dict[Key, int] = {}
        self._begun: set[int] = set()
        self._event: torch.cuda.Event | None = None

    @property
    def name(self) -> str:
        """The layer of its first record."""
        return self.records[0].key.layer if self.records else ""

    @property
    def family(self) -> tuple[str, ...]:
        """What graphs have in common that run the same for different microbatches."""
        if not self.records:
            return ()
        key = self.records[0].key
        return (key.layer, key.tensor, key.part, key.phase.value, key.stage.value)

    def begin(self, begin_replay: BeginReplay) -> None:
        """Launch what chooses the virtual slot, on the current stream: before any record."""
        begin_replay(self._head, self.words, self.groups.words, self.num_replays, self._overflow)

    def enter(self, stream: torch.cuda.Stream) -> None:
        """A record comes next on this stream of the capture; it follows ``begin``, on whichever stream that was."""
        handle = stream.cuda_stream
        if handle in self._begun:
            return
        if self._event is None:
            self._event = stream.record_event()
        else:  # a dependency inside the capture
            stream.wait_event(self._event)
        self._begun.add(handle)

    def claim(self, key: Key) -> Key | None:
        """The key with the first free ``call`` of this graph; None when there are too many."""
        call = self._calls.get(key, key.call)
        self._calls[key] = call + 1
        return dataclasses.replace(key, call=call) if call < MAX_CALLS else None

    def add(self, recorded: Recorded) -> None:
        """Take a record, and count its microbatch."""
        self.records.append(recorded)
        self.keep.append(recorded.destination)
        microbatches = [one.key.microbatch for one in self.records if one.key.microbatch != NO_MICROBATCH]
        if microbatches:
            self.first_microbatch = min(microbatches)
            self.num_microbatches = max(microbatches) - self.first_microbatch + 1

    def begin_replay(self) -> None:
        """See ``graph_class.Captured``."""
        tell = None if self.on_replay is None else self.on_replay()
        if tell is not None:
            tell(self)
