from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, key, loss, statistics_row

from flightrec.config.rules import LossJumpRule
from flightrec.config.training_rules import LossDriftRule
from flightrec.records import NO_MICROBATCH

LOSS = key("", "loss", NO_MICROBATCH)


def noisy(generator, level: float) -> float:
    return level * (1 + 0.02 * generator.standard_normal())


@pytest.mark.parametrize("seed", range(3))
def test_a_climb_from_2_5_to_7_5_over_500_iterations_fires_where_a_jump_does_not(seed):
    generator = np.random.default_rng(seed)
    run = Run([LossDriftRule(), LossJumpRule()])
    for _ in range(200):
        verdict = run.tick({LOSS: loss(noisy(generator, 2.5))})
        assert not verdict.any.item()
    fired = []
    for number in range(500):
        verdict = run.tick({LOSS: loss(noisy(generator, 2.5 + number / 100))})
        fired.append(verdict.fired.any(1).tolist())
    at = [number for number, (drift, _) in enumerate(fired) if drift]
    assert len(at) == 1
    assert at[0] < 150
    assert not any(jump for _, jump in fired)


def test_a_falling_or_steady_noisy_loss_is_silent():
    generator = np.random.default_rng(1)
    run = Run([LossDriftRule()])
    for number in range(1500):
        level = 2.0 + 8.0 * np.exp(-number / 200)
        assert run.fired({LOSS: loss(level * (1 + 0.1 * generator.standard_normal()))}) == set()


def test_it_is_silent_until_it_knows_enough_medians():
    run = Run([LossDriftRule(window=4, history=16, min_samples=8, sigma=0)])
    fired = [bool(run.fired({LOSS: loss(1.1**number)})) for number in range(20)]
    assert fired.index(True) == 4 - 1 + 8


def test_a_negative_loss_that_rises_counts_as_well():
    run = Run([LossDriftRule(window=4, history=32, min_samples=8, sigma=0)])
    assert not any(run.fired({LOSS: loss(-2.0)}) for _ in range(20))
    assert [bool(run.fired({LOSS: loss(-1.6)})) for _ in range(4)] == [False, True, False, False]


class Plain(PlainSeries):
    def __init__(self, rule) -> None:
        super().__init__(rule)
        self.values: deque[float] = deque(maxlen=rule.window)
        self.medians: deque[float] = deque(maxlen=rule.history)

    def judge(self, values):
        if not values:
            return False, set()
        losses = {seen: found["sum"] if np.isfinite(found["amax"]) else np.nan for seen, found in values.items()}
        mean = float(np.mean(list(losses.values())))
        if not np.isfinite(mean):
            return False, set()
        self.values.append(mean)
        faulty = False
        if len(self.values) == self.rule.window:
            median = float(np.median(self.values))
            if len(self.medians) >= self.rule.min_samples:
                smallest = min(self.medians)
                error = float(np.std(self.values)) * np.sqrt(np.pi / 2 / self.rule.window)
                reach = max((self.rule.factor - 1) * abs(smallest), self.rule.sigma * error)
                faulty = median > smallest + reach
            self.medians.append(median)
        return True, {max(losses, key=lambda seen: losses[seen])} if faulty else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = LossDriftRule(window=3 + seed % 4, history=8 + seed, min_samples=4, rearm=2, factor=1.25, sigma=0.3 * seed)

    def draw(generator):
        if generator.random() < 0.15:
            return None
        value = generator.choice([1.0, 1.3, 2.0, -1.0]) + 0.1 * generator.standard_normal()
        return loss(float(np.nan if generator.random() < 0.05 else value))

    def keys(number):
        return [key(f"head.{number}", "loss", microbatch) for microbatch in range(2)]

    assert compare(rule, Plain, draw, device=device, seed=seed, keys=keys).tells


def test_sentence():
    run = Run([LossDriftRule()])
    assert run.evaluator.explain(0, LOSS, 2.7, 2.625, statistics_row(loss(2.8))) == (
        "loss (loss) has drifted up: the median of its last 64 samples is 2.7, above 2.625: beyond 1.05 times the "
        "smallest such median of the 1024 samples before, and beyond its noise"
    )
