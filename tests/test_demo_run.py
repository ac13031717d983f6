"""The demonstration: a short one with a small model. The whole one is tox's environment `demo`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from cli_support import flightrec  # noqa: E402

from flightrec.commands.demo import show  # noqa: E402
from flightrec.demo import run, story  # noqa: E402
from flightrec.demo.model import GPT, ModelSize, OutlierChannel  # noqa: E402
from flightrec.demo.run import CONFIG, Options, Outcome, train  # noqa: E402
from flightrec.reports.text import report_console  # noqa: E402

SMALL = ModelSize(width=32, num_blocks=2, num_heads=2, num_sequences=4, context=32)


def small_config() -> dict[str, Any]:
    """The demo's configuration with rules that judge after fewer samples."""
    config = json.loads(json.dumps(CONFIG))
    for rule in config["triggers"]:
        if rule["kind"] in ("amax_spike", "loss_jump"):
            rule["min_samples"] = 10
    return config


def small_options(directory: Path) -> Options:
    """A demo of seconds."""
    return Options(directory=directory, num_iterations=24, size=SMALL, block=1, channel=5, config=small_config())


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return small_options(tmp_path / "incidents")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(small_options(tmp_path_factory.mktemp("demo") / "incidents"), report_console(io.StringIO()))


def test_healthy_iterations_write_nothing(outcome: Outcome) -> None:
    assert outcome.num_files_when_healthy == 0
    assert all(loss == loss for loss in outcome.losses[:24])


def test_spoiled_layer_is_blamed_in_every_incident(outcome: Outcome) -> None:
    assert len(outcome.incidents) >= 2
    assert outcome.spoiled_layer == "blocks.1.mlp.fc2"
    assert story.is_blamed(outcome.incidents, outcome.spoiled_layer)
    assert not story.is_blamed(outcome.incidents, "blocks.0.mlp.fc2")
    assert not story.is_blamed([], outcome.spoiled_layer)


def test_story_is_told(outcome: Outcome) -> None:
    file = io.StringIO()
    console = report_console(file)
    folder = story.nonfinite_incident(outcome.incidents)
    assert folder is not None
    story.list_incidents(outcome.incidents, console)
    story.tell(folder, console)
    told = file.getvalue()
    assert "nonfinite" in told
    assert "1. blocks.1.mlp.fc2 activation" in told


def test_plain_h5py_reads_what_was_lost(outcome: Outcome) -> None:
    folder = story.nonfinite_incident(outcome.incidents)
    assert folder is not None
    program = story.reading_program(folder, outcome.spoiled_layer)
    assert "flightrec" not in program
    assert max(map(len, program.splitlines())) <= 80
    told = story.run_program(program, folder)
    assert told.startswith("(4, 32, 128), largest")
    assert float(told.splitlines()[1].split("%")[0]) > 90


def test_demo_refuses_too_few_iterations() -> None:
    done = flightrec("demo", "--iterations", 5)
    assert done.returncode == 2


def test_spoiled_layer_blamed_is_a_success(options: Options) -> None:
    file = io.StringIO()
    assert show(options, report_console(file))
    told = file.getvalue()
    assert "24 healthy iterations, 0 files written" in told
    assert "blamed: the same, in every incident" in told
    assert "% of the values that were not zero are zero in FP8" in told.split("this prints:")[1]


def test_another_layer_blamed_is_a_failure(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(OutlierChannel):
        def __init__(self, model: GPT, *, block: int, channel: int) -> None:
            super().__init__(model, block=block, channel=channel)
            self.layer = "blocks.0.mlp.fc2"

    monkeypatch.setattr(run, "OutlierChannel", Liar)
    file = io.StringIO()
    assert not show(options, report_console(file))
    assert "blamed: another" in file.getvalue()
