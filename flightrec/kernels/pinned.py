"""Page-locked host memory of our own, for copies between device and host that nobody waits for.

Not torch's pinned tensors: their allocator records an event when one is freed, which throws out of a destructor once
the CUDA context is dead, and ends the process in the middle of the user's own traceback.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import Any

import torch

logger = logging.getLogger("flightrec")

_PAGE_BYTES = mmap.PAGESIZE


def register(memory: torch.Tensor, num_bytes: int) -> bool:
    """Page-lock the first ``num_bytes`` of a CPU tensor's memory; waits, about 0.8 s a GiB.

    Returns:
        False if the driver refused: copies then run at the speed of pageable memory, and wait.
    """
    code = int(_cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if code != 0:
        logger.warning(
            "flightrec: page-locking %d bytes of host memory failed (CUDA error %d); copies of evidence will wait. "
            "Raise the limit of locked memory (ulimit -l).",
            num_bytes,
            code,
        )
    return code == 0


def unregister(address: int) -> None:
    """Undo ``register``; an error (of a dead context) does not matter any more."""
    _cudart().cudaHostUnregister(address)


class HostBuffer:
    """Host memory for copies from ``device``: page-locked for CUDA, plain otherwise.

    Attributes:
        tensor: uint8 [at least num_bytes] on the CPU; valid as long as the buffer.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        size = max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES
        self._memory = mmap.mmap(-1, size)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        if device.type == "cuda" and register(self.tensor, size):
            weakref.finalize(self, unregister, self.tensor.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()
