from __future__ import annotations

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key, loss, statistics_row

from flightrec.config.rules import NonfiniteRule
from flightrec.records import NO_MICROBATCH, Phase

CODES = {"quantized_numel": 4096, "quantized_nan_count": 0, "quantized_inf_count": 0, "quantized_zero_count": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("word", ["nan_count", "positive_inf_count", "negative_inf_count"])
def test_each_kind_of_value_fires_in_the_first_tick(device, word):
    run = Run([NonfiniteRule()], device)
    bad = key("b")
    verdict = run.tick({key("a"): healthy(), bad: healthy(**{word: 2})})
    assert run.marked(verdict.fired) == {bad}
    assert verdict.value[0, run.rows[bad]].item() == 2
    assert verdict.threshold[0, run.rows[bad]].item() == 0
    assert verdict.hold.item()
    assert verdict.any.item()


@pytest.mark.parametrize("word", ["quantized_nan_count", "quantized_inf_count"])
def test_codes_fire_with_and_without_a_high_precision_tensor(word):
    run = Run([NonfiniteRule()])
    assert run.fired({key("a"): healthy() | CODES, key("b"): CODES}) == set()
    assert run.fired({key("a"): healthy() | CODES | {word: 1}, key("b"): CODES | {word: 1}}) == {key("a"), key("b")}


def test_f09_only_the_tick_of_the_infinite_loss_fires():
    run = Run([NonfiniteRule()])
    losses = [0.3, 0.4, 3.6e19, np.inf, np.nan, np.nan]
    record = key("", "loss", NO_MICROBATCH)
    assert [bool(run.fired({record: loss(value)})) for value in losses] == [False, False, False, True, False, False]


def test_f10_first_infinite_record_is_marked_with_all_that_follow():
    run = Run([NonfiniteRule()])
    output, norm, end = key("fc", "output"), key("norm", "output"), key("", "loss")
    records = {
        key("fc"): healthy(),
        output: healthy(positive_inf_count=128, amax=np.nan),
        norm: healthy(nan_count=128, amax=np.nan),
        end: loss(np.nan),
    }
    assert run.fired(records) == {output, norm, end}


def test_f12_nothing_forward_is_marked_when_only_a_gradient_is_nan():
    run = Run([NonfiniteRule()])
    blocks = {key(f"block.{n}", tensor): healthy() for n in range(3) for tensor in ("activation", "output", "dgrad")}
    assert run.fired(blocks) == set()
    assert run.fired(blocks | {key("block.1", "dgrad"): healthy(nan_count=1)}) == {key("block.1", "dgrad")}


def test_f16_the_raw_loss_fires_before_the_weights_turn():
    run = Run([NonfiniteRule()])
    raw, weight = key("", "loss"), key("fc", "weight", NO_MICROBATCH)
    assert run.fired({raw: loss(1.0), weight: healthy()}) == set()
    assert run.fired({raw: loss(np.nan), weight: healthy()}) == {raw}
    assert run.fired({raw: loss(1.0), weight: healthy(nan_count=4096)}) == {weight}


def test_f17_clean_first_step_then_nan_in_the_tail():
    run = Run([NonfiniteRule()])
    assert run.fired({key("op", "output"): healthy(zero_count=2000)}) == set()
    assert run.fired({key("op", "output"): healthy(nan_count=2000)}) == {key("op", "output")}


def test_one_bad_microbatch_is_named_and_a_standing_nan_fires_once():
    run = Run([NonfiniteRule()])
    records = {key(microbatch=number): healthy() for number in range(4)}
    bad = records | {key(microbatch=2): healthy(nan_count=1)}
    assert run.fired(records) == set()
    assert run.fired(bad) == {key(microbatch=2)}
    assert all(run.fired(bad) == set() for _ in range(20))


def test_armed_again_only_after_enough_clean_samples():
    run = Run([NonfiniteRule(rearm=3)])
    good, bad = {key(): healthy()}, {key(): healthy(nan_count=1)}
    assert run.fired(bad) == {key()}
    for clean, fires in ((2, False), (2, False), (3, True), (3, True)):
        for _ in range(clean):
            assert run.fired(good) == set()
        for _ in range(5):
            assert run.fired({}) == set()  # a turn that was left out is no clean sample
        assert bool(run.fired(bad)) is fires


def test_allowed_infinities_are_silent_and_the_others_are_not():
    run = Run([NonfiniteRule(allow=["-inf"]), NonfiniteRule(name="other", allow=["+inf"])])
    mask = healthy(negative_inf_count=100)
    assert run.fired({key(): mask}) == set()
    assert run.fired({key(): mask}, rule=1) == set()  # fired in the tick before
    fresh = Run([NonfiniteRule(allow=["-inf"])])
    # a format without infinity turns the mask's -Inf into NaN codes: 100 are legal, the 101st is not
    assert fresh.fired({key(): mask | CODES | {"quantized_nan_count": 100}}) == set()
    assert fresh.fired({key(): mask | CODES | {"quantized_inf_count": 100}}) == set()
    assert fresh.fired({key(): mask | CODES | {"quantized_nan_count": 101}}) == {key()}
    assert fresh.fired({key("codes"): CODES | {"quantized_inf_count": 5}}) == set()
    assert fresh.fired({key("codes"): CODES | {"quantized_nan_count": 5}}) == {key("codes")}
    assert fresh.fired({key("plus"): healthy(positive_inf_count=1)}) == {key("plus")}
    assert fresh.fired({key("nan"): mask | {"nan_count": 1}}) == {key("nan")}


def test_recompute_is_seen_eval_only_if_asked_for_and_warmup_never():
    bad = {key(phase=phase): healthy(nan_count=1) for phase in Phase}
    assert Run([NonfiniteRule()]).fired(bad) == {key(), key(phase=Phase.RECOMPUTE)}
    with_eval = Run([NonfiniteRule(phases=["train", "eval"])])
    assert with_eval.fired(bad) == {key(), key(phase=Phase.EVAL)}


def test_min_samples_waits():
    run = Run([NonfiniteRule(min_samples=2, rearm=1)])
    bad = {key(): healthy(nan_count=1)}
    assert [bool(run.fired(bad)) for _ in range(4)] == [False, False, True, False]


class Plain(PlainSeries):
    count = 0

    def judge(self, values):
        marked = set()
        for seen, found in values.items():
            bad, legal = found.get("nan_count", 0) + found.get("positive_inf_count", 0), 0
            if "-inf" in self.rule.allow:
                legal = found.get("negative_inf_count", 0)
            else:
                bad += found.get("negative_inf_count", 0)
            codes = found.get("quantized_nan_count", 0) + found.get("quantized_inf_count", 0)
            if "nan_count" not in found and "-inf" in self.rule.allow:
                codes = found.get("quantized_nan_count", 0)  # nothing tells which infinities came in
            if bad or codes > legal:
                marked.add(seen)
        self.count += bool(values)
        return bool(values), marked if self.count > self.rule.min_samples else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = NonfiniteRule(rearm=1 + seed, allow=["-inf"] if seed % 2 else [], min_samples=seed // 2 * 5)

    def draw(generator):
        if generator.random() < 0.2:
            return None
        values = healthy(
            nan_count=float(generator.random() < 0.03),
            positive_inf_count=2.0 * (generator.random() < 0.03),
            negative_inf_count=3.0 * (generator.random() < 0.06),
        )
        codes = CODES | {
            "quantized_nan_count": float(generator.choice([0, 0, 0, 0, 0, 0, 0, 0, 3, 4])),
            "quantized_inf_count": float(generator.choice([0, 0, 0, 0, 0, 0, 0, 0, 0, 2])),
        }
        return [values, values, codes, values | codes][int(generator.integers(4))]

    assert compare(rule, Plain, draw, device=device, seed=seed).tells


def test_sentences():
    run = Run([NonfiniteRule(allow=["-inf"])])

    output = key("fc", "output", 1)

    def explain(values, record=output):
        return run.evaluator.explain(0, record, 3.0, 0.0, statistics_row(values))

    assert explain(healthy(positive_inf_count=3, negative_inf_count=9)) == (
        "output of fc (microbatch 1, forward) holds 3 +Inf among 4096 elements"
    )
    assert explain(healthy() | CODES | {"quantized_nan_count": 32}) == (
        "output of fc (microbatch 1, forward) holds 32 NaN among 4096 quantized elements, "
        "while it was finite in high precision"
    )
    assert explain(CODES | {"quantized_inf_count": 1}) == (
        "output of fc (microbatch 1, forward) holds 1 Inf among 4096 quantized elements"
    )
    assert explain(loss(np.nan), key("", "loss", NO_MICROBATCH)) == "loss (loss) holds 1 NaN among 1 elements"
