"""The host tier on a CUDA device: a dead context leaves its incident, and nothing waits for the copies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import flightrec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CONFIG = {
    "budget": "none",
    "select": [{"tensors": ["output"]}],
    "ring": {"iterations": 3, "memory": "1 GiB", "host_memory": "128 MiB"},
    "triggers": [{"kind": "exception"}],
    "incident": {"older_iterations": 4},
}


def record(recorder, iteration, num_layers=3, numel=1 << 18):
    for layer in range(num_layers):
        x = torch.full((numel,), float(iteration), device="cuda") + layer / 4
        recorder.record(f"layer{layer}", "output", high_precision=x.bfloat16() if layer else x)


def test_after_a_device_side_assert_the_incident_is_written_from_the_host_tier(tmp_path):
    body = f"""
import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, flightrec
from test_host_tier_gpu import record
with flightrec.Recorder(json.loads({json.dumps(CONFIG)!r}), directory={str(tmp_path / "out")!r}) as recorder:
    for iteration in range(200):
        record(recorder, iteration)
        torch.cuda.synchronize()
        recorder.step()
    record(recorder, 200)
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1, ended.stderr[-4000:]
    assert "device-side assert" in ended.stderr
    (folder,) = (tmp_path / "out").iterdir()
    (facts,), (tensors,) = folder.glob("*.facts.h5"), folder.glob("*.tensors.h5")
    with h5py.File(facts) as file, h5py.File(tensors) as payload:
        names, records, iterations = file["names"].asstr()[:], file["records"][:], file["iterations"][:]
        assert names[file["firings"][:][0]["kind"]] == "exception"
        assert "device-side assert" in json.loads(file["environment"].asstr()[()])["stack"]
        held = iterations[iterations["tier"] == b"host"]
        recent = [int(number) for number in held[held["landmark"] == 0]["iteration"]]
        assert recent == list(range(recent[0], recent[-1] + 1)) and len(recent) >= 3 + 4
        assert 195 <= recent[-1] < 200
        landmark = held[held["landmark"] == 100]["iteration"]
        assert len(landmark) == 1 and 50 <= landmark[0] <= 100
        for row in records[np.isin(records["iteration"], held["iteration"])]:
            expected = float(row["iteration"]) + int(names[row["layer"]][-1]) / 4
            stored = payload[names[row["path"]]]["high_precision"][:]
            if stored.dtype == np.uint16:
                stored = (stored.astype("u4") << 16).view("f4")
                expected = float(torch.tensor(expected).bfloat16())
            assert stored.shape == (1 << 18,) and (stored == expected).all()
        assert iterations[-1]["iteration"] == 200 and iterations[-1]["partial"]
        assert len(records[records["iteration"] == 200]) == 3  # what had been recorded up to the fault is named
    with flightrec.open(folder) as incident:
        assert any("could not be read" in blind.reason for blind in incident.blind if blind.iteration == 200)


def test_nothing_waits_and_nothing_is_allocated_with_a_host_tier(tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:

        def iterate(iteration):
            record(recorder, iteration)
            recorder.step()

        for iteration in range(40):
            iterate(iteration)
            torch.cuda.synchronize()
        tier = recorder._capture.engine.tier
        assert "ready" not in tier.summary()  # all of it is page-locked by now
        before = torch.cuda.memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for iteration in range(40, 240):
                iterate(iteration)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        for name in ("num_device_alloc", "num_device_free", "allocated_bytes.all.current", "num_alloc_retries"):
            assert before[name] == after[name], name
        assert not list(tmp_path.iterdir())
        for iteration in range(240, 250):
            iterate(iteration)
            torch.cuda.synchronize()
        recorder.trigger("look")
        iterate(250)
    (folder,) = tmp_path.iterdir()
    with flightrec.open(folder) as incident:
        assert [entry.tier for entry in incident.iterations].count("host") >= 4
        found = incident.records(tensor="output")
        assert len(found) == 3 * len(incident.iterations)
        for entry in found:
            expected = torch.tensor(entry.iteration + int(entry.key.layer[-1]) / 4)
            expected = expected.bfloat16() if entry.key.layer != "layer0" else expected
            assert (entry.high_precision == float(expected)).all(), entry.why_absent
