"""Experts of a grouped product in the ring: rows of their own, beside the record of all."""

from __future__ import annotations

import pytest
import torch
from rules_support import DEVICES

from flightrec.records import Key, Representation, Statistic
from flightrec.ring.ring import Ring

KEY = Key("moe", "activation", microbatch=0)


def ring_on(device, **options):
    ring = Ring(device, iterations=2, **({"memory_bytes": 1 << 24} | options))
    ring.begin(0)
    return ring


def numels(ring, tick):
    """NUMEL by part, of the rows that count in a tick."""
    statistics, valid = ring.gather(tick)
    layouts = [ring.layouts[number] for number in ring.index(tick).layout_ids]
    assert all(valid[layout.row] for layout in layouts)
    assert int(valid.sum()) == len(layouts)
    return {layout.key.part: statistics[layout.row, Statistic.NUMEL].item() for layout in layouts}


@pytest.mark.parametrize("device", DEVICES)
def test_each_expert_has_a_row_in_every_iteration(device):
    ring = ring_on(device)
    x = torch.randn(20, 8, device=device)
    for tick, splits in enumerate([[3, 0, 10], [0, 20, 0], [1, 2, 3], [0, 0, 0], [20, 0, 0], [6, 6, 6]]):
        if tick:
            ring.begin(tick)
        counts = torch.tensor(splits, device=device)
        ring.record(KEY, high_precision=x, splits=counts)
        ring.record(Key("fc", "activation", microbatch=0), high_precision=x)
        ring.join()
        ring.commit()
        assert numels(ring, tick) == {f"expert.{n}": 8 * count for n, count in enumerate(splits)} | {"": 160.0}
        statistics, _ = ring.gather(tick)
        whole = ring.layouts[ring.index(tick).layout_ids[0]]
        assert statistics[whole.row, Statistic.NUMEL] == 8 * sum(splits)  # the rest is padding
        assert whole.representation is Representation.HIGH_PRECISION
        assert whole.num_bytes == x.nbytes
        ring.advance(tick)
    kinds = {layout.representation for layout in ring.layouts if layout.key.part}
    assert kinds == {Representation.STATISTICS}


def test_a_second_call_and_a_part_have_rows_of_their_own():
    ring = ring_on("cpu")
    x, splits = torch.randn(4, 8), torch.tensor([1, 3])
    for key in (KEY, KEY, Key("moe", "activation", "x", microbatch=0), Key("moe", "activation", microbatch=1)):
        ring.record(key, high_precision=x, splits=splits)
    ring.commit()
    keys = [ring.layouts[number].key for number in ring.index(0).layout_ids]
    assert len({ring.layouts[number].row for number in ring.index(0).layout_ids}) == len(set(keys)) == 12
    assert {key.part for key in keys} == {"", "x", "expert.0", "expert.1", "x.expert.0", "x.expert.1"}
    assert sum(key.call == 1 for key in keys) == 3


def test_rows_stay_together_across_blocks():
    ring = ring_on("cpu")
    x = torch.randn(400, 4)
    ring.record(Key("a", "activation"), high_precision=x)
    for number in range(3):
        ring.record(Key(f"moe.{number}", "activation"), high_precision=x, splits=torch.ones(200, dtype=torch.int64))
    ring.record(Key("huge", "activation"), high_precision=x, splits=torch.ones(5000, dtype=torch.int64))
    ring.commit()
    statistics, valid = ring.gather(0)
    for number in range(3):
        rows = [layout.row for layout in ring.layouts if layout.key.layer == f"moe.{number}" and layout.key.part]
        assert rows == list(range(rows[0], rows[0] + 200))
        assert valid[rows].all()
        assert statistics[rows, Statistic.NUMEL].tolist() == [4.0] * 200
    huge = [layout.row for layout in ring.layouts if layout.key.layer == "huge" and layout.key.part]
    assert statistics[huge, Statistic.NUMEL].tolist() == [4.0] * 400 + [0.0] * 4600


def test_another_number_of_experts_or_a_name_that_is_taken_leaves_the_experts_out_and_says_so():
    ring = ring_on("cpu")
    x = torch.randn(4, 8)
    ring.record(KEY, high_precision=x, splits=torch.tensor([1, 3]))
    assert ring.without_experts == set()
    ring.commit()
    ring.advance(0)
    ring.begin(1)
    ring.record(KEY, high_precision=x, splits=torch.tensor([1, 1, 2]))
    assert numels(ring, 1) == {"": 32.0}
    ring.record(Key("own", "gradient", "expert.1"), high_precision=x)
    ring.record(Key("own", "gradient"), high_precision=x, splits=torch.tensor([1, 3]))
    assert ring.without_experts == {("moe", "activation"), ("own", "gradient")}
    ring.advance(1)
    ring.begin(2)
    ring.record(Key("moe", "activation", "expert.0", microbatch=0), high_precision=x)
    ring.record(KEY, high_precision=x, splits=torch.tensor([1, 3]))
    assert numels(ring, 2) == {"expert.0": 32.0, "": 32.0}


def test_memory_that_runs_out_takes_the_bytes_and_not_the_experts():
    ring = ring_on("cpu", memory_bytes=4096)
    ring.record(KEY, high_precision=torch.randn(4000, 8), splits=torch.tensor([1000, 500]))
    ring.commit()
    assert numels(ring, 0) == {"": 12000.0, "expert.0": 8000.0, "expert.1": 4000.0}
