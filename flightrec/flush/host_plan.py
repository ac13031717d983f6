"""Which bytes of a slot an iteration has: the ranges of the ring's segments that its records lie in.

Host arithmetic only. An iteration that records the same as one before has the same plan: nothing is worked out anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flightrec.records import RecordLayout
from flightrec.writer.host_memory import extent_bytes, records_bytes

MAX_PLANS = 256
WISHED_RANGES = 64
SMALLEST_GAP_BYTES = 64 << 10
"""A hole between two records up to this long is copied along: another copy would take longer."""

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What is copied of an iteration, and where in its place it goes.

    Attributes:
        ids: int32 [n], layouts of its records.
        rows: int64 [n], their rows of the statistics matrix.
        ranges: (segment, start, bytes, offset in the place).
        records_offset: of the statistics and ids in the place.
        num_bytes: of the place.
    """

    ids: NDArray[np.int32]
    rows: NDArray[np.int64]
    ranges: tuple[tuple[int, int, int, int], ...]
    records_offset: int
    num_bytes: int


class Plans:
    """The plans of the iterations seen.

    Args:
        layouts: the ring's, by id; grows.
    """

    def __init__(self, layouts: Sequence[RecordLayout]) -> None:
        self._layouts = layouts
        self._known: dict[bytes, Plan] = {}

    def of(self, layout_ids: Sequence[int]) -> Plan:
        """The plan of an iteration with these records."""
        ids = np.array(layout_ids, np.int32)
        key = ids.tobytes()
        plan = self._known.get(key)
        if plan is None:
            if len(self._known) >= MAX_PLANS:
                self._known.clear()
            plan = self._known[key] = self._make(ids)
        return plan

    def _make(self, ids: NDArray[np.int32]) -> Plan:
        layouts = [self._layouts[number] for number in ids]
        spans = {
            (layout.segment, layout.offset_bytes, layout.offset_bytes + extent)
            for layout in layouts
            if (extent := extent_bytes(layout))
        }
        ranges, offset = [], 0
        for segment, start, end in merged(sorted(spans)):
            ranges.append((segment, start, end - start, offset))
            offset += -(-(end - start) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        rows = np.array([layout.row for layout in layouts], np.int64)
        return Plan(ids, rows, tuple(ranges), offset, offset + records_bytes(len(ids)))


def merged(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans (segment, start, end), in order, joined over small holes; over larger ones if there are too many."""
    gap = SMALLEST_GAP_BYTES
    while True:
        joined: list[tuple[int, int, int]] = []
        for segment, start, end in spans:
            if joined and joined[-1][0] == segment and start <= joined[-1][2] + gap:
                joined[-1] = (segment, joined[-1][1], max(end, joined[-1][2]))
            else:
                joined.append((segment, start, end))
        if len(joined) <= max(WISHED_RANGES, len({segment for segment, _, _ in spans})):
            return joined
        gap *= 4
