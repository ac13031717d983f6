"""Turns of replays: what is left out writes nothing and is in no index; what the host told holds for the next tick."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ring_replays import Graph, contents, end, layouts

from flightrec.records import Statistic
from flightrec.ring import turns
from flightrec.ring.ring import Ring
from flightrec.ring.turns import Turn


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3))
def test_a_replay_records_the_units_that_the_host_told(seed, num_replays):
    """Random turns, graphs that share units, records without turns, experts, graphs captured in between."""
    choose = random.Random(seed)
    ring = Ring("cpu", iterations=2, graph_replays=num_replays, memory_bytes=64 << 20)
    ring.begin(0)
    graphs: list[tuple[Graph, dict[str, Turn]]] = []
    state = [True] * 6
    value = 0.0
    for tick in range(8):
        if choose.random() < 0.4 or not graphs:
            picked = choose.sample(range(-1, 6), choose.randint(1, 5))
            own = {f"g{len(graphs)}.{unit}": Turn(unit, state[unit] if unit >= 0 else True, 6) for unit in picked}
            splits = torch.tensor([1, 3]) if choose.random() < 0.3 else None
            graphs.append((Graph(ring, list(own), expert_splits=splits, turns=own), own))
        made = {}
        for graph, own in graphs:
            for replay in range(choose.randint(0, num_replays)):
                value += 10
                graph.replay(value, seen=choose.random() < 0.8)
                for number, (name, turn) in enumerate(own.items()):
                    if turn.unit < 0 or state[turn.unit]:
                        made[name, replay] = value + number
        if tick:
            values, valid = ring.gather(tick)
        end(ring, tick)
        slot = ring.slots.decode(ring.slots.state).slot_of(tick)
        here = [one for one in layouts(ring, tick) if not one.key.part]
        assert sorted((one.key.layer, one.key.microbatch) for one in here) == sorted(made)
        for one in here:
            assert (contents(ring, slot, one) == made[one.key.layer, one.key.microbatch]).all()
        if tick:
            assert int(valid.sum()) == len(layouts(ring, tick)), "only these have a row"
            assert all(valid[one.row] for one in layouts(ring, tick))
            assert all(values[one.row, Statistic.AMAX] == made[one.key.layer, one.key.microbatch] for one in here)
        state = [choose.random() < 0.6 for _ in state]
        ring.choose_turns(state)


def test_a_unit_that_has_no_turn_at_its_capture_waits_for_one():
    ring = Ring("cpu", iterations=1, graph_replays=1)
    ring.begin(0)
    end(ring, 0)
    own = {"a": Turn(0, False, 2), "b": Turn(1, True, 2)}
    graph = Graph(ring, list(own), turns=own)
    seen = []
    for tick, told in enumerate(([True, False], [True, False], [], [False, False]), start=1):
        graph.replay(tick)
        end(ring, tick)
        seen.append([one.key.layer for one in layouts(ring, tick)])
        ring.choose_turns(told)
    assert seen == [["b"], ["a"], ["a"], ["a", "b"]]


def test_the_table_is_sent_only_when_it_changes_and_copies_in_flight_keep_their_memory():
    made = turns.Turns(torch.device("cpu"))
    groups = made.groups(4)
    for unit in range(3):
        assert made.slot(groups, Turn(unit, True, 4)) is not None
    assert not made.choose([True, True, True])
    for number in range(3 * turns._NUM_COPIES):
        state = [number % 2 == 0, False, number % 3 == 0]
        assert made.choose(state)
        assert made._table[:4].tolist() == [*state, 1]
        assert not made.choose(state)
    assert len(made._copies) == turns._NUM_COPIES


@pytest.mark.parametrize("unit", [turns.ALWAYS, turns.MAX_UNITS, 5])
def test_what_has_no_room_is_recorded_always(unit):
    made = turns.Turns(torch.device("cpu"))
    groups = made.groups(1)
    assert made.slot(groups, Turn(4, False, 1)).tolist() == [-1, -1]
    assert made.slot(groups, Turn(unit, False, 1)) is None
    assert made.state == [True] * 4 + [False]
    assert groups.words.units.tolist() == [1, 4]
    assert made._table[:6].tolist() == [1, 1, 1, 1, 0, 1]
