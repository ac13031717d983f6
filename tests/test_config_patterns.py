from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.config.expressions import compile_pattern
from flightrec.config.patterns import layer_predicate


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*", ["", "a", "a.b.c", "a\nb"], []),
        ("", [""], ["a"]),
        (
            "decoder.layers.*.mlp*",
            ["decoder.layers.0.mlp", "decoder.layers.1.x.mlp.fc1"],
            ["decoder.layers.0.attn", "x"],
        ),
        ("*.fc?", ["a.fc1"], ["a.fc", "a.fc10", "fc1"]),
        ("h.[01]", ["h.0", "h.1"], ["h.2", "h.01"]),
        ("Layer", ["Layer"], ["layer"]),
        ("a.b", ["a.b"], ["a_b", "aXb"]),
        ("re:a\\.b", ["a.b"], ["a_b", "a.bc", "xa.b"]),
        ("re: h\\.[0-3]", ["h.3"], ["h.4", "h.33"]),
        ("re:.*", ["", "a.b"], []),
        ("x[[]0]", ["x[0]"], ["x0"]),
    ],
)
def test_patterns(pattern, matching, other):
    predicate = layer_predicate((pattern,))
    assert [name for name in matching if not predicate(name)] == []
    assert [name for name in other if predicate(name)] == []


def test_one_of_several_patterns_suffices():
    predicate = layer_predicate(("a.*", "re:b\\d"))
    assert [predicate(name) for name in ("a.x", "b3", "c")] == [True, True, False]


@pytest.mark.parametrize(
    "pattern", ["re:", "re:(", "re:[", "re:*", "re:(?P<n>a)(?P<n>b)", "re:a{99999999999999999999}"]
)
def test_invalid_regular_expressions_are_refused(pattern):
    with pytest.raises(ValueError, match="expected a regular expression after re:"):
        compile_pattern(pattern)


@given(st.text())
def test_a_name_escaped_for_a_glob_matches_only_itself(name):
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in name)
    if escaped.startswith("re:"):
        return
    assert layer_predicate((escaped,))(name)
    assert not layer_predicate((escaped,))(name + "x")
