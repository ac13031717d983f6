from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from storage_samples import FP8, Sample, firing, write_incident

from flightrec.codecs import base
from flightrec.records import Key, QuantizerInfo
from flightrec.reports import elements
from flightrec.reports.elements import elements_of
from flightrec.storage.read import open_incident
from flightrec.storage.record import Record

KEY = Key("blocks.0.fc1", "activation", microbatch=0)
MXFP8 = QuantizerInfo("sample.MX", "float8_e4m3fn", "multiply_to_decode", (1, 32), {"scheme": "mxfp8"})
NVFP4 = QuantizerInfo(
    "sample.NV",
    "float4_e2m1fn_x2",
    "multiply_to_decode",
    (1, 16),
    {"scheme": "nvfp4", "columnwise": {"scheme": "nvfp4", "transposed": True, "block_shape": [1, 16]}},
)
INTEGERS = QuantizerInfo("sample.Int", "int8", "multiply_to_decode", (), {})


def record(
    tmp_path: Path, arrays: dict, quantizer: QuantizerInfo = FP8, shape: tuple[int, ...] | None = None
) -> Record:
    sample = Sample(KEY, arrays, quantizer=0, shape=shape)
    folder = write_incident(tmp_path, {4: [sample]}, [firing(KEY, 4)], quantizers=[quantizer.to_json()])
    return open_incident(folder).records()[0]


def floats(values: np.ndarray) -> tuple[np.ndarray, str]:
    return np.asarray(values, "<f4"), "float32"


def by_index(told: dict) -> dict[tuple[int, ...], dict]:
    return {tuple(element["index"]): element for element in told["elements"]}


def test_the_first_value_that_is_not_finite_and_its_neighbours(tmp_path: Path) -> None:
    values = np.arange(60, dtype="f4").reshape(5, 12)
    values[3, 7], values[4, 0] = np.inf, np.nan
    told = elements_of(record(tmp_path, {"high_precision": floats(values)}))
    assert (told["reason"], told["worst"], told["format"], told["absent"]) == ("nonfinite", [3, 7], "", "")
    indices = [tuple(element["index"]) for element in told["elements"]]
    assert indices == [(1, 7), (2, 7), *((3, column) for column in range(3, 12)), (4, 7)]
    assert by_index(told)[3, 6]["value"] == 42.0
    assert by_index(told)[3, 6]["code"] is by_index(told)[3, 6]["decoded"] is None


def test_codes_scales_and_what_they_decode_to(tmp_path: Path) -> None:
    values = np.full((4, 8), 1.0, "f4")
    values[2, 5] = 100.0  # clipped: 448 / 32 = 14
    codes = np.full((4, 8), 0x60, "u1")  # 32
    codes[2, 5], codes[2, 4] = 0x7E, 0x80
    arrays = {"high_precision": floats(values), "data": (codes, "float8_e4m3fn"), "scale": floats(32.0)}
    told = elements_of(record(tmp_path, arrays))
    assert (told["reason"], told["worst"], told["format"]) == ("largest_error", [2, 5], "float8_e4m3fn")
    worst, zero = by_index(told)[2, 5], by_index(told)[2, 4]
    assert worst == {
        "index": [2, 5],
        "value": 100.0,
        "code": 0x7E,
        "code_value": 448.0,
        "scale_inv": 0.03125,
        "decoded": 14.0,
    }
    assert (zero["code"], zero["code_value"], zero["decoded"]) == (0x80, 0.0, 0.0)
    assert np.signbit(zero["decoded"])


def test_a_scale_of_a_block_that_is_nan(tmp_path: Path) -> None:
    scales = np.full((2, 2), 127, "u1")
    scales[1, 1] = 255
    arrays = {"data": (np.full((2, 64), 0x38, "u1"), "float8_e4m3fn"), "scale_inv": (scales, "float8_e8m0fnu")}
    told = elements_of(record(tmp_path, arrays, MXFP8, (2, 64)))
    assert (told["reason"], told["worst"]) == ("quantized_nonfinite", [1, 32])
    worst, before = by_index(told)[1, 32], by_index(told)[1, 31]
    assert worst["value"] is None
    assert (worst["code_value"], np.isnan(worst["scale_inv"]), np.isnan(worst["decoded"])) == (1.0, True, True)
    assert (before["scale_inv"], before["decoded"]) == (1.0, 1.0)


@pytest.mark.parametrize("side", ["", "columnwise_"])
def test_packed_codes_of_either_side(tmp_path: Path, side: str) -> None:
    rng = np.random.default_rng(0)
    shape = (32, 32)
    packed = rng.integers(0, 256, (32, 16)).astype("u1")
    scales = rng.integers(0x30, 0x50, (32, 2)).astype("u1")
    arrays = {
        f"{side}data": (packed, "float4_e2m1fn_x2"),
        f"{side}scale_inv": (scales, "float8_e4m3fn"),
        f"{side}amax": floats([6.0]),
    }
    made = record(tmp_path, arrays, NVFP4, shape)
    told = elements_of(made)
    codes = base.unpack_fp4(packed)
    decoded = made.quantized.dequantize()
    assert told["reason"] == "largest"
    assert abs(decoded[tuple(told["worst"])]) == np.abs(decoded).max()
    for place, element in by_index(told).items():
        stored = place[::-1] if side else place
        assert element["code"] == codes[stored]
        assert element["code_value"] == base.decode(packed, "float4_e2m1fn_x2")[stored]
        assert element["decoded"] == decoded[place]
        assert element["code_value"] * element["scale_inv"] == pytest.approx(element["decoded"], rel=1e-6)


def test_integers_with_a_zero_point_have_no_factor(tmp_path: Path) -> None:
    arrays = {
        "data": (np.array([[1, -7]], "i1"), "int8"),
        "scale_inv": floats(0.5),
        "zero_point": (np.array(3, "<i4"), "int32"),
    }
    told = elements_of(record(tmp_path, arrays, INTEGERS))
    assert [element["code"] for element in told["elements"]] == [1, -7]
    assert [element["decoded"] for element in told["elements"]] == [-1.0, -5.0]
    assert told["elements"][0]["scale_inv"] is None


@pytest.mark.parametrize("values", [np.float32(2.0), np.arange(3.0, dtype="f4"), np.ones((2, 1, 3), "f4")])
def test_any_number_of_axes(tmp_path: Path, values: np.ndarray) -> None:
    told = elements_of(record(tmp_path, {"high_precision": floats(values)}))
    assert all(len(element["index"]) == values.ndim for element in told["elements"])
    assert told["worst"] in [element["index"] for element in told["elements"]]


def test_what_cannot_be_shown_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"data": (np.ones((2, 2), "u1"), "float8_e4m3fn")}
    (tmp_path / "a").mkdir()
    told = elements_of(record(tmp_path / "a", unknown))
    assert "scale" in told["absent"]
    assert told["elements"] == []
    (tmp_path / "b").mkdir()
    assert "no elements" in elements_of(record(tmp_path / "b", {"high_precision": floats(np.ones((0, 3)))}))["absent"]
    monkeypatch.setattr(elements, "MAX_NUMEL", 5)
    (tmp_path / "c").mkdir()
    assert "more than 5" in elements_of(record(tmp_path / "c", {"high_precision": floats(np.ones(6))}))["absent"]
