"""Going back to a checkpoint within one process, once or again and again, as loops do that rewind at a fault."""

from __future__ import annotations

import pytest
import torch
from models import RECORD_ALL, batches, loss_of, make

import flightrec
from flightrec.sources import watched


def test_no_attempt_comes_twice(tmp_path):
    net, data = make(), batches(10)
    config = {**RECORD_ALL, "ring": {"iterations": 6}, "incident": {"after": 1}}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = []
        for round_number in range(3):
            for iteration in range(recorder.iteration, 8):
                loss_of(net, data[iteration][0]).backward()
                if round_number == 2 and iteration == 6:
                    recorder.trigger("look")
                recorder.step()
                if round_number == 0 and iteration == 4:
                    state = recorder.state_dict()
            seen.append(recorder.attempt)
            if round_number < 2:
                recorder.load_state_dict(state)
    assert seen == [0, 1, 2]
    (folder,) = tmp_path.iterdir()
    incident = flightrec.open(folder)
    assert incident.trigger.attempt == 2
    held = [(iteration.attempt, iteration.iteration) for iteration in incident.iterations]
    assert held == [(0, 7), (1, 5), (1, 6), (1, 7), (2, 5), (2, 6), (2, 7)][-len(held) :]
    times = list(zip(incident.history.attempts.tolist(), incident.history.iterations.tolist(), strict=True))
    assert len(set(times)) == len(times)
    assert {(1, 5), (1, 7), (2, 5), (2, 7)} <= set(times)
    assert not [blind for blind in incident.blind if "cannot be made" in blind.reason]
    told = [tuple(blind) for blind in incident.blind if blind.iteration >= 0]
    assert len(set(told)) == len(told)


def test_the_launchers_attempt_is_never_undercut(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "5")
    with flightrec.Recorder(directory=tmp_path) as recorder:
        recorder.load_state_dict({"attempt": 2, "iteration": 7})
        assert (recorder.attempt, recorder.iteration) == (5, 7)
        recorder.load_state_dict({"attempt": 2, "iteration": 7})
        assert recorder.attempt == 6


@pytest.mark.parametrize(
    ("incident", "expected"), [({"limit": 4, "cooldown": 0}, 3), ({"limit": 9, "cooldown": 50}, 1)]
)
def test_rewinding_at_each_fault_writes_no_more_than_any_other_loop(incident, expected, tmp_path):
    config = {**RECORD_ALL, "triggers": [{"kind": "loss_jump", "window": 8, "min_samples": 4}], "incident": incident}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        for _ in range(12):
            recorder.step(loss=torch.tensor(1.0))
        state = recorder.state_dict()
        for _ in range(5):
            recorder.step(loss=torch.tensor(1.0))
            recorder.step(loss=torch.tensor(100.0))
            recorder.step(loss=torch.tensor(1.0))
            recorder.load_state_dict(state)
    assert len(list(tmp_path.iterdir())) == expected


def test_windows_of_an_abandoned_attempt_judge_nobody(tmp_path):
    with flightrec.Recorder({"triggers": [{"kind": "loss_jump"}]}, directory=tmp_path / "out") as recorder:
        recorder.attach(make())
        state = recorder.state_dict()
        for _ in range(80):
            recorder.step(loss=torch.tensor(1.0))
        recorder.load_state_dict(state)
        for _ in range(80):
            recorder.step(loss=torch.tensor(5.0))
    assert not (tmp_path / "out").exists()


def test_an_attach_that_fails_half_way_leaves_no_hooks(tmp_path):
    class Refusing(torch.nn.Linear):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks here")

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Refusing(2, 2))
    net[1].register_forward_hook(lambda *_: None)  # so that ours has to stand behind it, on the module itself
    with flightrec.Recorder(directory=tmp_path) as recorder:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no hooks here"):
                recorder.attach(net)
    assert not any(watched.is_watched(module) or module._forward_pre_hooks for module in net.modules())
    assert [len(module._forward_hooks) for module in net] == [0, 1]
