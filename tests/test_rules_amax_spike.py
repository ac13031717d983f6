from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from rules_support import DEVICES, ReferenceArming, Run, healthy, key, statistics_row

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


class ReferenceSeries:
    def __init__(self, rule: AmaxSpikeRule) -> None:
        self.window: deque[float] = deque(maxlen=rule.window)
        self.arming, self.watch_arming = ReferenceArming(rule.rearm), ReferenceArming(rule.rearm)
        self.run, self.pending = 0, 0.0


def reference(rule: AmaxSpikeRule, series: dict[int, ReferenceSeries], amaxes: dict[int, list[float]]):
    """One tick: (series, microbatch) pairs that fire, and that are watched."""
    samples = {number: max(values) for number, values in amaxes.items() if max(values) > 0}
    limits = {
        number: rule.factor * max(series[number].window)
        for number in samples
        if len(series[number].window) >= rule.min_samples
    }
    excesses = {number for number, limit in limits.items() if samples[number] > limit}
    fired, watched = set(), set()
    for number, sample in samples.items():
        one = series[number]
        if number not in excesses:
            one.run, one.pending = 0, 0.0
            one.window.append(sample)
            one.arming.fire(False)
            one.watch_arming.fire(False)
            continue
        one.run += 1
        one.pending = max(one.pending, sample)
        confirmed = len(excesses) >= rule.confirm or one.run >= rule.confirm
        rows = {(number, row) for row, value in enumerate(amaxes[number]) if value > limits[number]}
        if confirmed:
            one.window.append(one.pending)
            one.pending = 0.0
        if one.arming.fire(confirmed):
            fired |= rows
        if one.watch_arming.fire(not confirmed):
            watched |= rows
    return fired, watched


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_equals_a_plain_implementation(device, seed):
    generator = np.random.default_rng(seed)
    num_series = 300 if seed < 1 else 6
    rule = AmaxSpikeRule(
        window=int(generator.integers(3, 9)), min_samples=3, min_numel=1, rearm=2,
        confirm=int(1 if seed < 1 else generator.integers(1, 4)),
    )  # fmt: skip
    run, series = Run([rule], device), {number: ReferenceSeries(rule) for number in range(num_series)}
    num_fired = num_watched = 0
    for tick in range(30 if seed < 1 else 150):
        if tick and tick % 70 == 0:
            run.restart()
        records, amaxes = {}, {}
        for number in range(num_series if tick > 20 else max(1, num_series // 2)):
            if generator.random() < 0.2:
                continue
            amaxes[number] = []
            for microbatch in range(2):
                amax = generator.choice([0.0, 1.0, 1.5, 2.0, 9.0, 70.0], p=[0.1, 0.27, 0.27, 0.27, 0.06, 0.03])
                records[key(f"layer.{number}", microbatch=microbatch)] = healthy(amax=amax)
                amaxes[number].append(amax)
        verdict = run.tick(records)
        fired, watched = reference(rule, series, amaxes)
        assert run.marked(verdict.fired) == {key(f"layer.{n}", microbatch=m) for n, m in fired}
        assert run.marked(verdict.watch) == {key(f"layer.{n}", microbatch=m) for n, m in watched}
        num_fired, num_watched = num_fired + len(fired), num_watched + len(watched)
    assert num_fired > 2
    assert num_watched > 5 or rule.confirm == 1


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
