"""Which ranges of the ring an iteration is copied from."""

from __future__ import annotations

import itertools

from writer_support import make_layouts

from flightrec.flush.host_plan import SMALLEST_GAP_BYTES, WISHED_RANGES, Plans, merged
from flightrec.writer.host_memory import extent_bytes, records_bytes


def test_spans_are_joined_over_small_holes_only():
    far = SMALLEST_GAP_BYTES + 101
    spans = [(0, 0, 100), (0, 100, 200), (0, 300, 400), (0, 400 + far, 500 + far), (1, 0, 50), (1, 10, 20)]
    assert merged(spans) == [(0, 0, 400), (0, 400 + far, 500 + far), (1, 0, 50)]


def test_many_spans_are_joined_over_larger_holes_but_never_across_segments():
    step = 4 * SMALLEST_GAP_BYTES
    spans = [(segment, number * step, number * step + 1) for segment in range(2) for number in range(100)]
    joined = merged(spans)
    assert len(joined) <= WISHED_RANGES
    for segment, start, end in spans:
        assert any(s == segment and a <= start and end <= b for s, a, b in joined)
    many = [(segment, 0, 1) for segment in range(3 * WISHED_RANGES)]
    assert merged(many) == many


def test_a_plan_covers_the_records_of_an_iteration_and_no_others():
    layouts = make_layouts(6)
    plans = Plans(layouts)
    plan = plans.of([4, 1])
    assert plan is plans.of([4, 1]) is not plans.of([1, 4])
    assert plan.ids.tolist() == [4, 1]
    assert plan.rows.tolist() == [layouts[4].row, layouts[1].row]
    for number in plan.ids:
        layout = layouts[number]
        assert any(
            segment == layout.segment
            and start <= layout.offset_bytes
            and layout.offset_bytes + extent_bytes(layout) <= start + length
            for segment, start, length, _ in plan.ranges
        )
    places = sorted((offset, offset + length) for _, _, length, offset in plan.ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert plan.records_offset >= places[-1][1]
    assert plan.records_offset % 8 == 0
    assert plan.num_bytes == plan.records_offset + records_bytes(2)
