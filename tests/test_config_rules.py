from __future__ import annotations

import pytest
from pydantic import ValidationError

from flightrec.config.quantizer_rules import QuantizationErrorRule, SaturationRule, UnderflowRule
from flightrec.config.rules import (
    LATER_KINDS,
    RULE_CLASSES,
    AmaxSpikeRule,
    ExceptionRule,
    LossJumpRule,
    ManualRule,
    NonfiniteRule,
    default_rules,
)
from flightrec.config.training_rules import (
    LossDriftRule,
    LossScaleCollapseRule,
    MetricJumpRule,
    MetricThresholdRule,
)
from flightrec.records import TENSORS, Phase, Severity


def test_the_defaults_are_those_of_the_design():
    nonfinite, loss, amax, underflow, *others, exception, manual = default_rules()
    assert (nonfinite.tensors, nonfinite.allow, nonfinite.min_samples) == (TENSORS, (), 0)
    assert (loss.sigma, loss.window, loss.min_samples, loss.factor, loss.direction) == (6.0, 128, 64, None, "up")
    assert (amax.factor, amax.window, amax.min_samples, amax.min_numel, amax.confirm) == (4.0, 128, 64, 1024, 2)
    assert amax.tensors == ("activation", "gradient")
    assert (underflow.factor, underflow.minimum, underflow.new_row, underflow.min_samples) == (4.0, 0.25, 0.9, 16)
    severities = [rule.severity for rule in (nonfinite, loss, amax, underflow, exception, manual)]
    assert severities == [Severity.FAULT, *[Severity.WARNING] * 3, Severity.FAULT, Severity.FAULT]
    on_request = {"metric_jump", "metric_threshold", "unchanged_parameters", "expert"}
    assert {rule.kind for rule in default_rules()} == set(RULE_CLASSES) - on_request
    assert all(rule == RULE_CLASSES[rule.kind]() for rule in others)
    for rule in (nonfinite, loss, amax, underflow):
        assert (rule.layers, rule.phases, rule.rearm) == (("*",), (Phase.TRAIN, Phase.RECOMPUTE), 8)


def test_each_kind_has_one_class_and_is_called_by_it():
    needed = {"metric_threshold": {"above": 1.0}}
    names = {kind: cls(**needed.get(kind, {})).name for kind, cls in RULE_CLASSES.items()}
    assert names == {kind: kind for kind in RULE_CLASSES}
    assert not set(RULE_CLASSES) & set(LATER_KINDS)


def test_only_exception_and_manual_are_host_rules_and_have_no_layers():
    assert {kind for kind, cls in RULE_CLASSES.items() if cls.is_host} == {"exception", "manual"}
    with pytest.raises(ValidationError):
        ManualRule(layers="*")


def test_sees_needs_layer_tensor_and_phase():
    rule = NonfiniteRule(layers=["a.*", "re:b\\d"], tensors="gradient", phases=["train", "eval"])
    assert rule.sees("a.x", "gradient", Phase.TRAIN)
    assert rule.sees("b1", "gradient", "eval")
    assert not rule.sees("c", "gradient", Phase.TRAIN)
    assert not rule.sees("a.x", "weight", Phase.TRAIN)
    assert not rule.sees("a.x", "gradient", Phase.RECOMPUTE)


def test_cooldown_is_read_by_both_of_its_names_but_not_by_both_at_once():
    assert NonfiniteRule(cooldown=3) == NonfiniteRule(cooldown_iterations=3)
    with pytest.raises(ValidationError, match="got both"):
        NonfiniteRule(cooldown=3, cooldown_iterations=3)


@pytest.mark.parametrize(
    ("written", "meant"),
    [(["-inf"], ("-inf",)), ([float("-inf"), float("inf")], ("-inf", "+inf")), (["inf", "+inf"], ("+inf", "+inf"))],
)
def test_allow_takes_infinities_as_texts_and_numbers(written, meant):
    assert NonfiniteRule(allow=written).allow == meant


@pytest.mark.parametrize("value", ["nan", float("nan"), 0, None])
def test_allow_takes_nothing_else(value):
    with pytest.raises(ValidationError):
        NonfiniteRule(allow=[value])


@pytest.mark.parametrize(
    ("cls", "settings", "key"),
    [
        (AmaxSpikeRule, {"window": 64, "min_samples": 65}, "min_samples"),
        (AmaxSpikeRule, {"window": 63}, "window"),
        (LossJumpRule, {"min_samples": 129}, "min_samples"),
        (UnderflowRule, {"window": 15}, "window"),
        (UnderflowRule, {"minimum": 0.95}, "minimum"),
        (UnderflowRule, {"new_row": 0.2}, "new_row"),
        (LossJumpRule, {"tensors": ["activation"]}, "tensors"),
        (SaturationRule, {"minimum": 0.6}, "minimum"),
        (QuantizationErrorRule, {"minimum": 0.6}, "minimum"),
        (LossDriftRule, {"min_samples": 1025}, "min_samples"),
        (LossDriftRule, {"history": 32}, "history"),
        (LossDriftRule, {"tensors": ["metric"]}, "tensors"),
        (MetricThresholdRule, {}, "above"),
        (MetricThresholdRule, {"above": 1, "below": 2}, "below"),
        (MetricThresholdRule, {"above": 1, "tensors": ["loss"]}, "tensors"),
        (MetricJumpRule, {"tensors": ["loss"]}, "tensors"),
        (LossScaleCollapseRule, {"tensors": ["loss"]}, "tensors"),
        (ManualRule, {"severity": "watch"}, "severity"),
        (ExceptionRule, {"severity": "watch"}, "severity"),
    ],
)
def test_impossible_combinations_point_at_the_key_to_change(cls, settings, key):
    with pytest.raises(ValidationError) as caught:
        cls(**settings)
    (details,) = caught.value.errors()
    assert details["ctx"]["key"] == key


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (AmaxSpikeRule, {"window": 64}),
        (AmaxSpikeRule, {"window": 1, "min_samples": 1, "min_numel": 1, "confirm": 1}),
        (UnderflowRule, {"minimum": 0.9}),
        (SaturationRule, {"minimum": 0.5}),
        (MetricThresholdRule, {"above": 1.0, "below": 1.0}),
        (LossDriftRule, {"history": 64, "window": 1}),
        (LossJumpRule, {"factor": 2, "direction": "both", "consecutive": 3}),
    ],
)
def test_combinations_at_the_border_are_fine(cls, settings):
    rule = cls(**settings)
    assert all(getattr(rule, key) == value for key, value in settings.items())


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (AmaxSpikeRule, {"factor": 1}),
        (AmaxSpikeRule, {"factor": "4"}),
        (AmaxSpikeRule, {"factor": True}),
        (AmaxSpikeRule, {"factor": float("inf")}),
        (AmaxSpikeRule, {"window": 4097, "min_samples": 1}),
        (AmaxSpikeRule, {"window": 100.0}),
        (AmaxSpikeRule, {"confirm": 0}),
        (AmaxSpikeRule, {"min_samples": 0}),
        (LossJumpRule, {"sigma": 0}),
        (LossJumpRule, {"sigma": float("nan")}),
        (LossJumpRule, {"direction": "sideways"}),
        (NonfiniteRule, {"rearm": 0}),
        (NonfiniteRule, {"cooldown": -1}),
        (NonfiniteRule, {"tensors": []}),
        (NonfiniteRule, {"tensors": ["grad"]}),
        (NonfiniteRule, {"phases": ["warmup"]}),
        (NonfiniteRule, {"phases": []}),
        (NonfiniteRule, {"layers": []}),
        (NonfiniteRule, {"layers": "re:("}),
        (NonfiniteRule, {"name": "a/b"}),
        (NonfiniteRule, {"name": ""}),
        (NonfiniteRule, {"name": "x" * 65}),
        (NonfiniteRule, {"kind": "amax_spike"}),
    ],
)
def test_single_values_out_of_range_are_refused(cls, settings):
    with pytest.raises(ValidationError):
        cls(**settings)


def test_rules_are_frozen_and_hashable():
    rule = AmaxSpikeRule()
    with pytest.raises(ValidationError):
        rule.factor = 5.0
    assert hash(rule) == hash(AmaxSpikeRule())
