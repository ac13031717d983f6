"""The host tier's memory: whole past iterations in memory that trainer and writer share.

One memfd of its own, ``[header | table | data]``. A row of the table says which tick lies where in the data: the ranges
of the ring's segments that were copied, and the tick's record ids and statistics. The trainer fills it from its
training thread; the writer reads an iteration's bytes when it ends an incident, also after the trainer was killed.

There is no lock. A row is void (its stamp is 0) from before the first byte of an iteration changes until after the last
one arrived: an iteration whose copy was under way when the trainer died is not there. While an incident needs an
iteration, the trainer does not give its place away. Pages that were never touched take no memory.

Runs in both processes; numpy only, no torch. After a fork the child must not touch it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightrec.records import NUM_STATISTICS, RecordLayout

MAGIC = 0x31524954_54484C46  # "FLHTTIR1", least significant byte first
VERSION = 1
PAGE_BYTES = 4096
NUM_ENTRIES = 4096
"""Most iterations that the tier holds, however small they are."""

MAX_RANGES = 512
"""Most separate ranges of the ring's segments in one iteration."""

_MAGIC, _VERSION, _DATA_BYTES = range(3)
_STAMP, _NUM_RECORDS, _RECORDS_OFFSET, _NUM_RANGES, _FIRST_RANGE = range(5)
_ENTRY_WORDS = _FIRST_RANGE + 4 * MAX_RANGES
_TABLE_BYTES = -(-NUM_ENTRIES * _ENTRY_WORDS * 8 // PAGE_BYTES) * PAGE_BYTES


class Range(NamedTuple):
    """Bytes ``[start, start + num_bytes)`` of a segment's area of one slot, and where in the data they lie."""

    segment: int
    start: int
    num_bytes: int
    offset: int


class HostMemory:
    """The mapped memfd. ``create`` in the trainer, ``attach`` in the writer.

    Attributes:
        fd: the memfd, -1 once closed.
        data: writable bytes; may be page-locked by the caller.
        data_start: offset of the data in the memfd.
    """

    def __init__(self, fd: int, data_bytes: int) -> None:
        self.fd = fd
        self.data_start = PAGE_BYTES + _TABLE_BYTES
        self._map = mmap.mmap(fd, self.data_start + data_bytes, mmap.MAP_SHARED)
        self._words: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64, PAGE_BYTES // 8)
        words = np.frombuffer(self._map, np.int64, NUM_ENTRIES * _ENTRY_WORDS, PAGE_BYTES)
        self._table: npt.NDArray[np.int64] = words.reshape(NUM_ENTRIES, _ENTRY_WORDS)
        self.data = memoryview(self._map)[self.data_start :]

    @classmethod
    def create(cls, data_bytes: int) -> HostMemory:
        """Make a new memfd with ``data_bytes`` of data, rounded up to pages.

        Raises:
            OSError: the kernel gives no memfd or no address space.
        """
        data_bytes = -(-data_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("flightrec-host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES + _TABLE_BYTES + data_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # touching what is gone would be a SIGBUS
            memory = cls(fd, data_bytes)
        except BaseException:
            os.close(fd)
            raise
        words = memory._words
        words[_DATA_BYTES], words[_VERSION] = data_bytes, VERSION
        words[_MAGIC] = MAGIC
        return memory

    @classmethod
    def attach(cls, fd: int) -> HostMemory:
        """Map a memfd that ``create`` made.

        Raises:
            ValueError: it is not one, or of another version.
        """
        words = np.frombuffer(os.pread(fd, PAGE_BYTES, 0), np.int64)
        if words[_MAGIC] != MAGIC or words[_VERSION] != VERSION:
            found = f"magic {words[_MAGIC]:#x}, version {words[_VERSION]}"
            raise ValueError(f"host tier: {found}; this writer needs magic {MAGIC:#x}, version {VERSION}")
        return cls(fd, int(words[_DATA_BYTES]))

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last view of it goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- the trainer's side ------------------------------------------------------------------------------------------

    def describe(self, entry: int, ids: npt.NDArray[np.int32], offset: int, ranges: Sequence[Range]) -> None:
        """Say what a void entry is going to hold.

        Args:
            entry: row of the table, void since before anything in its place changed.
            ids: int32 [n], layouts of the records.
            offset: where in the data ``statistics_of`` and then the ids lie; a multiple of 8.
            ranges: of segments, ``MAX_RANGES`` at most.
        """
        row = self._table[entry]
        assert row[_STAMP] == 0
        row[_NUM_RECORDS], row[_RECORDS_OFFSET], row[_NUM_RANGES] = len(ids), offset, len(ranges)
        row[_FIRST_RANGE : _FIRST_RANGE + 4 * len(ranges)] = np.array(ranges, np.int64).reshape(-1)
        self._ids(entry)[:] = ids

    def complete(self, entry: int, tick: int) -> None:
        """All bytes of ``tick`` are in the entry's place."""
        self._table[entry, _STAMP] = tick + 1

    def clear(self, entry: int) -> None:
        """The entry's place is about to change."""
        self._table[entry, _STAMP] = 0

    # -- either side -------------------------------------------------------------------------------------------------

    def statistics(self, entry: int) -> npt.NDArray[np.float64]:
        """float64 [n, NUM_STATISTICS] of an entry's records, a view."""
        count, offset = int(self._table[entry, _NUM_RECORDS]), int(self._table[entry, _RECORDS_OFFSET])
        return np.frombuffer(self.data, np.float64, count * NUM_STATISTICS, offset).reshape(count, NUM_STATISTICS)

    def ids(self, entry: int) -> npt.NDArray[np.int32]:
        """int32 [n], layouts of an entry's records in the order in which they were recorded; a copy."""
        return self._ids(entry).copy()

    def _ids(self, entry: int) -> npt.NDArray[np.int32]:
        count, offset = int(self._table[entry, _NUM_RECORDS]), int(self._table[entry, _RECORDS_OFFSET])
        return np.frombuffer(self.data, np.int32, count, offset + count * NUM_STATISTICS * 8)

    def find(self, tick: int) -> list[Range] | None:
        """Where the bytes of a tick lie; None if it is not held, or not whole."""
        found = np.flatnonzero(self._table[:, _STAMP] == tick + 1)
        if not len(found):
            return None
        row = self._table[found[0]]
        words = row[_FIRST_RANGE : _FIRST_RANGE + 4 * int(row[_NUM_RANGES])].reshape(-1, 4)
        return [Range(*map(int, range_)) for range_ in words]


def records_bytes(num_records: int) -> int:
    """Bytes that the statistics and ids of so many records take."""
    return num_records * (NUM_STATISTICS * 8 + 4)


def extent_bytes(layout: RecordLayout) -> int:
    """Length of a record's area; 0 without bytes."""
    if layout.segment < 0 or not layout.components:
        return 0
    return max(component.offset_bytes + component.num_bytes for component in layout.components)


def buffers_of(layout: RecordLayout, ranges: Sequence[Range], data: memoryview) -> list[memoryview] | None:
    """The bytes of each component of a record; None when they are not in ``ranges``."""
    end = layout.offset_bytes + extent_bytes(layout)
    for segment, start, num_bytes, offset in ranges:
        if segment == layout.segment and start <= layout.offset_bytes and end <= start + num_bytes:
            at = offset + layout.offset_bytes - start
            spans = [(at + component.offset_bytes, component.num_bytes) for component in layout.components]
            return [data[first : first + length] for first, length in spans]
    return None
