"""A recorded training, by the stand-in's kernels or a GPU's: it is verified, and the exported script repeats it."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import te_cpu_modules
import te_models
import torch
from te_layer_support import Layer, batch, loss_of, recipe_of, run
from test_verify_gpu import CONFIG, DIRECTIONS, OPERANDS, compared, verified

import flightrec
from flightrec.interop import reproduce, te_tensors
from flightrec.reports.export import export_path

pytestmark = pytest.mark.filterwarnings("ignore")


def train(te: Any, recipe: str, directory: Path) -> Path:
    """Two iterations of one layer, and an incident of the last."""
    torch.manual_seed(0)
    model, words = Layer(te, "Linear", bias=False), recipe_of(te, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flightrec.Recorder(CONFIG, directory=directory) as recorder:
        recorder.attach(model, optimizer=optimizer)
        for iteration in range(2):
            loss_of(run(te, model, batch(iteration, te.device), words)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if iteration == 1:
                recorder.trigger("look")
            recorder.step()
    (path,) = directory.iterdir()
    return path


RECIPES = ["delayed", "current", "block"]


def export(path: Path, product: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A product's folder, as the script reads it: (manifest, arrays)."""
    monkeypatch.setitem(sys.modules, "te_tensors", te_tensors)  # the script's, not the tests' own
    export_path(path, output=str(target), product=product, layer="layer")
    monkeypatch.setattr(reproduce, "FOLDER", target)
    manifest = json.loads((target / "record.json").read_text())
    return manifest, reproduce.read_arrays(manifest)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_is_verified_and_multiplied_again_bit_for_bit(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with te_cpu_modules.running(monkeypatch) as te:
        path = train(te, recipe, tmp_path / "incidents")
        for product in ("forward", "dgrad", "wgrad"):
            manifest, arrays = export(path, product, tmp_path / product, monkeypatch)
            capsys.readouterr()
            with te_cpu_modules.watch() as (products, _):
                made = reproduce.te_tensors_of(manifest, arrays, "cpu")
                assert made is not None
                reproduce.te_product(manifest, made, arrays)
            told = capsys.readouterr().out
            assert told.count("decodes to the same numbers") == 2, told
            assert "bit for bit the recorded output" in told and "NOT bit" not in told, told
            ((layout, is_split),) = [(seen["layout"], seen["split"]) for seen in products]
            assert layout == {"forward": "TN", "dgrad": "NN", "wgrad": "NT"}[product]
            assert is_split == (recipe == "block" or product != "forward")
            entry = manifest["tensors"]["output"]["components"]["high_precision"]
            arrays[entry["array"]][3, 2] ^= 1
            reproduce.te_product(manifest, made, arrays)
            assert "NOT bit for bit the recorded output: 1 of " in capsys.readouterr().out
    found = verified(tmp_path / "incidents")
    assert not found.mismatches, found.mismatches
    assert compared(found) == (OPERANDS, DIRECTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_of_a_gpu_repeat_every_direction_bit_for_bit(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = te_models.load()
    te_models.reset_fp8()
    recipes = importlib.import_module("transformer_engine.common.recipe")
    te = types.SimpleNamespace(device="cuda", Linear=package.Linear, autocast=package.autocast, recipe=recipes)
    path = train(te, recipe, tmp_path / "incidents")
    told = {}
    for product in ("forward", "dgrad", "wgrad"):
        manifest, arrays = export(path, product, tmp_path / product, monkeypatch)
        capsys.readouterr()
        reproduce.with_transformer_engine(manifest, arrays, "cuda")
        told[product] = capsys.readouterr().out
    whole = "\n".join(f"{product}:\n{text}" for product, text in told.items())
    for text in told.values():
        assert text.count("decodes to the same numbers") == 2, whole
        assert "bit for bit the recorded output" in text and "NOT bit" not in text, whole
