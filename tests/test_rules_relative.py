"""Shares against their own history: saturation and quantization_error beside a plain implementation."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key

from flightrec.config.quantizer_rules import QuantizationErrorRule, SaturationRule, UnderflowRule
from flightrec.rules.relative import E2M1, E4M3, E5M2

MINIMUMS = {
    "saturation": {E4M3: 0.05, E5M2: 0.05, E2M1: 0.2},
    "quantization_error": {E4M3: 0.1, E5M2: 0.2, E2M1: 0.35},
}


def clipped(share: float, largest: float = E4M3, **values: float) -> dict[str, float]:
    return healthy(numel=1000, **values) | {"clipped_count": round(share * 1000), "quantized_largest": largest}


def erring(error: float, largest: float = E4M3, **values: float) -> dict[str, float]:
    return healthy(sum_of_squares=4000.0, **values) | {
        "squared_error": error**2 * 4000.0, "quantized_largest": largest,
    }  # fmt: skip


KINDS = [(SaturationRule, clipped), (QuantizationErrorRule, erring)]


def uncalibrated(values) -> bool:
    return values.get("scale_min") == 1 and values.get("scale_max") == 1


class PlainShare(PlainSeries):
    def __init__(self, rule) -> None:
        super().__init__(rule)
        self.window: deque[float] = deque(maxlen=rule.window)
        self.met = False

    def share(self, values) -> float:
        with np.errstate(all="ignore"):
            if self.rule.kind == "saturation":
                return np.float64(values.get("clipped_count", np.nan)) / (values["numel"] - values["nan_count"])
            return np.sqrt(np.float64(values.get("squared_error", np.nan)) / values["sum_of_squares"])

    def judge(self, values):
        shares = {seen: self.share(found) for seen, found in values.items()}
        real = {seen: share for seen, share in shares.items() if share == share}
        first, self.met = not self.met, self.met or bool(real)
        if first:
            real = {seen: share for seen, share in real.items() if not uncalibrated(values[seen])}
        limit = self.rule.new_row
        if len(self.window) >= self.rule.min_samples:
            floor = self.rule.minimum
            if floor is None:
                table = MINIMUMS[self.rule.kind]
                formats = [found.get("quantized_largest") for found in values.values()]
                floor = max((table.get(largest, max(table.values())) for largest in formats), default=0)
            limit = min(self.rule.new_row, max(floor, self.rule.factor * max(self.window)))
        marked = {seen for seen, share in real.items() if share > limit or share >= self.rule.new_row}
        if real:
            self.window.append(min(max(real.values()), self.rule.new_row))
        return bool(real), marked


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, kind, seed):
    rule_class, made = kind
    options = np.random.default_rng(seed)
    rule = rule_class(
        window=int(options.integers(4, 9)), min_samples=4, rearm=2, minimum=[None, 0.1][int(options.integers(2))]
    )

    def draw(generator):
        state = generator.choice(["pair", "unpaired", "nothing", "absent"], p=[0.7, 0.1, 0.1, 0.1])
        if state == "absent":
            return None
        share = generator.choice([0.0, 0.001, 0.02, 0.06, 0.15, 0.3, 0.49, 0.6], p=[0.3, 0.3, 0.2, *[0.04] * 5])
        values = made(float(share), [E4M3, E5M2, E2M1, 17.0][int(generator.integers(4))])
        if generator.random() < 0.5:
            values |= {"scale_min": 1.0, "scale_max": float(generator.choice([1.0, 1.0, 2.0]))}
        if state == "unpaired":
            values = {name: value for name, value in values.items() if name in healthy()}
        elif state == "nothing":
            values |= {"nan_count": values["numel"], "sum_of_squares": 0.0, "squared_error": 0.0, "clipped_count": 0.0}
        return values

    assert compare(rule, PlainShare, draw, device=device, seed=seed).tells


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_new_series_fires_at_one_half(kind):
    rule_class, made = kind
    run = Run([rule_class()])
    assert run.fired({key("a"): made(0.499), key("b"): made(0.501), key("c"): made(0.2)}) == {key("b")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_the_first_sample_of_delayed_scaling_counts_for_nothing(kind):
    """Its scales are 1 until it has seen a tensor; a scale that stays there is judged from the second sample on."""
    rule_class, made = kind
    initial = {"scale_min": 1.0, "scale_max": 1.0}
    run = Run([rule_class()])
    first = {
        key("a"): made(0.9) | initial,
        key("b"): made(0.9) | initial,
        key("c"): made(0.9) | initial | {"scale_max": 2.0},
    }
    assert run.fired(first) == {key("c")}
    assert run.fired({key("a"): made(0.9) | initial, key("b"): made(0.001)}) == {key("a")}
    both = {key("d", microbatch=0): made(0.9) | initial, key("d", microbatch=1): made(0.001)}
    assert run.fired(both) == set()
    for _ in range(16):
        assert run.fired({key("b"): made(0.001)}) == set()
    assert run.fired({key("b"): made(0.3)}) == {key("b")}, "the first sample must not stand in the window"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_with_a_history_the_formats_own_minimum_counts(kind):
    rule_class, made = kind
    for largest, minimum in MINIMUMS[rule_class().kind].items():
        for share, fires in ((minimum * 0.9, False), (minimum * 1.1, True)):
            run = Run([rule_class()])
            for _ in range(16):
                assert run.fired({key(): made(0.0, largest)}) == set()
            assert bool(run.fired({key(): made(share, largest)})) is fires


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_a_series_that_is_always_high_is_normal_for_itself(kind):
    rule_class, made = kind
    run = Run([rule_class()])
    for _ in range(40):
        assert run.fired({key(): made(0.3)}) == set()
    assert run.fired({key(): made(0.49)}) == set()


def test_one_great_error_does_not_poison_the_window_with_infinity():
    run = Run([QuantizationErrorRule(window=16, rearm=1)])
    garbage = erring(0.0) | {"sum_of_squares": 0.0, "squared_error": 5.0}  # codes of something, for a tensor of zeros
    assert run.fired({key(): garbage}) == {key()}
    for _ in range(16):
        assert run.fired({key(): erring(0.03)}) == set()
    assert run.fired({key(): erring(0.13)}) == {key()}


def test_rules_that_share_this_take_no_minimum_above_new_row():
    for rule in (UnderflowRule, SaturationRule, QuantizationErrorRule):
        with pytest.raises(ValueError, match="at most new_row"):
            rule(minimum=0.8, new_row=0.7)
