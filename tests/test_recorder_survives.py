"""Hostile surroundings: whatever happens, training goes on and the evidence of a fault is written."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from models import RECORD_ALL, batches, loss_of, make, train
from torch import nn

import flightrec
from flightrec.flush.history import MAX_SAMPLES, ScalarHistory
from flightrec.records import Stage


def config(iterations: int = 3, after: int = 1, **more):
    made = {
        **RECORD_ALL,
        "select": [{"tensors": "*"}],
        "ring": {"iterations": iterations},
        "incident": {"after": after, "cooldown": 0},
    }
    return {**made, **more}


def incidents(directory):
    found = [flightrec.open(folder) for folder in directory.iterdir()] if directory.exists() else []
    return sorted(found, key=lambda incident: incident.trigger.iteration)


def only(directory):
    (incident,) = incidents(directory)
    return incident


def steps(recorder, count, fault=None):
    """Iterations of one small record; ``fault`` is the iteration whose value is NaN."""
    for _ in range(count):
        value = math.nan if recorder.iteration == fault else 1.0
        recorder.record("x", "output", high_precision=torch.tensor([value, 2.0]))
        recorder.step()


# -- how loops end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["break", "exit", "interrupt", "trigger"])
def test_the_iteration_in_which_a_loop_stops_is_judged(end, tmp_path):
    net = make()
    try:
        with flightrec.Recorder(config(), directory=tmp_path) as recorder:
            recorder.attach(net)
            train(net, batches(3), recorder)
            x = batches(1)[0][0].clone()
            if end != "trigger":
                x[0, 0] = math.nan
            loss = loss_of(net, x)
            recorder.loss(loss)
            if end == "trigger":
                recorder.trigger("stopped by hand")
            if end == "exit":
                sys.exit(1)
            if end == "interrupt":
                raise KeyboardInterrupt
    except (SystemExit, KeyboardInterrupt):
        pass
    incident = only(tmp_path)
    assert incident.trigger.kind == ("manual" if end == "trigger" else "nonfinite")
    assert [(entry.iteration, bool(entry.partial)) for entry in incident.iterations][-1] == (3, True)


def test_a_loop_that_stops_in_a_healthy_iteration_writes_nothing(tmp_path):
    net = make()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(3), recorder)
        loss_of(net, batches(1)[0][0])
    assert not incidents(tmp_path)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


@pytest.mark.parametrize("error", [Unprintable(), ValueError("x" * 40_000_000), ValueError("\ud800"), ValueError()])
def test_whatever_the_exception_says_its_incident_is_written(error, tmp_path):
    with pytest.raises(type(error)), flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 4)
        recorder.record("x", "output", high_precision=torch.ones(2))
        raise error
    incident = only(tmp_path)
    assert type(error).__name__ in incident.trigger.message.encode().decode()
    assert type(error).__name__ in incident.environment["stack"]


def test_a_thread_that_ends_with_an_exception_does_not_end_recording(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 5)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        steps(recorder, 20, fault=15)
    first, second = incidents(tmp_path)
    assert first.trigger.kind == "exception" and "ZeroDivisionError" in first.trigger.message
    assert (second.trigger.kind, second.trigger.iteration) == ("nonfinite", 15)


def test_the_hooks_of_python_come_back_in_whatever_order_recorders_close(tmp_path):
    before = sys.excepthook, threading.excepthook
    first = flightrec.Recorder(directory=tmp_path)
    second = flightrec.Recorder(directory=tmp_path)
    assert sys.excepthook != before[0]
    first.close()
    second.close()
    assert (sys.excepthook, threading.excepthook) == before


def test_close_frees_the_ring_though_the_loss_and_the_recorder_live_on(tmp_path):
    net = make()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        for x in batches(2):
            loss = loss_of(net, x[0])
            loss.backward(retain_graph=True)
            recorder.step()
        ring = weakref.ref(recorder._capture.engine.ring)
        flusher = weakref.ref(recorder._capture.engine.flusher)
    gc.collect()
    assert loss.grad_fn is not None and recorder.iteration == 2
    assert ring() is None and flusher() is None


# -- the writer dies --------------------------------------------------------------------------------------------------


def test_a_killed_writer_is_replaced_and_later_faults_are_written(tmp_path, caplog):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 4)
        client = recorder._capture.engine.flusher._outbox.client
        assert client.wait_ready(60)
        os.kill(client.pid, signal.SIGKILL)
        while client.alive:
            time.sleep(0.01)
        steps(recorder, 20, fault=12)
    assert only(tmp_path).trigger.iteration == 12
    assert [e.iteration for e in only(tmp_path).iterations] == [10, 11, 12, 13]
    assert "started anew" in caplog.text


def test_a_writer_killed_right_after_the_fault_loses_nothing_that_the_ring_holds(tmp_path):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 8)
        flusher = recorder._capture.engine.flusher
        client = flusher._outbox.client
        assert client.wait_ready(60)
        os.kill(client.pid, signal.SIGSTOP)
        steps(recorder, 1, fault=8)
        os.kill(client.pid, signal.SIGKILL)
        while client.alive:
            time.sleep(0.01)
        steps(recorder, 6)
    incident = only(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [6, 7, 8, 9]
    (record,) = incident.records(tensor="output", iteration=8)
    assert math.isnan(record.high_precision[0])


def test_a_writer_killed_with_all_of_an_incident_in_its_inbox_loses_nothing(tmp_path):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 8)
        flusher = recorder._capture.engine.flusher
        client = flusher._outbox.client
        assert client.wait_ready(60)
        os.kill(client.pid, signal.SIGSTOP)
        steps(recorder, 2, fault=8)
        assert not flusher.busy
        os.kill(client.pid, signal.SIGKILL)
        while client.alive:
            time.sleep(0.01)
        steps(recorder, 1)
    incident = only(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [6, 7, 8, 9]
    (record,) = incident.records(tensor="output", iteration=8)
    assert math.isnan(record.high_precision[0])


def test_a_writer_that_dies_again_and_again_is_given_up_and_said_so(tmp_path, caplog):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 2)
        for _ in range(5):
            client = recorder._capture.engine.flusher._outbox.client
            if client.alive:
                os.kill(client.pid, signal.SIGKILL)
            while client.alive:
                time.sleep(0.01)
            steps(recorder, 1)
        steps(recorder, 5, fault=9)
    assert recorder.iteration == 12
    assert "no further incident will be written" in caplog.text
    assert "no incident: the writer died" in caplog.text
    assert not incidents(tmp_path)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_history_of_any_length_fits_into_an_incident(tmp_path):
    history = ScalarHistory(1000)
    history.load_state_dict({f"metric.{i}": [(k, 0.5) for k in range(1000)] for i in range(2200)})
    columns = history.columns()
    assert sum(len(values) for _, values, _ in columns.values()) <= MAX_SAMPLES
    assert columns["metric.7"][0][-1] == 999

    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 2)
        recorder._capture.engine.history.load_state_dict(history.state_dict())
        steps(recorder, 3, fault=3)
    assert len(only(tmp_path).history["metric.7"][0]) > 100


def test_a_message_that_never_fits_is_dropped_and_does_not_block_the_next_incident(tmp_path, caplog):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        steps(recorder, 2)
        recorder._capture.engine.flusher.send_config("x" * 40_000_000, {})
        steps(recorder, 5, fault=4)
    assert only(tmp_path).trigger.iteration == 4
    assert "it is dropped" in caplog.text


# -- arguments --------------------------------------------------------------------------------------------------------


def test_bad_arguments_do_not_raise_and_disarm_only_themselves(tmp_path, caplog):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        for index, data in (("a", None), (None, None), (0, [1]), (0, {"ids": object()}), (0, torch.ones(3))):
            with recorder.microbatch(index, data=data):
                pass
        recorder.valid_rows([1], 3)
        recorder.iteration = "3"
        recorder.loss("low")
        recorder.record(7, None, high_precision=torch.ones(1))
        recorder.step(metrics=[1, 2], loss="x")
        steps(recorder, 5, fault=4)
    assert only(tmp_path).trigger.iteration == 4


def test_nested_microbatches_come_back(tmp_path):
    with flightrec.Recorder(config(1, 0), directory=tmp_path) as recorder:
        with recorder.microbatch(0):
            with recorder.microbatch(1):
                recorder.record("inner", "output", high_precision=torch.ones(1))
            recorder.record("outer", "output", high_precision=torch.ones(1))
        recorder.trigger("now")
        recorder.step()
    assert {r.key.layer: r.key.microbatch for r in only(tmp_path).records()} == {"inner": 1, "outer": 0}


def test_who_triggers_by_hand_gets_an_incident_whatever_the_cooldown(tmp_path):
    made = {"select": [{"tensors": "*"}], "ring": {"iterations": 2}}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(24):
            if iteration in (4, 12, 20):
                recorder.trigger("look")
            steps(recorder, 1)
    assert [incident.trigger.iteration for incident in incidents(tmp_path)] == [4, 12, 20]


# -- blame ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["torchao", "fp32"])
def test_a_layers_gradient_is_blamed_before_the_bias_gradient_made_from_it(precision, tmp_path):
    net = make(precision)

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.nan

    net.blocks[1].act.register_forward_pre_hook(lambda module, args: (Spoil.apply(args[0]),))
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(1), recorder)
    first = only(tmp_path).blame()[0]
    assert (first.key.layer, first.key.tensor) in {("blocks.1.act", "dgrad"), ("blocks.1.fc1", "gradient")}
    named = [(f.key.layer, f.key.tensor) for f in only(tmp_path).blame() if f.key]
    assert named.index(("blocks.1.fc1", "gradient")) < named.index(("blocks.1.fc1", "wgrad"))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_loss_told_by_step_alone_is_blamed_before_what_it_spoils(num_microbatches, tmp_path):
    net = nn.Linear(4, 4)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        for index in range(num_microbatches):
            out = net(torch.ones(2, 4)).square().mean()
            loss = out * (math.inf if index == num_microbatches - 1 else 1)
            loss.backward()
        recorder.step(loss=loss)
    first = only(tmp_path).blame()[0]
    assert (first.key.tensor, first.key.stage) == ("loss", Stage.LOSS)


def test_errors_are_logged_once(tmp_path, caplog):
    with caplog.at_level(logging.ERROR), flightrec.Recorder(config(), directory=tmp_path) as recorder:
        for _ in range(5):
            recorder.valid_rows([1], 3)
            recorder.step()
    assert len(caplog.records) == 1


def test_a_trigger_in_a_run_that_recorded_nothing_is_told(tmp_path, caplog):
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.trigger("nothing to see")
        recorder.step()
        recorder.trigger("still nothing")
    assert "nothing was recorded" in caplog.text
    assert not incidents(tmp_path)


def test_windows_of_another_length_come_back_whatever_the_default_device(tmp_path, caplog):
    def made(window):
        spike = {"kind": "amax_spike", "window": window, "min_samples": 4, "min_numel": 1, "confirm": 1}
        return config(1, 0, triggers=[spike])

    def run(recorder, values):
        for value in values:
            recorder.record("x", "activation", high_precision=torch.tensor([value], device="cpu"))
            recorder.step()

    with flightrec.Recorder(made(16), directory=tmp_path / "a") as recorder:
        run(recorder, [1.0] * 8)
        state = recorder.state_dict()
    with flightrec.Recorder(made(8), directory=tmp_path / "b") as recorder:
        run(recorder, [1.0])
        with torch.device("meta"):
            recorder.load_state_dict(state)
        run(recorder, [1.0, 50.0])
    assert "disarmed" not in caplog.text
    assert only(tmp_path / "b").trigger.kind == "amax_spike"
