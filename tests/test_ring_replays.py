"""Replays against lists: places, microbatches, order and counts, with a graph that is a list of launches on the CPU."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ring_ring import key, parts_of, step, stored

from flightrec.kernels import replays as words_of
from flightrec.records import Representation, Statistic
from flightrec.ring.replays import DEFAULT_REPLAYS, _insert
from flightrec.ring.ring import Ring
from flightrec.ring.turns import NO_TURNS


class Graph:
    """What a captured CUDA graph does, on the CPU: the same launches again, on the same memory."""

    def __init__(self, ring, names, microbatches=(0,), shape=(4, 8), expert_splits=None, turns=None, keys=None):
        self.ring, self.inputs, self._launches = ring, [], []
        turns = turns or dict.fromkeys(names, NO_TURNS)
        num_units = max((turn.num_units for turn in turns.values()), default=0)
        self.captured = ring._replays.open_graph(
            ring._tick, ring.slots, ring._num_microbatches, nullcontext, num_units
        )  # fmt: skip
        self.captured.on_replay = None
        records = ring._graph_records
        for microbatch in microbatches:
            for name in names:
                x = torch.zeros(shape)
                recorded = records.add(
                    self.captured, keys[name] if keys else key(name, microbatch=microbatch), x, None,
                    frozenset({"high_precision"}), expert_splits, nullcontext, turns[name],
                )  # fmt: skip
                self.inputs.append(x)
                self._launches.append((recorded, x))
        self._splits = expert_splits

    def replay(self, value, *, seen=True):
        """One replay with inputs of its own; ``seen``: the host sees it launched."""
        for number, x in enumerate(self.inputs):
            x.fill_(value + number)
        if seen:
            self.ring._on_replay(self.captured)
        self.captured.begin(words_of.reference)
        for recorded, x in self._launches:
            self.ring._graph_records.launch(self.captured, recorded, x, None, None, self._splits)


def end(ring, tick, **more):
    """``step``, and the verdict read at once."""
    step(ring, tick, **more)
    return ring.take_replays(tick)


def contents(ring, slot, layout):
    return torch.frombuffer(bytearray(stored(ring, slot, layout)["high_precision"]), dtype=torch.float32)


def layouts(ring, tick):
    return [ring.layouts[number] for number in ring.index(tick).layout_ids]


def test_every_replay_fills_its_own_place_between_the_records_around_it():
    ring = Ring("cpu", iterations=2, graph_replays=3)
    ring.begin(0)
    graph = Graph(ring, ["a", "b"])
    for tick in range(5):
        for microbatch in range(3):
            ring.record(key("before", microbatch=microbatch), high_precision=torch.ones(2))
            graph.replay(100 * tick + 10 * microbatch)
            ring.record(key("after", microbatch=microbatch), high_precision=torch.ones(2))
        values, valid = (None, None) if tick == 0 else ring.gather(tick)
        found = end(ring, tick)
        assert found.num_microbatches == 3
        assert not found.dropped
        seen = [(one.key.layer, one.key.microbatch) for one in layouts(ring, tick)]
        assert seen == [(name, m) for m in range(3) for name in ("before", "a", "b", "after")]
        slot = ring.slots.decode(ring.slots.state).slot_of(tick)
        for layout in layouts(ring, tick):
            if layout.key.layer in "ab":
                expected = 100 * tick + 10 * layout.key.microbatch + (layout.key.layer == "b")
                assert (contents(ring, slot, layout) == expected).all()
                if values is not None:
                    assert valid[layout.row]
                    assert values[layout.row, Statistic.AMAX] == expected
        if valid is not None:
            assert int(valid.sum()) == 12


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 3))
def test_random_replays_are_found_where_they_were_made(seed, num_graphs, num_replays):
    """Several graphs, any number of replays, unseen ones, held slots, eager records between."""
    choose = random.Random(seed)
    ring = Ring("cpu", iterations=choose.randint(1, 3), graph_replays=num_replays, memory_bytes=64 << 20)
    ring.begin(0)
    graphs = [Graph(ring, [f"g{number}.a", f"g{number}.b"]) for number in range(num_graphs)]
    kept: dict[int, list[tuple[str, int, float]]] = {}
    value = 0.0
    for tick in range(8):
        made, counts = [], Counter()
        for _ in range(choose.randint(0, 3 * num_graphs)):
            number = choose.randrange(num_graphs)
            value += 10
            graphs[number].replay(value, seen=choose.random() < 0.8)
            if counts[number] < num_replays:
                made += [(f"g{number}.{name}", counts[number], value + at) for at, name in enumerate("ab")]
            counts[number] += 1
            ring.record(key("eager", microbatch=len(made)), high_precision=torch.full((3,), value))
        found = end(ring, tick, fired=choose.random() < 0.2)
        too_many = [number for number in counts if counts[number] > num_replays]
        assert {layer for layer, _ in found.dropped} <= {f"g{number}.a" for number in too_many}
        here = layouts(ring, tick)
        replayed = [one for one in here if one.key.layer != "eager"]
        assert sorted((one.key.layer, one.key.microbatch) for one in replayed) == sorted(m[:2] for m in made)
        assert [one.key.layer for one in here].count("eager") == sum(counts.values())
        kept[tick] = made
        state = ring.slots.decode(ring.slots.state)
        for old, expected in kept.items():
            slot = state.slot_of(old)
            if slot is not None:
                by_key = {(one.key.layer, one.key.microbatch): one for one in layouts(ring, old)}
                for layer, microbatch, number in expected:
                    assert (contents(ring, slot, by_key[layer, microbatch]) == number).all()


def test_a_microbatch_that_was_not_replayed_keeps_a_key_of_its_own():
    ring = Ring("cpu", iterations=2, graph_replays=2)
    ring.begin(0)
    graph = Graph(ring, ["a", "b"])
    num_layouts = []
    for tick in range(5):
        if tick != 2:  # a first microbatch of another shape runs eagerly
            ring.record(key("a"), high_precision=torch.full((3,), -1.0))
        graph.replay(10)
        graph.replay(20)
        end(ring, tick)
        here = layouts(ring, tick)
        assert len({one.key for one in here}) == len(here) == (4 if tick == 2 else 5)
        slot = ring.slots.decode(ring.slots.state).slot_of(tick)
        found = [(one.key.layer, one.key.microbatch, one.key.call, contents(ring, slot, one)[0].item()) for one in here]
        eager, call = ([("a", 0, 0, -1)], 1) if tick != 2 else ([], 0)
        assert found == [*eager, ("a", 0, call, 10), ("b", 0, 0, 11), ("a", 1, 0, 20), ("b", 1, 0, 21)]
        num_layouts.append(len(ring.layouts))
    assert num_layouts[0] == num_layouts[-1], "nothing new, tick by tick"


def test_a_replay_too_many_is_counted_told_once_and_harms_nothing():
    ring = Ring("cpu", iterations=1, graph_replays=2)
    ring.begin(0)
    graph = Graph(ring, ["a"])
    told = []
    for tick, count in enumerate((2, 5, 4, 6)):
        for replay in range(count):
            graph.replay(10 * tick + replay)
        found = end(ring, tick)
        told.append([reason for _, reason in found.dropped])
        slot = ring.slots.decode(ring.slots.state).slot_of(tick)
        assert [contents(ring, slot, one)[0].item() for one in layouts(ring, tick)] == [10 * tick, 10 * tick + 1]
    assert [len(reasons) for reasons in told] == [0, 1, 0, 1]
    assert "replayed 5 times in an iteration, and 2 have a place" in told[1][0]
    assert "ring.graph_replays: 5" in told[1][0]
    assert ring._replays.num_dropped == 3 + 2 + 4


def test_a_graph_for_each_microbatch_and_a_graph_of_several():
    ring = Ring("cpu", iterations=1, graph_replays=2)
    ring.begin(0)
    ordered = [Graph(ring, ["a"], microbatches=(number,)) for number in (4, 5, 6)]  # as the sources had counted on
    whole = Graph(ring, ["whole"], microbatches=(7, 8))
    for graph in ordered:
        graph.replay(0)
    whole.replay(0)
    whole.replay(0)
    assert end(ring, 0).num_microbatches == 4
    seen = [(one.key.layer, one.key.microbatch) for one in layouts(ring, 0)]
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("whole", 0), ("whole", 1), ("whole", 2), ("whole", 3)]


def test_the_rules_know_a_replay_before_its_iteration_ends():
    known = []
    ring = Ring("cpu", iterations=1, graph_replays=4, on_layout=known.append)
    ring.begin(0)
    graph = Graph(ring, ["a"])
    assert known == []
    graph.replay(1)
    graph.replay(2)
    assert [one.key.microbatch for one in known] == [0, 1]
    assert known[0].row != known[1].row
    assert ring.has_records(0)
    end(ring, 0)
    assert not ring.has_records(1)
    graph.replay(1)
    end(ring, 1)
    assert len(known) == 2


def test_nothing_that_a_graph_points_to_moves_when_the_first_iteration_ends():
    ring = Ring("cpu", iterations=3, graph_replays=2)
    ring.begin(0)
    graph = Graph(ring, ["a"])
    ring.record(key("eager"), high_precision=torch.ones(1000))
    recorded = graph.captured.records[0]
    rows = recorded.rows
    graph.replay(3)
    end(ring, 0)
    ring.record(key("more"), high_precision=torch.ones(9))
    ring.record(key("eager"), high_precision=torch.ones(1000))
    graph.replay(4)
    values, valid = ring.gather(1)
    assert int(valid.sum()) == 3
    assert values[rows.first_row, Statistic.AMAX] == 4
    assert end(ring, 1).num_microbatches == 1
    assert valid.shape[0] == ring._registry.statistics.num_allocated_rows


@pytest.mark.parametrize(("asked", "num_replays"), [(None, DEFAULT_REPLAYS), (2, 2)])
def test_what_does_not_fit_is_kept_as_statistics_with_the_reason(asked, num_replays):
    ring = Ring("cpu", iterations=1, graph_replays=asked, memory_bytes=1 << 20)
    ring.begin(0)
    large = Graph(ring, ["large"], shape=(1 << 20,))
    assert ring._replays.virtual.num_replays == num_replays
    (template,) = large.captured.records[0].templates
    assert template.representation is Representation.STATISTICS
    assert f"{num_replays} replays" in template.reason
    assert "ring.graph_replays" in template.reason
    large.replay(7)
    end(ring, 0)
    assert [one.representation for one in layouts(ring, 0)] == [Representation.STATISTICS]


def test_the_number_of_replays_comes_from_the_microbatches_seen_and_from_what_fits():
    ring = Ring("cpu", iterations=1)
    ring.begin(0)
    for microbatch in range(3):
        ring.record(key("eager", microbatch=microbatch), high_precision=torch.ones(4))
    end(ring, 0)
    Graph(ring, ["a"])
    assert ring._replays.virtual.num_replays == 3

    ring = Ring("cpu", iterations=1, after=1, latency=2, memory_bytes=100 << 20)  # 5 slots
    ring.begin(0)
    ring.record(key("eager"), high_precision=torch.ones(1 << 20))  # 4 MiB
    Graph(ring, ["a"])
    assert ring._replays.virtual.num_replays == 4


def test_memory_of_graphs_counts_and_is_read_for_replays_that_there_were():
    ring = Ring("cpu", iterations=1, graph_replays=4, memory_bytes=64 << 20)
    ring.begin(0)
    before = ring._registry.segments.memory_bytes
    graph = Graph(ring, ["a"], shape=(100, 100))
    assert before - ring._registry.segments.memory_bytes == ring._replays.num_bytes > 40_000 * 4 * 5
    graph.replay(1)
    graph.replay(2)
    end(ring, 0)
    sizes = [area.numel() for number, area in ring.read_slot(0) if number >= 1 << 20]
    assert sizes == [40_192, 40_192]
    assert "1 captured CUDA graphs" in ring.summary()


def test_experts_of_a_replay_have_rows_of_their_own():
    ring = Ring("cpu", iterations=1, graph_replays=2)
    ring.begin(0)
    graph = Graph(ring, ["moe"], shape=(6, 4), expert_splits=torch.tensor([2, 3]))
    end(ring, 0)
    graph.replay(5)
    graph.replay(6)
    values, valid = ring.gather(1)
    end(ring, 1)
    found = [(one.key.part, one.key.microbatch, values[one.row, Statistic.NUMEL].item()) for one in layouts(ring, 1)]
    assert found == [
        (part, replay, size) for replay in range(2) for part, size in (("", 20), ("expert.0", 8), ("expert.1", 12))
    ]
    assert int(valid.sum()) == 6


def test_more_room_than_replays_is_told_once_when_a_second_iteration_has_shown_it():
    for asked, most, told in ((None, 1, True), (None, DEFAULT_REPLAYS, False), (4, 1, False)):
        ring = Ring("cpu", iterations=1, graph_replays=asked, memory_bytes=64 << 20)
        ring.begin(0)
        graph = Graph(ring, ["a"])
        advice = []
        for tick in range(5):
            for _ in range(most if tick in (1, 2, 4) else 0):
                graph.replay(1)
            advice.append(end(ring, tick).advice)
        assert [bool(text) for text in advice] == [False, False, told, False, False]
        if told:
            assert "Set ring.graph_replays: 1, which frees" in advice[2]
            assert "no CUDA graph is replayed more than 1 times" in advice[2]


def test_quantized_records_of_a_graph():
    ring = Ring("cpu", iterations=1, graph_replays=2)
    ring.begin(0)
    graph = Graph(ring, [])
    x = torch.linspace(-3, 3, 64).reshape(8, 8)
    parts = parts_of(x)
    records = ring._graph_records
    keep = frozenset({"high_precision", "quantized"})
    recorded = records.add(graph.captured, key("fc1"), x, parts, keep, None, nullcontext)
    again = records.add(graph.captured, key("fc1"), x, parts, keep, None, nullcontext)
    assert again.key.call == 1
    ring._on_replay(graph.captured)
    graph.captured.begin(words_of.reference)
    for one in (recorded, again):
        records.launch(graph.captured, one, x, parts, None, None)
    end(ring, 0)
    first, second = layouts(ring, 0)
    assert (first.key.call, second.key.call) == (0, 1)
    assert first.representation is Representation.BOTH
    kept = stored(ring, 0, second)
    assert kept["high_precision"] == x.numpy().tobytes()
    assert kept["data"] == parts.components["data"].view(torch.uint8).numpy().tobytes()


def test_order():
    ids = [1, 2, 3]
    _insert(ids, [(1, 5, [10]), (1, 2, [11, 12]), (3, 9, [13]), (0, 1, [14])])
    assert ids == [14, 1, 11, 12, 10, 2, 3, 13]
