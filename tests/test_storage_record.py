from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import FP8, Sample, firing, plain, statistics, write_incident

from flightrec.errors import FormatError, IncidentError
from flightrec.records import Key, Representation
from flightrec.storage.facts import Blind
from flightrec.storage.read import Incident, open_incident

KEY = Key("fc", "activation", microbatch=0)
BOTH = {
    "high_precision": (np.array([0x3F80, 0xC000], dtype="<u2"), "bfloat16"),
    "data": (np.array([0x38, 0xC0], dtype="u1"), "float8_e4m3fn"),
    "scale": (np.array(2.0, dtype="<f4"), "float32"),
}


def opened(folder: Path, *samples: Sample, **changes) -> Incident:
    return open_incident(write_incident(folder, {3: samples}, [firing(KEY, 3)], **changes))


def test_both_sides(tmp_path: Path) -> None:
    with opened(tmp_path, Sample(KEY, BOTH, statistics(numel=2, amax=2.0, nan_count=0), 0)) as incident:
        (record,) = incident.records()
        assert (record.key, record.attempt, record.iteration, record.sequence) == (KEY, 0, 3, 0)
        assert (record.shape, record.dtype, record.num_bytes) == ((2,), "bfloat16", 10)
        assert record.representation is Representation.BOTH
        assert record.path == "/0.0000003/fc/activation/0.train.0.forward"
        assert record.high_precision.tolist() == [1.0, -2.0]
        assert record.high_precision.dtype == np.float32
        assert list(record.quantized.components) == ["data", "scale"]
        assert record.quantized.components["data"].tolist() == [0x38, 0xC0]
        assert record.quantized.metadata == {**FP8.to_json(), "block_shape": ()}
        assert record.quantized.dequantize().tolist() == [0.5, -1.0]
        assert record.why_absent == ""
        assert "fc activation" in repr(record)
        with pytest.raises(KeyError):
            record.quantized.components["high_precision"]


def test_statistics_are_counts_numbers_and_none(tmp_path: Path) -> None:
    values = statistics(numel=2**40, nan_count=3, amax=1.5, sum=float("inf"))
    with opened(tmp_path, Sample(KEY, {}, values)) as incident:
        found = incident.records()[0].statistics
        assert found["numel"] == 2**40
        assert isinstance(found["nan_count"], int)
        assert found["amax"] == 1.5
        assert found["sum"] == float("inf")
        assert found["underflow_count"] is None


@pytest.mark.parametrize(
    ("values", "form", "expected"),
    [([1.5], "float16", np.float16), ([1, 0], "bool", np.bool_), ([3], "int64", np.int64), ([1.5], "float64", "f8")],
)
def test_native_types_come_as_they_are(tmp_path: Path, values: list[float], form: str, expected: str) -> None:
    with opened(tmp_path, plain(KEY, values, form)) as incident:
        found = incident.records()[0].high_precision
        assert found.dtype == np.dtype(expected)
        assert found.tolist() == values


def test_only_one_side(tmp_path: Path) -> None:
    quantized = {name: BOTH[name] for name in ("data", "scale")}
    other = Key("fc", "weight", microbatch=0)
    with opened(tmp_path, Sample(KEY, quantized, quantizer=0), plain(other, [1.0])) as incident:
        first, second = incident.records()
        assert first.high_precision is None
        assert first.why_absent == ""
        assert first.quantized.dequantize().tolist() == [0.5, -1.0]
        assert second.quantized is None
        with pytest.raises(IncidentError, match="no component 'data'; it has high_precision"):
            second.raw("data")


def test_unknown_quantizers_keep_their_bytes(tmp_path: Path) -> None:
    with opened(tmp_path, Sample(KEY, {"data": (np.array([1, 2], dtype="u1"), "strange")})) as incident:
        quantized = incident.records()[0].quantized
        assert quantized.components["data"].tolist() == [1, 2]
        assert quantized.metadata == {}
        with pytest.raises(FormatError, match="strange"):
            quantized.dequantize()


def test_missing_tensors_file(tmp_path: Path) -> None:
    opened(tmp_path, plain(KEY, [1.0])).close()
    (tmp_path / "rank00000.test.tensors.h5").unlink()
    with open_incident(tmp_path) as incident:
        (record,) = incident.records()
        assert record.high_precision is None
        assert record.quantized is None
        assert "tensors" in record.why_absent
        with pytest.raises(IncidentError, match="bytes of high_precision are missing"):
            record.raw("high_precision")


def drop_components(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        empty = file["components"][:0]
        del file["components"]
        file["components"] = empty


def test_blind_rows_explain_what_did_not_arrive(tmp_path: Path) -> None:
    blind = [Blind(0, 3, "other", "", "not me"), Blind(-1, 3, "fc", "activation", "staging was full")]
    opened(tmp_path, plain(KEY, [1.0]), late_blind=blind).close()
    drop_components(tmp_path / "rank00000.test.tensors.h5")
    with open_incident(tmp_path) as incident:
        assert incident.records()[0].why_absent == "staging was full"
        assert incident.records()[0].high_precision is None


def test_without_a_reason_it_says_what_is_missing(tmp_path: Path) -> None:
    opened(tmp_path, plain(KEY, [1.0])).close()
    drop_components(tmp_path / "rank00000.test.tensors.h5")
    with open_incident(tmp_path) as incident:
        assert incident.records()[0].why_absent == "high_precision did not reach the tensors file"


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    opened(tmp_path, plain(KEY, [1.0, 2.0])).close()
    path = tmp_path / "rank00000.test.tensors.h5"
    with h5py.File(path) as file:
        offset = int(file["components"][0]["offset"])
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    with open_incident(tmp_path) as incident:
        (record,) = incident.records()
        with pytest.raises(IncidentError, match="crc32"):
            _ = record.high_precision
        assert record.raw("high_precision", check=False).shape == (2,)


def test_another_shape_than_the_facts_say_is_damage(tmp_path: Path) -> None:
    opened(tmp_path, plain(KEY, [1.0, 2.0])).close()
    with h5py.File(tmp_path / "rank00000.test.tensors.h5", "r+") as file:
        group = file["0.0000003/fc/activation/0.train.0.forward"]
        del group["high_precision"]
        group["high_precision"] = np.array([[1.0], [2.0]], dtype="<f4")
    with open_incident(tmp_path) as incident, pytest.raises(IncidentError, match=r"\(2, 1\)"):
        incident.records()[0].raw("high_precision")


def test_a_dataset_that_is_gone_is_damage(tmp_path: Path) -> None:
    opened(tmp_path, plain(KEY, [1.0, 2.0])).close()
    with h5py.File(tmp_path / "rank00000.test.tensors.h5", "r+") as file:
        del file["0.0000003/fc/activation/0.train.0.forward"]
    with open_incident(tmp_path) as incident, pytest.raises(IncidentError, match="damaged"):
        incident.records()[0].raw("high_precision")


def test_only_the_columnwise_side(tmp_path: Path) -> None:
    components = {
        "columnwise_data": (np.array([[0x38, 0xC0]], dtype="u1"), "float8_e4m3fn"),
        "columnwise_scale": (np.array(2.0, dtype="<f4"), "float32"),
    }
    with opened(tmp_path, Sample(KEY, components, quantizer=0)) as incident:
        quantized = incident.records()[0].quantized
        assert quantized.dequantize().tolist() == quantized.dequantize(side="columnwise").tolist() == [[0.5, -1.0]]
        with pytest.raises(FormatError, match="rowwise side has no codes"):
            quantized.dequantize(side="rowwise")
        with pytest.raises(FormatError, match="only a grouped tensor has members"):
            quantized.dequantize_members()
