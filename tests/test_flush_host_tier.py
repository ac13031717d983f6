"""The host tier of a ring on the CPU: how deep it is, what it drops, what it gives up last."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flightrec.flush.history import TickInfo
from flightrec.flush.host_tier import HostTier
from flightrec.flush.verdicts import VerdictView
from flightrec.records import NUM_STATISTICS, Key, Statistic
from flightrec.ring.ring import Ring
from flightrec.writer.host_memory import HostMemory, buffers_of

NUMEL = 3000


class Run:
    """A ring that records two tensors a tick, and its tier."""

    def __init__(self, memory_bytes: int, *, older: int = 0, iterations: int = 2) -> None:
        self.ring = Ring("cpu", iterations=iterations, memory_bytes=1 << 24)
        self.memory = HostMemory.create(memory_bytes)
        self.failures: list[Exception] = []
        self.tier = HostTier(
            self.ring, self.memory, older=older, on_failure=lambda _, error: self.failures.append(error)
        )
        self.tick = 0
        self.ring.begin(0)

    def step(self, count: int = 1, *, numel: int = NUMEL, is_good: bool = True, paused: bool = False, spoil=None):
        for _ in range(count):
            tick, ring = self.tick, self.ring
            for layer in ("a", "b"):
                ring.record(Key(layer, "output"), high_precision=torch.full((numel,), tick + 0.25 * (layer == "b")))
            ring.commit()
            statistics, _ = ring.gather(tick)
            ring.advance(tick)
            view = VerdictView(tick, ring.slots.state.double().numpy().copy(), statistics.numpy())
            ids = ring.index(tick).layout_ids
            self.tick += 1
            ring.begin(self.tick)
            self.tier.advance()
            if spoil is not None:
                spoil(tick)
            self.tier.on_verdict(view, TickInfo(tick, 0, tick), ids, is_good=is_good, paused=paused)

    def check(self, tick: int) -> None:
        """Every byte and statistic of a tick is what was recorded."""
        kept, ranges = self.tier.get(tick), self.memory.find(tick)
        assert kept is not None and ranges is not None and kept.info.tick == tick
        assert len(kept.layout_ids) == 2
        for number, rows in zip(kept.layout_ids, kept.statistics, strict=True):
            layout = self.ring.layouts[number]
            expected = tick + 0.25 * (layout.key.layer == "b")
            (buffer,) = buffers_of(layout, ranges, self.memory.data)
            stored = np.frombuffer(buffer, np.float32)
            assert stored.shape == layout.shape and (stored == expected).all()
            assert rows[Statistic.AMAX] == expected


@pytest.fixture
def runs():
    made: list[Run] = []

    def make(*args, **options):
        made.append(Run(*args, **options))
        return made[-1]

    yield make
    for run in made:
        run.tier.close()
        run.memory.close()
        assert not run.failures


def test_it_holds_the_newest_iterations_that_fit_and_wraps_around(runs):
    run = runs(5 * 28_672)  # an iteration: 2 x 12 000 bytes and two rows, in pages of 4 096
    run.step(3)
    assert run.tier.ticks == [0, 1, 2]
    run.step(40)
    assert run.tier.ticks == [38, 39, 40, 41, 42]
    for tick in run.tier.ticks:
        run.check(tick)
    assert run.memory.find(37) is None and run.tier.get(37) is None
    assert run.tier.told() == ""
    assert "5 iterations of" in run.tier.summary() and "no landmarks" in run.tier.summary()


def test_landmarks_outlive_what_wraps_around(runs):
    run = runs(12 * 28_672)
    run.step(400)
    (landmark,) = [tick for tick in run.tier.choose(before=395, now=399) if run.tier.landmark(tick, 399)]
    assert run.tier.landmark(landmark, 399) == 100 and 250 <= landmark <= 299
    run.check(landmark)
    newest = run.tier.ticks[-6:]
    assert newest == list(range(394, 400))


def test_a_tick_in_which_a_rule_fired_is_no_landmark(runs):
    run = runs(12 * 28_672)
    run.step(1, is_good=False)
    run.step(1)
    run.step(148)
    assert run.tier.get(0) is None
    assert run.tier.landmark(1, 149) == 100


def test_an_incident_gets_the_newest_older_ones_and_the_landmarks(runs):
    run = runs(30 * 28_672, older=3)
    run.step(220)
    assert run.tier.choose(before=217, now=219) == [100, 214, 215, 216]
    assert run.tier.choose(before=217, now=219, more=2) == [100, 212, 213, 214, 215, 216]


def test_what_an_incident_needs_is_not_overwritten_until_it_is_done(runs):
    run = runs(5 * 28_672)
    run.step(5)
    run.tier.hold(1, 1)
    run.tier.hold(2, 1)
    run.tier.hold(1, 3)
    run.step(20)
    assert run.tier.ticks == [1, 3, 22, 23, 24]
    run.check(1)
    run.check(3)
    run.tier.release(1)
    run.step(20)
    assert run.tier.ticks == [1, 41, 42, 43, 44]
    run.tier.release(2)
    run.tier.release("not an incident")
    run.step(20)
    assert run.tier.ticks == [60, 61, 62, 63, 64]
    for tick in (60, 61, 62, 63, 64):
        run.tier.hold(3, tick)
    run.step(2)
    assert run.tier.ticks == [60, 61, 62, 63, 64]
    assert run.tier.told().startswith("2 of 67 iterations were not copied to the host tier: 2 because open incidents")


def test_what_is_dropped_is_counted_by_reason(runs, caplog):
    caplog.set_level("INFO", logger="flightrec")
    run = runs(5 * 28_672)
    run.step(4)
    run.step(2, paused=True)
    run.step(1)
    assert run.tier.ticks == [0, 1, 2, 3, 6]
    assert run.tier.told() == ""  # every incident leaves some out: that is nothing to tell in each
    assert run.tier.summary().endswith("2 of 7 left out: 2 because an incident was being copied")
    assert caplog.text.count("was not copied to the host tier") == 1
    run.step(2, numel=40 * NUMEL)
    told = "2 of 9 iterations were not copied to the host tier: 2 because ring.host_memory does not hold one of them"
    assert run.tier.told() == told
    assert caplog.text.count("was not copied to the host tier") == 2


def test_an_iteration_that_the_tier_can_never_hold_is_dropped_and_the_rest_goes_on(runs):
    run = runs(5 * 28_672)
    run.step(2)
    run.step(1, numel=40 * NUMEL)
    run.step(1)
    assert run.tier.ticks == [0, 1, 3]
    assert run.tier.told().endswith("1 because ring.host_memory does not hold one of them")


def test_a_slot_that_was_overwritten_while_it_was_copied_is_not_kept(runs):
    """The device gives the slot away before the copy ends: the word that is copied last tells."""
    run = runs(5 * 28_672)
    run.step(3)

    def overwrite(tick):
        slot = run.ring.slots.decode(run.ring.slots.state).slot_of(tick)
        for _, area in run.ring.read_slot(slot):
            area.zero_()
        run.ring.slots.slot_tick[slot] = tick + 4

    run.step(1, spoil=overwrite)
    assert run.tier.ticks == [0, 1, 2] and run.memory.find(3) is None
    assert run.tier.told().endswith("1 because their slot was overwritten while it was copied")
    run.step(3)
    assert run.tier.ticks[-3:] == [4, 5, 6]


def test_changing_sizes_never_mix_iterations_up(runs):
    run = runs(9 * 28_672)
    for round_ in range(30):
        run.step(3)
        run.step(2, numel=NUMEL * (1 + round_ % 3))
    assert run.tier.num_iterations >= 3
    for tick in run.tier.ticks:
        kept, ranges = run.tier.get(tick), run.memory.find(tick)
        for number in kept.layout_ids:
            layout = run.ring.layouts[number]
            (buffer,) = buffers_of(layout, ranges, run.memory.data)
            assert (np.frombuffer(buffer, np.float32) == tick + 0.25 * (layout.key.layer == "b")).all()


def test_after_a_failure_it_copies_no_more_and_keeps_what_it_has(runs, monkeypatch):
    run = runs(5 * 28_672)
    run.step(3)

    def dead(*_):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Ring, "read_slot", dead)
    run.step(3)
    assert [str(error) for error in run.failures] == ["CUDA error"]
    run.failures.clear()
    assert run.tier.ticks == [0, 1, 2]
    run.check(2)


def test_statistics_alone_are_an_iteration_too(runs):
    run = runs(1 << 20)
    run.ring.record(Key("c", "output"), high_precision=torch.ones(4), keep=frozenset())
    run.ring.commit()
    statistics, _ = run.ring.gather(0)
    run.ring.advance(0)
    view = VerdictView(0, run.ring.slots.state.double().numpy(), statistics.numpy())
    ids = run.ring.index(0).layout_ids
    run.tier.on_verdict(view, TickInfo(0, 0, 0), ids, is_good=True, paused=False)
    kept = run.tier.get(0)
    assert kept is not None and run.memory.find(0) == []
    assert kept.statistics.shape == (1, NUM_STATISTICS) and kept.statistics[0, Statistic.AMAX] == 1
