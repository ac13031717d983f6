"""The host tier's table and data, as trainer and writer see them."""

from __future__ import annotations

import os

import numpy as np
import pytest
from writer_support import make_layouts

from flightrec.records import NUM_STATISTICS
from flightrec.writer.host_memory import MAX_RANGES, HostMemory, Range, buffers_of, extent_bytes, records_bytes


@pytest.fixture
def memory():
    made = HostMemory.create(1 << 20)
    yield made
    made.close()


def test_the_other_side_sees_an_iteration_only_while_it_is_whole(memory):
    other = HostMemory.attach(os.dup(memory.fd))
    ranges = [Range(0, 256, 512, 4096), Range(3, 0, 256, 4608)]
    memory.describe(7, np.arange(5, dtype=np.int32), 8192, ranges)
    memory.statistics(7)[:] = np.arange(5 * NUM_STATISTICS).reshape(5, -1)
    memory.data[4096:4100] = b"abcd"
    assert other.find(3) is None
    memory.complete(7, 3)
    assert other.find(3) == ranges
    assert other.ids(7).tolist() == [0, 1, 2, 3, 4]
    assert other.statistics(7)[4, 0] == 4 * NUM_STATISTICS
    assert bytes(other.data[4096:4100]) == b"abcd"
    assert other.find(0) is None and other.find(2) is None
    memory.clear(7)
    assert other.find(3) is None
    other.close()


def test_an_iteration_without_records_or_bytes_is_one(memory):
    memory.describe(0, np.empty(0, np.int32), 0, [])
    memory.complete(0, 0)
    assert memory.find(0) == []
    assert memory.ids(0).size == memory.statistics(0).size == records_bytes(0) == 0


def test_as_many_ranges_as_promised_fit(memory):
    ranges = [Range(number, 0, 1, number) for number in range(MAX_RANGES)]
    for entry in (0, 1):
        memory.describe(entry, np.empty(0, np.int32), 0, ranges)
        memory.complete(entry, entry)
    assert memory.find(0) == memory.find(1) == ranges


def test_a_foreign_memory_is_refused():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="host tier: magic 0x0, version 0; this writer needs"):
        HostMemory.attach(fd)
    os.close(fd)


def test_a_records_bytes_are_found_in_the_range_that_holds_all_of_them(memory):
    layout = make_layouts(3)[1]
    extent = extent_bytes(layout)
    assert layout.offset_bytes > 0 and extent >= layout.num_bytes > 0
    whole = Range(layout.segment, layout.offset_bytes - 64, extent + 64, 5000)
    for number in range(extent):
        memory.data[5064 + number] = number % 251
    buffers = buffers_of(layout, [Range(layout.segment + 1, 0, 1 << 19, 0), whole], memory.data)
    assert buffers is not None
    for component, buffer in zip(layout.components, buffers, strict=True):
        expected = [(component.offset_bytes + number) % 251 for number in range(component.num_bytes)]
        assert list(buffer) == expected
    short = whole._replace(num_bytes=whole.num_bytes - 1)
    assert buffers_of(layout, [short], memory.data) is None
