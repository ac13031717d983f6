from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, key, loss, statistics_row

from flightrec.config.rules import LossJumpRule
from flightrec.records import NO_MICROBATCH, Key, Phase, Stage

WHOLE = key("", "loss", NO_MICROBATCH)


def feed(run: Run, values) -> list[bool]:
    return [bool(run.fired({WHOLE: loss(value)})) for value in values]


def test_jump_beyond_six_deviations_fires_once():
    generator = np.random.default_rng(0)
    run = Run([LossJumpRule()])
    assert not any(feed(run, 2.5 + 0.01 * generator.standard_normal(200)))
    assert feed(run, [2.58, 2.58, 2.58]) == [True, False, False]


def test_first_steps_are_silent_whatever_they_bring():
    run = Run([LossJumpRule()])
    assert not any(feed(run, [1, 5, 1e9, -4, 3e38, np.nan, np.inf] + [1.0] * 54 + [1e12]))


def test_f09_benign_arm_flat_loss_is_silent():
    generator = np.random.default_rng(1)
    run = Run([LossJumpRule()])
    assert not any(feed(run, 2.0 + 0.1 * generator.standard_normal(400)))
    assert not any(feed(run, [2.4, 1.6, 2.2, 2.0]))  # +-20 %


def test_f21_eval_loss_five_times_as_high_is_silent_and_no_history():
    run = Run([LossJumpRule(min_samples=4, window=8)])
    for tick in range(40):
        records = {WHOLE: loss(1.0 + 0.001 * (tick % 3))}
        if tick % 2:
            records[key("", "loss", NO_MICROBATCH, Phase.EVAL)] = loss(5.0)
        assert run.fired(records) == set()
    assert run.fired({WHOLE: loss(1.1)}) == {WHOLE}


def test_nan_poisons_nothing():
    run = Run([LossJumpRule(min_samples=4, window=8)])
    assert not any(feed(run, [1.0, 1.1, 0.9, 1.0, np.nan, np.inf, -np.inf, 1.0, np.nan]))
    assert feed(run, [9.0]) == [True]


def test_flat_history_allows_a_tenth_of_a_percent():
    run = Run([LossJumpRule()])
    assert not any(feed(run, [2.0] * 64))
    assert feed(run, [2.0119, 2.0]) == [False, False]
    assert feed(run, [2.02]) == [True]


def test_one_spike_does_not_hide_the_next():
    generator = np.random.default_rng(2)
    run = Run([LossJumpRule(rearm=1)])
    feed(run, 2.5 + 0.01 * generator.standard_normal(128))
    assert feed(run, [2000.0, 2.5, 2.5, 2.9]) == [True, False, False, True]


def test_new_level_is_learnt():
    generator = np.random.default_rng(3)
    run = Run([LossJumpRule()])
    feed(run, 2.5 + 0.01 * generator.standard_normal(128))
    assert sum(feed(run, 7.5 + 0.01 * generator.standard_normal(200))) == 1
    assert feed(run, [30.0]) == [True]


def test_directions():
    quiet = [1.0, 1.1, 0.9, 1.0] * 20
    for direction, up, down in (("up", True, False), ("down", False, True), ("both", True, True)):
        for value, fires in ((5.0, up), (-3.0, down)):
            run = Run([LossJumpRule(direction=direction)])
            feed(run, quiet)
            assert feed(run, [value]) == [fires]


def test_factor_fires_inside_the_deviations():
    noisy = [1.0, 3.0] * 40  # deviation 1: six of them are never reached
    for direction, value, fires in (("up", 4.2, True), ("up", 3.9, False), ("down", 0.9, True), ("down", 1.1, False)):
        run = Run([LossJumpRule(direction=direction, factor=2.0)])
        feed(run, noisy)
        assert feed(run, [value]) == [fires]


def test_consecutive_needs_them_in_a_row_on_one_side():
    run = Run([LossJumpRule(direction="both", consecutive=3, rearm=1)])
    feed(run, [1.0, 1.1, 0.9, 1.0] * 32)
    assert feed(run, [9, 9, 1, 9, 9, -9, 9, 9]) == [False] * 8
    assert feed(run, [9, 9]) == [True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_loss_of_step_is_preferred_to_the_microbatches(device):
    run = Run([LossJumpRule(min_samples=2, window=4)], device)
    step = Key("", "loss", stage=Stage.AFTER_STEP)
    calm = {key("", "loss", number): loss(1.0) for number in range(2)}
    for _ in range(4):
        assert run.fired(calm | {step: loss(1.0)}) == set()
    assert run.fired(calm | {key("", "loss", 1): loss(900.0), step: loss(1.0)}) == set()
    assert run.fired(calm | {step: loss(50.0)}) == {step}


def test_mean_over_microbatches_is_judged_and_the_furthest_is_named():
    run = Run([LossJumpRule(min_samples=2, window=4)])
    calm = {key("", "loss", number): loss(1.0) for number in range(4)}
    for _ in range(4):
        run.tick(calm)
    verdict = run.tick(calm | {key("", "loss", 2): loss(9.0)})
    assert run.marked(verdict.fired) == {key("", "loss", 2)}
    assert verdict.value[0, run.rows[key("", "loss", 2)]].item() == 3.0
    assert verdict.threshold[0, run.rows[key("", "loss", 2)]].item() == pytest.approx(1.006)


def test_one_nonfinite_microbatch_makes_the_iteration_no_sample():
    run = Run([LossJumpRule(min_samples=2, window=4)])
    calm = {key("", "loss", number): loss(1.0) for number in range(2)}
    for _ in range(4):
        run.tick(calm)
    assert run.fired({key("", "loss", 0): loss(np.nan), key("", "loss", 1): loss(99.0)}) == set()
    assert run.tick(calm).threshold[0, 0].item() == pytest.approx(1.006)


class Plain(PlainSeries):
    def __init__(self, rule: LossJumpRule) -> None:
        super().__init__(rule)
        self.window: deque[float] = deque(maxlen=rule.window)
        self.run = 0

    def judge(self, values):
        losses = {seen: found["sum"] if np.isfinite(found["amax"]) else np.nan for seen, found in values.items()}
        whole = {seen: value for seen, value in losses.items() if seen.microbatch == NO_MICROBATCH}
        used = whole or losses
        value = sum(used.values()) / len(used) if used else np.nan
        if not np.isfinite(value):
            return False, set()
        rule, window = self.rule, np.array(self.window)
        if len(window) < rule.min_samples:
            self.window.append(value)
            self.run = 0
            return True, set()
        mean = window.mean()
        above = below = rule.sigma * max(window.std(), 0.001 * abs(mean))
        if rule.factor is not None:
            above, below = min(above, abs(mean) * (rule.factor - 1)), min(below, abs(mean) * (1 - 1 / rule.factor))
        side = int(value > mean + above and rule.direction != "down") - int(
            value < mean - below and rule.direction != "up"
        )
        self.run = self.run + side if self.run * side > 0 else side
        self.window.append(min(max(value, mean - below), mean + above))
        furthest = max(used, key=lambda seen: (used[seen] - mean) * side)
        return True, {furthest} if abs(self.run) >= rule.consecutive else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    options = np.random.default_rng(seed)
    rule = LossJumpRule(
        window=int(options.integers(5, 20)), min_samples=5, rearm=1 + seed % 3, sigma=2.5,
        direction=["up", "down", "both"][seed % 3], factor=None if seed % 2 else 1.5, consecutive=1 + seed % 2,
    )  # fmt: skip

    def draw(generator):
        if generator.random() < 0.15:
            return None
        value = 1.5 + generator.standard_normal() * generator.choice([0.1, 0.1, 0.1, 2.0])
        return loss(float(generator.choice([value, np.nan, np.inf, -np.inf], p=[0.97, 0.01, 0.01, 0.01])))

    def keys(number):
        names = [key(f"head.{number}", "loss", microbatch) for microbatch in range(2)]
        return [*names, key(f"head.{number}", "loss", NO_MICROBATCH)] if number % 2 else names

    assert compare(rule, Plain, draw, device=device, seed=seed, keys=keys).tells


def test_sentences():
    run = Run([LossJumpRule(factor=2.0)])
    assert run.evaluator.explain(0, WHOLE, 7.5, 2.56, statistics_row(loss(7.5))) == (
        "loss (loss) is 7.5, above the limit of 2.56 (6 standard deviations or a factor of 2 from the mean of the "
        "last 128 samples)"
    )
    assert run.evaluator.explain(0, key("", "loss", 2), 3.0, 4.0, statistics_row(loss(9.0))) == (
        "loss (microbatch 2, loss) is 3 as the mean of its microbatches (9 in this one), below the limit of 4 "
        "(6 standard deviations or a factor of 2 from the mean of the last 128 samples)"
    )
