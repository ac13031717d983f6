from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from rules_support import (
    ALL_HISTORIES,
    DEVICES,
    HISTORIES,
    PlainRule,
    ReferenceArming,
    Run,
    compare,
    healthy,
    key,
    statistics_row,
)

from flightrec.config.rules import AmaxSpikeRule
from flightrec.records import Phase

SMALL = {"min_samples": 1, "min_numel": 1, "confirm": 1}


def test_f08_worst_microbatch_counts_and_is_named():
    run = Run([AmaxSpikeRule(**SMALL)])
    quiet = {key(microbatch=number): healthy(amax=2.1) for number in range(3)}
    spiked = {key(microbatch=number): healthy(amax=3114 if number == 0 else 2.1) for number in range(3)}
    assert run.fired(quiet) == set()
    verdict = run.tick(spiked)
    assert run.marked(verdict.fired) == {key(microbatch=0)}
    assert run.marked(verdict.watch) == set()
    assert verdict.value[0, run.rows[key(microbatch=0)]].item() == 3114
    assert verdict.threshold[0, run.rows[key(microbatch=0)]].item() == pytest.approx(8.4)


def test_f09_first_steps_are_silent_and_a_spike_fires_before_the_nan():
    run = Run([AmaxSpikeRule(**SMALL)])
    seen = [bool(run.fired({key("lin", "activation"): healthy(amax=amax)})) for amax in (2.6, 2.4, 2.5e10, 2.4, 2.5)]
    assert seen == [False, False, True, False, False]
    assert run.fired({key("new"): healthy(amax=1e30)}) == set()


def test_f21_eval_neither_feeds_nor_fires():
    run = Run([AmaxSpikeRule(**SMALL)])
    records = {key(): healthy(amax=2.0), key(phase=Phase.EVAL): healthy(amax=1e6)}
    assert all(run.fired(records) == set() for _ in range(4))
    assert run.fired({key(): healthy(amax=9.0)}) == {key()}


def test_eval_that_was_asked_for_is_judged_by_the_history_of_training():
    run = Run([AmaxSpikeRule(**SMALL, phases=["train", "eval"])])
    assert run.fired({key(phase=Phase.EVAL): healthy(amax=50.0)}) == set()  # no history
    run.tick({key(): healthy(amax=2.0)})
    assert run.fired({key(phase=Phase.EVAL): healthy(amax=7.0)}) == set()
    assert run.fired({key(phase=Phase.EVAL): healthy(amax=9.0)}) == {key(phase=Phase.EVAL)}
    assert run.fired({key(): healthy(amax=9.0)}) == {key()}  # the 9 of eval is in no window


def test_one_tensor_in_train_and_recompute_confirms_nothing():
    run = Run([AmaxSpikeRule(min_samples=1, min_numel=1, confirm=2)])
    recompute = key(phase=Phase.RECOMPUTE)
    run.tick({key(): healthy(amax=1.0), recompute: healthy(amax=1.0)})
    verdict = run.tick({key(): healthy(amax=9.0), recompute: healthy(amax=9.0)})
    assert run.marked(verdict.fired) == set()
    assert run.marked(verdict.watch) == {key(), recompute}
    assert not verdict.hold.item()
    assert verdict.any.item()


def test_tensors_of_one_expert_confirm_each_other_as_little_and_two_experts_do():
    names = [
        key("mlp.experts.3", "gradient"), key("mlp.experts.3.w1", "gradient"), key("mlp.experts.3.w2"),
        key("mlp.experts.30.w1"), replace(key("moe"), part="expert.3"),
        replace(key("moe", "gradient"), part="expert.3"),
    ]  # fmt: skip

    def after(spiked):
        run = Run([AmaxSpikeRule(min_samples=1, min_numel=1)])
        run.tick({name: healthy(amax=1.0) for name in names})
        return run.fired({name: healthy(amax=9.0 if name in spiked else 1.0) for name in names})

    for one in (names[:3], names[4:]):
        assert after(one) == set()
    for two in (names[2:4], [names[0], names[4]]):
        assert after(two) == set(two)


def test_two_tensors_or_two_iterations_confirm():
    def fresh():
        run = Run([AmaxSpikeRule(min_samples=1, min_numel=1)])
        run.tick({key("a"): healthy(amax=1.0), key("b"): healthy(amax=1.0)})
        return run

    high, low = healthy(amax=9.0), healthy(amax=1.0)
    run = fresh()
    assert run.fired({key("a"): high, key("b"): high}) == {key("a"), key("b")}
    run = fresh()
    first, second = run.tick({key("a"): high, key("b"): low}), run.tick({key("a"): high, key("b"): low})
    assert (run.marked(first.fired), run.marked(first.watch)) == (set(), {key("a")})
    assert (run.marked(second.fired), run.marked(second.watch)) == ({key("a")}, set())
    run = fresh()
    for _ in range(4):  # a lone spike every other iteration is never confirmed
        assert run.fired({key("a"): high}) == set()
        assert run.fired({key("a"): low}) == set()


def test_lone_spike_does_not_enter_the_window_a_confirmed_one_does():
    run = Run([AmaxSpikeRule(min_samples=1, min_numel=1, rearm=1)])

    def threshold(amax):
        return run.tick({key(): healthy(amax=amax)}).threshold[0, 0].item()

    assert np.isnan(threshold(1.0))
    assert threshold(100.0) == 4.0
    assert threshold(1.0) == 4.0
    assert threshold(1.0) == 4.0
    assert threshold(50.0) == 4.0
    assert threshold(40.0) == 4.0  # confirmed: the run's largest value, 50, is now a sample
    assert threshold(1.0) == 200.0


def test_zero_empty_small_and_all_nan_tensors_are_no_samples():
    run = Run([AmaxSpikeRule(min_samples=2, min_numel=1024, confirm=1)])
    none = [
        healthy(amax=0.0),
        healthy(numel=0, amax=np.nan),
        healthy(numel=1023, amax=5.0),
        healthy(nan_count=4096, amax=np.nan),
        {"quantized_numel": 4096, "quantized_nan_count": 0},
    ]
    run.tick({key(): healthy(amax=1.0)})
    for values in none * 3:
        run.tick({key(): values})
    assert run.fired({key(): healthy(amax=9.0)}) == set()  # only one sample so far; this is the second
    assert run.fired({key(): healthy(amax=37.0)}) == {key()}
    assert run.fired({key("small"): healthy(numel=1023, amax=1e9)}) == set()


def test_severity_watch_fires_and_never_holds():
    run = Run([AmaxSpikeRule(**SMALL, severity="watch")])
    run.tick({key(): healthy(amax=1.0)})
    run.evaluator.set_may_hold(0, True)
    verdict = run.tick({key(): healthy(amax=9.0)})
    assert run.marked(verdict.fired) == {key()}
    assert not verdict.hold.item()


class PlainAmax(PlainRule):
    """All series of an evaluator: they confirm each other."""

    def __init__(self, rule: AmaxSpikeRule, num_series: int) -> None:
        self.rule = rule
        self.windows = [deque(maxlen=rule.window) for _ in range(num_series)]
        self.arming = [ReferenceArming(rule.rearm) for _ in range(num_series)]
        self.watch_arming = [ReferenceArming(rule.rearm) for _ in range(num_series)]
        self.runs, self.pending = [0] * num_series, [0.0] * num_series

    def tick(self, records):
        amaxes = {
            number: {
                seen: found["amax"]
                for seen, found in values.items()
                if found["amax"] > 0 and found["numel"] >= self.rule.min_numel
            }
            for number, values in records.items()
        }
        samples = {number: max(values.values()) for number, values in amaxes.items() if values}
        limits = {
            number: self.rule.factor * max(self.windows[number])
            for number in samples
            if len(self.windows[number]) >= self.rule.min_samples
        }
        excesses = {number for number, limit in limits.items() if samples[number] > limit}
        fired, watched = set(), set()
        for number, sample in samples.items():
            is_excess = number in excesses
            self.runs[number] = self.runs[number] + 1 if is_excess else 0
            confirmed = is_excess and max(len(excesses), self.runs[number]) >= self.rule.confirm
            self.pending[number] = max(self.pending[number], sample) if is_excess else 0.0
            if confirmed or not is_excess:
                self.windows[number].append(self.pending[number] if confirmed else sample)
                self.pending[number] = 0.0
            rows = {seen for seen, value in amaxes[number].items() if is_excess and value > limits[number]}
            fired |= rows if self.arming[number].fire(confirmed) else set()
            watched |= rows if self.watch_arming[number].fire(is_excess and not confirmed) else set()
        return fired, watched


def draw_amax(generator, rare: float):
    if generator.random() < 0.2:
        return None
    spikes = [rare, rare / 2]
    amax = generator.choice(
        [0.0, np.nan, 1.0, 1.5, 2.0, 9.0, 70.0], p=[0.1, 0.05, *[(0.85 - sum(spikes)) / 3] * 3, *spikes]
    )
    numel = generator.choice([0, 10, 2000], p=[0.02, 0.05, 0.93])
    return healthy(numel=float(numel), amax=float(amax * generator.uniform(0.9, 1.1)) if numel else np.nan)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation_where_series_confirm_themselves(device, seed):
    rule = AmaxSpikeRule(window=3 + seed, min_samples=3, min_numel=100, rearm=2, confirm=1 + 63 * (seed % 2))
    proof = compare(
        rule, None, lambda generator: draw_amax(generator, 0.04), device=device, seed=seed,
        whole=lambda rule: PlainAmax(rule, ALL_HISTORIES // 4),
    )  # fmt: skip
    assert proof.tells


@pytest.mark.parametrize("device", DEVICES)
def test_equals_a_plain_implementation_where_series_confirm_each_other(device):
    num_series, fired = 50, 0
    for seed in range(HISTORIES // num_series):
        options = np.random.default_rng(seed)
        rule = AmaxSpikeRule(
            window=int(options.integers(3, 9)), min_samples=3, min_numel=100, rearm=2,
            confirm=int(options.integers(2, 5)),
        )  # fmt: skip
        fired += compare(
            rule, None, lambda generator: draw_amax(generator, 0.01), device=device, seed=seed, num_series=num_series,
            num_ticks=30, pool=300, whole=lambda rule: PlainAmax(rule, num_series),
        ).fired  # fmt: skip
    assert fired > 300


def test_sentence():
    run = Run([AmaxSpikeRule()])
    sentence = run.evaluator.explain(0, key("fc", "gradient", 2), 3114.0, 12.0, statistics_row(healthy(amax=3114)))
    assert sentence == (
        "the largest magnitude of gradient of fc (microbatch 2, forward) is 3114, 1038 times the largest of the last "
        "128 samples (3); up to 4 times is normal"
    )
    watched = run.evaluator.explain(
        0, key("fc", "gradient", 2), 3114.0, 12.0, statistics_row(healthy(amax=3114)), watch=True
    )
    assert watched == f"{sentence}, not confirmed yet"
