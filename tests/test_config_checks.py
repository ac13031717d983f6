from __future__ import annotations

import pytest

from flightrec.config.checks import cross_check
from flightrec.config.quantizer_rules import UnderflowRule
from flightrec.config.rules import AmaxSpikeRule, LossJumpRule, ManualRule, NonfiniteRule
from flightrec.config.selection import Selection

EVERYTHING = (Selection(),)


def found(select, triggers):
    return [(problem.dotted, problem.message) for problem in cross_check(select, triggers)]


def test_a_sound_configuration_has_no_problems():
    select = (Selection(layers="a", tensors="weight"), Selection(layers="b", tensors="weight"), Selection())
    assert found(select, (NonfiniteRule(), AmaxSpikeRule(), LossJumpRule(), ManualRule())) == []


@pytest.mark.parametrize(
    "hidden",
    [
        Selection(),
        Selection(layers="a"),
        Selection(layers=["a", "b"], tensors="weight"),
        Selection(every=3, keep="statistics"),
    ],
)
def test_an_entry_after_one_that_takes_everything_is_refused(hidden):
    ((key, message),) = found((Selection(), hidden), ())
    assert key == "select[1]"
    assert "select[0] already takes" in message


def test_an_entry_with_one_tensor_or_layer_more_is_not_hidden():
    assert found((Selection(layers="a"), Selection(layers=["a", "b"])), ()) == []
    assert found((Selection(), Selection(tensors=["weight", "parameter"])), ()) == []


def test_names_are_unique():
    triggers = (NonfiniteRule(name="x"), AmaxSpikeRule(), AmaxSpikeRule(factor=8), LossJumpRule(name="x"))
    assert [key for key, _ in found(EVERYTHING, triggers)] == ["triggers[2].name", "triggers[3].name"]


@pytest.mark.parametrize("manual_first", [True, False])
def test_the_name_of_the_manual_rule_is_taken(manual_first):
    other = NonfiniteRule(name="manual")
    triggers = (ManualRule(), other) if manual_first else (other, ManualRule())
    ((key, message),) = found(EVERYTHING, triggers)
    assert key == f"triggers[{triggers.index(other)}].name"
    assert "the rule that is always there" in message


def test_a_rule_whose_tensors_are_not_recorded_is_refused():
    ((key, message),) = found(
        (Selection(tensors=["weight", "wgrad"]),), (AmaxSpikeRule(), LossJumpRule(), NonfiniteRule())
    )
    assert key == "triggers[0].tensors"
    assert "select records only weight, wgrad" in message


def test_a_rule_whose_tensors_no_stage_shows_is_refused():
    select = (Selection(tensors="*", stages=["reduced", "start"]),)
    ((key, message),) = found(select, (AmaxSpikeRule(), NonfiniteRule()))
    assert key == "triggers[0].tensors"
    assert "select records only metric, parameter, wgrad" in message


def test_a_rule_whose_phases_are_not_recorded_is_refused():
    select = (Selection(tensors="weight", phases=["train", "eval"]), Selection(tensors="output"))
    rule = UnderflowRule(tensors="output", phases="eval")
    ((key, message),) = found(select, (rule,))
    assert key == "triggers[0].phases"
    assert "only in train" in message
    assert found(select, (UnderflowRule(tensors="weight", phases="eval"),)) == []


def test_statistics_of_few_iterations_are_enough_for_a_rule():
    assert found((Selection(tensors="activation", keep="statistics", every=10),), (AmaxSpikeRule(),)) == []
