"""Payload bytes on their way into a tensors file: what is queued, what has arrived of each array, and its checksum.

Runs in the writer process; a second thread reads for the checksums while the first one writes. No HDF5.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flightrec.storage import checksum

_INLINE_BYTES = 1 << 20
"""Below this a thread costs more than it saves."""


@dataclass(slots=True)
class Array:
    """One component on its way.

    Attributes:
        name: of the component.
        num_bytes: its length.
        offset: in the file, -1 for an array without elements.
        dataset: the dataset while it has no link yet, None for one that is in its group.
        parts: by offset in the array: length and crc32 of what was written.
    """

    name: str
    num_bytes: int
    offset: int
    dataset: Any = None
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def crc32(self) -> int:
        """Of all bytes, from the parts'."""
        total = 0
        for _, (num_bytes, crc) in sorted(self.parts.items()):
            total = checksum.combine(total, crc, num_bytes) if total else crc
        return total


@dataclass(slots=True)
class PendingRecord:
    """A record of which bytes are queued or still to come.

    Attributes:
        index: its row of ``/records``.
        group_path: where it is to stand.
        arrays: its components.
        missing_bytes: not queued yet.
    """

    index: int
    group_path: str
    arrays: list[Array]
    missing_bytes: int


@dataclass(slots=True)
class Queued:
    """Bytes of an array, in memory that stays as it is until they are written."""

    array: Array
    start: int
    view: memoryview


class Checksums:
    """The crc32 of several buffers, in a thread of its own where that is worth it.

    Args:
        views: read until ``results`` returns.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._results: list[int] = []
        self._thread: threading.Thread | None = None
        if sum(view.nbytes for view in views) >= _INLINE_BYTES:
            thread = threading.Thread(target=self._work, name="flightrec-crc32", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # none can be started: the interpreter is ending
                self._thread = None

    def results(self) -> list[int]:
        """Wait for them; in the order of the buffers."""
        if self._thread is not None:
            self._thread.join()
        if len(self._results) < len(self._views):
            self._work()
        return self._results

    def _work(self) -> None:
        self._results = [zlib.crc32(view) for view in self._views]
