"""``flightrec check --model``: what would be recorded of a model, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import flightrec, flightrec_process

from flightrec.commands import check
from flightrec.config.load import load
from flightrec.errors import AttachError

pytest.importorskip("torch")

MODELS = """
import torch

def alone():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

def with_step():
    model = alone()
    return model, lambda: model(torch.ones(3, 8)).sum().backward()

def broken():
    raise RuntimeError("no such checkpoint")

def bad_step():
    return alone(), lambda: 1 / 0

def number():
    return 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "made_models.py").write_text(MODELS)
    (tmp_path / "c.yaml").write_text("select: [{layers: '*', tensors: [activation, gradient]}]\n")
    yield tmp_path
    sys.modules.pop("made_models", None)


def test_with_step_tells_the_ring(folder: Path) -> None:
    done = flightrec_process("check", "c.yaml", "--model", "made_models:with_step", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "activation" in done.stdout.split("Sequential")[1]
    assert not (folder / "incidents").exists()


def test_without_step_tells_the_layers(folder: Path) -> None:
    done = flightrec("check", "c.yaml", "--model", "made_models:alone")
    assert done.returncode == 0, done.stderr
    assert "(model, step)" in done.stdout


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("made_models:broken", "no such checkpoint"),
        ("made_models:number", "int"),
        ("made_models:absent", "absent"),
        ("nowhere:alone", "nowhere"),
        ("made_models", "package.module:factory"),
    ],
)
def test_factory_that_cannot_be_used(folder: Path, target: str, word: str) -> None:
    with pytest.raises(AttachError, match=word) as caught:
        check.check_model(load(folder / "c.yaml"), target)
    assert target in str(caught.value)


def test_step_that_fails(folder: Path) -> None:
    done = flightrec("check", "c.yaml", "--model", "made_models:bad_step")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_selected(folder: Path) -> None:
    (folder / "c.yaml").write_text("select: [{layers: 'decoder.*', tensors: [activation]}]\n")
    done = flightrec("check", "c.yaml", "--model", "made_models:alone")
    assert done.returncode == 2
    assert "select" in done.stderr
    assert "Sequential" in done.stderr
