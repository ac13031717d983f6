"""The document behind the page: what is looked at closely, what is listed, and that all of it is bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_support import FAULTY, LAYERS, write_report_incident
from storage_samples import firing, plain, write_golden, write_incident

from flightrec.analysis.blame import blame
from flightrec.analysis.incident import open_incident
from flightrec.records import Key
from flightrec.reports.page import curves, document, suspects, table
from flightrec.storage.facts import Blind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report_incident(tmp_path_factory.mktemp("report"))


def test_document_is_strict_json_of_bounded_size(folder: Path) -> None:
    found = document.document_of_path(folder)
    assert len(json.dumps(found, allow_nan=False)) < 200_000
    assert found["document"] == "flightrec-report"
    assert found["incident"]["id"] == "test"
    assert found["suspects"][0]["key"]["layer"] == LAYERS[1]
    assert found["suspects"][0]["before"]["iteration"] == FAULTY - 1
    assert found["suspects"][0]["before"]["values"]["nan"] == 0
    assert found["verdict"]["story"]
    assert found["tensors"]["iteration"] == FAULTY
    assert found["environment"]["argv"] == ["train.py", LAYERS[0]]
    assert found["left_out"] == {}


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3"])
def test_every_version_of_the_format(version: str, tmp_path: Path) -> None:
    for path in (Path(__file__).parent / "golden").glob(f"incident-{version}.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = document.document_of_path(tmp_path)
    assert found["suspects"]
    assert found["maps"]["rows"]


def test_many_firings_and_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    key = Key("a", "output")
    fired = [firing(key, 1, rule=f"rule {number}", message="m" * 5000) for number in range(300)]
    blind = [Blind(0, 1, "x", "y", "why")] * 500
    found = document.document_of_path(
        write_incident(tmp_path, {1: [plain(key, [1.0])]}, fired, blind=blind, config_text="# " + "c" * 300_000)
    )
    assert len(found["firings"]) == 200
    assert found["left_out"]["firings"] == 100
    assert found["left_out"]["blind"] == 300
    assert found["trigger"]["message"].endswith("... (5000 characters)")
    assert len(found["config"]) == document.MAX_TEXT
    assert found["config_is_cut"]


def test_the_first_faulty_record_is_looked_at_first(folder: Path) -> None:
    with open_incident(folder) as incident:
        findings = blame(incident)
        first = findings[0]
        place = {"rank": 0, "record": first.record}
        chosen = suspects.choose(incident, {"began": {"before": place, "after": {"rank": 0, "record": 0}}}, findings)
    assert chosen[0][0].index == first.record
    assert chosen[0][1] == ("the first faulty record", "blamed first", "what the trigger fired on")
    assert len(chosen) <= suspects.MAX_SUSPECTS
    assert chosen[1][1] == ("the last clean record",)
    assert len({record.index for record, _ in chosen}) == len(chosen)


def test_places_that_do_not_exist_are_passed_over(folder: Path) -> None:
    with open_incident(folder) as incident:
        nowhere = [{"rank": 7, "record": 0}, {"rank": 0, "record": 10_000}]
        for place in nowhere:
            chosen = suspects.choose(incident, {"began": {"before": place}}, [])
            assert [reasons for _, reasons in chosen] == [("what the trigger fired on",)]


def test_reference_is_the_latest_clean_one_before(tmp_path: Path) -> None:
    key = Key("a", "output", microbatch=0)
    samples = {n: [plain(key, [1.0], nan_count=float(n == 3))] for n in (1, 2, 3, 4)}
    with open_incident(write_incident(tmp_path, samples, [firing(key, 4)])) as incident:
        rank, records = incident.ranks[0], incident.records()
        before = suspects.reference(rank, records[3])
        assert before is not None
        assert before.iteration == 2
        assert suspects.reference(rank, records[0]) is None
        assert [record.iteration for record in suspects.same_series(rank, records[1])] == [1, 2, 3, 4]


def test_scale_history_joins_the_history_and_the_records(folder: Path) -> None:
    with open_incident(folder) as incident:
        rank = incident.ranks[0]
        record = incident.records(layer=LAYERS[1], tensor="activation")[-1]
        found = curves.scale_history(rank, record.key, suspects.same_series(rank, record))
    assert found["iterations"] == list(range(FAULTY - 40, FAULTY + 1))
    assert found["amax"][-1] == 900
    assert found["scale_max"][-1] == 64
    assert found["key"]["microbatch"] == -1


def test_scale_history_of_a_tensor_without_any(tmp_path: Path) -> None:
    key = Key("a", "output", microbatch=0)
    samples = {1: [plain(key, [1.0], amax=1.0), plain(replace(key, microbatch=1), [3.0], amax=3.0)]}
    with open_incident(write_incident(tmp_path, samples, [firing(key, 1)])) as incident:
        found = curves.scale_history(incident.ranks[0], key, incident.records())
    assert found["amax"] == [3]
    assert "scale_min" not in found


def test_scalars_begin_with_the_loss(folder: Path) -> None:
    with open_incident(folder) as incident:
        found = curves.scalars(incident)
    assert [entry["name"] for entry in found] == ["loss", f"metric.{LAYERS[0]}"]
    assert found[0]["values"][-1] is None
    assert found[0]["num_nonfinite"] == 1


def test_table_keeps_the_most_suspect_rows_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Key(f"layer.{number}", "output", microbatch=0) for number in range(20)]
    amax = np.arange(20.0)
    samples = {
        1: [plain(key, [1.0], amax=amax[place], nan_count=float(place == 3)) for place, key in enumerate(keys)],
        2: [],
    }
    monkeypatch.setattr(table, "MAX_ROWS", 3)
    with open_incident(write_incident(tmp_path, samples, [firing(None, 2)])) as incident:
        found = table.tensors_at(incident.ranks[0], 0, 2)
        empty = table.tensors_at(incident.ranks[0], 0, 0)
    assert (found["iteration"], found["num"]) == (1, 20)
    assert [row["layer"] for row in found["rows"]] == ["layer.3", "layer.18", "layer.19"]
    assert empty["iteration"] == 1


def test_golden_with_late_firings_and_blind_iterations(tmp_path: Path) -> None:
    found = document.document_of_path(write_golden(tmp_path))
    assert {entry["reason"] for entry in found["blind"]} == {"no slot was free", "staging was full"}
