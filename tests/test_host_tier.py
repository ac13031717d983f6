"""The host tier from the recorder to the incident, in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest
import torch
from host_tier_trainer import CONFIG, LAST, NUMEL, value_of
from models import RECORD_ALL, batches, make, train

import flightrec

TRAINER = Path(__file__).parent / "host_tier_trainer.py"


class Ended(NamedTuple):
    """A trainer that is no more."""

    directory: Path
    code: int
    stderr: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    """All trainers, side by side."""
    started = {}
    for scenario in ("dead", "dead_in_step", "dead_without", "killed"):
        folder = tmp_path_factory.mktemp(scenario)
        command = [sys.executable, str(TRAINER), scenario, str(folder)]
        started[scenario] = (folder, subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    found = {}
    for scenario, (folder, process) in started.items():
        _, stderr = process.communicate(timeout=100)
        found[scenario] = Ended(folder, process.returncode, stderr)
    return found


def only(directory: Path) -> Path:
    """The one incident, once its index is written: the writer outlives the trainer."""
    deadline = time.monotonic() + 60
    while not list(directory.glob("*/*.index.h5")) and time.monotonic() < deadline:
        time.sleep(0.05)
    (folder,) = directory.iterdir()
    return folder


def check_bytes(folder: Path, iterations: list[int]) -> None:
    """With plain h5py: every record of these iterations is there and is what was recorded."""
    (facts,), (tensors,) = folder.glob("*.facts.h5"), folder.glob("*.tensors.h5")
    with h5py.File(facts) as file, h5py.File(tensors) as payload:
        names, records = file["names"].asstr()[:], file["records"][:]
        for iteration in iterations:
            rows = records[records["iteration"] == iteration]
            assert len(rows) == 3
            for row in rows:
                value = value_of(iteration, int(names[row["layer"]][-1]))
                stored = payload[names[row["path"]]]["high_precision"][:]
                assert stored.shape == (NUMEL,) and (stored == value).all()
                assert row["amax"] == value and row["sum"] == pytest.approx(value * NUMEL)


@pytest.mark.parametrize("scenario", ["dead", "dead_in_step"])
def test_a_dead_device_leaves_the_iterations_before_it(scenario, ended):
    trainer = ended[scenario]
    assert trainer.code == 1 and trainer.stderr.rstrip().endswith("device-side assert triggered")
    assert "cannot be read any more" in trainer.stderr
    folder = only(trainer.directory)
    with flightrec.open(folder) as incident:
        assert (incident.trigger.kind, incident.trigger.iteration, incident.ended) == ("exception", LAST, "")
        tiers = {entry.iteration: (entry.tier, entry.landmark) for entry in incident.iterations}
        held = [iteration for iteration, (tier, _) in tiers.items() if tier == "host"]
        # the three of the ring and four older ones, before the one that was under way, and the landmark
        assert tiers[100] == ("host", 100)
        assert held[-1] == LAST - 1 and held[1:] == list(range(held[1], LAST)) and len(held) - 1 >= 3 + 4
        last = incident.iterations[-1]
        assert (last.iteration, last.tier, last.partial) == (LAST, "ring", True)
        lost = incident.records(iteration=LAST)
        assert [record.key.layer for record in lost] == ["layer0", "layer1"]  # what was recorded up to the fault
        assert all(record.high_precision is None for record in lost)
        assert any("could not be read" in blind.reason for blind in incident.blind if blind.iteration == LAST)
        assert "device-side assert" in incident.environment["stack"]
    check_bytes(folder, held)


def test_without_a_host_tier_a_dead_device_leaves_what_the_host_knew(ended):
    folder = only(ended["dead_without"].directory)
    with flightrec.open(folder) as incident:
        assert (incident.trigger.kind, incident.trigger.iteration) == ("exception", LAST)
        assert [entry.iteration for entry in incident.iterations] == [LAST - 3, LAST - 2, LAST - 1, LAST]
        for record in incident.records(tensor="output"):
            assert record.high_precision is None
            is_last = record.iteration == LAST  # its verdict had not come
            value = value_of(record.iteration, int(record.key.layer[-1]))
            assert record.statistics["amax"] == (None if is_last else value)
        lost = {blind.iteration for blind in incident.blind if "could not be read" in blind.reason}
        assert lost == {LAST - 3, LAST - 2, LAST - 1, LAST}


def test_a_trainer_that_is_killed_with_a_trigger_pending_leaves_what_the_tier_holds(ended):
    assert ended["killed"].code == -signal.SIGKILL
    folder = only(ended["killed"].directory)
    with flightrec.open(folder) as incident:
        assert (incident.trigger.kind, incident.trigger.iteration, incident.ended) == (
            "nonfinite",
            LAST,
            "trainer died",
        )
        iterations = [entry.iteration for entry in incident.iterations]
        assert iterations == [100, *range(LAST - 6, LAST + 1)]
        faulty = incident.records(iteration=LAST, layer="layer1")[0].high_precision
        assert np.flatnonzero(np.isnan(faulty)).tolist() == [7]
    check_bytes(folder, iterations[:-1])


def test_an_incident_beside_training_has_the_ring_the_older_ones_and_the_landmark(tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        for iteration in range(160):
            for layer in range(3):
                recorder.record(
                    f"layer{layer}", "output", high_precision=torch.full((NUMEL,), value_of(iteration, layer))
                )
            if iteration == 155:
                recorder.trigger("look")
            recorder.step()
        summary = recorder.summary()
    assert "host tier: 6.0 MiB" in summary and "GB/s from the device" in summary
    folder = only(tmp_path)
    with flightrec.open(folder) as incident:
        found = [(entry.iteration, entry.tier, entry.landmark) for entry in incident.iterations]
        older = [(iteration, "host", 0) for iteration in range(149, 153)]
        assert found == [(50, "host", 100), *older, *((iteration, "ring", 0) for iteration in range(153, 157))]
        assert all(record.high_precision is not None for record in incident.records(tensor="output"))
        assert all(
            (record.high_precision == value_of(record.iteration, int(record.key.layer[-1]))).all()
            for record in incident.records(tensor="output")
        )
    check_bytes(folder, [iteration for iteration, _, _ in found])


def test_training_is_the_same_with_a_host_tier(tmp_path):
    data = batches(6)
    bare = train(make(), data)
    net = make()
    made = {**RECORD_ALL, "ring": {"iterations": 2, "host_memory": "64 MiB"}}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        recorded = train(net, data, recorder)
        assert recorder._capture.engine.tier.num_iterations >= 5
    assert len(bare) == len(recorded) and all(torch.equal(a, b) for a, b in zip(bare, recorded, strict=True))
    assert not list(tmp_path.iterdir())
