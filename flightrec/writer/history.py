"""The statistics of past iterations, in memory that trainer and writer share.

One memfd of its own, so that a writer that is started anew finds what the old one saw:
``[header | blocks | samples | names | data]``. The trainer adds one sample an iteration, on its training thread and
without a copy to anywhere else; the writer reads when an incident opens, also after the trainer was killed. Pages that
were never touched take no memory.

There is no lock. A row of time is void while it is filled: its stamp is 0 before the first value changes and its number
after the last. The writer takes the newest rows, looks at their stamps before and after it copied them, and drops those
that changed meanwhile. There are a few rows more than it takes, so that the trainer first overwrites what nobody reads.

Runs in both processes; numpy only, no torch. After a fork the child must not touch it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flightrec.records import Key
from flightrec.storage.facts import HistoryPiece
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS
from flightrec.writer.messages import key_from_json, key_to_json

MAGIC = 0x31534948_54484C46  # "FLHTHIS1", least significant byte first
VERSION = 1
PAGE_BYTES = 4096
SPARE_SAMPLES = 16
"""Rows of time beyond those that are read: what the trainer may overwrite while the writer reads."""

BLOCK_SERIES = 256
NAMES_SHARE = 32
"""One part in so many of the memory holds the names of the series."""

PLAIN, QUANTIZED = 0, 1
NUM_COLUMNS = (len(PLAIN_STATISTICS), len(HISTORY_STATISTICS))
"""Columns of a block by its kind; a plain one has the first columns of a quantized one."""

# Words of the header (64 bits each); positions that only grow have a cache line of their own.
_MAGIC, _VERSION, _ITERATIONS, _NAMES_BYTES, _NUM_BLOCKS = range(5)
_NUM_SAMPLES, _NAMES_END, _BLOCKS_IN_USE = 8, 16, 24
_STAMP, _ATTEMPT, _ITERATION = range(3)
_KIND, _FIRST_SAMPLE = range(2)

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def block_bytes(kind: int, num_rows: int) -> int:
    """Memory of one block with all its pages touched."""
    return num_rows * NUM_COLUMNS[kind] * BLOCK_SERIES * 4


class HistoryMemory:
    """The mapped memfd. ``create`` in the trainer, ``attach`` in the writer.

    Attributes:
        fd: the memfd, -1 once closed.
        iterations: samples that are kept for certain.
        num_rows: rows of time, ``SPARE_SAMPLES`` more.
    """

    def __init__(self, fd: int, iterations: int, names_bytes: int, num_blocks: int) -> None:
        self.fd = fd
        self.iterations = iterations
        self.num_rows = iterations + SPARE_SAMPLES
        blocks_start = PAGE_BYTES
        samples_start = blocks_start + _paged(num_blocks * 16)
        names_start = samples_start + _paged(self.num_rows * 24)
        self._data_start = names_start + names_bytes
        self._data_bytes = num_blocks * block_bytes(PLAIN, self.num_rows)
        # No view may outlive the mapping: numpy keeps it alive for as long as an array looks into it.
        self._map = mmap.mmap(fd, self._data_start + self._data_bytes, mmap.MAP_SHARED)
        self._words: Integers = np.frombuffer(self._map, np.int64, PAGE_BYTES // 8)
        self._table: Integers = np.frombuffer(self._map, np.int64, num_blocks * 2, blocks_start).reshape(-1, 2)
        self._samples: Integers = np.frombuffer(self._map, np.int64, self.num_rows * 3, samples_start).reshape(-1, 3)
        self._names = memoryview(self._map)[names_start : self._data_start]
        self._blocks: list[Floats] = []

    @classmethod
    def create(cls, memory_bytes: int, iterations: int) -> HistoryMemory:
        """Make a new memfd of about ``memory_bytes``; less than a block has room for no series.

        Raises:
            OSError: the kernel gives no memfd or no address space.
        """
        names_bytes = _paged(memory_bytes // NAMES_SHARE)
        num_blocks = max(0, memory_bytes - names_bytes) // block_bytes(PLAIN, iterations + SPARE_SAMPLES)
        fd = os.memfd_create("flightrec-history", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            num_rows = iterations + SPARE_SAMPLES
            size = PAGE_BYTES + _paged(num_blocks * 16) + _paged(num_rows * 24) + names_bytes
            os.ftruncate(fd, size + num_blocks * block_bytes(PLAIN, num_rows))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # touching what is gone would be a SIGBUS
            memory = cls(fd, iterations, names_bytes, num_blocks)
        except BaseException:
            os.close(fd)
            raise
        words = memory._words
        words[_ITERATIONS], words[_NAMES_BYTES], words[_NUM_BLOCKS] = iterations, names_bytes, num_blocks
        words[_VERSION] = VERSION
        words[_MAGIC] = MAGIC
        return memory

    @classmethod
    def attach(cls, fd: int) -> HistoryMemory:
        """Map a memfd that ``create`` made.

        Raises:
            ValueError: it is not one, or of another version.
        """
        words = np.frombuffer(os.pread(fd, PAGE_BYTES, 0), np.int64)
        if words[_MAGIC] != MAGIC or words[_VERSION] != VERSION:
            found = f"magic {words[_MAGIC]:#x}, version {words[_VERSION]}"
            raise ValueError(f"history memory: {found}; this writer needs magic {MAGIC:#x}, version {VERSION}")
        return cls(fd, int(words[_ITERATIONS]), int(words[_NAMES_BYTES]), int(words[_NUM_BLOCKS]))

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last view of it goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- the trainer's side ------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Samples that were ever begun."""
        return int(self._words[_NUM_SAMPLES])

    def open_block(self, kind: int) -> int | None:
        """Number of a new block for ``BLOCK_SERIES`` series that have no sample yet; None: no room is left."""
        blocks = self._all_blocks()
        used = sum(block.nbytes for block in blocks)
        if len(blocks) >= len(self._table) or used + block_bytes(kind, self.num_rows) > self._data_bytes:
            return None
        number = len(blocks)
        self._table[number] = kind, self.num_samples  # rows of earlier samples hold nothing: their pages stay untouched
        self._blocks.append(self._view(kind, used))
        self._words[_BLOCKS_IN_USE] = number + 1
        return number

    def name(self, block: int, column: int, series: Key) -> bool:
        """Say whose samples stand in a column of a block, the next one; False: there is no room for the name."""
        line = json.dumps([block, column, *key_to_json(series)]).encode() + b"\n"
        end = int(self._words[_NAMES_END])
        if end + len(line) > len(self._names):
            return False
        self._names[end : end + len(line)] = line
        self._words[_NAMES_END] = end + len(line)  # last: the name exists from here on
        return True

    def add(self, attempt: int, iteration: int, matrices: Sequence[tuple[Sequence[int], Floats]]) -> None:
        """Append one sample to all series.

        Args:
            attempt: whose.
            iteration: whose.
            matrices: block numbers and float32 [C, BLOCK_SERIES x their number], NaN where there is no sample.
        """
        number = self.num_samples
        row = number % self.num_rows
        sample = self._samples[row]
        sample[_STAMP] = 0
        self._words[_NUM_SAMPLES] = number + 1
        for blocks, matrix in matrices:
            for position, block in enumerate(blocks):
                start = position * BLOCK_SERIES
                self._blocks[block][row] = matrix[:, start : start + BLOCK_SERIES]
        sample[_ATTEMPT], sample[_ITERATION] = attempt, iteration
        sample[_STAMP] = number + 1

    def refill(self, attempts: Integers, iterations: Integers, values: dict[int, Floats]) -> None:
        """Replace all samples; at most ``iterations`` of them. A writer that reads meanwhile sees fewer.

        Args:
            attempts: int64 [n].
            iterations: int64 [n].
            values: by block, float32 [n, C, BLOCK_SERIES]; blocks that are left out get NaN.
        """
        count = len(attempts)
        assert count <= self.iterations
        first = self.num_samples
        self._samples[:, _STAMP] = 0
        numbers = np.arange(first, first + count)
        rows = numbers % self.num_rows
        for block, view in enumerate(self._blocks):
            view[rows] = values.get(block, np.nan)
        self._samples[rows, _ATTEMPT], self._samples[rows, _ITERATION] = attempts, iterations
        self._words[_NUM_SAMPLES] = first + count
        self._samples[rows, _STAMP] = numbers + 1

    # -- reading, on either side -------------------------------------------------------------------------------------

    def read(self, after: int = 0) -> HistoryPiece:
        """Copy the newest ``iterations`` samples whose number is above ``after``, oldest first.

        Returns:
            them, without those that the trainer changed meanwhile.
        """
        stamps = self._samples[:, _STAMP].copy()
        rows = np.flatnonzero(stamps > after)
        rows = rows[np.argsort(stamps[rows])][-self.iterations :]
        blocks = self._all_blocks()
        names = self._series(len(blocks))
        keys: tuple[list[Key], list[Key]] = ([], [])
        for number, (kind, _) in enumerate(self._table[: len(blocks)]):
            keys[kind].extend(names.get(number, []))
        values = tuple(
            np.empty((len(rows), columns, len(known)), np.float32)
            for columns, known in zip(NUM_COLUMNS, keys, strict=True)
        )
        filled = [0, 0]
        for number, (kind, first) in enumerate(self._table[: len(blocks)]):
            count = len(names.get(number, []))
            part = values[kind][:, :, filled[kind] : filled[kind] + count]
            part[:] = blocks[number][rows, :, :count]
            part[stamps[rows] <= first] = np.nan
            filled[kind] += count
        attempts, iterations = self._samples[rows, _ATTEMPT], self._samples[rows, _ITERATION]
        whole = self._samples[rows, _STAMP] == stamps[rows]
        plain, quantized = values if whole.all() else (part[whole] for part in values)
        return HistoryPiece(
            last=int(stamps[rows][whole][-1]) if whole.any() else after,
            attempts=attempts[whole],
            iterations=iterations[whole],
            plain_series=keys[PLAIN],
            plain=plain,
            quantized_series=keys[QUANTIZED],
            quantized=quantized,
        )

    def _series(self, num_blocks: int) -> dict[int, list[Key]]:
        """Keys of the first columns of each block."""
        text = bytes(self._names[: int(self._words[_NAMES_END])])
        found: dict[int, list[Key]] = {}
        for line in text.splitlines():
            block, column, *key = json.loads(line)
            if block < num_blocks:
                assert column == len(found.setdefault(block, []))
                found[block].append(key_from_json(key))
        return found

    def _all_blocks(self) -> list[Floats]:
        """Views of all blocks, also of those that the other side opened."""
        while len(self._blocks) < self._words[_BLOCKS_IN_USE]:
            used = sum(block.nbytes for block in self._blocks)
            self._blocks.append(self._view(int(self._table[len(self._blocks), _KIND]), used))
        return self._blocks

    def _view(self, kind: int, offset: int) -> Floats:
        shape = (self.num_rows, NUM_COLUMNS[kind], BLOCK_SERIES)
        count = self.num_rows * NUM_COLUMNS[kind] * BLOCK_SERIES
        return np.frombuffer(self._map, np.float32, count, self._data_start + offset).reshape(shape)


def _paged(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
