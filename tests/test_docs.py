"""What README and docs show is true: the code runs, links lead somewhere, commands have the options that are shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import flightrec
from incident_support import write_incident
from test_reports_summary import FIELDS

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

TRAINING = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1, bias=False))
net, model = model, None
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        return self.net(x).square().mean()
model = Loss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.full((2, 4), value) for value in (1.0, 2.0, float("inf"), 1.0, 1.0)]
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)


def test_readme_has_a_training_and_a_reading_example() -> None:
    assert len(PYTHON) == 2
    assert "recorder.step" in PYTHON[0]
    assert "flightrec.open" in PYTHON[1]


def test_training_example_writes_an_incident_that_the_reading_example_reads(tmp_path: Path) -> None:
    done = run(TRAINING + PYTHON[0], tmp_path)
    assert done.returncode == 0, done.stderr
    incidents = sorted((tmp_path / "incidents").iterdir())
    assert incidents, done.stderr
    name = incidents[0].name
    done = run(PYTHON[1].replace("incidents/NAME", f"incidents/{name}"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Inf" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_readme_commands_exist_with_these_options() -> None:
    rows = re.findall(r"^\| `flightrec (\w+) ?(.*?)` \|", README, re.MULTILINE)
    assert {name for name, _ in rows} == {
        "demo", "check", "bench", "inspect", "report", "verify", "diff", "export", "pack"
    }  # fmt: skip
    for name, usage in rows:
        shown = flightrec(name, "--help")
        assert shown.returncode == 0
        for option in re.findall(r"--\w+", usage):
            assert option in shown.stdout, f"{name} {option}"


def test_readme_commands_are_what_tox_and_ci_run() -> None:
    ci = (ROOT / ".ci" / "run").read_text() if (ROOT / ".ci" / "run").exists() else ""
    tox = (ROOT / "tox.ini").read_text()
    assert "python -m pip install tox && tox run -e tests" in README
    assert "tox run -e demo" in README
    for name in ("demo", "tests"):
        assert f"[testenv:{name}]" in tox
    if ci:
        assert "python -m pip install tox && tox run -e tests" in ci
        assert "demo" in re.findall(r"environments=\((.*)\)", ci)[0].split()


def test_inspect_page_lists_every_field(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "inspect.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) | {"document", "version"} == FIELDS
    document = json.loads(flightrec("inspect", write_incident(tmp_path), "--json").stdout)
    for field in ("incident", "trigger"):
        for name in document[field]:
            assert f"`{name}`" in rows[field], f"{field}.{name}"
    for field in ("ranks", "iterations", "blame"):
        for name in document[field][0]:
            assert f"`{name}`" in rows[field], f"{field}[].{name}"
    for row in (*document["way"], *document["around"]):
        for name in row:
            assert f"`{name}`" in page, name


def test_picture_loads_nothing() -> None:
    picture = (ROOT / "docs" / "inspect.svg").read_text()
    assert "Where it began".replace(" ", "&#160;") in picture
    assert "url(http" not in picture
    assert "@import" not in picture


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!i]*.yaml")), ids=lambda path: path.name)
def test_configuration_records_a_run(path: Path, tmp_path: Path) -> None:
    """Each shipped configuration takes a model from healthy to NaN and writes the incident."""
    program = TRAINING + PYTHON[0].replace("flightrec.Recorder(", f"flightrec.Recorder({str(path)!r}, ")
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "incidents").rglob("*.index.h5")), done.stderr


def test_configuration_page_examples_are_accepted() -> None:
    from flightrec.config.load import load_text

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        load_text(block)
