"""Files of every format version that was ever released must be read for ever: never rewrite what stands in golden/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from storage_samples import GOLDEN_ACTIVATION, GOLDEN_CODES, GOLDEN_ODD_LAYER, write_golden

from flightrec.analysis.incident import Incident, open_incident
from flightrec.records import Key, Representation, Severity, Stage
from flightrec.storage import schema
from flightrec.storage.facts import Blind
from flightrec.storage.scale_age import ScaleAge

GOLDEN = Path(__file__).parent / "golden"
NEWEST = f"incident-{schema.FORMAT_VERSION}.index.h5"


KEPT = sorted(GOLDEN.glob("*.index.h5"))


@pytest.fixture(params=[*KEPT, "written now"], ids=str)
def incident(request: pytest.FixtureRequest, tmp_path: Path):
    path = write_golden(tmp_path) / NEWEST if request.param == "written now" else request.param
    with open_incident(path) as opened:
        yield opened


def test_every_version_is_kept() -> None:
    assert [path.name for path in KEPT] == [*(f"incident-1.{minor}.index.h5" for minor in range(4)), NEWEST]


def test_identity_and_facts(incident: Incident) -> None:
    assert incident.incident_id in ("incident-1.0", "incident-1.1", "incident-1.2", "incident-1.3", "incident-1.4")
    assert (incident.run_id, incident.attempt, incident.world_size, incident.host) == ("run", 0, 1, "host")
    assert incident.created_ns == 1_700_000_000_000_000_000
    assert incident.versions == {"flightrec": "0.1.0"}
    assert incident.environment == {"argv": ["train.py"]}
    assert incident.config_text == "triggers: [{kind: nonfinite}]\n"
    assert [(entry.iteration, entry.loss, entry.num_records) for entry in incident.iterations] == [
        (11, 5.5, 4),
        (12, 6.0, 4),
    ]
    assert incident.blind == [
        Blind(0, 10, "", "", "no slot was free"),
        Blind(0, 13, "blocks.1.fc1", "weight", "staging was full"),
    ]
    iterations, values = incident.history["loss"]
    assert iterations.tolist() == [9, 10, 11, 12]
    assert values[:3].tolist() == [0.9, 0.8, 0.7]


def test_firings(incident: Incident) -> None:
    assert incident.trigger.key == Key("blocks.1.fc1", "activation", microbatch=0)
    assert (incident.trigger.iteration, incident.trigger.record) == (12, 4)
    assert [firing.rule for firing in incident.firings] == ["nan", "late"]
    late = incident.firings[1]
    assert late.severity is Severity.WARNING
    assert late.key == Key(GOLDEN_ODD_LAYER, "gradient", "aux.0/x", microbatch=1, stage=Stage.BACKWARD)


def test_high_precision_and_codes(incident: Incident) -> None:
    for record in incident.records(layer="blocks.*", tensor="activation"):
        assert record.representation is Representation.BOTH
        assert record.dtype == "bfloat16"
        assert record.raw("high_precision").tobytes() == GOLDEN_ACTIVATION.tobytes()
        assert record.high_precision.tobytes() == (GOLDEN_ACTIVATION.astype("u4") << 16).tobytes()
        assert record.quantized.components["data"].tobytes() == GOLDEN_CODES.tobytes()
        expected = [[0.25, -0.5, np.nan], [2.0**-11, -0.0, 112.0]]
        assert np.array_equal(record.quantized.dequantize(), np.float32(expected), equal_nan=True)


def test_blocks_with_packed_codes_and_an_odd_shape(incident: Incident) -> None:
    record = incident.records(tensor="weight")[0]
    assert record.shape == (1, 5)
    assert record.quantized.metadata["metadata"] == {"note": [1, None]}
    assert record.quantized.dequantize().tolist() == [[0.25, 0.5, 0.75, 1.0, -24.0]]


def test_odd_names_and_records_without_bytes(incident: Incident) -> None:
    odd, loss = incident.records(iteration=12)[2:]
    assert odd.key.layer == GOLDEN_ODD_LAYER
    assert odd.high_precision.tobytes() == np.array([1.5, -0.0]).tobytes()
    assert loss.representation is Representation.STATISTICS
    assert loss.high_precision is None
    assert loss.why_absent == "does not fit into the ring"
    assert loss.statistics["sum"] == 0.25
    assert loss.statistics["clipped_count"] is None  # a column that came later


def test_blame(incident: Incident) -> None:
    first, second = incident.blame()
    assert (first.kind, first.rule, first.record, first.side) == ("nonfinite", "nan", 4, "high_precision")
    assert (second.kind, second.rule, second.key.layer) == ("amax_spike", "late", GOLDEN_ODD_LAYER)


def test_what_came_with_1_1(incident: Incident) -> None:
    entry, history = incident.iterations[0], incident.history
    if incident.incident_id == "incident-1.0":
        assert (entry.step_time_s, entry.loss_scale, entry.optimizer, entry.data) == (None, None, {}, {})
        assert (history.all_series, history.statistics, len(history.iterations)) == ([], (), 0)
        assert history.attempts_of("loss").tolist() == [0, 0, 0, 0]
        assert incident.ranks[0].random_states(0, 11) == {}
        return
    assert (entry.step_time_s, entry.data_time_s, entry.loss_scale) == (0.5, 0.125, 1024.0)
    assert entry.optimizer["groups"] == [{"lr": 0.001, "betas": [0.9, 0.95]}]
    assert entry.data == {"num_valid_labels": {0: 7.0}}
    assert incident.ranks[0].random_states(0, 11)["torch_cpu"].tolist() == list(range(16))
    assert [series.key.layer for series in history.all_series] == ["blocks.1.fc1", "plain.0"]
    assert history.series(layer="plain.*")["mean"].tolist() == [6, 106, 206, 306]
    assert history.series(tensor="activation")["zero_scale_count"].tolist() == [20, 120, 220, 320]
    assert np.isnan(history.series(tensor="output")["scale_max"]).all()
    assert history.iterations.tolist() == [9, 10, 11, 12]


def test_what_came_with_1_2(incident: Incident) -> None:
    ages = [record.scale_age for record in incident.records(tensor="weight")]
    statistics = incident.records(tensor="weight")[0].statistics
    series = incident.history.find(tensor="activation")
    if incident.incident_id < "incident-1.2":
        assert ages == [None, None]
        assert statistics["quantizer_amax"] is None
        assert all(np.isnan(entry["quantizer_amax"]).all() for entry in series)
        return
    assert ages == [None, ScaleAge(1, -1)]
    assert (statistics["scale_min"], statistics["quantizer_amax"], statistics["amax_history_max"]) == (0.5, 24.0, 32.0)
    assert series[0]["quantizer_amax"].tolist() == [21, 121, 221, 321]


def test_what_came_with_1_3(incident: Incident) -> None:
    found = [(entry.tier, entry.landmark) for entry in incident.iterations]
    first = ("host", 100) if incident.incident_id >= "incident-1.3" else ("ring", 0)
    assert found == [first, ("ring", 0)]
