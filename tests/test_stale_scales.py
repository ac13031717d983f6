"""From the file alone one can say: this scale was 30 iterations stale. Real loops, read with plain h5py."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from models import RECORD_ALL, make

import flightrec

CONFIG = {
    **RECORD_ALL,
    "select": [{"tensors": "*"}],
    "triggers": [{"kind": "stale_scale", "consecutive": 1}],
    "ring": {"iterations": 3},
    "incident": {"after": 0, "cooldown": 0},
}


def quantized(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> flightrec.Quantized:
    codes = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return flightrec.Quantized(codes, "float8_e4m3fn", scale=scale, amax_history=amax)


def train(recorder: flightrec.Recorder, iterations: range, *, turn: int = 1) -> None:
    """A model trains; beside it a tensor whose amax grows from 1.25 is quantized with a scale that nobody updates."""
    model, scale = make(), torch.tensor(64.0)
    recorder.attach(model)
    for iteration in iterations:
        x = torch.zeros(8, 16)
        x[0, 0] = 1.25 if iteration < 30 else 37.0
        if iteration % turn == 0:
            codes = quantized(x, scale, torch.tensor([1.0, 1.25]))
            recorder.record("mine", "activation", high_precision=x, quantized=codes)
        model(torch.ones(2, 32)).square().mean().backward()
        recorder.step()


def facts_of(directory: Path) -> Path:
    """The facts file; the tensors file is lost."""
    (folder,) = directory.iterdir()
    for path in folder.glob("*.tensors.h5"):
        path.unlink()
    return next(folder.glob("*.facts.h5"))


def test_a_scale_that_was_30_iterations_stale(tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        train(recorder, range(31))
    with h5py.File(facts_of(tmp_path)) as file:
        names, records = file["names"].asstr()[()], file["records"][()]
        (row,) = records[(names[records["layer"]] == "mine") & (records["iteration"] == 30)]
        assert row["scale_unchanged_iterations"] == 30
        assert row["scale_differed_iterations"] == -1  # it never had other words
        assert row["scale_min"] == row["scale_max"] == 64.0
        assert row["amax_history_max"] == 1.25
        assert row["amax"] == 37.0
        quantizer = file["quantizers"][int(row["quantizer"])]
        assert quantizer["scale_direction"] == b"multiply_to_encode"
        assert (names[quantizer["class_name"]], names[quantizer["format"]]) == ("flightrec.Quantized", "float8_e4m3fn")
        assert (json.loads(names[quantizer["block_shape"]]), json.loads(names[quantizer["metadata"]])) == ([], {})
        message = file["trigger"].attrs["message"]
    assert "the scale is unchanged for at least 30 iterations, while amax rose from 1.25 to 37" in message


def test_in_turns_the_file_says_what_is_known(tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        train(recorder, range(31), turn=10)
    with h5py.File(facts_of(tmp_path)) as file:
        names, records = file["names"].asstr()[()], file["records"][()]
        (row,) = records[(names[records["layer"]] == "mine") & (records["iteration"] == 30)]
        assert (row["scale_unchanged_iterations"], row["scale_differed_iterations"]) == (30, -1)


@pytest.mark.parametrize("changes", [False, True])
def test_a_restart_carries_it_on(tmp_path, changes):
    with flightrec.Recorder(CONFIG, directory=tmp_path / "first") as recorder:
        train(recorder, range(20))
        state = recorder.state_dict()
    with flightrec.Recorder(CONFIG, directory=tmp_path / "second") as recorder:
        recorder.load_state_dict(state)
        if changes:
            x, scale = torch.ones(8, 16), torch.tensor(32.0)
            recorder.record("mine", "activation", high_precision=x, quantized=quantized(x, scale, torch.ones(2)))
            recorder.step()
        train(recorder, range(20 + changes, 31))
    with h5py.File(facts_of(tmp_path / "second")) as file:
        names, records = file["names"].asstr()[()], file["records"][()]
        row = records[(names[records["layer"]] == "mine") & (names[records["tensor"]] == "activation")][-1]
        known = (row["scale_unchanged_iterations"], row["scale_differed_iterations"])
        assert known == ((9, 10) if changes else (30, -1))


def test_without_a_history_the_incident_speaks_for_itself(tmp_path):
    config = {**CONFIG, "history": {"memory": "4 KiB"}}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        train(recorder, range(31))
    with h5py.File(facts_of(tmp_path)) as file:
        names, records = file["names"].asstr()[()], file["records"][()]
        mine = records[names[records["layer"]] == "mine"]
        ages = dict(zip(mine["iteration"].tolist(), mine["scale_unchanged_iterations"].tolist(), strict=True))
        assert ages == {28: -1, 29: 1, 30: 2}
        assert np.all(mine["scale_differed_iterations"] == -1)


def test_a_scale_that_follows_is_not_stale(tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        for iteration in range(6):
            x = torch.full((4, 16), 2.0**iteration)
            scale = torch.tensor(448 / 2.0**iteration)
            recorder.record("mine", "activation", high_precision=x, quantized=quantized(x, scale, torch.ones(1)))
            if iteration == 5:
                recorder.trigger("look")
            recorder.step()
    with h5py.File(facts_of(tmp_path)) as file:
        records = file["records"][()]
        assert records["scale_unchanged_iterations"].tolist() == [0, 0, 0]
        assert records["scale_differed_iterations"].tolist() == [1, 1, 1]
