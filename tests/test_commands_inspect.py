"""The options of ``flightrec inspect``; what it tells is tested with the reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import flightrec


def test_filters_reach_the_child(incident_folder: Path) -> None:
    options = ["--layer", "blocks.0*", "--tensor", "activation", "--tensor", "output", "--iteration", "211:"]
    done = flightrec("inspect", incident_folder, *options, "--microbatch", "0", "--rank", "0:3", "--json")
    assert done.returncode == 0, done.stderr
    selected = json.loads(done.stdout)["selected"]
    assert selected["num_selected"] == 6
    assert selected["filters"] == {
        "layer": ["blocks.0*"],
        "tensor": ["activation", "output"],
        "iteration": [[211, None]],
        "rank": [[0, 3]],
        "microbatch": [[0, 0]],
    }


def test_worst_and_values_in_words(incident_folder: Path) -> None:
    done = flightrec("inspect", incident_folder, "--worst", "2", "--values")
    assert done.returncode == 0, done.stderr
    assert "21 of 21" in done.stdout
    assert "Elements of" in done.stdout
    assert "Where it began" not in done.stdout


def test_nothing_selected_is_told(incident_folder: Path) -> None:
    done = flightrec("inspect", incident_folder, "--layer", "nowhere")
    assert done.returncode == 3
    assert "no record is selected by --layer nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--iteration", "x"],
        ["--layer", "re:("],
        ["--worst", "0"],
        ["--quantizer", "blocks.0.fc1", "--worst", "1"],
        ["--quantizer", "blocks.0.fc1", "--layer", "blocks.0.fc1"],
        ["--quantizer", "blocks.0.fc1", "--values"],
    ],
)
def test_wrong_options_are_usage_errors(incident_folder: Path, options: list[str]) -> None:
    done = flightrec("inspect", incident_folder, *options)
    assert done.returncode == 2
    assert options[0] in done.stderr
