from __future__ import annotations

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, loss, metric, statistics_row

from flightrec.config.training_rules import MetricThresholdRule
from flightrec.records import Key, Stage

(NORM,) = metric(0)


def fires(run: Run, values) -> list[bool]:
    return [bool(run.fired({NORM: loss(value)})) for value in values]


def test_above_and_below():
    assert fires(Run([MetricThresholdRule(above=2.5)]), [2.5, 2.6, 9.0]) == [False, True, False]
    assert fires(Run([MetricThresholdRule(below=-1)]), [-1.0, -1.5]) == [False, True]
    run = Run([MetricThresholdRule(above=5, below=0.1, rearm=1)])
    verdicts = [run.tick({NORM: loss(value)}) for value in (1.0, 6.0, 1.0, 0.05)]
    assert [bool(verdict.fired.any()) for verdict in verdicts] == [False, True, False, True]
    assert [verdict.threshold[0, 0].item() for verdict in verdicts[1::2]] == [5.0, 0.1]
    assert [verdict.value[0, 0].item() for verdict in verdicts[1::2]] == [6.0, 0.05]


def test_consecutive_and_min_samples():
    assert fires(Run([MetricThresholdRule(above=0, consecutive=3)]), [1, 1, -1, 1, 1, 1]) == [False] * 5 + [True]
    assert fires(Run([MetricThresholdRule(above=0, min_samples=3)]), [1, 1, 1, 1]) == [False] * 3 + [True]


def test_non_finite_values_are_no_sample():
    run = Run([MetricThresholdRule(above=0, consecutive=2)])
    assert fires(run, [1, np.nan, np.inf, 1]) == [False, False, False, True]


def test_names():
    run = Run([MetricThresholdRule(metrics=["grad*", "re:lr"], above=0)])
    named = [Key("", "metric", name, stage=Stage.AFTER_STEP) for name in ("grad_norm", "lr", "lr2", "accuracy")]
    data = Key("", "metric", "grad", microbatch=0, stage=Stage.START)  # what a microbatch carries is no metric
    assert run.fired({seen: loss(1.0) for seen in (*named, data)}) == set(named[:2])


class Plain(PlainSeries):
    run = count = 0

    def judge(self, values):
        found = [statistics["sum"] for statistics in values.values() if np.isfinite(statistics["amax"])]
        if not found:
            return False, set()
        beyond = found[0] > self.rule.above or found[0] < self.rule.below
        self.run = self.run + 1 if beyond else 0
        faulty = beyond and self.run >= self.rule.consecutive and self.count >= self.rule.min_samples
        self.count += 1
        return True, set(values) if faulty else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = MetricThresholdRule(above=1.0, below=-1.0, consecutive=1 + seed % 3, min_samples=3 * (seed % 2), rearm=2)

    def draw(generator):
        if generator.random() < 0.1:
            return None
        return loss(float(generator.choice([np.nan, np.inf, generator.standard_normal()], p=[0.05, 0.05, 0.9])))

    assert compare(rule, Plain, draw, device=device, seed=seed, keys=metric).tells


def test_sentences():
    explain = Run([MetricThresholdRule(above=5)]).evaluator.explain
    assert explain(0, NORM, 6.5, 5.0, statistics_row(loss(6.5))) == "metric m0 is 6.5, above 5"
    explain = Run([MetricThresholdRule(below=5, consecutive=2)]).evaluator.explain
    told = explain(0, NORM, 1.5, 5.0, statistics_row(loss(1.5)))
    assert told == "metric m0 is 1.5, below 5, in 2 samples in a row"
