"""Page-locked host memory of our own, for copies between device and host that nobody waits for.

Not torch's pinned tensors: their allocator records an event when one is freed, which throws out of a destructor once
the CUDA context is dead, and ends the process in the middle of the user's own traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from typing import Any

import torch

logger = logging.getLogger("flightrec")

_PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
_POPULATE_THREADS = 8
_POPULATE_BYTES = 32 << 20


def populate(memory: torch.Tensor, num_bytes: int) -> None:
    """Have the kernel give the first ``num_bytes`` of a CPU tensor their pages, in several threads; waits for them.

    Most of the time that page-locking takes is this, on one core. Where the kernel cannot (before Linux 5.14),
    nothing happens and page-locking does it. The threads make no CUDA call and hold no lock of Python's.
    """
    address, end = memory.data_ptr(), memory.data_ptr() + num_bytes
    address -= address % -_PAGE_BYTES  # up to a page
    starts = iter(range(address, end - _PAGE_BYTES + 1, _POPULATE_BYTES))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def work() -> None:
        for start in starts:  # one iterator for all: each takes the next part
            length = min(_POPULATE_BYTES, end - start) // _PAGE_BYTES * _PAGE_BYTES
            if madvise(start, length, _MADV_POPULATE_WRITE) != 0:
                return

    num_threads = min(_POPULATE_THREADS, len(os.sched_getaffinity(0)), -(-num_bytes // _POPULATE_BYTES))
    threads = [threading.Thread(target=work, name="flightrec-populate", daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
        _forget_error()
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


def _forget_error() -> None:
    """Take the runtime's note of a refusal, which the next launch of the user's would be blamed for."""
    with contextlib.suppress(RuntimeError):  # this launch is blamed instead, once
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()
