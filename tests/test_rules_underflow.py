from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key, statistics_row

from flightrec.config.quantizer_rules import UnderflowRule


def pair(share: float, numel: int = 1000, **values: float) -> dict[str, float]:
    """A pair of which ``share`` of the non-zero finite values became zero."""
    statistics = healthy(numel=numel, **values)
    lost = statistics["zero_count"] + statistics["nan_count"] + statistics["positive_inf_count"]
    return statistics | {"underflow_count": round(share * (numel - lost))}


@pytest.mark.parametrize("device", DEVICES)
def test_new_series_fires_at_nine_tenths(device):
    run = Run([UnderflowRule()], device)
    verdict = run.tick({key("a"): pair(0.55), key("b"): pair(0.9), key("c"): pair(1.0), key("d"): pair(0.899)})
    assert run.marked(verdict.fired) == {key("b"), key("c")}
    assert verdict.value[0, run.rows[key("b")]].item() == 0.9
    assert verdict.threshold[0, run.rows[key("b")]].item() == pytest.approx(0.9)
    assert verdict.hold.item()


def test_legal_zeros_are_silent():
    run = Run([UnderflowRule()])
    assert run.fired({key("zero"): pair(0.0, zero_count=1000), key("third"): pair(0.3)}) == set()
    assert run.fired({key("empty"): healthy(numel=0) | {"underflow_count": 0}}) == set()
    assert run.fired({key("nan"): pair(0.0, nan_count=1000), key("unpaired"): healthy(zero_count=4000)}) == set()


def test_share_is_of_the_values_that_could_underflow():
    run = Run([UnderflowRule()])
    statistics = pair(0.95, zero_count=500, nan_count=200, positive_inf_count=100)  # 190 of 200
    verdict = run.tick({key(): statistics})
    assert verdict.value[0, 0].item() == 0.95
    assert run.marked(verdict.fired) == {key()}


@pytest.mark.parametrize(
    ("usual", "fires_at", "silent_at"), [(0.001, 0.26, 0.24), (0.1, 0.41, 0.39), (0.4, 0.9, 0.89), (0.0, 0.26, 0.25)]
)
def test_with_a_history_the_own_share_counts(usual, fires_at, silent_at):
    for share, fires in ((fires_at, True), (silent_at, False)):
        run = Run([UnderflowRule()])
        for _ in range(16):
            assert run.fired({key(): pair(usual)}) == set()
        assert bool(run.fired({key(): pair(share)})) is fires


def test_worst_microbatch_is_named():
    run = Run([UnderflowRule()])
    records = {key(microbatch=number): pair(0.95 if number == 1 else 0.01) for number in range(3)}
    assert run.fired(records) == {key(microbatch=1)}


class Plain(PlainSeries):
    def __init__(self, rule) -> None:
        super().__init__(rule)
        self.window: deque[float] = deque(maxlen=rule.window)

    def judge(self, values):
        shares = {}
        for seen, found in values.items():
            nonzero = found["numel"] - found["zero_count"] - found["nan_count"] - found["positive_inf_count"]
            if "underflow_count" in found and nonzero:
                shares[seen] = found["underflow_count"] / nonzero
        if not shares:
            return False, set()
        limit = self.rule.new_row
        if len(self.window) >= self.rule.min_samples:
            limit = min(self.rule.new_row, max(self.rule.minimum, self.rule.factor * max(self.window)))
        self.window.append(max(shares.values()))
        return True, {seen for seen, share in shares.items() if share > limit or share >= self.rule.new_row}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    options = np.random.default_rng(seed)
    rule = UnderflowRule(window=int(options.integers(4, 9)), min_samples=4, rearm=1 + seed % 3)

    def draw(generator):
        state = generator.choice(["pair", "unpaired", "zero", "nan", "absent"], p=[0.65, 0.1, 0.1, 0.05, 0.1])
        share = float(generator.choice([0.0, 0.01, 0.05, 0.3, 0.6, 0.95], p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]))
        lost = {"zero": {"zero_count": 1000}, "nan": {"nan_count": 1000}}.get(
            state, {"zero_count": 100, "nan_count": 7}
        )
        if state == "absent":
            return None
        return healthy(numel=1000) | lost if state == "unpaired" else pair(share, **lost)

    assert compare(rule, Plain, draw, device=device, seed=seed).tells


def test_sentence():
    run = Run([UnderflowRule()])
    assert run.evaluator.explain(0, key("fc"), 0.95, 0.4, statistics_row(pair(0.95, zero_count=200))) == (
        "quantization turned 95.0% of the non-zero values of activation of fc (microbatch 0, forward) into zero "
        "(760 of 800); up to 40.0% is normal here"
    )
