"""The JSON document of ``inspect --json``: its fields are a contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from incident_support import FAULTY_ITERATION, write_incident

from flightrec.errors import IncidentError
from flightrec.reports.summary import summarize_path

FIELDS = {
    "document", "version", "incident", "trigger", "firings", "ranks", "iterations", "verdict", "blame", "way", "around",
    "history", "blind",
}  # fmt: skip


def test_is_strict_json(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_top_level_is_stable(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    assert set(document) == FIELDS
    assert (document["document"], document["version"]) == ("flightrec-inspect", 1)


def test_identity(incident_folder: Path) -> None:
    about = summarize_path(incident_folder)["incident"]
    assert about["id"] == incident_folder.name
    assert about["created"] == "2023-11-14T22:13:20+00:00"
    assert (about["run_id"], about["attempt"], about["world_size"], about["host"]) == ("run", 0, 1, "node7")


def test_blame_names_the_first_tensor(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    first = document["blame"][0]
    assert first["position"] == 1
    assert (first["iteration"], first["rule"], first["kind"]) == (FAULTY_ITERATION, "nan", "nonfinite")
    assert first["key"] == {
        "layer": "blocks.0.fc2",
        "tensor": "activation",
        "part": "",
        "microbatch": 0,
        "phase": "train",
        "call": 0,
        "stage": "forward",
    }
    assert document["trigger"]["key"] == first["key"]


def test_absent_numbers_are_null_and_infinite_ones_are_words(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    assert document["way"][1]["amax"] is None
    assert document["iterations"][0]["loss"] == 2.5


def test_missing_tensors_file(tmp_path: Path) -> None:
    document = summarize_path(write_incident(tmp_path, with_tensors=False, with_history=False))
    assert document["ranks"][0]["tensors"] is None
    assert document["ranks"][0]["tensors_problem"]
    assert document["history"] == {}


def test_refuses_what_is_no_incident(tmp_path: Path) -> None:
    with pytest.raises(IncidentError, match="holds no incident"):
        summarize_path(tmp_path)
