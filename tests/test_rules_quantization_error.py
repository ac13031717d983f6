from __future__ import annotations

import pytest
from rules_support import Run, healthy, key, statistics_row

from flightrec.config.quantizer_rules import QuantizationErrorRule
from flightrec.rules.relative import E4M3


def erring(error: float) -> dict[str, float]:
    return healthy() | {"squared_error": error**2 * 4000, "quantized_largest": E4M3}


def test_f03_error_of_a_scale_that_moved_on_and_only_in_that_microbatch():
    run = Run([QuantizationErrorRule()])
    verdict = run.tick({key(microbatch=0): erring(0.03), key(microbatch=1): erring(0.9998)})
    assert run.marked(verdict.fired) == {key(microbatch=1)}
    assert verdict.value[0, run.rows[key(microbatch=1)]].item() == pytest.approx(0.9998)


def test_without_a_pair_nothing_is_judged():
    run = Run([QuantizationErrorRule()])
    zero = healthy(sum_of_squares=0.0, zero_count=4096) | {"squared_error": 0.0, "quantized_largest": E4M3}
    assert run.fired({key("plain"): healthy(), key("zero"): zero}) == set()


def test_sentence():
    run = Run([QuantizationErrorRule()])
    row = statistics_row(erring(0.9) | {"scale_min": 2.0, "scale_max": 2.0})
    assert run.evaluator.explain(0, key("fc", "weight"), 0.9, 0.5, row) == (
        "what the codes of weight of fc (microbatch 0, forward) decode to (with a scale of 2) differs from the tensor "
        "by 0.9 of its norm; up to 0.5 is normal here"
    )
    blocks = statistics_row(erring(0.9) | {"scale_min": 2.0, "scale_max": 3.0})
    assert "with a scale" not in run.evaluator.explain(0, key("fc", "weight"), 0.9, 0.5, blocks)
