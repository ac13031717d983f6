"""Held slots on their way to the writer: copies into shared staging memory, piece by piece.

Training thread. On CUDA the copies run on a side stream of our own into memory pinned beforehand and nothing waits for
them: everything that the staging memory has room for is queued at once, so that neither a slow step nor a busy host
leaves a gap, and the writer's own backlog carries it over to the next step. No thread: one that made CUDA calls could
meet the capture of a CUDA graph. Makes no CUDA call unless there is something to copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flightrec.kernels import pinned
from flightrec.writer.client import WriterClient

Piece = tuple[int, int, int, int]
"""Segment index, offset in the segment's area, staging offset, bytes."""

Range = tuple[int, int, int]
"""Segment index, first byte, byte after the last one."""

PIECE_BYTES = 64 << 20
"""Longest piece: long enough for the bus's full speed, short enough to give staging memory back early."""

ALIGNMENT_BYTES = 4096
_LEAST_PINNED_BYTES = 32 << 20


@dataclass(slots=True)
class _Copy:
    piece: Piece
    event: torch.cuda.Event | None


class SlotCopy:
    """The copy of one slot into staging memory, in pieces, as there is room for them.

    Args:
        client: gives the memory.
        staging: the usable part of the arena as a uint8 CPU tensor.
        areas: (segment, uint8 tensor on the ring's device) of the slot.
        stream: side stream on CUDA, ``None`` on the CPU.
        first: what is copied before the rest.
        piece_bytes: longest piece; None for what suits the staging memory.
    """

    def __init__(
        self,
        client: WriterClient,
        staging: torch.Tensor,
        areas: Iterable[tuple[int, torch.Tensor]],
        stream: torch.cuda.Stream | None,
        *,
        first: Sequence[Range] = (),
        piece_bytes: int | None = None,
    ) -> None:
        self._client = client
        self._staging = staging
        self._stream = stream
        self._todo = deque(_cut(areas, piece_bytes or piece_bytes_for(staging), first))
        self._running: deque[_Copy] = deque()

    @property
    def waiting(self) -> bool:
        """Pieces have not been queued yet."""
        return bool(self._todo)

    @property
    def copied(self) -> bool:
        """All pieces have left the slot: it may be released."""
        return not self._todo and not self._running

    def start(self, max_bytes: int) -> int:
        """Queue copies while there is room, at least one piece if ``max_bytes`` is above 0; bytes queued."""
        num_bytes = 0
        while self._todo and num_bytes < max_bytes:
            segment, start, source = self._todo[0]
            offset = self._client.allocate(source.numel())
            if offset is None:
                break
            if offset + source.numel() > self._staging.numel():  # beyond the pinned part: the copy would wait
                self._client.release(offset)
                break
            self._todo.popleft()
            event = self._launch(source, self._staging[offset : offset + source.numel()])
            self._running.append(_Copy((segment, start, offset, source.numel()), event))
            num_bytes += source.numel()
        return num_bytes

    def collect(self, send: Callable[[list[Piece], bool], None]) -> bool:
        """Hand over what has arrived; does not wait.

        Args:
            send: called with pieces whose bytes are complete, about ``PIECE_BYTES`` together so that the writer gives
                them back soon, and whether they are the slot's last ones.

        Returns:
            Whether anything had arrived.
        """
        arrived: list[Piece] = []
        num_bytes, moved = 0, False
        while self._running and (self._running[0].event is None or self._running[0].event.query()):
            piece = self._running.popleft().piece
            if arrived and num_bytes + piece[3] > PIECE_BYTES:
                send(arrived, False)
                arrived, num_bytes = [], 0
            arrived.append(piece)
            num_bytes += piece[3]
            moved = True
        if arrived:
            send(arrived, self.copied)
        return moved

    def cancel(self) -> None:
        """Queue nothing more; what is under way arrives."""
        self._todo.clear()

    def abandon(self) -> None:
        """Wait for copies under way and give their memory back."""
        self._todo.clear()
        for copy in self._running:
            if copy.event is not None:
                copy.event.synchronize()
            self._client.release(copy.piece[2])
        self._running.clear()

    def _launch(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        with torch.no_grad():
            if self._stream is None:
                target.copy_(source)
                return None
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
                return event


def piece_bytes_for(staging: torch.Tensor) -> int:
    """A quarter of the staging memory, so that copies and the writer overlap, and ``PIECE_BYTES`` at most."""
    return max(ALIGNMENT_BYTES, min(PIECE_BYTES, staging.numel() // 4 // ALIGNMENT_BYTES * ALIGNMENT_BYTES))


def _cut(
    areas: Iterable[tuple[int, torch.Tensor]], piece_bytes: int, first: Sequence[Range]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(segment, offset, bytes) of each piece, those that touch ``first`` before the others."""
    pieces = [
        (segment, start, area[start : start + piece_bytes])
        for segment, area in areas
        for start in range(0, area.numel(), piece_bytes)
    ]
    suspect = {
        (segment, at) for segment, start, stop in first for at in range(start // piece_bytes, -(-stop // piece_bytes))
    }
    yield from sorted(pieces, key=lambda piece: (piece[0], piece[1] // piece_bytes) not in suspect)


def staging_tensor(client: WriterClient) -> torch.Tensor:
    """The staging arena as a uint8 CPU tensor that shares its memory."""
    return torch.frombuffer(client.staging, dtype=torch.uint8)


def pin(staging: torch.Tensor, num_bytes: int) -> int:
    """Page-lock the first ``num_bytes`` of the arena for copies from CUDA, once, or as much as the driver lets; waits.

    Returns:
        Bytes that are locked; 0 if the driver refused.
    """
    num_bytes = min(num_bytes, staging.numel())
    pinned.populate(staging, num_bytes)
    while num_bytes and not pinned.register(staging, num_bytes):
        num_bytes = num_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if num_bytes < _LEAST_PINNED_BYTES:
            return 0
    return num_bytes


def unpin(staging: torch.Tensor) -> None:
    """Undo ``pin``."""
    pinned.unregister(staging.data_ptr())
