"""The host tier's memory, made ready piece by piece while training runs.

For copies from CUDA each piece has its pages given by the kernel first, on a thread of our own that makes no CUDA call
(page faults are most of the time that page-locking takes), and is page-locked then by the training thread, one piece a
step. A copy never crosses two pieces: each is a registration of its own. On the CPU the memory is there at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import torch

from flightrec.kernels import pinned
from flightrec.writer.host_memory import HostMemory

logger = logging.getLogger("flightrec")

PIECE_BYTES = 64 << 20
"""What one step page-locks."""


class HostGrowth:
    """See the module.

    Attributes:
        tensor: uint8 [n] on the CPU, the data of the memory.
        ready_bytes: what may be used, from the start.
        problem: why it grows no further, or empty.

    Args:
        memory: of the tier.
        lock: page-locks the memory of a CPU tensor, and says whether that went well; None: nothing is to be locked.
        unlock: undoes it for an address.
    """

    def __init__(
        self,
        memory: HostMemory,
        lock: Callable[[torch.Tensor, int], bool] | None,
        unlock: Callable[[int], None] = pinned.unregister,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.tensor = torch.frombuffer(memory.data, dtype=torch.uint8)
        self.ready_bytes = 0 if lock is not None else self.tensor.numel()
        self.problem = ""
        self._memory = memory
        self._lock, self._unlock = lock, unlock
        self._piece_bytes = piece_bytes
        self._given_bytes = 0  # pages are there; written by the thread
        self._stop = False
        self._locked: list[int] = []
        self._thread: threading.Thread | None = None
        if lock is not None:
            self._thread = threading.Thread(target=self._give_pages, name="flightrec-host-tier", daemon=True)
            self._thread.start()

    def advance(self) -> bool:
        """Page-lock the next piece if its pages are there; the training thread's, once a step. Whether it grew."""
        total = self.tensor.numel()
        if self._lock is None or self.problem or self.ready_bytes >= total:
            return False
        end = min(self.ready_bytes + self._piece_bytes, total)
        if self._given_bytes < end:
            return False
        piece = self.tensor[self.ready_bytes : end]
        if not self._lock(piece, piece.numel()):
            self._give_up(f"page-locking ended at {self.ready_bytes} of {total} bytes")
            return False
        self._locked.append(piece.data_ptr())
        self.ready_bytes = end
        return True

    def split(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """``[start, end)`` of the data in parts that lie in one piece each."""
        while start < end:
            stop = min(end, (start // self._piece_bytes + 1) * self._piece_bytes)
            yield start, stop
            start = stop

    def close(self) -> None:
        """Unlock all. No copy may be under way."""
        self._stop = True
        if self._thread is not None:
            self._thread.join()
        for address in self._locked:
            self._unlock(address)
        self._locked.clear()

    def _give_pages(self) -> None:
        total = self.tensor.numel()
        while self._given_bytes < total and not self._stop:
            length = min(self._piece_bytes, total - self._given_bytes)
            try:
                os.posix_fallocate(self._memory.fd, self._memory.data_start + self._given_bytes, length)
            except OSError as error:  # the descriptor was closed, or the machine has no memory left
                if not self._stop:
                    self._give_up(f"the kernel gives no more memory than {self._given_bytes} of {total} bytes: {error}")
                return
            self._given_bytes += length

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        logger.warning("flightrec: ring.host_memory: %s; the host tier stays at what it has", problem)


def growth_for(memory: HostMemory, device: torch.device) -> HostGrowth:
    """The growth for copies from ``device``."""
    return HostGrowth(memory, pinned.register if device.type == "cuda" else None)
