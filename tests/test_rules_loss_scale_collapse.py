from __future__ import annotations

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, loss, metric, statistics_row

from flightrec.config.training_rules import LossScaleCollapseRule
from flightrec.records import Key, Stage

SCALE = Key("", "metric", "loss_scale", stage=Stage.AFTER_STEP)


def fires(values, **settings) -> list[bool]:
    run = Run([LossScaleCollapseRule(**settings)])
    return [bool(run.fired({SCALE: loss(float(value))})) for value in values]


def test_a_start_that_skips_twenty_three_times_is_silent():
    assert not any(fires(2.0 ** (40 - number) for number in range(24)))


def test_a_scale_that_falls_below_one_fires_once():
    assert fires([4, 2, 1, 0.5, 0.25, 0.125]) == [False, False, False, False, True, False]


def test_single_skips_below_one_and_other_metrics_are_silent():
    assert not any(fires([0.5, 0.25, 0.25, 0.5, 0.25] * 5))
    run = Run([LossScaleCollapseRule(consecutive=1)])
    (other,) = metric(0)
    assert not any(run.fired({other: loss(0.5**number)}) for number in range(10))


class Plain(PlainSeries):
    previous, run, count = np.nan, 0, 0

    def judge(self, values):
        found = [statistics["sum"] for statistics in values.values() if np.isfinite(statistics["amax"])]
        if not found:
            return False, set()
        fell = found[0] < self.previous
        self.run = self.run + 1 if fell else 0
        self.previous = found[0]
        faulty = self.run >= self.rule.consecutive and found[0] < self.rule.minimum
        faulty = faulty and self.count >= self.rule.min_samples
        self.count += 1
        return True, set(values) if faulty else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = LossScaleCollapseRule(metrics="*", consecutive=1 + seed % 3, min_samples=5 * (seed % 2), rearm=1)

    def draw(generator):
        if generator.random() < 0.1:
            return None
        return loss(float(generator.choice([np.nan, 4.0, 1.0, 0.5, 0.25, 0.125], p=[0.1, 0.1, 0.2, 0.2, 0.2, 0.2])))

    assert compare(rule, Plain, draw, device=device, seed=seed, keys=metric).tells


def test_sentence():
    run = Run([LossScaleCollapseRule()])
    assert run.evaluator.explain(0, SCALE, 0.5, 1.0, statistics_row(loss(0.5))) == (
        "the loss scale (loss_scale) fell to 0.5, below 1, in at least 4 skipped steps in a row"
    )
