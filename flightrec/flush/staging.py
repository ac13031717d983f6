"""Held slots on their way to the writer: copies into shared staging memory, one slot at a time.

Training thread. On CUDA the copies run on a side stream of our own into memory pinned beforehand and nothing waits for
them; on the CPU a copy is a ``memcpy`` of one slot a step. Makes no CUDA call unless there is something to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flightrec.kernels import pinned
from flightrec.writer.client import WriterClient

Segment = tuple[int, int, int]
"""Segment index, staging offset, bytes."""


@dataclass(slots=True)
class _Copy:
    segment: Segment
    event: torch.cuda.Event | None


class SlotCopy:
    """The copy of one slot into staging memory, in as many pieces as there is room for.

    Attributes:
        dropped: segments that no staging memory could ever hold.

    Args:
        client: gives the memory.
        staging: the usable part of the arena as a uint8 CPU tensor.
        pieces: (segment, uint8 tensor on the ring's device) of the slot.
        stream: side stream on CUDA, ``None`` on the CPU.
    """

    def __init__(
        self,
        client: WriterClient,
        staging: torch.Tensor,
        pieces: Iterator[tuple[int, torch.Tensor]],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._client = client
        self._staging = staging
        self._stream = stream
        self._todo = list(pieces)
        self.dropped = [segment for segment, source in self._todo if source.numel() > staging.numel()]
        self._todo = [(segment, source) for segment, source in self._todo if segment not in self.dropped]
        self._running: list[_Copy] = []

    @property
    def copied(self) -> bool:
        """All pieces have left the slot: it may be released."""
        return not self._todo and not self._running

    def advance(self, send: Callable[[list[Segment], bool], None]) -> bool:
        """Queue copies while there is room, and hand over what has arrived.

        Args:
            send: called with segments whose bytes are complete, and whether they are the slot's last ones.

        Returns:
            Whether anything moved.
        """
        moved = self._start()
        arrived: list[Segment] = []
        while self._running and (self._running[0].event is None or self._running[0].event.query()):
            arrived.append(self._running.pop(0).segment)
        if arrived:
            send(arrived, self.copied)
        return moved or bool(arrived)

    def abandon(self) -> None:
        """Wait for copies under way and give their memory back."""
        for copy in self._running:
            if copy.event is not None:
                copy.event.synchronize()
            self._client.release(copy.segment[1])
        self._running.clear()
        self._todo.clear()

    def _start(self) -> bool:
        moved = False
        while self._todo:
            segment, source = self._todo[0]
            offset = self._client.allocate(source.numel())
            if offset is None:
                break
            if offset + source.numel() > self._staging.numel():  # beyond the pinned part: the copy would wait
                self._client.release(offset)
                break
            self._todo.pop(0)
            target = self._staging[offset : offset + source.numel()]
            event = None
            with torch.no_grad():
                if self._stream is None:
                    target.copy_(source)
                else:
                    with torch.cuda.stream(self._stream):
                        target.copy_(source, non_blocking=True)
                        event = torch.cuda.Event()
                        event.record(self._stream)
            self._running.append(_Copy((segment, offset, source.numel()), event))
            moved = True
        return moved


def staging_tensor(client: WriterClient) -> torch.Tensor:
    """The staging arena as a uint8 CPU tensor that shares its memory."""
    return torch.frombuffer(client.staging, dtype=torch.uint8)


def pin(staging: torch.Tensor, num_bytes: int) -> int:
    """Page-lock the first ``num_bytes`` of the arena for copies from CUDA, once; waits.

    Returns:
        Bytes that are locked; 0 if the driver refused.
    """
    num_bytes = min(num_bytes, staging.numel())
    return num_bytes if num_bytes and pinned.register(staging, num_bytes) else 0


def unpin(staging: torch.Tensor) -> None:
    """Undo ``pin``."""
    pinned.unregister(staging.data_ptr())
