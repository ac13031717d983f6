"""Memory for the records of captured graphs: virtual slots, of which each slot of the ring has one a replay.

Segments and statistics rows of their own, as many slots deep as were asked for, because a captured graph points into
them: nothing moves here, not even when the first iteration ends. Virtual slot ``slot x replays + replay``; one more
takes what is a replay too many. Host bookkeeping under the ring's lock; the caller says where memory is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flightrec.kernels.driver import allocate
from flightrec.records import NUM_STATISTICS
from flightrec.ring.layout import LARGEST_AREA_BYTES, Place, Segment
from flightrec.ring.registry import Registry
from flightrec.ring.statistics import never_written

FIRST_SEGMENT = 1 << 20
"""Numbers of segments from here on are of captured graphs: each replay's part of a segment has one of its own."""

_SMALLEST_AREA_BYTES = 1 << 16
_FIRST_ROWS, _MOST_ROWS = 16, 512


@dataclass(frozen=True, slots=True)
class Rows:
    """Statistics rows of one record in every virtual slot.

    Attributes:
        first_row: number of the row of replay 0.
        stride: from the row of a replay to that of the next one.
        values: float64 ``[virtual slots + 1, n, C]``, a view.
        stamps: int64 ``[virtual slots + 1, n]``, a view.
    """

    first_row: int
    stride: int
    values: torch.Tensor
    stamps: torch.Tensor


class VirtualSlots:
    """See the module.

    Args:
        registry: whose rows these are, and whose memory limit counts.
        device: of the ring.
        num_planes: slots that the ring will have at most, scrap included.
        num_replays: of one graph in an iteration.
    """

    def __init__(self, registry: Registry, device: torch.device, num_planes: int, num_replays: int) -> None:
        self.num_planes, self.num_replays = num_planes, num_replays
        self._registry, self._device = registry, device
        self._segments: list[Segment] = []
        self._block: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._next_row = self._num_block_rows = 0

    @property
    def overflow(self) -> int:
        """The virtual slot that nobody reads."""
        return self.num_planes * self.num_replays

    @property
    def num_bytes(self) -> int:
        """Memory of all segments."""
        return sum(segment.buffer.nbytes for segment in self._segments)

    @property
    def bytes_per_replay(self) -> int:
        """Bytes given to records in one virtual slot."""
        return sum(segment.used_bytes for segment in self._segments)

    def segment(self, place: Place) -> Segment:
        """The segment of a place that ``take_bytes`` gave."""
        return self._segments[place.segment]

    def number(self, place: Place, replay: int) -> int:
        """The segment's number in the layouts of a replay."""
        return FIRST_SEGMENT + place.segment * self.num_replays + replay

    def take_bytes(self, num_bytes: int) -> Place | None:
        """An area in every virtual slot; None when ``ring.memory`` does not reach.

        Raises:
            RuntimeError, MemoryError: the device refused the memory.
        """
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.area_bytes - segment.used_bytes < num_bytes:
            segments = self._registry.segments
            # Before the first iteration has ended the ring's own segments have one slot, and will have all.
            taken = max(segments.num_bytes, segments.used_bytes * self.num_planes)
            room = (segments.memory_bytes - taken) // (self.overflow + 1)
            room -= room % _ALIGNMENT
            if room < num_bytes:
                return None
            wished = min(max(self.bytes_per_replay // 4 // _ALIGNMENT * _ALIGNMENT, _SMALLEST_AREA_BYTES), _LARGEST)
            area_bytes = min(max(wished, num_bytes), room)
            segment = Segment(len(self._segments), self._device, self.overflow, area_bytes)
            self._segments.append(segment)
            segments.memory_bytes -= segment.buffer.nbytes
        place = Place(segment.index, segment.used_bytes, num_bytes)
        segment.used_bytes += num_bytes
        return place

    def take_rows(self, num_rows: int) -> Rows:
        """Statistics rows, one after the other, in every virtual slot.

        Raises:
            RuntimeError, MemoryError: the device refused the memory.
        """
        if self._block is None or self._num_block_rows - self._next_row < num_rows:
            size = max(num_rows, min(max(self._num_block_rows * 2, _FIRST_ROWS), _MOST_ROWS))
            self._block = self._open_block(size)
            self._num_block_rows, self._next_row = size, 0
        first_row, values, stamps = self._block
        at = slice(self._next_row, self._next_row + num_rows)
        self._next_row += num_rows
        return Rows(first_row + at.start, self._num_block_rows, values[:, at], stamps[:, at])

    def _open_block(self, num_rows: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        depth = self.overflow
        values, stamps = allocate(self._device, lambda: never_written(self._device, depth + 1, num_rows))
        by_slot = (self.num_planes, self.num_replays * num_rows)
        with torch.inference_mode(False):
            first_row = self._registry.statistics.add_fixed_block(
                values[:depth].view(*by_slot, NUM_STATISTICS), stamps[:depth].view(by_slot)
            )
        return first_row, values, stamps

    def read(self, slot: int, num_replays: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(segment number, uint8 ``[used bytes]``, a view) of the first replays of a slot."""
        for segment in self._segments:
            for replay in range(num_replays):
                area = segment.buffer[slot * self.num_replays + replay]
                yield FIRST_SEGMENT + segment.index * self.num_replays + replay, area[: segment.used_bytes]


_ALIGNMENT, _LARGEST = 256, LARGEST_AREA_BYTES
