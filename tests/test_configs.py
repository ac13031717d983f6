"""Each shipped configuration, in a real run: silent while it is healthy, and right about a planted fault."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from models import batches, make, train

import flightrec
from flightrec.config.load import load, packaged

CONFIGS = sorted(path.stem for path in packaged().parent.glob("*.yaml") if not path.stem.startswith("inspect-"))
"""Those of a recorder; the others are nvdlfw_inspect's."""


def test_the_configurations_are_there():
    assert {"default", "long-pretrain", "nan-hunt", "te-fp8-pretrain"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("faulty", [False, True])
def test_a_shipped_configuration_is_silent_until_something_is_wrong(name: str, faulty: bool, tmp_path: Path):
    net = make("torchao")

    def spoil(iteration: int) -> None:
        if faulty and iteration == 99:
            with torch.no_grad():
                net.blocks[0].fc2.weight[2, 7] = math.nan

    with flightrec.Recorder(packaged(name), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(104, rows=64), recorder, before_step=spoil, lr=1e-3, keep=False)
    folders = list(tmp_path.iterdir())
    if not faulty:
        assert not folders
        return
    (folder,) = folders
    with flightrec.open(folder) as incident:
        config = load(packaged(name))
        assert incident.trigger.kind == "nonfinite"
        assert incident.config_text == config.text
        first = incident.blame()[0]
        expected_iteration = 99 if config.selects("blocks.0.fc2", "parameter") else 100
        assert first.iteration == expected_iteration
        if config.budget == "none":
            assert first.key.layer == "blocks.0.fc2"
            assert first.key.tensor in ("weight", "parameter")
        elif config.selects("blocks.0", "output"):  # seen first at the block's border, unless the layer had its turn
            assert first.key.layer in ("blocks.0", "blocks.0.fc2")
        last = first.iteration + config.incident.after
        kept = [entry.iteration for entry in incident.iterations]
        assert kept == list(range(first.iteration - config.ring.iterations + 1, last + 1))
        # Under a budget the iterations after the fault are recorded whole.
        whole = first.iteration if config.budget == "none" else last
        activations = incident.records(layer="blocks.0.fc2", tensor="activation", iteration=whole)
        assert [record.high_precision.shape[0] for record in activations] == [64]
        if config.budget == "none":
            assert np.isfinite(activations[0].high_precision).all()
