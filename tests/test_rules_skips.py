from __future__ import annotations

import pytest
import torch
from rules_support import DEVICES, Run, healthy, key, loss

from flightrec.config.rules import AmaxSpikeRule, NonfiniteRule
from flightrec.config.training_rules import (
    MetricJumpRule,
    MetricThresholdRule,
    MissingRecordRule,
    UnchangedParametersRule,
    ZeroGradientRule,
)
from flightrec.records import NO_MICROBATCH, Key, Stage
from flightrec.rules.skips import SkippedSteps

SKIPPED = Key("", "metric", "skipped_step", stage=Stage.AFTER_STEP)
SCALE = Key("", "metric", "loss_scale", stage=Stage.AFTER_STEP)
NORM = Key("", "metric", "grad_norm", stage=Stage.AFTER_STEP)
GRADIENTS = [
    key("fc", "gradient"),
    key("fc", "dgrad"),
    *(Key("fc", "wgrad", "", m, stage=s) for s, m in ((Stage.BACKWARD, 0), (Stage.REDUCED, -1), (Stage.UNSCALED, -1))),
]
OTHERS = [key("fc", "activation"), key("fc", "weight"), key("fc", "parameter", NO_MICROBATCH), key("", "loss")]


def tick(skipped: bool, records):
    return {SKIPPED: loss(float(skipped)), **records}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skipped", [True, False])
def test_gradients_of_a_skipped_step_are_silent_and_others_fire(device, skipped):
    run = Run([NonfiniteRule(tensors="*")], device)
    bad = healthy(nan_count=3)
    fired = run.fired(tick(skipped, dict.fromkeys([*GRADIENTS, *OTHERS], bad)))
    assert fired == set(OTHERS if skipped else [*OTHERS, *GRADIENTS])


def test_without_a_scaler_nothing_is_excused():
    run = Run([NonfiniteRule(tensors="*")])
    assert run.fired(dict.fromkeys(GRADIENTS, healthy(nan_count=3))) == set(GRADIENTS)
    skips = SkippedSteps(torch.device("cpu"))
    skips.add(GRADIENTS[0], 0)
    assert skips.look(torch.zeros(1, 24), torch.ones(1, dtype=torch.bool)) is None


def test_a_step_of_an_earlier_iteration_excuses_nothing():
    """The row of an iteration that recorded no metric holds what an older one left."""
    run = Run([NonfiniteRule(tensors="*")])
    assert not run.fired(tick(True, {GRADIENTS[0]: healthy(nan_count=3)}))
    assert run.fired({GRADIENTS[0]: healthy(nan_count=3)}) == {GRADIENTS[0]}


def test_rows_that_come_later_are_known_too():
    run = Run([NonfiniteRule(tensors="*")], block=1)
    assert not run.fired({GRADIENTS[0]: healthy()})
    assert not run.fired(tick(True, {GRADIENTS[0]: healthy(nan_count=1)}))
    assert not run.fired(tick(True, {GRADIENTS[1]: healthy(nan_count=1)}))
    assert run.fired(tick(False, {GRADIENTS[1]: healthy(nan_count=1)})) == {GRADIENTS[1]}


def test_only_metrics_that_are_not_finite_are_excused():
    run = Run([NonfiniteRule(tensors="*"), MetricThresholdRule(metrics="grad_norm", above=10.0)])
    verdict = run.tick(tick(True, {NORM: loss(float("inf"))}))
    assert not verdict.any.item()
    verdict = run.tick(tick(True, {NORM: loss(11.0)}))
    assert run.marked(verdict.fired, 1) == {NORM}
    assert run.fired(tick(False, {NORM: loss(float("inf"))})) == {NORM}


def test_huge_gradients_of_skipped_steps_enter_no_window():
    run = Run([AmaxSpikeRule(tensors="*", min_samples=2, window=4, min_numel=1, confirm=1)])
    gradient = GRADIENTS[0]
    for number in range(4):
        assert not run.fired(tick(False, {gradient: healthy(amax=1.0 + number / 10)}))
    for _ in range(8):
        assert not run.fired(tick(True, {gradient: healthy(amax=1e30)}))
    assert run.fired(tick(False, {gradient: healthy(amax=100.0)})) == {gradient}


def test_skipped_iterations_do_not_make_a_gradient_missing_or_zero():
    rules = [MissingRecordRule(min_samples=2, consecutive=2), ZeroGradientRule(min_samples=2, consecutive=2)]
    run = Run(rules)
    clipped = Key("fc", "wgrad", stage=Stage.CLIPPED)
    both = {clipped: healthy(), GRADIENTS[0]: healthy()}
    for _ in range(3):
        assert not run.tick(tick(False, both)).any.item()
    for _ in range(30):  # the scaler skips: nothing reaches the optimizer, what reached backward is flushed to zero
        assert not run.tick(tick(True, {GRADIENTS[0]: healthy(amax=0.0)})).any.item()
    verdicts = [run.tick(tick(False, {GRADIENTS[0]: healthy(amax=0.0)})) for _ in range(3)]
    assert [run.marked(verdict.fired, 0) for verdict in verdicts] == [set(), set(), {clipped}]
    assert [run.marked(verdict.fired, 1) for verdict in verdicts] == [set(), {GRADIENTS[0]}, set()]


def test_parameters_that_stand_still_count_only_in_steps_that_were_taken():
    parameter = Key("fc", "parameter", "weight", stage=Stage.AFTER_STEP)
    run = Run([UnchangedParametersRule(min_samples=2, consecutive=3)])
    values = iter(range(100))
    for _ in range(4):
        assert not run.fired(tick(False, {parameter: healthy(sum=float(next(values)))}))
    still = {parameter: healthy(sum=float(next(values)))}
    assert not run.fired(tick(False, still))
    assert not any(run.fired(tick(True, still)) for _ in range(30))
    assert [bool(run.fired(tick(False, still))) for _ in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("names, fires", [("*", False), ("loss_*", True), (["*", "loss_scale"], True)])
def test_a_scale_that_grows_fires_only_where_it_is_named(names, fires):
    run = Run([MetricJumpRule(metrics=names, min_samples=4, window=8)])
    for _ in range(8):
        assert not run.fired(tick(False, {SCALE: loss(1024.0)}))
    assert bool(run.fired(tick(False, {SCALE: loss(2048.0)}))) is fires
