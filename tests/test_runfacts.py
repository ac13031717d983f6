"""Facts of each iteration in a real run: random states that bring the iteration back, settings, times."""

from __future__ import annotations

import random
import re
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from models import batches, loss_of, make
from torch import nn

import flightrec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = {
    "select": [{"tensors": ["input", "output"]}],
    "ring": {"iterations": 4},
    "incident": {"after": 0, "cooldown": 0},
    "triggers": [{"kind": "manual"}],
}


def opened(directory):
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


RESTORE = re.findall(
    r"```python\n(import random, h5py.*?)```",
    (Path(__file__).parent.parent / "docs" / "format.md").read_text(),
    re.DOTALL,
)


def restore(incident, iteration: int, suffix: str = "", attempt: int = 0) -> None:
    """Run the lines of docs/format.md on an incident's iteration."""
    (lines,) = RESTORE
    lines = lines.replace("incident-1.1.facts.h5", str(incident.ranks[0].facts_path))
    lines = lines.replace("0.0000012", f"{attempt}.{iteration:07d}")
    for name in ("torch_cpu", "python", "numpy"):
        lines = lines.replace(f'"{name}"', f'"{name}{suffix}"')
    exec(lines, {})


def draw() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_state_brings_back_the_iterations_random_numbers(device, tmp_path):
    """Dropout's mask and all draws of an iteration in the ring come again, also after a draw before the forward."""
    torch.manual_seed(3), random.seed(4), np.random.seed(5)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    x, drawn, outputs = torch.ones(4, 8, device=device), [], []
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net)
        for iteration in range(9):
            drawn.append(draw())
            outputs.append(net(x).detach().clone())
            if iteration == 7:
                recorder.trigger("now")
            recorder.step()
    incident = opened(tmp_path)
    for iteration in range(4, 8):
        restore(incident, iteration)
        assert draw() == drawn[iteration]
        states = incident.ranks[0].random_states(0, iteration)
        if device == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(states["torch_cuda"]))
        assert torch.equal(net(x), outputs[iteration])
        if device == "cpu":
            torch.rand(100)
            torch.set_rng_state(torch.from_numpy(states["torch_cpu_at_forward"]))
            assert torch.equal(net(x), outputs[iteration])
    assert incident.ranks[0].random_states(0, 3) == {}


def test_a_state_before_the_forward_is_kept_only_if_it_differs(tmp_path):
    net = make()
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net)
        for iteration, (x,) in enumerate(batches(3)):
            if iteration == 2:
                random.random()
                recorder.trigger("now")
            loss_of(net, x)
            recorder.step()
    rank = opened(tmp_path).ranks[0]
    assert set(rank.random_states(0, 1)) >= {"torch_cpu", "python", "numpy"}
    assert not any(name.endswith("_at_forward") for name in rank.random_states(0, 1))
    assert set(rank.random_states(0, 2)) - set(rank.random_states(0, 1)) == {"python_at_forward"}


def test_the_tracker_of_transformer_engine_is_asked_if_it_is_loaded(tmp_path, monkeypatch):
    tracker = torch.arange(16, dtype=torch.uint8)

    class States:
        def get_states(self):
            return {"model-parallel-rng": tracker, "generator": torch.Generator().manual_seed(7)}

    module = types.ModuleType("transformer_engine.pytorch.distributed")
    module.get_all_rng_states = lambda: {"default": States(), "cpu": tracker, "device": torch.empty(1, device="meta")}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.record("x", "output", high_precision=torch.ones(1))
        recorder.trigger("now")
        recorder.step()
    states = opened(tmp_path).ranks[0].random_states(0, 0)
    assert states["transformer_engine.default.model-parallel-rng"].tolist() == list(range(16))
    assert states["transformer_engine.cpu"].tolist() == list(range(16))
    expected = torch.Generator().manual_seed(7).get_state().numpy()
    assert np.array_equal(states["transformer_engine.default.generator"], expected)
    assert "transformer_engine.device" not in states


def test_one_failing_fact_costs_no_other(tmp_path, monkeypatch, caplog):
    module = types.ModuleType("transformer_engine.pytorch.distributed")
    module.get_all_rng_states = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Optimizer:
        @property
        def param_groups(self):
            raise LookupError("no groups")

    net = make()
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=Optimizer())
        for (x,) in batches(3):
            loss_of(net, x)
            recorder.trigger("now")
            recorder.step(loss=1.0)
    incident = flightrec.open(sorted(tmp_path.iterdir())[-1])
    entry = incident.iterations[-1]
    assert entry.step_time_s > 0 and entry.loss == 1.0 and entry.optimizer == {}
    assert "torch_cpu" in incident.ranks[0].random_states(0, entry.iteration)
    reasons = {blind.tensor: blind.reason for blind in incident.blind}
    assert "ZeroDivisionError" in reasons["the state of transformer_engine"]
    assert "LookupError: no groups" in reasons["the optimizer's settings"]
    assert sum("is disarmed" in record.message for record in caplog.records) == 2


def test_the_settings_are_those_that_the_step_used(tmp_path):
    net = make()
    groups = [
        {"params": list(net.blocks.parameters())},
        {"params": list(net.head.parameters()), "lr": torch.tensor(0.5)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scheduler=scheduler)
        for iteration, (x,) in enumerate(batches(4)):
            loss_of(net, x).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if iteration == 3:
                recorder.trigger("now")
            recorder.step(metrics={"loss_scale": 2.0**iteration})
    incident = opened(tmp_path)
    assert [entry.optimizer["groups"][0]["lr"] for entry in incident.iterations] == [0.1, 0.05, 0.025, 0.0125]
    assert [entry.optimizer["groups"][1]["lr"] for entry in incident.iterations] == [0.5, 0.25, 0.125, 0.0625]
    assert [entry.loss_scale for entry in incident.iterations] == [1.0, 2.0, 4.0, 8.0]
    first = incident.iterations[0].optimizer
    assert (first["class"], first["scheduler"]) == ("AdamW", {"class": "StepLR", "last_epoch": 1})
    assert first["groups"][0]["betas"] == [0.8, 0.95]
    assert first["groups"][0]["num_parameters"] == 12
    assert "params" not in first["groups"][0]
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.gpu
def test_a_learning_rate_on_the_device_is_named_and_not_read(tmp_path):
    net = make().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1, device="cuda"), capturable=True)
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        for (x,) in batches(3, device="cuda"):
            loss_of(net, x).backward()
            torch.cuda.set_sync_debug_mode("error")
            try:
                recorder._facts._before_optimizer_step(optimizer)
                recorder._facts.end()
                recorder._facts.begin()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            recorder.trigger("now")
            recorder.step()
    incident = flightrec.open(sorted(tmp_path.iterdir())[-1])
    assert incident.iterations[-1].optimizer["groups"][0]["lr"] == "not read: a tensor on cuda:0"
    assert "torch_cuda" in incident.ranks[0].random_states(0, incident.iterations[-1].iteration)


def test_optimizers_of_other_makes_and_many_groups(tmp_path):
    class Wrapped:
        param_groups = [{"params": [1, 2], "lr": n, "note": "text", "long": list(range(99))} for n in range(70)]  # noqa: RUF012

    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        net = make()
        recorder.attach(net, optimizer=Wrapped(), scheduler=object())
        loss_of(net, batches(1)[0][0])
        recorder.trigger("now")
        recorder.step()
    found = opened(tmp_path).iterations[0].optimizer
    assert len(found["groups"]) == 64 and found["num_groups"] == 70
    assert found["groups"][3] == {"num_parameters": 2, "lr": 3}
    assert found["scheduler"] == {"class": "object"}


def test_times_are_of_the_iteration(tmp_path):
    net = make()
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net)
        for iteration, (x,) in enumerate(batches(4)):
            loss_of(net, x)
            if iteration == 3:
                recorder.trigger("now")
            recorder.step()
    first, *later = opened(tmp_path).iterations
    assert first.step_time_s is None and first.data_time_s is None
    assert all(0 < entry.data_time_s < entry.step_time_s for entry in later)


def test_values_and_whole_batches_given_with_microbatches(tmp_path):
    net = make()
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net)
        for index, x in enumerate(batches(1, 3)[0]):
            ids = torch.arange(5) + 2**40 + index
            with recorder.microbatch(index, data={"sample_ids": ids, "num_valid_labels": 10 + index}):
                loss_of(net, x)
        recorder.trigger("now")
        recorder.step(metrics={"tokens": 3})
    incident = opened(tmp_path)
    assert incident.iterations[0].data == {"num_valid_labels": {0: 10.0, 1: 11.0, 2: 12.0}}
    assert incident.iterations[0].metrics == {"tokens": 3.0}
    assert [record.high_precision.tolist() for record in incident.records(part="data.sample_ids")] == [
        [2**40 + n + index for n in range(5)] for index in range(3)
    ]
    with h5py.File(incident.ranks[0].facts_path) as file:
        assert "metric.data.sample_ids" not in file["history"]


def test_training_is_bit_identical_with_an_optimizer_attached(tmp_path):
    def run(recorder):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if recorder is not None:
            recorder.attach(net, optimizer=optimizer)
        seen = []
        for _ in range(5):
            loss = net(torch.rand(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), torch.tensor(random.random()), torch.tensor(np.random.rand())]
            optimizer.zero_grad()
            if recorder is not None:
                recorder.step(loss=loss)
        return seen + [parameter.detach() for parameter in net.parameters()]

    random.seed(1), np.random.seed(1)
    plain = run(None)
    random.seed(1), np.random.seed(1)
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorded = run(recorder)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_optimizer_step_goes_on(tmp_path):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        for iteration, (x,) in enumerate(batches(3)):
            loss_of(net, x).backward()
            step()
            if iteration == 2:
                recorder.trigger("now")
            recorder.step()
    assert opened(tmp_path).iterations[-1].optimizer["groups"][0]["lr"] == 0.1
