from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from storage_samples import Sample, firing, plain, statistics, write_incident

from flightrec.analysis.incident import open_incident
from flightrec.errors import IncidentError
from flightrec.records import Key
from flightrec.reports.selected import MAX_VALUES, inspect_path, select

HEALTHY = {"numel": 100, "nan_count": 0, "positive_inf_count": 0, "negative_inf_count": 0, "zero_count": 0}
QUANTIZED = {"quantized_numel": 100, "quantized_nan_count": 0, "quantized_inf_count": 0, "scale_nonfinite_count": 0}


def sample(layer: str, tensor: str = "activation", microbatch: int = 0, **changes: float) -> Sample:
    key = Key(layer, tensor, microbatch=microbatch)
    numbers = {"amax": 1.0, "sum_of_squares": 100.0, **HEALTHY, **QUANTIZED}
    return Sample(key, {}, statistics(**(numbers | changes)))


BY_BADNESS = [
    sample("nan", nan_count=50),
    sample("codes", quantized_nan_count=20, scale_nonfinite_count=1),
    sample("inf", positive_inf_count=1),
    sample("saturated", quantized_saturated_count=30),
    sample("underflow", underflow_count=80, quantized_saturated_count=0.9),
    sample("error", squared_error=9.0, quantized_saturated_count=0.9, underflow_count=0.5),
    sample("amax", amax=8.0, squared_error=0.005),
    sample("healthy", squared_error=0.006),
]
"""One record for each thing that can be wrong, the worst first; below a percent nothing counts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("selected")
    before = [sample(entry.key.layer, amax=1.0) for entry in BY_BADNESS]
    samples = {8: before, 9: list(reversed(BY_BADNESS)), 10: [sample("healthy", "weight", -1), sample("nan", "x", 1)]}
    return write_incident(target, samples, [firing(BY_BADNESS[0].key, 9)])


def layers(selected: dict) -> list[str]:
    return [row["key"]["layer"] for row in selected["records"]]


def test_filters(folder: Path) -> None:
    with open_incident(folder) as incident:
        found = select(incident, {"layer": ["re:nan|inf"], "iteration": [[9, 9]]})
        assert layers(found) == ["inf", "nan"]  # as they were seen
        assert found["num_selected"] == 2
        assert found["filters"] == {"layer": ["re:nan|inf"], "iteration": [[9, 9]]}
        assert layers(select(incident, {"tensor": ["weight", "x"]})) == ["healthy", "nan"]
        assert layers(select(incident, {"microbatch": [[-1, -1]]})) == ["healthy"]
        assert layers(select(incident, {"microbatch": [[1, None], [-1, -1]]})) == ["healthy", "nan"]
        assert select(incident, {"rank": [[0, 0]], "iteration": [[None, 8], [10, None]]})["num_selected"] == 10


def test_worst_first(folder: Path) -> None:
    expected = [entry.key.layer for entry in BY_BADNESS]
    with open_incident(folder) as incident:
        found = select(incident, {"iteration": [[9, 9]]}, worst=20)
        assert layers(found) == expected
        assert layers(select(incident, {}, worst=3)) == expected[:3]
        rows = {row["key"]["layer"]: row for row in found["records"]}
    assert rows["nan"]["nonfinite_share"] == 0.5
    assert rows["codes"]["nonfinite_share"] == 0.21
    assert rows["amax"]["amax_growth"] == 8.0
    assert rows["error"]["quantization_error"] == pytest.approx(0.3)
    assert rows["underflow"]["underflow_share"] == 0.8
    assert rows["healthy"]["scale_min"] is None


def test_nothing_selected_names_what_there_is(folder: Path) -> None:
    with open_incident(folder) as incident, pytest.raises(IncidentError) as told:
        select(incident, {"layer": ["saturatd"], "iteration": [[3, None], [7, 7]], "rank": None})
    message = str(told.value)
    assert "--layer saturatd, --iteration 3:,7;" in message
    assert "there are layers saturated" in message
    assert "iterations 8 to 10" in message
    assert "microbatches -1 to 1" in message


def test_values_are_those_of_the_worst_that_have_bytes(tmp_path: Path) -> None:
    bad = np.ones((4, 4), "f4")
    bad[2, 1] = np.nan
    samples = [
        sample("no bytes", nan_count=100),
        plain(Key("fine", "activation"), np.ones(3), nan_count=0),
        plain(Key("bad", "activation"), bad, nan_count=1),
        *(plain(Key(f"more.{number}", "weight"), np.ones(3), nan_count=0) for number in range(MAX_VALUES)),
    ]
    folder = write_incident(tmp_path, {4: samples}, [firing(samples[0].key, 4)])
    with open_incident(folder) as incident:
        found = select(incident, {}, values=True)
        assert [entry["key"]["layer"] for entry in found["values"]] == ["bad"]
        assert found["values"][0]["worst"] == [2, 1]
        assert len(found["records"]) == len(samples)
        assert [e["key"]["layer"] for e in select(incident, {}, worst=2, values=True)["values"]] == ["bad", "fine"]
        assert len(select(incident, {}, worst=100, values=True)["values"]) == MAX_VALUES
        assert select(incident, {}, worst=1)["values"] == []
        assert select(incident, {"layer": ["no bytes"]}, values=True)["values"] == []


def test_the_document_is_the_storys_with_one_field_more_and_strict_json(folder: Path) -> None:
    document = inspect_path(folder, {"layer": ["nan"]}, values=True)
    json.dumps(document, allow_nan=False)
    assert document["document"] == "flightrec-inspect"
    assert document["blame"]
    assert set(document["selected"]) == {"filters", "worst", "num_selected", "records", "values"}


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.4"])
def test_incidents_of_earlier_versions(version: str) -> None:
    path = Path(__file__).parent / "golden" / f"incident-{version}.index.h5"
    selected = inspect_path(path, {}, worst=2, values=True)["selected"]
    assert layers(selected)[0] == "blocks.1.fc1"
    assert selected["values"][0]["elements"]
