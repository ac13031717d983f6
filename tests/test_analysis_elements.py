from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
from storage_samples import FP8, Sample, firing, plain, statistics, write_incident

import flightrec
from flightrec.analysis.elements import Elements, find_elements
from flightrec.errors import IncidentError
from flightrec.records import Key

KEY = Key("fc1", "activation", microbatch=0)


def found(tmp_path: Any, values: Any, side: str = "high_precision", form: str = "float32", **more: Any) -> Any:
    write_incident(tmp_path, {3: [plain(KEY, values, form, **more)]}, [firing(KEY, 3)])
    with flightrec.open(tmp_path) as incident:
        return find_elements(incident.records()[0], side, num_indices=4)


def spoiled(shape: tuple[int, ...], *where: Any, value: float = np.nan) -> np.ndarray:
    values = np.ones(shape, np.float32)
    for index in where:
        values[index] = value
    return values


def test_indices_values_and_shares(tmp_path):
    values = spoiled((4, 6), (1, 2), (3, 5))
    values[3, 5] = -np.inf
    elements = found(tmp_path, values)
    assert isinstance(elements, Elements)
    assert (elements.num_faulty, elements.numel, elements.shape) == (2, 24, (4, 6))
    assert elements.indices == ((1, 2), (3, 5))
    assert np.isnan(elements.values[0])
    assert elements.values[1] == -np.inf
    assert (elements.rows, elements.columns) == ((), ())
    assert (elements.row_share, elements.column_share) == (0.5, pytest.approx(1 / 3))
    assert not elements.is_tail
    assert elements.where == "2 of 24 elements, first at [1, 2], [3, 5]"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ((slice(None),), "all 24 elements"),
        ((2,), "6 of 24 elements: row 2 of 4 as a whole"),
        ((slice(None), 1), "4 of 24 elements: column 1 of 6 as a whole"),
        ((slice(2, None),), "rows 2 to 3 of 4, none before"),
        ((slice(2, None), slice(0, 2)), "rows 2 to 3 of 4, none before"),
        ((slice(0, 2),), "12 of 24 elements: rows 0, 1 of 4 as a whole"),
    ],
)
def test_patterns_are_told_in_words(tmp_path, where, words):
    assert found(tmp_path, spoiled((4, 6), where)).where == words


def test_f17_a_tail_that_no_kernel_wrote_is_told_by_its_first_row(tmp_path):
    elements = found(tmp_path, spoiled((6, 2, 3), slice(4, None)))
    assert (elements.is_tail, elements.valid_rows) == (True, 4)
    assert elements.rows == (8, 9, 10, 11)
    assert elements.where == "rows 4 to 5 of 6, none before"


def test_nothing_at_fault_and_bytes_that_are_not_there_give_none(tmp_path):
    assert found(tmp_path, np.ones((3, 3), np.float32)) is None
    with flightrec.open(tmp_path) as incident:
        assert find_elements(incident.records()[0], "quantized") is None


def test_of_a_finite_tensor_the_largest_elements_are_told(tmp_path):
    values = spoiled((4, 6), (2, 3), value=-40.0)
    elements = found(tmp_path, values, side="", amax=40.0)
    assert (elements.indices, elements.values) == (((2, 3),), (-40.0,))


def test_bfloat16_and_vectors(tmp_path):
    elements = found(tmp_path, np.array([0x3F80, 0x7FC1, 0xFF80], "<u2"), form="bfloat16")
    assert elements.indices == ((1,), (2,))
    assert elements.values[1] == -np.inf
    assert (elements.is_tail, elements.valid_rows) == (True, 1)


def test_codes_and_scales(tmp_path):
    codes = np.array([[0x38, 0x7F], [0xFF, 0x7E]], "u1")
    arrays = {"data": (codes, "float8_e4m3fn"), "scale_inv": (np.array([0.0], "<f4"), "float32")}
    write_incident(tmp_path, {3: [Sample(KEY, arrays, statistics(numel=4))]}, [firing(KEY, 3)])
    with flightrec.open(tmp_path) as incident:
        record = incident.records()[0]
        quantized, scale = find_elements(record, "quantized"), find_elements(record, "scale")
    assert FP8.format
    assert (quantized.component, quantized.indices) == ("data", ((0, 1), (1, 0)))
    assert (scale.component, scale.num_faulty, scale.values) == ("scale_inv", 1, (0.0,))


def test_pieces_are_as_the_whole_and_damage_is_told(tmp_path):
    values = np.arange(4096, dtype=np.float32).reshape(64, 64)
    values[40, 7] = np.nan
    write_incident(tmp_path, {3: [plain(KEY, values)]}, [firing(KEY, 3)])
    with flightrec.open(tmp_path) as incident:
        record = incident.records()[0]
        pieces = list(record.pieces("high_precision", piece_bytes=1000))
        assert len(pieces) == 22
        assert np.array_equal(np.concatenate(pieces), values, equal_nan=True)
    path = next(tmp_path.glob("*.tensors.h5"))
    with h5py.File(path, "r") as file:
        offset = file[f"{record.path}/high_precision"].id.get_offset()
    with path.open("r+b") as file:
        file.seek(offset + 8)
        file.write(b"\xff")
    with flightrec.open(tmp_path) as incident, pytest.raises(IncidentError, match="damaged"):
        find_elements(incident.records()[0], "high_precision")
