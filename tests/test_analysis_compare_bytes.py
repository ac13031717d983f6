"""Two stored arrays: what differs, where, and by how much, bit by bit and within a tolerance; NaN and damage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.analysis import compare_bytes
from flightrec.analysis.compare_bytes import Comparison, Tolerance, compare_component, step_of
from flightrec.errors import ConfigError
from flightrec.records import Key
from flightrec.storage.read import open_incident

KEY = Key("fc1", "activation", microbatch=0)


def compared(
    folder: Path, a: Any, b: Any, form: str, *texts: str, details: bool = True, spoil: bool = False
) -> Comparison:
    for name, array in (("a", a), ("b", b)):
        sample = Sample(KEY, {"high_precision": (array, form)}, statistics())
        path = folder / name
        path.mkdir()
        write_incident(path, {1: [sample]}, [firing(KEY, 1)], incident_id=name)
    if spoil:
        with h5py.File(next((folder / "b").glob("*.tensors.h5")), "r+") as file:
            file["0.0000001/fc1/activation/0.train.0.forward/high_precision"][0] = a[0]
    with open_incident(folder / "a") as one, open_incident(folder / "b") as other:
        (mine,), (theirs,) = one.records(), other.records()
        return compare_component(mine, theirs, "high_precision", Tolerance.parse(texts), details=details)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype="<f4")


def test_equal_checksums_are_equal_without_reading(tmp_path: Path) -> None:
    with mock.patch.object(compare_bytes, "_read", side_effect=AssertionError("it was read")):
        found = compared(tmp_path, floats(1, math.nan), floats(1, math.nan), "float32")
    assert (found.status, found.num_elements) == ("equal", 0)


def test_without_details_checksums_are_enough(tmp_path: Path) -> None:
    found = compared(tmp_path, floats(1, 2), floats(1, 3), "float32", details=False)
    assert (found.status, found.num_elements) == ("different", 0)
    assert "not read" in found.note


def test_elements_are_counted_over_pieces(tmp_path: Path) -> None:
    a = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    b = a.copy()
    b[0, 2, 1], b[1, 1, 3] = -1, math.nan
    with mock.patch.object(compare_bytes, "MAX_ELEMENTS", 5):
        found = compared(tmp_path, a, b, "float32")
    assert (found.status, found.num_elements, found.num_different) == ("different", 24, 2)
    assert found.first == found.worst == ((0, 2, 1), 9.0, -1.0)
    assert (found.max_difference, found.num_nan_a, found.num_nan_b) == (10.0, 0, 1)


def test_packed_fp4_is_compared_code_by_code(tmp_path: Path) -> None:
    found = compared(tmp_path, np.array([[0x21]], "u1"), np.array([[0x61]], "u1"), "float4_e2m1fn_x2")
    assert (found.num_elements, found.num_different) == (2, 1)
    assert found.first == ((0, 1), 1.0, 4.0)


def test_bit_by_bit_sees_signs_of_zero_and_payloads_of_nan_and_a_tolerance_does_not(tmp_path: Path) -> None:
    a, b = np.array([0x0000, 0x7FC0, 0x3F80], "<u2"), np.array([0x8000, 0x7FC1, 0x3F80], "<u2")
    (tmp_path / "exact").mkdir()
    (tmp_path / "near").mkdir()
    exact = compared(tmp_path / "exact", a, b, "bfloat16")
    assert (exact.status, exact.num_different) == ("different", 2)
    near = compared(tmp_path / "near", a, b, "bfloat16", "0")
    assert (near.status, near.num_different) == ("within", 0)


@pytest.mark.parametrize(
    ("form", "a", "b", "steps"),
    [
        ("bfloat16", 0x3F80, 0x3F81, 1),
        ("bfloat16", 0x3F80, 0x3F83, 3),
        ("float8_e4m3fn", 0x38, 0x39, 1),
        ("float8_e4m3fn", 0x01, 0x02, 1),  # two neighbours below the smallest normal number
        ("float8_e5m2", 0x3C, 0x3E, 2),
        ("float8_e8m0fnu", 127, 128, 1),
        ("float4_e2m1fn_x2", 0x02, 0x03, 1),
    ],
)
def test_a_step_of_the_format(form: str, a: int, b: int, steps: int, tmp_path: Path) -> None:
    dtype = "<u2" if form == "bfloat16" else "u1"
    found = compared(tmp_path, np.array([a], dtype), np.array([b], dtype), form, "format")
    assert found.status == ("within" if steps == 1 else "different")


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ((1.0, 1.0099), "within"),
        ((1.0, 1.02), "different"),
        ((math.inf, math.inf), "equal"),
        ((math.inf, -math.inf), "different"),
        ((math.inf, 1e30), "different"),
        ((math.nan, 1.0), "different"),
    ],
)
def test_a_relative_tolerance(values: tuple[float, float], status: str, tmp_path: Path) -> None:
    found = compared(tmp_path, floats(values[0], 0), floats(values[1], 0), "float32", "float32=0.01", "bfloat16=9")
    assert found.status == status


def test_another_shape_or_format_is_a_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, floats(1), floats(1, 2), "float32")
    assert (found.status, found.note) == ("different", "float32 [1] against float32 [2]")


def test_damage_is_told(tmp_path: Path) -> None:
    found = compared(tmp_path, floats(5, 2), floats(1, 2), "float32", spoil=True)
    assert found.status == "different"
    assert "damaged in B" in found.note


def test_tolerances_that_are_none() -> None:
    for text in ("nonsense", "-1", "nan", "bf16=0.1", "bfloat16="):
        with pytest.raises(ConfigError, match="expected a number, FORMAT=NUMBER"):
            Tolerance.parse([text])
    assert Tolerance.parse([]).is_exact
    assert step_of("int64") is step_of("nonsense") is None
    mixed = Tolerance.parse(["format", "bfloat16=0.5"])
    assert (mixed.of("bfloat16"), mixed.of("float8_e5m2"), mixed.of("int32")) == (0.5, 0.25, None)
