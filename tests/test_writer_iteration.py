from __future__ import annotations

import pytest
from writer_support import make_layouts, statistics

from flightrec.records import NUM_STATISTICS
from flightrec.storage.facts import Blind
from flightrec.writer.iteration import NOT_STAGED, Iteration, component_buffers, component_parts

HEADER = {
    "attempt": 2,
    "iteration": 30,
    "tick": 5,
    "num_microbatches": 2,
    "loss": None,
    "partial": False,
    "blind": "",
    "metrics": {},
    "tier": "ring",
    "landmark": 0,
}


@pytest.fixture
def iteration():
    result = Iteration(HEADER)
    layouts = make_layouts(6)
    result.append(HEADER, layouts[:4], statistics(0, 4))
    result.append(HEADER | {"partial": True}, layouts[4:], statistics(0, 6)[4:])
    return result


def test_pieces_become_one_iteration_with_the_newest_header(iteration):
    facts = iteration.freeze(first_record=100)
    assert (facts.attempt, facts.iteration, facts.tick, facts.partial) == (2, 30, 5, True)
    assert facts.statistics[:, 5].tolist() == [n / 1024 for n in range(6)]
    assert iteration.by_segment == {0: [0, 1, 2, 3, 4, 5]}
    assert [iteration.record_of(layout.key) for layout in make_layouts(7)] == [100, 101, 102, 103, 104, 105, -1]


def test_an_iteration_without_records(iteration):
    empty = Iteration(HEADER)
    facts = empty.freeze(3)
    assert facts.statistics.shape == (0, NUM_STATISTICS)
    assert empty.missing("why") == []


def test_missing_names_the_iteration_or_its_tensors(iteration):
    iteration.freeze(0)
    assert iteration.missing("why") == [Blind(2, 30, "", "", "why")]
    iteration.written = {0, 1, 2, 4}
    rows = [Blind(2, 30, f"layers.{n}.fc", "activation", "why") for n in (1, 2)]
    assert iteration.missing("why") == rows
    iteration.complete = True
    assert {row.reason for row in iteration.missing("why")} == {NOT_STAGED}
    iteration.written = set(range(6))
    assert iteration.missing("why") == []


def test_an_iteration_that_was_blind_keeps_its_own_reason(iteration):
    iteration.header = HEADER | {"blind": "no slot was free"}
    iteration.freeze(0)
    assert iteration.missing("why") == [Blind(2, 30, "", "", "no slot was free")]


def test_component_buffers_lie_inside_the_area():
    layout = make_layouts(2)[1]
    data = bytes(range(256)) * 4
    buffers = component_buffers(layout, memoryview(data))
    assert [bytes(buffer) for buffer in buffers] == [data[512:768], data[768:896], data[896:900]]
    assert component_buffers(layout, memoryview(data)[:900]) is not None
    assert component_buffers(layout, memoryview(data)[:899]) is None


def test_records_that_touch_a_range_and_their_parts(iteration):
    iteration.freeze(0)
    assert list(iteration.touching(0, 0, 512)) == [0]
    assert list(iteration.touching(0, 511, 513)) == [0, 1]
    assert list(iteration.touching(0, 700, 1600)) == [1, 2, 3]
    assert list(iteration.touching(3, 0, 512)) == []
    layout = make_layouts(2)[1]  # at 512: 256 bytes, 128, 4
    data = bytes(range(256)) * 4
    parts = [
        part
        for start, stop in [(0, 600), (600, 800), (800, 1024)]
        for part in component_parts(layout, memoryview(data)[start:stop], start)
    ]
    assert [(number, start, view.nbytes) for number, start, view in parts] == [
        (0, 0, 88), (0, 88, 168), (1, 0, 32), (1, 32, 96), (2, 0, 4),
    ]  # fmt: skip
    assert b"".join(view for _, _, view in parts) == data[512:900]
    whole = component_buffers(layout, memoryview(data)[500:900], 500)
    assert b"".join(whole) == data[512:900]
    assert component_buffers(layout, memoryview(data)[513:900], 513) is None
