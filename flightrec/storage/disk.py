"""A file on disk as HDF5 sees it while it is written: HDF5 never meets an error.

A failed write of its own metadata leaves HDF5 with a file that it can neither flush nor close; at the latest when the
process ends it crashes. So HDF5 gets this object instead of a path: what the disk refuses is kept in memory, HDF5 goes
on, and the error is told to who asks for it. One thread at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from flightrec.storage import commit

PAGE_BYTES = 4096
KEPT_PAGES_BYTES = 512 << 20
"""Bytes behind the last write that stay in the page cache; the kernel has had the time to write what is older."""

_MAX_BUFFERS = 1024  # of one system call


class ForgivingFile:
    """File object for h5py's ``fileobj`` driver, with its own place for what could not be written.

    Attributes:
        error: the first error of the disk, None while all went well.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._position = 0
        self._size = 0
        self._refused: list[tuple[int, bytes]] = []
        self._cached: deque[tuple[int, int]] = deque()
        self._cached_bytes = 0
        self.error: OSError | None = None

    def write_payload(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Write (offset, bytes) that are not HDF5's own, neighbours in one call; raises ``OSError``, remembers it."""
        try:
            for offset, buffers in _runs(parts):
                self._let_go(offset, commit.write_vector(self._descriptor, buffers, offset))
        except OSError as error:
            self.error = self.error or error
            raise

    def _let_go(self, offset: int, num_bytes: int) -> None:
        """Have the kernel begin to write these bytes, and drop older ones from its cache: training needs the memory."""
        if num_bytes < PAGE_BYTES or not hasattr(os, "posix_fadvise"):
            return
        self._cached.append((offset, num_bytes))
        self._cached_bytes += num_bytes
        with contextlib.suppress(OSError):  # advice only
            os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
            while self._cached_bytes > KEPT_PAGES_BYTES:
                start, length = self._cached.popleft()
                self._cached_bytes -= length
                os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor; HDF5 must be done."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as of any file object."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Give the position."""
        return self._position

    def read(self, size: int) -> bytes:
        """Read bytes, zeros where nothing was written."""
        buffer = bytearray(size)
        self.readinto(memoryview(buffer))
        return bytes(buffer)

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer, with zeros where nothing was written."""
        view = memoryview(buffer).cast("B")
        found = os.pread(self._descriptor, view.nbytes, self._position)
        view[:] = found + bytes(view.nbytes - len(found))
        for offset, data in self._refused:
            start, stop = max(offset, self._position), min(offset + len(data), self._position + view.nbytes)
            if start < stop:
                view[start - self._position : stop - self._position] = data[start - offset : stop - offset]
        self._position += view.nbytes
        return view.nbytes

    def write(self, data: memoryview) -> int:
        """Write at the position; never fails."""
        view = memoryview(data).cast("B")
        try:
            commit.write_all(self._descriptor, view, self._position)
        except OSError as error:
            self.error = self.error or error
            self._refused.append((self._position, bytes(view)))
        self._position += view.nbytes
        self._size = max(self._size, self._position)
        return view.nbytes

    def truncate(self, size: int) -> int:
        """Set the file's length; never fails."""
        self._size = size
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self.error = self.error or error
        return size

    def flush(self) -> None:
        """Do nothing: every write went to the operating system."""


def _runs(parts: Iterable[tuple[int, memoryview]]) -> Iterable[tuple[int, list[memoryview]]]:
    """Parts that follow each other in the file, together."""
    start, end, buffers = 0, -1, list[memoryview]()
    for offset, view in sorted(parts, key=lambda part: part[0]):
        if offset != end or len(buffers) == _MAX_BUFFERS:
            if buffers:
                yield start, buffers
            start, buffers = offset, []
        buffers.append(view)
        end = offset + view.nbytes
    if buffers:
        yield start, buffers
