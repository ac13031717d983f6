"""``flightrec check --model``: what would be recorded of a model, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_cli import flightrec

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
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "c.yaml").write_text("select: [{layers: '*', tensors: [activation, gradient]}]\n")
    return tmp_path


def test_with_step_tells_the_ring(folder: Path) -> None:
    done = flightrec("check", "c.yaml", "--model", "models:with_step", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "activation" in done.stdout.split("Sequential")[1]
    assert not (folder / "incidents").exists()


def test_without_step_tells_the_layers(folder: Path) -> None:
    done = flightrec("check", "c.yaml", "--model", "models:alone", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "(model, step)" in done.stdout


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("models:broken", "no such checkpoint"),
        ("models:number", "int"),
        ("models:absent", "absent"),
        ("nowhere:alone", "nowhere"),
        ("models", "package.module:factory"),
    ],
)
def test_factory_that_cannot_be_used(folder: Path, target: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    with pytest.raises(AttachError, match=word) as caught:
        check.check_model(load(folder / "c.yaml"), target)
    assert target in str(caught.value)
    sys.modules.pop("models", None)


def test_step_that_fails(folder: Path) -> None:
    done = flightrec("check", "c.yaml", "--model", "models:bad_step", cwd=folder)
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_selected(folder: Path) -> None:
    (folder / "c.yaml").write_text("select: [{layers: 'decoder.*', tensors: [activation]}]\n")
    done = flightrec("check", "c.yaml", "--model", "models:alone", cwd=folder)
    assert done.returncode == 2
    assert "select" in done.stderr
    assert "Sequential" in done.stderr
