from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.storage import text

TEXTS = ["", "plain", "nul\0inside", "\0", "\ud800 lone", "x" * 70_000, "back\\slash \\u0000", "ü 漢 🙂", "tail\0"]
anything = st.text(st.characters(exclude_categories=()))


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "text.h5", "w", libver=("earliest", "v110")) as opened:
        yield opened


@pytest.mark.parametrize("value", TEXTS)
def test_f38_text_comes_back(file: h5py.File, value: str) -> None:
    text.write_text(file, "config", value)
    text.write_attributes(file, {"name": value, "other": "plain", "number": np.int64(2**62)})
    assert text.read_text(file, "config") == value
    assert text.read_attribute(file, "name") == value
    assert text.read_attribute(file, "other") == "plain"
    assert text.read_attribute(file, "number") == 2**62


def test_ordinary_text_is_stored_as_it_is(file: h5py.File) -> None:
    text.write_text(file, "config", "re:\\d+")
    assert file["config"].asstr()[()] == "re:\\d+"
    assert "escaped" not in file["config"].attrs


def test_text_tables_share_rows_and_keep_every_text(file: h5py.File) -> None:
    table = text.TextTable()
    rows = [table.add(value) for value in TEXTS]
    assert rows[0] == 0
    assert [table.add(value) for value in TEXTS] == rows
    table.write(file)
    found = text.read_text_table(file)
    assert [found[row] for row in rows] == TEXTS


@given(value=anything)
def test_escape_is_reversible(value: str) -> None:
    escaped = text.escape_text(value)
    assert text.unescape_text(escaped) == value
    assert not text.needs_escape(escaped)


class Color(enum.IntEnum):
    RED = 3


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


class BadMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("broken")

    def __iter__(self) -> Any:
        raise RuntimeError("broken")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": None}, {"a": None}),
        ([1, "x", None], [1, "x", None]),
        ("ab\0cd", "ab\0cd"),
        (float("inf"), float("inf")),
        (float("-inf"), float("-inf")),
        (2**63, 2**63),
        (-(10**40), -(10**40)),
        ({"x": {"y": [{"z": 1.5}]}}, {"x": {"y": [{"z": 1.5}]}}),
        ("\udc80", "\udc80"),
        (b"\x00\xff", b"\x00\xff"),
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: "a"}, {"1": "a"}),
        ({"$float": "x", "$$": 1}, {"$float": "x", "$$": 1}),
        (Color.RED, 3),
        (True, True),
        (np.float32(1.5), 1.5),
        (np.bool_(True), True),
        (np.dtype("f4"), "float32"),
        (np.array(["a"]), "['a']"),
        (np.array([[1, 2]], dtype="i2")[0], np.array([1, 2], dtype="i2")),
    ],
)
def test_f38_values_come_back(value: Any, expected: Any) -> None:
    found = text.from_json_text(text.to_json_text(value))
    assert type(found) is type(expected)
    assert np.array_equal(found, expected) if isinstance(expected, np.ndarray) else found == expected


def test_f38_negative_zero_nan_and_a_long_array() -> None:
    found = text.from_json_text(text.to_json_text({"z": -0.0, "n": float("nan"), "h": np.full(16384, np.nan, "f4")}))
    assert np.signbit(found["z"])
    assert np.isnan(found["n"])
    assert found["h"].dtype == np.float32
    assert found["h"].shape == (16384,)
    assert np.isnan(found["h"]).all()


def test_one_bad_value_never_loses_the_others() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    found = text.from_json_text(text.to_json_text({"bad": Unprintable(), "map": BadMapping(), "c": cycle, "good": 1}))
    assert found["good"] == 1
    assert "Unprintable" in found["bad"]
    assert "broken" in str(found["map"])


def test_json_text_is_strict() -> None:
    encoded = text.to_json_text({"a": float("nan"), "b": "ü\0"})
    assert encoded.isascii()
    json.loads(encoded, parse_constant=pytest.fail)


def test_no_text_is_no_value() -> None:
    assert text.from_json_text("") is None
