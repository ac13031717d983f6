from __future__ import annotations

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key, statistics_row

from flightrec.config.quantizer_rules import StaleScaleRule


def reaching(ratio: float, **values: float) -> dict[str, float]:
    return healthy() | {"range_ratio": ratio} | values


def fires(run: Run, ratios, **values: float) -> list[bool]:
    return [bool(run.fired({key(): reaching(ratio, **values)})) for ratio in ratios]


def test_it_takes_consecutive_samples():
    run = Run([StaleScaleRule()])
    assert fires(run, [1.0, 7.0, 7.0, 7.0, 1.0, 7.0, 7.0, 7.0, 7.0, 7.0]) == [False] * 8 + [True, False]
    assert fires(Run([StaleScaleRule(consecutive=1)]), [0.9, 2.0, 2.1]) == [False, False, True]


def test_delayed_scaling_that_follows_is_silent():
    """A tensor that grows ten times an iteration, and a scale that is one iteration behind, are never 4 late."""
    run = Run([StaleScaleRule()])
    assert not any(fires(run, [1, 10, 10, 10, 1, 1, 3, 3, 0.5, 5] * 10))


def test_zero_tensors_say_nothing():
    run = Run([StaleScaleRule()])
    assert fires(run, [3, 0, 3, 0, 3, 0, 3]) == [False] * 6 + [True]


def test_with_a_margin_the_amax_history_counts_too():
    past = {"history_ratio": 1.1}
    assert not any(fires(Run([StaleScaleRule()]), [1.0] * 10, history_ratio=9.0))
    assert not any(fires(Run([StaleScaleRule(margin=0)]), [1.0] * 10, **past))
    assert fires(Run([StaleScaleRule(margin=1)]), [1.0] * 5, **past) == [False] * 3 + [True, False]
    assert not any(fires(Run([StaleScaleRule(margin=-2)]), [1.0] * 10, history_ratio=7.0))


def rotated(run: Run, scales) -> list[bool]:
    """Every sample is beyond the range, three turns lie between two of them."""
    fired = []
    for scale in scales:
        fired.append(bool(run.fired({key(): reaching(5.0, scale_min=scale, scale_max=scale)}, left_out=[])))
        for _ in range(3):
            assert not run.fired({}, left_out=[key()])
    return fired


def test_samples_that_are_turns_apart_are_in_a_row_only_under_the_same_scale():
    assert not any(rotated(Run([StaleScaleRule()]), range(1, 20)))
    assert rotated(Run([StaleScaleRule()]), [1, 2, 3, 3, 3, 3, 3]) == [False] * 5 + [True, False]
    assert not any(rotated(Run([StaleScaleRule()]), [3, 3, 3, 2, 2, 2, 3, 3, 3]))


def test_neighbouring_samples_need_no_scale():
    run = Run([StaleScaleRule()])
    row = [bool(run.fired({key(): reaching(5.0, scale_min=n, scale_max=n)}, left_out=[])) for n in range(1, 6)]
    assert row == [False] * 3 + [True, False]


def test_min_samples():
    assert fires(Run([StaleScaleRule(min_samples=5)]), [9] * 7) == [False] * 5 + [True, False]


class Plain(PlainSeries):
    def __init__(self, rule) -> None:
        super().__init__(rule)
        self.run = self.count = 0

    def judge(self, values):
        spread = None if self.rule.margin is None else 2.0**self.rule.margin
        ratios = {}
        for seen, found in values.items():
            both = [found.get("range_ratio", np.nan)]
            both += [] if spread is None else [found.get("history_ratio", np.nan) * spread]
            ratio = np.fmax.reduce(both)
            if ratio > 0:
                ratios[seen] = ratio
        if not ratios:
            return False, set()
        marked = {seen for seen, ratio in ratios.items() if ratio > self.rule.factor}
        self.run = self.run + 1 if marked else 0
        late = self.run >= self.rule.consecutive and self.count >= self.rule.min_samples
        self.count += 1
        return True, marked if late else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = StaleScaleRule(
        consecutive=1 + seed, margin=[None, 0, 1, -1][seed], rearm=1 + seed % 2, min_samples=5 * (seed % 2)
    )

    def draw(generator):
        if generator.random() < 0.2:
            return None
        values = reaching(float(generator.choice([0.0, 0.5, 2.0, 2.5, 40.0])))
        if generator.random() < 0.2:
            values.pop("range_ratio")
        if generator.random() < 0.4:
            values["history_ratio"] = float(generator.choice([0.0, 0.9, 1.5, 3.0]))
        return values

    assert compare(rule, Plain, draw, device=device, seed=seed).tells


def test_sentences():
    explain = Run([StaleScaleRule()]).evaluator.explain
    row = statistics_row(reaching(7.5, scale_min=1.0, scale_max=1.0))
    assert explain(0, key("fc", "gradient"), 7.5, 2.0, row) == (
        "the scale of 1 does not follow gradient of fc (microbatch 0, forward): the largest magnitude is 7.5 times "
        "the range of the codes, more than 2 times in 4 samples in a row"
    )
    explain = Run([StaleScaleRule(consecutive=1)]).evaluator.explain
    assert explain(0, key("fc", "gradient"), 7.5, 2.0, statistics_row(reaching(1.5))) == (
        "the scale does not follow gradient of fc (microbatch 0, forward): the amax history is 7.5 times the range of "
        "the codes, more than 2 times now"
    )
