"""Memory of the host tier that becomes ready piece by piece."""

from __future__ import annotations

import os
import time

import pytest
import torch

from flightrec.flush.host_growth import HostGrowth, growth_for
from flightrec.writer.host_memory import HostMemory

PIECE = 64 << 10


@pytest.fixture
def memory():
    made = HostMemory.create(4 * PIECE + 4096)
    yield made
    made.close()


def advance(growth, times):
    """Steps until it grew so many times."""
    deadline = time.monotonic() + 30
    while times and time.monotonic() < deadline:
        times -= growth.advance()
        time.sleep(0.001)
    assert times == 0


def test_each_step_locks_one_piece_whose_pages_are_there(memory):
    locked, unlocked = [], []

    def lock(piece, num_bytes):
        held_bytes = os.fstat(memory.fd).st_blocks * 512
        assert held_bytes >= growth.ready_bytes + num_bytes  # no page fault is left to the training thread
        locked.append((piece.data_ptr(), num_bytes))
        return True

    growth = HostGrowth(memory, lock, unlocked.append, PIECE)
    assert growth.ready_bytes == 0
    for number in range(1, 6):
        advance(growth, 1)
        assert growth.ready_bytes == min(number * PIECE, 4 * PIECE + 4096)
    assert not growth.advance()
    base = growth.tensor.data_ptr()
    assert locked == [(base + number * PIECE, PIECE) for number in range(4)] + [(base + 4 * PIECE, 4096)]
    growth.close()
    assert unlocked == [address for address, _ in locked]


def test_it_stays_at_what_it_has_when_the_driver_refuses(memory, caplog):
    growth = HostGrowth(memory, lambda piece, _: piece.data_ptr() == growth.tensor.data_ptr(), lambda _: None, PIECE)
    advance(growth, 1)
    deadline = time.monotonic() + 30
    while not growth.problem and time.monotonic() < deadline:
        assert not growth.advance()
    assert growth.ready_bytes == PIECE
    assert "page-locking ended at 65536 of 266240 bytes" in growth.problem
    assert caplog.text.count("stays at what it has") == 1
    growth.close()


def test_no_part_of_a_copy_crosses_two_pieces(memory):
    growth = growth_for(memory, torch.device("cpu"))
    assert growth.ready_bytes == growth.tensor.numel() == 4 * PIECE + 4096
    growth = HostGrowth(memory, None, piece_bytes=PIECE)
    assert list(growth.split(100, 200)) == [(100, 200)]
    assert list(growth.split(PIECE - 1, 3 * PIECE)) == [(PIECE - 1, PIECE), (PIECE, 2 * PIECE), (2 * PIECE, 3 * PIECE)]
    assert list(growth.split(5, 5)) == []
    growth.close()
