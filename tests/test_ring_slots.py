"""The slot table against a list of slots."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_support import DEVICES

from flightrec.ring.slots import TABLE_SIZE, SlotTable


@dataclass
class ListedSlots:
    """What the table shall do, in plain Python."""

    num_slots: int
    iterations: int
    after: int
    first_tick: int

    def __post_init__(self):
        self.slots = [[-1, False] for _ in range(self.num_slots)]
        self.slots[0][0] = self.first_tick
        self.hold_until = -1
        self.table = {self.first_tick: 0}

    def advance(self, tick, fired, release):
        for slot, (held_tick, _) in enumerate(self.slots):
            if release is not None and release[slot] == held_tick:
                self.slots[slot][1] = False
        if fired:
            self.hold_until = max(self.hold_until, tick + self.after)
            for slot in self.slots:
                if slot[0] >= 0 and tick - self.iterations < slot[0] <= tick:
                    slot[1] = True
        for slot in self.slots:
            if slot[0] == tick and self.hold_until >= tick:
                slot[1] = True
        free = [(held_tick, number) for number, (held_tick, held) in enumerate(self.slots) if not held]
        chosen = min(free)[1] if free else self.num_slots
        if free:
            self.slots[chosen][0] = tick + 1
        self.table[tick + 1] = chosen


def assert_equal(table, model, tick):
    state = table.decode(table.state.cpu())
    assert list(state.slot_tick) == [held_tick for held_tick, _ in model.slots]
    assert list(state.held) == [held for _, held in model.slots]
    assert state.hold_until == model.hold_until
    for known in range(max(model.first_tick, tick + 2 - TABLE_SIZE), tick + 2):
        assert state.table[known % TABLE_SIZE] == model.table[known]
        assert table.tick_entry(known).tolist() == [known]
        assert table.table_entry(known).tolist() == [model.table[known]]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_histories(device, data):
    iterations, after = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    num_slots = iterations + after + data.draw(st.integers(1, 3))
    first = data.draw(st.sampled_from([0, 7, 1000]))
    table = SlotTable(torch.device(device), num_slots, iterations=iterations, after=after, first_tick=first)
    model = ListedSlots(num_slots, iterations, after, first)
    for tick in range(first, first + data.draw(st.integers(1, 30))):
        fired, asked = data.draw(st.sampled_from([None, False, True])), data.draw(st.sampled_from([None, False, True]))
        release = None
        if data.draw(st.booleans()):
            ticks = [held_tick for held_tick, _ in model.slots]
            release = [data.draw(st.sampled_from([-1, held_tick, held_tick - 1])) for held_tick in ticks]
        table.advance(
            tick,
            None if fired is None else torch.tensor(fired, device=device),
            None if release is None else torch.tensor(release, device=device),
            None if asked is None else torch.tensor(asked, device=device),
        )
        model.advance(tick, bool(fired) or bool(asked), release)
        assert_equal(table, model, tick)


def quiet(table, ticks):
    for tick in ticks:
        table.advance(tick, None, None, None)


def test_fault_keeps_iterations_up_to_it_and_after():
    table = SlotTable(torch.device("cpu"), 6, iterations=3, after=1, first_tick=0)
    quiet(table, range(10))
    table.advance(10, torch.tensor(True), None, None)
    quiet(table, range(11, 20))
    state = table.decode(table.state)
    held = {tick for tick, holds in zip(state.slot_tick, state.held, strict=True) if holds}
    assert held == {8, 9, 10, 11}
    assert state.slot_of(8) is not None
    assert state.slot_of(12) is None
    assert state.slot_of(-1) is None


def test_everything_held_sends_the_next_tick_to_scrap_until_a_release():
    table = SlotTable(torch.device("cpu"), 2, iterations=1, after=1, first_tick=0)
    table.advance(0, torch.tensor(True), None, None)
    table.advance(1, None, None, None)
    assert table.table_entry(2).tolist() == [2]
    assert table.decode(table.state).slot_of(2) is None
    table.advance(2, None, torch.tensor([0, -1]), None)
    assert table.table_entry(3).tolist() == [0]


def test_first_tick_is_held_when_it_fires():
    table = SlotTable(torch.device("cpu"), 4, iterations=4, after=0, first_tick=0)
    table.advance(0, torch.tensor(True), None, None)
    assert table.decode(table.state).held == (True, False, False, False)


def test_a_release_of_an_older_tick_leaves_the_slot_held():
    table = SlotTable(torch.device("cpu"), 3, iterations=1, after=0, first_tick=5)
    table.advance(5, torch.tensor(True), None, None)
    table.advance(6, None, torch.tensor([4, -1, -1]), None)
    assert table.decode(table.state).held[0]
    table.advance(7, None, torch.tensor([5, -1, -1]), None)
    assert not table.decode(table.state).held[0]


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_algorithms_are_enough(device):
    torch.use_deterministic_algorithms(True)
    try:
        table = SlotTable(torch.device(device), 4, iterations=2, after=1, first_tick=0)
        model = ListedSlots(4, 2, 1, 0)
        for tick in range(8):
            table.advance(tick, torch.tensor(tick == 3, device=device), None, None)
            model.advance(tick, tick == 3, None)
            assert_equal(table, model, tick)
    finally:
        torch.use_deterministic_algorithms(False)
