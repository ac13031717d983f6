"""``flightrec bench``: end to end on the CPU, its JSON, and what it says of a factory that is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import flightrec

from flightrec.bench.results import studies_of

pytest.importorskip("torch")

MODELS = """
import torch

def small(tokens=4):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    def step():
        loss = model(torch.ones(tokens, 8)).square().mean()
        loss.backward()
        model.zero_grad()
        return loss
    return model, step

def alone():
    return small()[0]

def broken():
    raise RuntimeError("no such checkpoint")

def bad_step():
    return small()[0], lambda: 1 / 0

def late_step():
    model, step = small()
    left = iter(range(3))
    return model, lambda: step() if next(left, None) is not None else 1 / 0

def empty():
    return torch.nn.ReLU(), lambda: None

def fixed():
    return small()

number = 7
"""
QUICK = ("--pairs", 1, "--steps", 1, "--warm-up", 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bench_models.py").write_text(MODELS)
    (tmp_path / "all.yaml").write_text("budget: none\nselect: [{layers: '*', tensors: [activation]}]\n")
    yield tmp_path
    sys.modules.pop("bench_models", None)


def test_measures_and_writes_json(folder: Path) -> None:
    arguments = ("--model", "bench_models:small", "--config", "all.yaml", "--tokens", 4, "--tokens", 6, *QUICK)
    done = flightrec("bench", *arguments, "--output", "found.json")
    assert done.returncode == 0, done.stderr
    for word in ("all", "added, ms", "byte bound, ms", "predicted, ms", "host, ms", "torch"):
        assert word in done.stdout, word
    document = json.loads((folder / "found.json").read_text())
    studies = studies_of(document)
    assert [study.workload[-8:] for study in studies] == ["4 tokens", "6 tokens"]
    for study, tokens in zip(studies, (4, 6), strict=True):
        (found,) = study.comparisons
        assert found.recorded is not None
        assert found.recorded.num_bytes == 2 * tokens * 8 * 4 + 4  # two activations and the loss
        assert found.on is not None and found.on.num_files == 0
    assert document["machine"]["torch"]
    page = (Path(__file__).parent.parent / "docs" / "bench.md").read_text()
    fields = document["studies"][0]["comparisons"][0]
    told = [*fields, *(f"recorded.{name}" for name in fields["recorded"]), *(f"on.{name}" for name in fields["on"])]
    told = [
        name for name in told if name not in ("name", "recorded", "off", "on.num_steps", "on.num_device_allocations")
    ]
    for name in told:
        assert f"`{name}`" in page or f"`{name.replace('on.', 'off.')}`" in page, name
    assert sorted(path.name for path in folder.iterdir() if path.suffix != "") == [
        "all.yaml", "bench_models.py", "found.json",
    ]  # fmt: skip
    again = flightrec("bench", *arguments, "--output", "found.json")
    assert again.returncode == 2
    assert "--force" in again.stderr


def test_documents_of_another_version_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="version 1, got 'flightrec-bench' of version 99"):
        studies_of({"format": "flightrec-bench", "version": 99})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "bench_models"), ("bench_models", "(model, step)")),
        (("--model", "bench_models:none"), ("no attribute", "(model, step)")),
        (("--model", "bench_models:number"), ("is a int", "(model, step)")),
        (("--model", "bench_models:alone"), ("gave a Sequential", "(model, step)")),
        (("--model", "bench_models:broken"), ("no such checkpoint", "(model, step)")),
        (("--model", "bench_models:bad_step"), ("without a recorder", "ZeroDivisionError")),
        (("--model", "bench_models:late_step"), ("step() failed", "ZeroDivisionError", "can be repeated")),
        (("--model", "bench_models:empty"), ("no parameters",)),
        (("--model", "bench_models:fixed", "--tokens", 4), ("no parameter `tokens`", "leave --tokens out")),
        (("--model", "bench_models:fixed", "--device", "tpu"), ("--device tpu", "expected cuda or cpu")),
        (("--tokens", 3), ("--tokens 3", "sequences of 64")),
    ],
)
def test_what_cannot_be_measured_is_refused(folder: Path, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    done = flightrec("bench", *options, *QUICK, *(() if "--device" in options else ("--device", "cpu")))
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr, word
    assert "Traceback" not in done.stderr
