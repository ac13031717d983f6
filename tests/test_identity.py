from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import flightrec
from flightrec import identity


@pytest.mark.parametrize("variable", identity.COMMIT_VARIABLES)
def test_a_commit_in_the_environment_overrules_git(variable, monkeypatch):
    for name in identity.COMMIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "commit" not in identity.environment(None)
    monkeypatch.setenv(variable, "abc")
    facts = identity.environment(None)
    assert (facts["commit"], facts["commit_from"]) == ("abc", variable)


def test_topology_from_the_launchers_variables(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    topology = identity.environment(None)["topology"]
    assert topology["rank"] == 5 and topology["world_size"] == 16
    assert topology["local_rank"] == 1 and topology["local_world_size"] == 4 and topology["num_nodes"] == 4
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert identity.environment(None)["topology"]["num_nodes"] == 2


def test_backend_and_mesh_of_a_distributed_model(tmp_path):
    body = """
        import sys, torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_module
        from flightrec.identity import environment
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        print(environment(None, distribute_module(torch.nn.Linear(2, 2), mesh))["topology"])
        dist.destroy_process_group()
    """
    command = [sys.executable, "-c", "\n".join(line.strip() for line in body.splitlines()), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    topology = eval(done.stdout)
    assert topology["backend"] == "gloo"
    assert topology["meshes"] == [{"names": ["dp", "tp"], "shape": [1, 1]}]


def test_an_exceptions_incident_has_the_mesh_too(tmp_path):
    body = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
import flightrec
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
net = distribute_module(torch.nn.Linear(2, 2), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
try:
    with flightrec.Recorder(directory=sys.argv[2]) as recorder:
        recorder.attach(net)
        recorder.step(loss=1.0)
        recorder.loss(2.0)
        raise ValueError("boom")
except ValueError:
    dist.destroy_process_group()
"""
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", body, str(tmp_path / "store"), str(out)], check=True)
    (folder,) = out.iterdir()
    environment = flightrec.open(folder).environment
    assert environment["topology"]["meshes"] == [{"names": ["dp"], "shape": [1]}]
    assert environment["exception"] == "ValueError"


def test_an_incident_names_the_commit_of_the_script(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    script = source / "train.py"
    script.write_text(
        "import sys, torch, flightrec\n"
        "with flightrec.Recorder(directory=sys.argv[1]) as recorder:\n"
        "    recorder.record('x', 'output', high_precision=torch.tensor([float('nan')]))\n"
        "    recorder.step()\n"
    )
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    try:
        for arguments in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "first"]):
            subprocess.run([*git, *arguments], check=True)
    except FileNotFoundError:
        pytest.skip("needs git")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([sys.executable, script, tmp_path / "out"], cwd=tmp_path, check=True)
    (folder,) = (tmp_path / "out").iterdir()
    facts = flightrec.open(folder).environment
    assert (facts["commit"], facts["dirty"], facts["main"]) == (commit, False, str(script))


@pytest.mark.gpu
def test_a_gpu_is_named():
    facts = identity.environment(torch.device("cuda:0"), nn.Linear(1, 1))
    assert facts["gpu"]["uuid"] and facts["topology"]["num_gpus"] >= 1
