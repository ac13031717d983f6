from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from rules_support import DEVICES, PlainSeries, Run, compare, key, layout_of, loss, statistics_row

from flightrec.config.rules import LossJumpRule
from flightrec.config.training_rules import LossDriftRule
from flightrec.records import NO_MICROBATCH, NUM_STATISTICS, Statistic
from flightrec.rules.evaluate import Evaluator

LOSS = key("", "loss", NO_MICROBATCH)


def fired_at(rules, losses) -> list[np.ndarray]:
    """For each rule, bool [iterations, runs]: judge many runs at once, losses [iterations, runs]."""
    evaluator = Evaluator("cpu", rules)
    num_runs = losses.shape[1]
    for run in range(num_runs):
        evaluator.register(layout_of(key(f"run.{run}", "loss", NO_MICROBATCH), run))
    found = []
    for tick, now in enumerate(losses):
        rows = np.full((num_runs, NUM_STATISTICS), np.nan)
        for name, values in (("NUMEL", 1), ("NAN_COUNT", 0), ("POSITIVE_INF_COUNT", 0), ("NEGATIVE_INF_COUNT", 0)):
            rows[:, Statistic[name]] = values
        rows[:, Statistic.SUM], rows[:, Statistic.AMAX] = now, np.abs(now)
        verdict = evaluator.evaluate(tick, torch.from_numpy(rows), torch.ones(num_runs, dtype=torch.bool))
        found.append(verdict.fired.numpy())
    return list(np.stack(found, axis=1))


def test_a_climb_from_2_5_to_7_5_over_500_iterations_fires_in_12_of_12_seeds_where_a_jump_does_not():
    level = np.concatenate([np.full(200, 2.5), np.linspace(2.5, 7.5, 500)])[:, None]
    noise = np.random.default_rng(0).standard_normal((700, 12))
    drift, jump = fired_at([LossDriftRule(), LossJumpRule()], level * (1 + 0.02 * noise))
    assert not drift[:200].any()
    assert drift[200:350].any(0).all()
    assert (drift.sum(0) == 1).all()
    assert not jump.any()


def test_nothing_fires_in_800_000_healthy_samples():
    """Falling and flat losses, quiet and noisy, normal and heavy-tailed, batches alike or correlated: 400 runs."""
    generator = np.random.default_rng(3)
    num_iterations, num_runs = 2000, 400
    time = np.arange(num_iterations)[:, None]
    run = np.arange(num_runs)
    level = 2.0 + np.where(run % 2, 6.0, 0.0) * np.exp(-time / generator.uniform(50, 1500, num_runs))
    noise = generator.standard_normal((num_iterations, num_runs))
    heavy = np.exp(0.7 * generator.standard_normal((num_iterations, num_runs))) - np.exp(0.245)
    noise = np.where(run % 5 == 4, heavy, noise)
    for number in range(1, num_iterations):
        noise[number, run % 7 == 6] += 0.3 * noise[number - 1, run % 7 == 6]
    share = generator.choice([0.01, 0.03, 0.1, 0.3], num_runs)
    (drift,) = fired_at([LossDriftRule()], level * (1 + share * noise))
    assert drift.size == 800_000
    assert drift.sum() == 0


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
