from __future__ import annotations

from rules_support import Run, healthy, key, statistics_row

from flightrec.config.quantizer_rules import SaturationRule
from flightrec.rules.relative import E2M1, E4M3


def clipped(share: float, largest: float = E4M3, **values: float) -> dict[str, float]:
    return healthy(numel=1000) | {"clipped_count": 1000 * share, "quantized_largest": largest} | values


def test_f01_two_thirds_of_the_values_clipped():
    run = Run([SaturationRule()])
    for share in (0.0, 0.0, 0.0):
        assert run.fired({key(): clipped(share)}) == set()
    assert run.fired({key(): clipped(0.65)}) == {key()}


def test_codes_at_the_largest_value_are_not_clipped():
    run = Run([SaturationRule()])
    for _ in range(40):
        values = clipped(0.035, E2M1, quantized_numel=1000, quantized_saturated_count=110)
        assert run.fired({key("fp4"): values, key("all"): clipped(0.0, quantized_saturated_count=1000)}) == set()


def test_nan_and_infinite_values_are_no_part_of_the_share():
    run = Run([SaturationRule()])
    values = clipped(0.0, clipped_count=60, nan_count=700, positive_inf_count=100, negative_inf_count=100)
    verdict = run.tick({key(): values})
    assert verdict.value[0, 0].item() == 0.6
    assert run.fired({key("nothing"): clipped(0.0, nan_count=1000)}) == set()


def test_sentence():
    run = Run([SaturationRule()])
    row = statistics_row(clipped(0.65, range_ratio=7.5))
    assert run.evaluator.explain(0, key("fc", "gradient"), 0.65, 0.5, row) == (
        "65.0% of the values of gradient of fc (microbatch 0, forward) are beyond the range of their codes (up to 7.5 "
        "times the largest code, 448); up to 50.0% is normal here"
    )
