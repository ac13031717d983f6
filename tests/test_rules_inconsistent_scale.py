from __future__ import annotations

import numpy as np
import pytest
from rules_support import DEVICES, HISTORIES, PlainSeries, Run, compare, healthy, key, statistics_row

from flightrec.config.quantizer_rules import InconsistentScaleRule


def scaled(**values: float) -> dict[str, float]:
    fine = {"scale_nonfinite_count": 0, "zero_scale_count": 0, "scale_min": 2.0, "scale_max": 2.0}
    return healthy() | fine | values


@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ({"scale_inverse_error": 999.0}, True),  # F05
        ({"scale_nonfinite_count": 1}, True),  # F04
        ({"scale_nonfinite_count": 3, "scale_inverse_error": 0.0}, True),
        ({"zero_scale_count": 5}, True),
        ({"scale_inverse_error": 0.011}, True),
        ({"scale_inverse_error": 0.009}, False),
        ({}, False),
        ({"scale_min": 0.0, "scale_max": 0.0}, False),  # of a block of zeros
    ],
)
def test_what_fires(values, fires):
    run = Run([InconsistentScaleRule()])
    assert bool(run.fired({key(): scaled(**values)})) is fires
    assert run.fired({key("unscaled"): healthy()}) == set()


def test_it_fires_once_and_again_after_clean_samples():
    run = Run([InconsistentScaleRule(rearm=2)])
    marks = [bool(run.fired({key(): scaled(scale_inverse_error=error)})) for error in (9, 9, 0, 9, 0, 0, 9)]
    assert marks == [True, False, False, False, False, False, True]


class Plain(PlainSeries):
    count = 0

    def judge(self, values):
        marked = {
            seen
            for seen, found in values.items()
            if found.get("scale_nonfinite_count", 0) > 0
            or found.get("zero_scale_count", 0) > 0
            or found.get("scale_inverse_error", 0) > self.rule.tolerance
        }
        self.count += bool(values)
        return bool(values), marked if self.count > self.rule.min_samples else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("min_samples", [0, 5])
def test_equals_a_plain_implementation(device, min_samples):
    def draw(generator):
        if generator.random() < 0.2:
            return None
        values = scaled() if generator.random() < 0.8 else healthy()
        if generator.random() < 0.1:
            values["scale_inverse_error"] = float(generator.choice([0.0, 0.05, 0.2, np.inf]))
        values["scale_nonfinite_count"] = float(generator.random() < 0.02)
        values["zero_scale_count"] = float(generator.random() < 0.02)
        return values

    rule = InconsistentScaleRule(tolerance=0.1, rearm=2, min_samples=min_samples)
    proof = compare(rule, Plain, draw, device=device, seed=min_samples, num_series=HISTORIES // 2)
    assert proof.tells


def test_sentences():
    explain = Run([InconsistentScaleRule()]).evaluator.explain
    row = statistics_row(scaled(scale_inverse_error=999.0))
    assert explain(0, key("fc", "weight"), 999.0, 0.01, row) == (
        "scale and inverse scale of weight of fc (microbatch 0, forward) (the one that decodes is 2) contradict each "
        "other: their product differs from 1 by 999, more than 0.01"
    )
    assert explain(0, key("fc", "weight"), np.inf, 0.01, statistics_row(scaled(scale_nonfinite_count=3))) == (
        "3 of the words that scale weight of fc (microbatch 0, forward) are NaN or infinite"
    )
    assert explain(0, key("fc", "weight"), np.inf, 0.01, statistics_row(scaled(zero_scale_count=3))) == (
        "the scale of 3 non-zero values of weight of fc (microbatch 0, forward) is 0"
    )
