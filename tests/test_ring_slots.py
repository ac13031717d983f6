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


class DelayedHost:
    """Asks for the release of each held tick some ticks after it saw it held; the same delay, whatever the table."""

    def __init__(self, table, delays):
        self.table, self.delays, self.seen = table, delays, {}

    def release(self, tick):
        for held in held_ticks(self.table):
            self.seen.setdefault(held, tick + self.delays[held % len(self.delays)])
        state = self.table.decode(self.table.state)
        due = {held for held, when in self.seen.items() if when == tick}
        return torch.tensor([held if held in due else -1 for held in state.slot_tick])


def held_ticks(table):
    state = table.decode(table.state)
    return {tick for tick, held in zip(state.slot_tick, state.held, strict=True) if held}


@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_choosing_before_the_verdict_keeps_what_choosing_after_it_keeps(overlap, data):
    """``turn`` with one slot more than ``advance``, under random faults and releases that come late.

    A fault before which nothing was held for a while finds all N, and the iterations beyond it, in either order. While
    faults overlap, slots are short in either order: what is held stays, and the faulty tick is had if it had a slot.
    """
    iterations, after = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    num_slots, first = iterations + after + data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 1000]))
    known = SlotTable(torch.device("cpu"), num_slots, iterations=iterations, after=after, first_tick=first)
    ahead = SlotTable(torch.device("cpu"), num_slots + 1, iterations=iterations, after=after, first_tick=first)
    delays = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    hosts = DelayedHost(known, delays), DelayedHost(ahead, delays)
    num_ticks = data.draw(st.integers(1, 40))
    faults = data.draw(st.sets(st.integers(0, num_ticks), max_size=12))
    in_order = data.draw(st.sets(st.integers(0, num_ticks), max_size=8))
    num_quiet = num_slots + 2  # nothing is held in a new table
    for tick in range(first, first + num_ticks):
        releases = [host.release(tick) for host in hosts]
        kept = held_ticks(ahead) - set(releases[1].tolist())
        recent = set(range(max(first, tick - iterations + 1), tick + 1))
        num_quiet = 0 if kept else num_quiet + 1
        is_quiet = num_quiet > num_slots + 1
        hold = torch.tensor(tick - first in faults and (overlap or is_quiet))
        current = ahead.current_slot().item()
        known.advance(tick, hold, releases[0], None)
        if tick - first in in_order:  # a tick that is judged in order, between ticks that are judged beside
            ahead.advance(tick, hold, releases[1], None)
        else:
            ahead.turn(releases[1])
            ahead.hold_closed(hold)
        state, other = ahead.decode(ahead.state), known.decode(known.state)
        assert kept <= held_ticks(ahead)
        assert int(ahead.tick) == tick + 1
        assert ahead.tick_entry(tick + 1).tolist() == [tick + 1]
        assert ahead.current_slot().tolist() == ahead.table_entry(tick + 1).tolist()
        if hold and current < ahead.num_slots:
            assert state.slot_tick[current] == tick
            assert state.held[current]
        if hold and is_quiet:
            assert recent <= held_ticks(ahead)
        if not overlap:
            assert held_ticks(ahead) == held_ticks(known)
            assert {number for number in other.slot_tick if number >= 0} <= set(state.slot_tick)
