from __future__ import annotations

import pickle

import pytest

from flightrec.config.model import Config, NonfiniteRule
from flightrec.config.problems import InvalidConfigError, Problem, describe, nearest
from flightrec.config.rules import LATER_KINDS
from flightrec.errors import ConfigError


def messages(**settings):
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    return {problem.dotted: problem.message for problem in caught.value.problems}


def rule(**settings):
    return messages(triggers=[settings])


def test_a_problem_renders_place_key_and_message():
    problem = Problem(("triggers", 0, "factor"), "expected more", line=3, column=7)
    assert problem.render("a.yaml") == "a.yaml:3:7: triggers[0].factor: expected more"
    assert Problem((), "expected a mapping").render("configuration") == "configuration: expected a mapping"


def test_the_error_counts_its_problems_and_survives_pickling():
    error = InvalidConfigError([Problem(("a",), "x"), Problem(("b",), "y")], "f.yaml")
    assert str(error) == "f.yaml has 2 errors:\nf.yaml: a: x\nf.yaml: b: y"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems, again.origin) == (str(error), error.problems, "f.yaml")
    assert "errors" not in str(InvalidConfigError([Problem(("a",), "x")]))


@pytest.mark.parametrize(
    ("settings", "key", "parts"),
    [
        ({"rng": {}}, "rng", ["unknown key, did you mean ring?", "Known keys: budget, watch_iterations, ring, select"]),
        ({"zzz": 1}, "zzz", ["unknown key. Known keys: budget"]),
        ({"limit": 3}, "limit", ["it belongs into incident."]),
        ({"iterations": 3}, "iterations", ["it belongs into ring or history."]),
        ({"ring": {"iteratons": 3}}, "ring.iteratons", ["did you mean iterations?", "on_out_of_memory"]),
        ({"ring": {"host_memory": 3}}, "ring.host_memory", ["expected a size", "did you mean 3 GiB?"]),
        ({"history": {"memory": None}}, "history.memory", ["size such as 256 MiB", "a share"]),
        ({"ring": 3}, "ring", ["expected a mapping, got 3"]),
        ({"ring": {"iterations": "4"}}, "ring.iterations", ["expected an integer, got the text '4'"]),
        ({"ring": {"iterations": True}}, "ring.iterations", ["expected an integer, got true"]),
        ({"ring": {"iterations": 0}}, "ring.iterations", ["expected at least 1, got 0"]),
        ({"ring": {"iterations": 5000}}, "ring.iterations", ["expected at most 1024, got 5000"]),
        ({"ring": {"iterations": None}}, "ring.iterations", ["expected an integer, got nothing (null)"]),
        (
            {"ring": {"memory": "8 GB1"}},
            "ring.memory",
            ["size such as 8 GiB", "a share", "got the text '8 GB1'"],
        ),
        ({"ring": {"microbatches": "al"}}, "ring.microbatches", ["expected all, first, last or rotate", "mean all?"]),
        ({"ring": {3: 4}}, "ring[3]", ["expected a text as key, got 3"]),
        ({"incident": {"after": 65}}, "incident.after", ["expected at most 64, got 65"]),
        ({"incident": {"disk_quota": "5%"}}, "incident.disk_quota", ["expected a size", "got the text '5%'"]),
        ({"incident": {"writer": "fork"}}, "incident.writer", ["expected process or thread, got the text 'fork'"]),
        ({"select": {}}, "select", ["expected a list, got {}"]),
        ({"select": "all"}, "select", ["expected a list, got the text 'all'"]),
        ({"select": []}, "select", ["expected at least one entry, got []; leave select out"]),
        ({"select": [3]}, "select[0]", ["expected a mapping, got 3"]),
        ({"select": [{"tensors": "gradients"}]}, "select[0].tensors", ["did you mean gradient?"]),
        ({"select": [{"tensors": ["weight", "gradients"]}]}, "select[0].tensors[1]", ["did you mean gradient?"]),
        ({"select": [{"phases": ["trian"]}]}, "select[0].phases[0]", ["did you mean train?"]),
        (
            {"select": [{"layers": "re:("}]},
            "select[0].layers",
            ["expected a regular", "got the text 're:('"],
        ),
        ({"budget": "0%"}, "budget", ["expected a share of a step above 0% and at most 100%, got the text '0%'"]),
        ({"budget": "101%"}, "budget", ["expected a share of a step above 0% and at most 100%, got the text '101%'"]),
        ({"budget": 3}, "budget", ["expected none or a share of a step such as 1%, got 3"]),
        ({"budget": "1 ms"}, "budget", ["expected none or a share of a step such as 1%, got the text '1 ms'"]),
        ({"watch_iterations": -1}, "watch_iterations", ["expected at least 0, got -1"]),
        ({"triggers": ["nonfinite"]}, "triggers[0]", ["expected a mapping, got the text 'nonfinite'"]),
    ],
)
def test_each_message_says_where_what_was_expected_and_what_was_found(settings, key, parts):
    found = messages(**settings)
    assert list(found) == [key]
    assert [part for part in parts if part not in found[key]] == []


@pytest.mark.parametrize(
    ("settings", "key", "part"),
    [
        ({"name": "x"}, "triggers[0]", "missing key kind; known kinds: nonfinite, loss_jump"),
        ({"kind": "nonfinit"}, "triggers[0].kind", "did you mean nonfinite?"),
        ({"kind": "hnag"}, "triggers[0].kind", "did you mean hang (not available in this version)?"),
        ({"kind": 3}, "triggers[0].kind", "expected one of nonfinite"),
        ({"kind": "nonfinite", "factor": 3}, "triggers[0].factor", "unknown key. Known keys: kind, name"),
        ({"kind": "amax_spike", "factr": 3}, "triggers[0].factr", "did you mean factor?"),
        ({"kind": "amax_spike", "factor": 1}, "triggers[0].factor", "expected more than 1, got 1"),
        ({"kind": "amax_spike", "factor": float("inf")}, "triggers[0].factor", "expected a finite number, got inf"),
        ({"kind": "amax_spike", "window": 64.0}, "triggers[0].window", "expected an integer, got 64.0"),
        (
            {"kind": "amax_spike", "window": 32},
            "triggers[0].window",
            "expected at least min_samples = 64 (its default)",
        ),
        ({"kind": "manual", "layers": "a"}, "triggers[0].layers", "unknown key"),
        ({"kind": "manual", "severity": "watch"}, "triggers[0].severity", "only writes incidents"),
        ({"kind": "nonfinite", "severity": "fatal"}, "triggers[0].severity", "did you mean fault?"),
        ({"kind": "nonfinite", "name": "a/b"}, "triggers[0].name", "expected 1 to 64 letters"),
        ({"kind": "nonfinite", "allow": ["nan"]}, "triggers[0].allow[0]", "expected -inf or +inf"),
    ],
)
def test_messages_about_rules_name_the_rules_own_keys(settings, key, part):
    found = rule(**settings)
    assert list(found) == [key]
    assert part in found[key]


@pytest.mark.parametrize("kind", LATER_KINDS)
def test_kinds_of_later_versions_are_refused_by_name(kind):
    assert f"the kind {kind} is not available in this version" in rule(kind=kind)["triggers[0].kind"]


def test_all_problems_are_told_at_once():
    found = messages(
        ring={"iterations": 0, "memry": 3},
        select=[{"every": 0}, {"keep": []}],
        triggers=[{"kind": "hang"}, {"kind": "underflow", "window": 3}, NonfiniteRule()],
        bdget="none",
    )
    assert set(found) == {
        "ring.iterations",
        "ring.memry",
        "select[0].every",
        "select[1].keep",
        "triggers[0].kind",
        "triggers[1].window",
        "bdget",
    }


def test_long_and_nested_values_are_cut_short_in_messages():
    nested = [0]
    for _ in range(60):
        nested = [nested, nested]
    assert len(messages(ring={"iterations": nested})["ring.iterations"]) < 2000
    assert len(messages(ring={"memory": "x" * 10_000})["ring.memory"]) < 300
    assert len(describe({str(i): i for i in range(1000)})) < 100


def test_nearest():
    assert nearest("Iterations", ["iterations", "memory"]) == "iterations"
    assert nearest("on-out-of-memory", ["on_out_of_memory"]) == "on_out_of_memory"
    assert nearest("qqq", ["iterations"]) is None
