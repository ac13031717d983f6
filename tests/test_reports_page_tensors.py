"""What is read of a suspect record: values, codes, scales, the worst elements; what is damaged is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report_support import COLUMNS, FAULTY, ROWS, SCALE, values, write_report_incident
from storage_samples import Sample, firing, plain, statistics, write_golden, write_incident

from flightrec.records import Key, QuantizerInfo
from flightrec.reports.page import counting, tensors
from flightrec.storage.read import open_incident


def look(folder: Path, **wanted: object) -> dict:
    with open_incident(folder) as incident:
        record = incident.records(**wanted)[-1]
        return tensors.look(incident.ranks[0], record, ["it is asked for"])


def test_a_pair(tmp_path: Path) -> None:
    found = look(write_report_incident(tmp_path), layer="blocks.0.fc2", tensor="activation")
    assert found["problems"] == []
    assert found["reasons"] == ["it is asked for"]
    high = values(FAULTY)
    assert found["values"]["num"] == high.size
    assert found["values"]["largest"][0] == {"index": [5, 7], "value": -900}
    assert found["values"]["nonfinite"] == [
        {"index": [3, 5], "value": "NaN"},
        {"index": [4, 6], "value": "Infinity"},
    ]
    assert found["values"]["range"]["largest"] == 448 / SCALE
    assert found["values"]["range"]["smallest"] == pytest.approx(2**-9 / SCALE, rel=1e-3)
    assert found["codes"]["nan"] == 1
    assert found["codes"]["at_largest"] == 2
    assert found["pairs"][0] == {"index": [5, 7], "value": -900, "dequantized": -7}
    assert found["scales"] is None


def test_a_tensor_in_blocks(tmp_path: Path) -> None:
    found = look(write_report_incident(tmp_path), layer="blocks.0.fc2", tensor="weight")
    assert found["values"]["of"] == "dequantized codes"
    assert found["values"]["num"] == ROWS * COLUMNS
    scales = found["scales"]
    assert scales["shape"] == [ROWS, COLUMNS // 4]
    assert (scales["smallest"], scales["largest"]) == (0.125, 8)
    assert scales["map"][0] == [0.125, 0.25, 0.5, 1]
    assert found["pairs"] is None


def test_packed_codes_with_scales_that_are_codes_themselves(tmp_path: Path) -> None:
    found = look(write_golden(tmp_path), tensor="weight")
    assert found["codes"]["format"] == "float4_e2m1fn_x2"
    assert found["codes"]["num"] == 6
    assert found["scales"]["map"] == [[0.5, 4]]
    assert found["problems"] == []


def test_scales_of_padded_blocks_are_shown_without_the_padding(tmp_path: Path) -> None:
    info = QuantizerInfo("x", "float8_e4m3fn", "multiply_to_decode", (4, 4), {})
    scales = np.arange(32, dtype="<f4").reshape(4, 8)
    arrays = {"data": (np.zeros((8, 12), "u1"), "float8_e4m3fn"), "scale_inv": (scales, "float32")}
    key = Key("a", "weight")
    folder = write_incident(
        tmp_path, {1: [Sample(key, arrays, statistics(), 0)]}, [firing(key, 1)], quantizers=[info.to_json()]
    )
    assert look(folder)["scales"]["map"] == [[0, 1, 2], [8, 9, 10]]


def test_large_maps_show_the_largest_of_each_group() -> None:
    square = np.zeros((500, 3))
    square[123, 1], square[0, 0] = 7, np.nan
    found = tensors._shrunk(square)
    assert found.shape == (84, 3)
    assert found[20].tolist() == [0, 7, 0]


def test_huge_arrays_are_sampled_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1, 4001, dtype="<f4").reshape(40, 100)
    key = Key("a", "output")
    folder = write_incident(tmp_path, {1: [plain(key, array)]}, [firing(key, 1)])
    monkeypatch.setattr(tensors, "MAX_WHOLE_BYTES", 100)
    monkeypatch.setattr(counting, "WINDOW_ELEMENTS", 200)
    whole = look(folder)["values"]
    assert whole["num"] == 3200
    assert whole["sampled"] == "a sample: 16 of 20 parts of high_precision, evenly spaced"
    monkeypatch.setattr(tensors, "MAX_WINDOWS", 20)
    whole = look(folder)["values"]
    assert whole["num"] == 4000
    assert "without comparing the checksum" in whole["sampled"]
    assert whole["largest"][0] == {"index": [39, 99], "value": 4000}


def test_damaged_bytes_cost_their_part_only(tmp_path: Path) -> None:
    folder = write_report_incident(tmp_path)
    path = next(folder.glob("*.tensors.h5"))
    data = bytearray(path.read_bytes())
    wanted = values(FAULTY).tobytes()
    assert data.count(wanted) == 2
    for _ in range(2):
        data[data.index(wanted)] ^= 1
    path.write_bytes(data)
    found = look(folder, layer="blocks.0.fc2", tensor="activation")
    assert found["values"] is None
    assert found["codes"]["nan"] == 1
    assert "crc32" in found["problems"][0]


def test_without_a_tensors_file_the_reason_is_told(tmp_path: Path) -> None:
    folder = write_report_incident(tmp_path)
    next(folder.glob("*.tensors.h5")).unlink()
    found = look(folder, layer="blocks.0.fc2", tensor="activation")
    assert found["values"] is None
    assert "no such file" in found["problems"][0]
    assert found["statistics"]["nan_count"] == 1
