from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, loss, metric, statistics_row

from flightrec.config.training_rules import MetricJumpRule
from flightrec.records import Key, Stage


def test_a_named_metric_is_judged_and_others_are_not():
    run = Run([MetricJumpRule(metrics="m0", min_samples=8)])
    (wanted,), (other,) = metric(0), metric(1)
    for number in range(20):
        assert run.fired({seen: loss(1 + 0.01 * (number % 3)) for seen in (wanted, other)}) == set()
    assert run.fired({seen: loss(2.0) for seen in (wanted, other)}) == {wanted}


def test_each_metric_has_its_own_history():
    run = Run([MetricJumpRule(min_samples=8)])
    (low,), (high,) = metric(0), metric(1)
    for number in range(20):
        run.tick({low: loss(1 + 0.01 * (number % 3)), high: loss(100.0 + number % 3)})
    assert run.fired({low: loss(50.0), high: loss(101.0)}) == {low}


def test_what_a_microbatch_carries_is_no_metric():
    run = Run([MetricJumpRule(min_samples=2)])
    carried = Key("", "metric", "data.ids", microbatch=0, stage=Stage.START)
    assert not any(run.fired({carried: loss(10.0**number)}) for number in range(10))


class Plain(PlainSeries):
    def __init__(self, rule) -> None:
        super().__init__(rule)
        self.window: deque[float] = deque(maxlen=rule.window)

    def judge(self, values):
        found = [statistics["sum"] for statistics in values.values() if np.isfinite(statistics["amax"])]
        if not found:
            return False, set()
        value, faulty = found[0], False
        if len(self.window) >= self.rule.min_samples:
            mean = float(np.mean(self.window))
            reach = self.rule.sigma * max(float(np.std(self.window)), 1e-3 * abs(mean))
            faulty = value > mean + reach
            self.window.append(min(max(value, mean - reach), mean + reach))
        else:
            self.window.append(value)
        return True, set(values) if faulty else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = MetricJumpRule(window=6 + seed, min_samples=4, rearm=1 + seed % 2, sigma=2.0)

    def draw(generator):
        if generator.random() < 0.1:
            return None
        kind = generator.choice(["nan", "jump", "usual"], p=[0.05, 0.05, 0.9])
        usual = 3 + generator.standard_normal()
        return loss({"nan": np.nan, "jump": 20.0 + usual, "usual": usual}[kind])

    assert compare(rule, Plain, draw, device=device, seed=seed, keys=metric).tells


def test_sentence():
    run = Run([MetricJumpRule()])
    assert run.evaluator.explain(0, metric(0)[0], 6.5, 5.0, statistics_row(loss(6.5))) == (
        "metric.m0 (after_step) is 6.5, above the limit of 5 (6 standard deviations from the mean of the last 128 "
        "samples)"
    )
