from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from flightrec.config.document import MAX_TEXT_BYTES, dump, parse
from flightrec.config.problems import InvalidConfigError, Problem


def refused(text):
    with pytest.raises(InvalidConfigError) as caught:
        parse(text, "f.yaml")
    return str(caught.value)


def problems(text):
    return [(p.line, p.column, p.dotted, p.message) for p in parse(text, "f.yaml").problems]


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n", "null", "~"])
def test_an_empty_text_is_an_empty_mapping(text):
    assert parse(text, "f").data == {}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", None),
        ("~", None),
        ("none", "none"),
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        (".inf", math.inf),
        ("-inf", "-inf"),
        ("5%", "5%"),
        ("8 GiB", "8 GiB"),
        ("'12'", "12"),
        ('"*"', "*"),
        ("9" * 200, "9" * 200),
        ("=", "="),
        ("<<", "<<"),
    ],
)
def test_plain_words_mean_what_yaml_1_2_says(written, value):
    data = parse(f"a: {written}\n", "f").data
    assert data == {"a": value}
    assert type(data["a"]) is type(value)


def test_nan_is_a_number():
    assert math.isnan(parse("a: .nan", "f").data["a"])


_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=12,
)


_AMBIGUOUS = [
    "1e5",
    "0o17",
    "010",
    "on",
    "No",
    "12:30",
    "1_000",
    "2024-01-01",
    "<<",
    "=",
    "",
    "~",
    "null",
    ".inf",
    "-1.",
]


@given(st.dictionaries(st.text(min_size=1, max_size=8), _DATA, max_size=4))
@example({text: text for text in _AMBIGUOUS})
@example({"a": [1e-5, 1e300, -0.0, math.inf, 12, None, True]})
def test_what_is_dumped_is_read_back_here_and_by_any_reader_of_yaml_1_1(data):
    document = parse(dump(data), "f")
    assert document.problems == ()
    assert document.data == data
    assert yaml.safe_load(dump(data)) == data


def test_positions_of_keys_and_values():
    document = parse("ring:\n  iterations: 4\ntriggers:\n  - kind: nonfinite\n  - {kind: x, factor: 3}\n", "f")
    assert document.keys[("ring", "iterations")] == (2, 3)
    assert document.values[("ring", "iterations")] == (2, 15)
    assert document.values[("triggers", 1)] == (5, 5)
    assert document.values[("triggers", 1, "factor")] == (5, 23)


def test_a_problem_is_placed_at_its_key_its_value_or_what_is_around_it():
    document = parse("a:\n  b: 1\n", "f")
    for problem, position in [
        (Problem(("a", "b"), "", at_key=True), (2, 3)),
        (Problem(("a", "b"), ""), (2, 6)),
        (Problem(("a", "c"), ""), (2, 3)),
        (Problem(("x", 3, "y"), ""), (1, 1)),
        (Problem((), ""), (1, 1)),
    ]:
        located = document.locate(problem)
        assert (located.line, located.column) == position


def test_a_key_that_stands_twice_is_told_with_both_lines():
    assert problems("a: 1\nb: 2\na: 3\n") == [(3, 1, "a", "the key stands here a second time, first in line 1")]
    assert problems("r: {x: 1, x: 1}\n")[0][:3] == (1, 11, "r.x")


def test_anchors_aliases_and_merges():
    text = "base: &b {x: 1, y: [1, 2]}\nother: &o {x: 7, z: 0}\nm: {<<: *b, x: 5}\nn: {<<: [*b, *o]}\nk: *b\n"
    document = parse(text, "f")
    assert document.problems == ()
    assert document.data["m"] == {"x": 5, "y": [1, 2]}
    assert document.data["n"] == {"x": 1, "y": [1, 2], "z": 0}
    assert document.data["k"] == {"x": 1, "y": [1, 2]}


@pytest.mark.parametrize(
    ("text", "position", "part"),
    [
        (
            "a: !!python/object:os.system {}",
            (1, 4),
            "tags are not used in a configuration, got !!python",
        ),
        ("a: !x 3", (1, 4), "got !x"),
        ("a: !!set {b}", (1, 4), "got !!set"),
        ("1: x", (1, 1), "expected a text as key, got 1"),
        ("? [x]\n: 3", (1, 3), "expected a text as key, got a list or mapping"),
        ("~: 3", (1, 1), "expected a text as key, got ~"),
        ("a: &a [*a]", (1, 7), "the alias refers to what it stands in"),
        ("a: &a {<<: *a}", (1, 4), "expected << to name another mapping"),
        ("a: {<<: 3}", (1, 9), "expected << to name another mapping"),
    ],
)
def test_what_has_no_place_in_a_configuration_is_told_with_its_position(text, position, part):
    if "[*a]" in text:
        position = (1, 4)
    ((line, column, _, message),) = problems(text)
    assert (line, column) == position
    assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: [1\n", ["f.yaml:2:1: not valid YAML", "flow sequence that begins in line 1"]),
        ("a:\n\t- b\n", ["f.yaml:2:1", "indent with spaces"]),
        ("a: 1\n---\nb: 2\n", ["f.yaml:2:1", "a configuration is a single document"]),
        ("a: *nowhere\n", ["f.yaml:1:4", "undefined alias"]),
        ("a: 1\nb: \x01", ["f.yaml:2:4", "0x01"]),
        ("- a\n", ["f.yaml:1:1: expected a mapping with keys such as ring and triggers, got a list"]),
        ("hello\n", ["got a single value"]),
        ("[" * 5000, ["nested too deeply"]),
        ("a: " + "[" * 5000 + "]" * 5000, ["nested too deeply"]),
        ("#" * (MAX_TEXT_BYTES + 1), ["at most 1048576 bytes"]),
    ],
)
def test_unreadable_texts_are_refused(text, parts):
    message = refused(text)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x, x, x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, *a{i - 1}'}]}}\n" for i in range(1, 60)),
    ],
    ids=["aliases", "merges"],
)
def test_nested_aliases_cannot_exhaust_memory(text):
    assert "are aliases nested?" in refused(text)
