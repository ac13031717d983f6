"""A slot's way into staging memory: cut into pieces, what is suspect first, as much as there is room for."""

from __future__ import annotations

import pytest
import torch

from flightrec.flush.staging import SlotCopy, _cut, piece_bytes_for, staging_tensor
from flightrec.writer.arena import Arena

MIB = 1 << 20


class Memory:
    """The part of ``WriterClient`` that hands out staging memory."""

    def __init__(self, num_bytes: int) -> None:
        self.staging = memoryview(bytearray(num_bytes))
        self.arena = Arena(num_bytes)
        self.allocate, self.release = self.arena.allocate, self.arena.release


@pytest.fixture
def memory():
    return Memory(4 * MIB)


def areas(*sizes: int) -> list[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (segment, torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
        for segment, size in enumerate(sizes)
    ]


def test_pieces_cover_every_byte_once_and_suspect_ones_come_first():
    source = areas(10_000, 0, 4096, 20_000)
    pieces = list(_cut(source, 4096, [(3, 9_000, 13_000), (0, 8_192, 8_193), (7, 0, 1)]))
    assert [(segment, start) for segment, start, _ in pieces[:3]] == [(0, 8192), (3, 8192), (3, 12288)]
    for segment, area in source:
        mine = sorted((start, view) for number, start, view in pieces if number == segment)
        assert [start for start, _ in mine] == list(range(0, len(area), 4096))
        assert torch.equal(torch.cat([view for _, view in mine] or [area]), area)


def test_a_slot_larger_than_the_memory_goes_as_memory_is_given_back(memory):
    source = areas(9 * MIB + 5, 3 * MIB)
    copy = SlotCopy(memory, staging_tensor(memory), source, None)
    arrived = {segment: bytearray(area.numel()) for segment, area in source}
    ends, messages = [], []

    def send(pieces, last):
        messages.append(pieces)
        ends.append(last)

    for _ in range(20):
        copy.start(64 * MIB)
        assert memory.arena.used_bytes <= 4 * MIB
        copy.collect(send)
        for segment, start, offset, num_bytes in (piece for pieces in messages for piece in pieces):
            arrived[segment][start : start + num_bytes] = memory.staging[offset : offset + num_bytes]
            memory.release(offset)
        messages.clear()
        if copy.copied:
            break
    assert copy.copied and not copy.waiting
    assert ends[-1] and not any(ends[:-1])
    assert all(bytes(arrived[segment]) == area.numpy().tobytes() for segment, area in source)


def test_no_more_than_asked_for_is_begun(memory):
    copy = SlotCopy(memory, staging_tensor(memory), areas(4 * MIB), None, piece_bytes=MIB)
    assert copy.start(MIB) == MIB
    assert copy.start(0) == 0
    assert copy.waiting
    copy.cancel()
    assert not copy.copied
    assert copy.collect(lambda pieces, last: None)
    assert copy.copied


def test_beyond_the_usable_part_nothing_is_begun_and_abandoned_memory_returns(memory):
    copy = SlotCopy(memory, staging_tensor(memory)[: 2 * MIB], areas(4 * MIB), None, piece_bytes=MIB)
    assert copy.start(64 * MIB) == 2 * MIB
    assert memory.arena.used_bytes == 2 * MIB
    copy.abandon()
    assert memory.arena.used_bytes == 0
    assert copy.copied


@pytest.mark.parametrize(("num_bytes", "expected"), [(4096, 4096), (4 * MIB, MIB), (1 << 40, 64 * MIB)])
def test_pieces_leave_room_for_copies_beside_the_writer(num_bytes, expected):
    assert piece_bytes_for(torch.empty(num_bytes, dtype=torch.uint8, device="meta")) == expected
