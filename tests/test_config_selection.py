from __future__ import annotations

import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flightrec.config.selection import ALWAYS_RECORDED, DEFAULT_TENSORS, STAGES_OF, Matcher, Selection
from flightrec.records import TENSORS, Phase, Stage


def test_an_empty_entry_keeps_all_bytes_of_what_products_need():
    entry = Selection()
    assert (entry.layers, entry.tensors, entry.every, entry.phases) == (("*",), DEFAULT_TENSORS, 1, (Phase.TRAIN,))
    assert entry.keep == frozenset({"high_precision", "quantized"})


def test_single_words_stand_for_lists_and_repetitions_count_once():
    entry = Selection(layers="a", tensors="weight", keep="statistics", phases="eval")
    assert (entry.layers, entry.tensors, entry.keep, entry.phases) == (
        ("a",),
        ("weight",),
        frozenset({"statistics"}),
        (Phase.EVAL,),
    )
    assert Selection(layers=["a", "a"], tensors=["weight", "weight"]).tensors == ("weight",)
    assert Selection(tensors="*").tensors == TENSORS


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": []},
        {"keep": ["bytes"]},
        {"every": 0},
        {"every": True},
        {"tensors": "loss", "every": 2},
        {"tensors": ["loss", "metric"], "every": 2},
        {"phases": "warmup"},
        {"stages": []},
        {"stages": "later"},
        {"tensors": "activation", "stages": ["forward", "reduced"]},
        {"tensors": ["wgrad", "weight"], "stages": ["reduced"]},
        {"tensors": "parameter", "stages": "backward"},
        {"layer": "a"},
    ],
)
def test_entries_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValidationError):
        Selection(**settings)


def test_stages_that_cost_a_copy_have_to_be_asked_for():
    asked_for = {Stage.REDUCED, Stage.UNSCALED, Stage.CLIPPED}
    assert set(Selection().stages) == set(Stage) - asked_for
    matcher = Matcher([Selection()])
    assert {stage for stage in Stage if matcher.selects("a", "wgrad", stage=stage)} == set(Stage) - asked_for
    assert set(STAGES_OF) == set(TENSORS)
    assert {stage for stages in STAGES_OF.values() for stage in stages} == set(Stage)


def test_the_first_entry_decides_about_the_stage_too():
    first = Selection(tensors="wgrad", stages=["reduced", "clipped", "reduced"])
    second = Selection(tensors="*")
    matcher = Matcher([first, second])
    assert first.stages == (Stage.REDUCED, Stage.CLIPPED)
    assert matcher.selects("a", "wgrad") is first
    assert matcher.selects("a", "wgrad", stage=Stage.CLIPPED) is first
    assert matcher.selects("a", "wgrad", stage=Stage.BACKWARD) is None
    assert matcher.selects("a", "parameter", stage=Stage.START) is second


def test_stages_filter_what_a_wildcard_names():
    matcher = Matcher([Selection(tensors="*", stages=["backward", "clipped"])])
    assert {tensor for tensor in TENSORS if matcher.selects("a", tensor)} == {
        *("activation", "weight", "gradient", "dgrad", "wgrad"),
        *ALWAYS_RECORDED,
    }
    assert matcher.selects("", "loss", stage=Stage.LOSS) is not None
    assert matcher.selects("", "metric", stage=Stage.START) is not None


def test_the_first_entry_that_matches_layer_and_tensor_decides_about_the_phase_too():
    first = Selection(layers="a.*", tensors="weight", keep="statistics")
    second = Selection(tensors=["weight", "gradient"], phases=["train", "eval"])
    matcher = Matcher([first, second])
    assert matcher.selects("a.x", "weight") is first
    assert matcher.selects("a.x", "gradient") is second
    assert matcher.selects("b", "weight", Phase.EVAL) is second
    assert matcher.selects("b", "weight", "eval") is second
    assert matcher.selects("a.x", "weight", Phase.EVAL) is None
    assert matcher.selects("b", "output") is None
    assert matcher.selects("b", "weight", Phase.WARMUP) is None


def test_answers_are_remembered_also_the_negative_ones(monkeypatch):
    matcher = Matcher([Selection(layers="re:a+", tensors="weight")])
    asked = [("a", "weight"), ("b", "weight"), ("a", "output"), ("", "loss")]
    answers = [matcher.selects(*names) for names in asked]
    monkeypatch.setattr(matcher, "_decide", None)
    assert [matcher.selects(*names) for names in asked] == answers


@pytest.mark.parametrize("tensor", sorted(ALWAYS_RECORDED))
def test_loss_and_metrics_are_recorded_in_every_iteration_whatever_is_selected(tensor):
    unrelated = Matcher([Selection(layers="a", tensors="weight")])
    assert unrelated.selects("", tensor).every == 1
    assert unrelated.selects("", tensor, Phase.EVAL) is None
    sparse = Matcher([Selection(tensors="*", every=10, keep="statistics", phases=["train", "eval"])])
    assert (sparse.selects("", tensor).every, sparse.selects("", tensor).keep) == (1, frozenset({"statistics"}))
    assert sparse.selects("", tensor, Phase.EVAL).every == 1
    evaluation_only = Matcher([Selection(tensors="*", phases="eval")])
    assert evaluation_only.selects("", tensor) is not None


def test_a_matcher_can_be_pickled_and_shared_by_threads():
    matcher = pickle.loads(pickle.dumps(Matcher([Selection(layers="a*", tensors="weight")])))
    answers = []

    def ask():
        answers.append([matcher.selects(f"{'ab'[i % 2]}{i}", "weight") is not None for i in range(500)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[True, False] * 250] * 4


_ENTRIES = st.builds(
    Selection,
    layers=st.lists(st.sampled_from(["*", "a", "a.*", "b?", "re:[ab]"]), min_size=1, max_size=2),
    tensors=st.lists(st.sampled_from(["weight", "gradient", "output"]), min_size=1),
)


@given(
    _ENTRIES, _ENTRIES, st.sampled_from(["a", "a.b", "b1", "c", ""]), st.sampled_from(["weight", "gradient", "output"])
)
def test_what_an_entry_covers_never_reaches_a_later_one(first, second, layer, tensor):
    if first.covers(second):
        assert Matcher([first, second]).selects(layer, tensor) is not second
