from __future__ import annotations

import mmap
import os
import platform
from pathlib import Path

import pytest
import torch

from flightrec.kernels import pinned

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 14), reason="needs MADV_POPULATE_WRITE"
)
def test_pages_are_there_before_they_are_touched_and_keep_their_bytes() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 96 * MIB)
    memory = torch.frombuffer(mmap.mmap(descriptor, 96 * MIB), dtype=torch.uint8)
    os.close(descriptor)
    memory[5] = 7
    before = resident_bytes()
    pinned.populate(memory[3:], 70 * MIB)  # from the middle of a page
    assert 69 * MIB <= resident_bytes() - before <= 80 * MIB
    assert memory[5] == 7
    pinned.populate(memory, 0)
