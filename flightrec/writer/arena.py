"""First-fit allocation of the staging arena.

Owns the list of free ranges, on the trainer's side only: the writer never allocates, it says what it no longer needs.
Not thread-safe; ``WriterClient`` calls it under its lock.
"""

from __future__ import annotations

import bisect

ALIGNMENT_BYTES = 4096


class Arena:
    """Free ranges of ``[0, capacity_bytes)``, merged, in order.

    Args:
        capacity_bytes: size of the arena; rounded down to a multiple of ``ALIGNMENT_BYTES``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, with rounding."""
        return sum(self._used.values())

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a range of at least ``num_bytes`` (also for 0), or ``None`` when no free range is long enough."""
        needed = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        for index, (offset, length) in enumerate(self._free):
            if length < needed:
                continue
            if length == needed:
                del self._free[index]
            else:
                self._free[index] = (offset + needed, length - needed)
            self._used[offset] = needed
            return offset
        return None

    def release(self, offset: int) -> bool:
        """Give a range back; ``False`` when ``offset`` is not one that is handed out."""
        length = self._used.pop(offset, None)
        if length is None:
            return False
        index = bisect.bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            previous, previous_length = self._free[index - 1]
            self._free[index - 1] = (previous, previous_length + length)
        else:
            self._free.insert(index, (offset, length))
        return True
