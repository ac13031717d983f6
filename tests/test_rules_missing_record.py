from __future__ import annotations

import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key, statistics_row

from flightrec.config.training_rules import MissingRecordRule
from flightrec.records import Phase

GONE, STAYS = key("gone", "gradient"), key("stays", "gradient")


def fires(run: Run, present) -> list[bool]:
    return [bool(run.fired({STAYS: healthy()} | ({GONE: healthy()} if there else {}))) for there in present]


def test_a_gradient_that_no_longer_comes_fires_once():
    run = Run([MissingRecordRule(min_samples=3, consecutive=4)])
    assert fires(run, [1] * 3 + [0] * 9) == [False] * 7 + [True] + [False] * 4


def test_it_is_named_and_told_for_how_long():
    run = Run([MissingRecordRule(min_samples=1, consecutive=2)])
    fires(run, [1, 0, 0])
    verdict = run.tick({STAYS: healthy()})
    assert run.marked(verdict.fired) == {GONE}
    row = run.rows[GONE]
    assert (verdict.value[0, row].item(), verdict.threshold[0, row].item()) == (3.0, 2.0)


def test_every_nth_iteration_and_rotation_are_silent():
    for every in (2, 10, 50):
        run = Run([MissingRecordRule(min_samples=2)])
        first = [number % every == 0 for number in range(2 * every + 1)]
        assert not any(fires(run, first[:2] + first)) or every > 16
        assert not any(fires(run, (number % every == every - 1 for number in range(6 * every))))


def test_a_tensor_that_came_only_once_or_twice_is_silent():
    run = Run([MissingRecordRule()])
    assert not any(fires(run, [1, 1] + [0] * 60))


def test_turns_that_it_did_not_get_do_not_count():
    run = Run([MissingRecordRule(min_samples=2, consecutive=2, factor=1)])
    run.tick({STAYS: healthy(), GONE: healthy()}, left_out=[])
    for round_length in (1, 40, 3, 200, 1, 90):
        for turn in range(1, round_length + 1):
            present = {STAYS: healthy()} | ({GONE: healthy()} if turn == round_length else {})
            assert not run.fired(present, left_out=[] if turn == round_length else [GONE])


def test_a_turn_that_came_without_it_counts():
    run = Run([MissingRecordRule(min_samples=1, consecutive=2, factor=1)])
    run.tick({STAYS: healthy(), GONE: healthy()}, left_out=[])
    fired = []
    for tick in range(1, 40):
        its_turn = tick % 10 == 0
        fired.append(run.fired({STAYS: healthy()}, left_out=[] if its_turn else [GONE]))
    assert [tick for tick, found in enumerate(fired, 1) if found] == [30]
    assert fired[29] == {GONE}


def test_evaluation_that_pauses_is_silent():
    run = Run([MissingRecordRule(min_samples=1, consecutive=1)])
    seen = key("x", "gradient", phase=Phase.RECOMPUTE)
    run.tick({seen: healthy()})
    assert not any(run.fired({STAYS: healthy()}) for _ in range(20))


class Plain(PlainSeries):
    gap = longest = count = 0

    def judge(self, values):
        if values:
            self.longest, self.gap, self.count = max(self.longest, self.gap), 0, self.count + 1
            return True, set()
        self.gap += 1
        faulty = self.gap > max(self.rule.consecutive, self.rule.factor * self.longest)
        if not faulty or self.count < self.rule.min_samples:
            return False, set()
        return True, {self.first}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = MissingRecordRule(
        tensors="activation", consecutive=1 + seed % 3, factor=1.0 + 0.3 * (seed % 2), min_samples=1 + seed, rearm=2
    )
    numbers = iter(range(10**6))

    class Named(Plain):
        def __init__(self, rule) -> None:
            super().__init__(rule)
            self.first = key(f"layer.{next(numbers)}")

    def draw(generator):
        return healthy() if generator.random() < 0.4 else None

    proof = compare(rule, Named, draw, device=device, seed=seed, keys=lambda number: [key(f"layer.{number}")])
    assert proof.tells


def test_state_goes_over_a_restart():
    run = Run([MissingRecordRule(min_samples=5, consecutive=3)])
    assert not any(fires(run, [1] * 5 + [0] * 2 + [1]))
    run.restart()
    assert fires(run, [1] + [0] * 9) == [False] * 9 + [True]  # 4 x the longest absence before the restart


def test_sentence():
    run = Run([MissingRecordRule()])
    assert run.evaluator.explain(0, GONE, 17.0, 16.0, statistics_row(healthy())) == (
        "gradient of gone (microbatch 0, forward) has not been recorded for 17 iterations, though it used to be; up to "
        "16 are normal here"
    )


def test_an_expert_is_missed_only_when_its_siblings_are():
    run = Run([MissingRecordRule(min_samples=3, consecutive=4)])
    names = [key(f"blocks.1.experts.{number}.w1", "gradient") for number in range(3)]
    for _ in range(5):
        assert run.fired({name: healthy() for name in (*names, STAYS)}) == set()
    for _ in range(40):
        assert run.fired({names[1]: healthy(), STAYS: healthy()}) == set()
    fired = [run.fired({STAYS: healthy()}) for _ in range(6)]
    assert fired == [set()] * 4 + [set(names), set()]
