from __future__ import annotations

import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key, statistics_row

from flightrec.config.training_rules import UnchangedParametersRule

WEIGHT = key("fc", "parameter")


def fires(run: Run, sums) -> list[bool]:
    return [bool(run.fired({WEIGHT: healthy(sum=float(value))})) for value in sums]


def test_a_parameter_that_stops_fires_once():
    run = Run([UnchangedParametersRule(min_samples=3, consecutive=4)])
    assert fires(run, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]) == [False] * 7 + [True] + [False] * 2


def test_a_frozen_parameter_is_silent():
    run = Run([UnchangedParametersRule(min_samples=1, consecutive=1)])
    assert not any(fires(run, [1] * 50))


def test_skipped_steps_at_the_start_are_silent():
    run = Run([UnchangedParametersRule()])
    assert not any(fires(run, [0] * 24 + list(range(20)) + [20] * 32))


def test_any_of_the_statistics_may_tell_a_change():
    run = Run([UnchangedParametersRule(min_samples=1, consecutive=1)])
    for name in ("sum", "sum_of_squares", "amax"):
        assert not any(run.fired({WEIGHT: healthy(**{name: 2.0 + number})}) for number in range(5))
    assert run.fired({WEIGHT: healthy(amax=6.0)}) == {WEIGHT}


class Plain(PlainSeries):
    known, run, changes = None, 0, 0

    def judge(self, values):
        if not values:
            return False, set()
        now = tuple(sum(found[name] for found in values.values()) for name in ("sum", "sum_of_squares", "amax"))
        before, self.known = self.known, now
        same = now == before
        self.run = self.run + 1 if same else 0
        self.changes += before is not None and not same
        return True, set(
            values
        ) if same and self.run >= self.rule.consecutive and self.changes >= self.rule.min_samples else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = UnchangedParametersRule(tensors="activation", consecutive=1 + seed, min_samples=1 + seed, rearm=1 + seed % 2)

    def draw(generator):
        if generator.random() < 0.1:
            return None
        return healthy(sum=float(generator.random() < 0.15), amax=float(generator.random() < 0.05))

    proof = compare(
        rule, Plain, draw, device=device, seed=seed, keys=lambda number: [key(f"layer.{number}", microbatch=0)]
    )
    assert proof.tells


def test_sentence():
    run = Run([UnchangedParametersRule()])
    assert run.evaluator.explain(0, WEIGHT, 32.0, 32.0, statistics_row(healthy())) == (
        "parameter of fc (microbatch 0, forward) has not changed in 32 samples in a row, though it used to"
    )


def test_an_expert_that_is_left_alone_is_silent_and_all_of_them_are_not():
    run = Run([UnchangedParametersRule(min_samples=3, consecutive=4)])
    names = [key(f"experts.{number}.w1", "parameter") for number in range(2)]
    for tick in range(5):
        assert run.fired({name: healthy(sum=float(tick)) for name in names}) == set()
    for tick in range(40):
        assert run.fired({names[0]: healthy(sum=float(tick)), names[1]: healthy(sum=4.0)}) == set()
    fired = [run.fired({names[0]: healthy(sum=39.0), names[1]: healthy(sum=4.0)}) for _ in range(5)]
    assert fired == [set()] * 3 + [set(names), set()]
