"""One iteration of an incident in the writer: its records, where their bytes go, and which have arrived.

Owns what ``iteration`` messages brought. Runs in the writer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.records import NUM_STATISTICS, Key, RecordLayout
from flightrec.storage.facts import Blind, IterationFacts

NOT_STAGED = "its bytes were not staged with the rest of the iteration"


class Iteration:
    """One iteration of an incident, possibly sent in pieces; and which of its records have bytes on disk."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.header = header
        self.layouts: list[RecordLayout] = []
        self._statistics: list[npt.NDArray[np.float64]] = []
        self.first_record = 0
        self.paths: list[str] = []
        self.by_segment: dict[int, list[int]] = {}
        self._starts: dict[int, list[int]] = {}
        self.written: set[int] = set()
        self.refused: set[int] = set()
        """Contradict themselves; told in the incident."""
        self.complete = False
        self.random_states: dict[str, npt.NDArray[np.uint8]] = {}
        self._sequences: dict[Key, int] | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Attempt and iteration."""
        return self.header["attempt"], self.header["iteration"]

    def append(self, header: Mapping[str, Any], layouts: list[RecordLayout], rows: npt.NDArray[np.float64]) -> None:
        """Add records after those that are here; the newest header holds."""
        self.header = header
        self.layouts += layouts
        self._statistics.append(rows)

    def freeze(self, first_record: int) -> IterationFacts:
        """No more records: give its facts, and index the records by segment for the payload."""
        header = self.header
        statistics = np.concatenate([np.empty((0, NUM_STATISTICS)), *self._statistics])
        self._statistics = [statistics]
        facts = IterationFacts(
            attempt=header["attempt"],
            iteration=header["iteration"],
            tick=header["tick"],
            num_microbatches=header["num_microbatches"],
            loss=header["loss"],
            layouts=self.layouts,
            statistics=statistics,
            partial=bool(header["partial"]),
            blind=str(header["blind"]),
            metrics=header["metrics"],
            facts=header.get("facts") or {},
            random_states=self.random_states,
            tier=header["tier"],
            landmark=header["landmark"],
        )
        self.first_record = first_record
        self.paths = facts.record_paths()
        for sequence, (layout, path) in enumerate(zip(self.layouts, self.paths, strict=True)):
            if path:
                self.by_segment.setdefault(layout.segment, []).append(sequence)
        for segment, sequences in self.by_segment.items():
            sequences.sort(key=lambda sequence: self.layouts[sequence].offset_bytes)
            self._starts[segment] = [self.layouts[sequence].offset_bytes for sequence in sequences]
        return facts

    def touching(self, segment: int, start: int, stop: int) -> Sequence[int]:
        """Records of which bytes lie in this range of a segment's area, by place. After ``freeze``."""
        starts = self._starts.get(segment, [])
        first = max(bisect_right(starts, start) - 1, 0)
        return self.by_segment.get(segment, [])[first : bisect_left(starts, stop)]

    def record_of(self, key: Key) -> int:
        """Row in ``/records`` of a key, -1 when this iteration has none. After ``freeze``."""
        if self._sequences is None:
            self._sequences = {layout.key: sequence for sequence, layout in enumerate(self.layouts)}
        sequence = self._sequences.get(key)
        return -1 if sequence is None else self.first_record + sequence

    def missing(self, reason: str) -> list[Blind]:
        """Rows for what should have bytes in the tensors file and has none."""
        expected = [sequence for sequence, path in enumerate(self.paths) if path]
        lost = [sequence for sequence in expected if sequence not in self.written]
        if not lost:
            return []
        reason = self.header["blind"] or (NOT_STAGED if self.complete else reason)
        if not self.written:
            return [Blind(*self.place, "", "", reason)]
        keys = dict.fromkeys((self.layouts[n].key.layer, self.layouts[n].key.tensor) for n in lost)
        return [Blind(*self.place, layer, tensor, reason) for layer, tensor in keys]


def component_buffers(layout: RecordLayout, area: memoryview, begin: int = 0) -> Sequence[memoryview] | None:
    """The bytes of each component, ``None`` when they do not all lie in ``area``.

    Args:
        layout: the record's.
        area: a part of its segment's area.
        begin: offset of that part.
    """
    buffers = []
    for component in layout.components:
        start = layout.offset_bytes + component.offset_bytes - begin
        if start < 0 or start + component.num_bytes > area.nbytes:
            return None
        buffers.append(area[start : start + component.num_bytes])
    return buffers


def component_parts(layout: RecordLayout, area: memoryview, begin: int) -> Iterator[tuple[int, int, memoryview]]:
    """(number of the component, offset in it, bytes) of what ``area`` has of each; arguments as above."""
    for number, component in enumerate(layout.components):
        start = layout.offset_bytes + component.offset_bytes - begin
        first, last = max(start, 0), min(start + component.num_bytes, area.nbytes)
        if first < last:
            yield number, first - start, area[first:last]
