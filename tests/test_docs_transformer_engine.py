"""docs/transformer-engine.md: its examples run on an incident of Transformer Engine's tensors, its YAML is accepted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from te_delayed import Delayed

import flightrec
from flightrec.config.load import load_text
from flightrec.records import TENSORS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "transformer-engine.md").read_text()
RUN = re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
FORGET = "import sys\nfor name in ({names}): sys.modules[name] = None\n"
STALE = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An incident of delayed scaling: a tensor grows, and from iteration 5 on its scale stands still."""
    directory, fp8, kept = tmp_path_factory.mktemp("incidents"), Delayed(), None
    config = {
        "budget": "none",
        "ring": {"iterations": 4},
        "select": [{"tensors": "*"}],
        "triggers": [{"kind": "stale_scale", "margin": 0, "consecutive": 1, "factor": 1.5 * 2**STALE}],
        "incident": {"after": 0},
    }
    with flightrec.Recorder(config, directory=directory) as recorder:
        for iteration in range(7 + STALE + 3):
            x = torch.linspace(-1, 1, 2048).reshape(32, 64) * (1 + iteration) * 2.0 ** max(0, iteration - 5)
            tensor = fp8.quantize(x)
            recorder.record("layers.0.layernorm_mlp.fc1", "activation", high_precision=x, quantized=fp8.parts(tensor))
            recorder.step()
            fp8.update()
            if iteration >= 5:
                kept = fp8.scale.clone() if kept is None else kept
                fp8.state.scale.copy_(kept)
    (found,) = directory.iterdir()
    return found


def run(block: str, folder: Path, *without: str) -> str:
    forget = FORGET.format(names=", ".join(map(repr, (*without, "transformer_engine"))))
    command = [sys.executable, "-W", "error", "-c", forget + block]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_h5py_tells_for_how_long_a_scale_stood_still(folder: Path) -> None:
    said = run(RUN[0], folder, "flightrec", "torch", "ml_dtypes")
    with flightrec.open(folder) as incident:
        stale = incident.trigger.iteration - 6
    assert stale >= STALE - 2
    assert said.startswith("layers.0.layernorm_mlp.fc1 activation transformer_engine.")
    assert "'margin': 0" in said
    assert f"unchanged for {stale} iterations" in said


def test_an_incident_is_read_without_torch(folder: Path) -> None:
    said = run(RUN[1], folder, "torch").splitlines()
    assert len(said) == 4
    with flightrec.open(folder) as incident:
        assert [int(line.split()[0]) for line in said] == [entry.iteration for entry in incident.iterations]


def test_what_is_not_run_is_python_at_least() -> None:
    assert len(RUN) == 2
    assert len(PYTHON) > len(RUN)
    for block in PYTHON:
        compile(block, "docs/transformer-engine.md", "exec")


def test_yaml_examples_are_accepted() -> None:
    assert len(YAML) == 4
    kinds = set()
    for block in YAML:
        data = yaml.safe_load(block)
        kinds |= {"recorder"} if "select" in data else set().union(*map(features, data.values()))
        if "select" in data:
            load_text(block)
    assert kinds == {"recorder", "DumpTensors", "FlightRecorder"}


def features(section: dict[str, Any]) -> set[str]:
    """Names of the features of a section of nvdlfw_inspect's file, which has to look like one."""
    assert section["enabled"] is True
    re.compile(section["layers"]["layer_name_regex_pattern"])
    for options in section["transformer_engine"].values():
        entries = options.get("tensors_struct") or [{"tensor": name} for name in options["tensors"]]
        assert {entry["tensor"] for entry in entries} <= set(TENSORS[:6])
    return set(section["transformer_engine"])
