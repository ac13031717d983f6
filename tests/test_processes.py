"""Real processes: ranks, kills, forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import flightrec

TESTS = Path(__file__).parent


def start(body: str, *arguments: str, **environment: str) -> subprocess.Popen:
    head = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
    head += "import math, os, signal, torch, flightrec\nfrom models import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(body), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_incident(directory: Path, timeout_s: float = 150) -> flightrec.Incident:
    """The incident, once its index is there: the writer outlives the trainer."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := list(directory.glob("*/*.index.h5")):
            return flightrec.open(found[0].parent)
        time.sleep(0.1)
    raise AssertionError(f"no incident: {list(directory.rglob('*'))}")


@pytest.mark.dist
@pytest.mark.parametrize("steps_after", [0, 1, 3])
def test_a_trainer_killed_after_a_verdict_leaves_a_whole_incident(steps_after, tmp_path):
    process = start(
        """
        net = make("torchao")
        config = {**RECORD_ALL, "ring": {"iterations": 3}, "select": [{"tensors": "*"}]}
        recorder = flightrec.Recorder(config, directory=sys.argv[1])
        recorder.attach(net)
        train(net, batches(5), recorder)
        with torch.no_grad():
            net.blocks[1].fc2.weight[0, 0] = math.nan
        train(net, batches(1 + int(sys.argv[2])), recorder)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path / "out"),
        str(steps_after),
    )
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    incident = wait_for_incident(tmp_path / "out")
    assert incident.ended in ("trainer died", "") if steps_after else incident.ended == "trainer died"
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 5)
    first = incident.blame()[0]
    assert (first.key.layer, first.key.tensor) == ("blocks.1.fc2", "weight")
    (weight,) = incident.records(layer="blocks.1.fc2", tensor="weight", iteration=5)
    assert np.isnan(weight.high_precision[0, 0])
    assert {3, 4, 5} <= {entry.iteration for entry in incident.iterations}
    # What did not reach the shared memory in time is named.
    lost = {record.iteration for record in incident.records() if record.why_absent}
    assert lost <= {entry.iteration for entry in incident.blind}
    assert not list((tmp_path / "out").rglob("*.partial"))


@pytest.mark.dist
def test_a_killed_trainer_without_a_verdict_leaves_nothing_and_no_process(tmp_path):
    process = start(
        """
        net = make()
        recorder = flightrec.Recorder(directory=sys.argv[1])
        recorder.attach(net)
        train(net, batches(2), recorder)
        print(recorder._client.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path / "out"),
    )
    out, _ = process.communicate(timeout=120)
    writer = int(out.split()[0])
    deadline = time.monotonic() + 30
    while Path(f"/proc/{writer}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{writer}").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.dist
def test_two_ranks_write_files_of_their_own_and_a_healthy_one_writes_nothing(tmp_path):
    body = """
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
        net = make(seed=0)
        recorder = flightrec.Recorder({**RECORD_ALL, "ring": {"iterations": 2}}, directory=sys.argv[1], run_id="pair")
        recorder.attach(net)
        def spoil(iteration, index, x):
            if iteration == 3 and rank == 1:
                x[2, 3] = math.nan
        # Gradients are not reduced: the fault stays on its rank.
        train(net, batches(6), recorder, before_forward=spoil)
        recorder.close()
        total = torch.ones(1)
        dist.all_reduce(total)
        print(rank, total.item(), flush=True)
        dist.destroy_process_group()
        """
    processes = [
        start(body, str(tmp_path / "out"), str(tmp_path / "store"), RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out.split()[-2:] for out, _ in outputs] == [["0", "2.0"], ["1", "2.0"]]
    (folder,) = (tmp_path / "out").iterdir()
    incident = flightrec.open(folder)
    assert [rank.rank for rank in incident.ranks] == [1]
    assert incident.world_size == 2 and incident.run_id == "pair"
    assert {entry.iteration for entry in incident.iterations} == {2, 3, 4}
    first = incident.blame()[0]
    assert (first.rank, first.iteration, first.key.layer, first.key.tensor) == (1, 3, "", "input")
    assert np.isnan(incident.records(layer="", tensor="input", iteration=3)[0].high_precision[2, 3])
    assert not any("00000" in path.name.split(".")[0] for path in folder.iterdir())


@pytest.mark.dist
def test_workers_forked_by_a_data_loader_neither_record_nor_keep_the_writer(tmp_path):
    process = start(
        """
        import torch.utils.data
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.full((WIDTH,), float(i))
        net = make()
        with flightrec.Recorder({**RECORD_ALL, "ring": {"iterations": 2}}, directory=sys.argv[1]) as recorder:
            recorder.attach(net)
            loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for epoch in range(2):
                train(net, [[x] for x in loader], recorder)
            recorder.trigger("now")
            train(net, batches(2), recorder)
        print("done", flush=True)
        """,
        str(tmp_path / "out"),
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out.split() == ["done"], err
    (folder,) = (tmp_path / "out").iterdir()
    assert flightrec.open(folder).trigger.kind == "manual"


@pytest.mark.dist
@pytest.mark.parametrize("killed", ["trainer", "writer"])
def test_the_history_survives_a_kill_of_either_process(killed, tmp_path):
    process = start(
        """
        recorder = flightrec.Recorder({"select": [{"tensors": "*"}], "ring": {"iterations": 2}}, directory=sys.argv[1])
        def run(values):
            for value in values:
                recorder.record("x", "output", high_precision=torch.tensor([value]))
                recorder.step()
        run([float(n) for n in range(50)])
        if sys.argv[2] == "writer":
            os.kill(recorder._client.pid, signal.SIGKILL)
            recorder._client._process.wait()
        run([50.0, math.nan])
        if sys.argv[2] == "trainer":
            os.kill(os.getpid(), signal.SIGKILL)
        run([52.0])
        recorder.close()
        """,
        str(tmp_path / "out"),
        killed,
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGKILL if killed == "trainer" else 0), err
    incident = wait_for_incident(tmp_path / "out")
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 51)
    series = incident.history.series(layer="x")
    assert series.iterations.tolist()[:52] == list(range(52))
    assert series["amax"][:51].tolist() == [float(n) for n in range(51)]
    assert series["nan_count"][[50, 51]].tolist() == [0.0, 1.0]


@pytest.mark.dist
def test_a_forked_child_adds_nothing_to_the_history(tmp_path):
    process = start(
        """
        recorder = flightrec.Recorder({"select": [{"tensors": "*"}]}, directory=sys.argv[1])
        def run(values):
            for value in values:
                recorder.record("x", "output", high_precision=torch.tensor([value]))
                recorder.step()
        run([1.0, 2.0])
        child = os.fork()
        if child == 0:
            run([100.0] * 5)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        recorder.trigger("now")
        run([3.0])
        recorder.close()
        """,
        str(tmp_path / "out"),
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert wait_for_incident(tmp_path / "out").history.series(layer="x")["amax"].tolist() == [1.0, 2.0, 3.0]
