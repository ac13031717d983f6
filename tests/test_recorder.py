"""The recorder as a whole: what an incident holds, who triggers it, what it survives."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import textwrap
import threading

import h5py
import numpy as np
import pytest
import torch
from models import RECORD_ALL, WIDTH, batches, loss_of, make, train
from torch import nn

import flightrec
from flightrec.errors import AttachError, ConfigError, RingMemoryError
from flightrec.records import Severity, Stage


def config(iterations: int = 3, after: int = 1, **more):
    made = {
        **RECORD_ALL,
        "select": [{"tensors": "*"}],
        "ring": {"iterations": iterations},
        "incident": {"after": after, "cooldown": 0},
    }
    for key, value in more.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) and key in made else value
    return made


def incidents(directory):
    folders = sorted(directory.iterdir()) if directory.exists() else []
    return [flightrec.open(folder) for folder in folders]


def only(directory):
    (incident,) = incidents(directory)
    return incident


def poison(net, layer: str = "blocks.1.fc2") -> None:
    with torch.no_grad():
        net.get_submodule(layer).weight[0, 0] = math.nan


# -- what an incident holds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations, after", [(1, 0), (1, 1), (3, 1), (4, 3), (6, 2)])
def test_an_incident_holds_n_complete_iterations_and_after_more(iterations, after, tmp_path):
    net, fault = make("torchao"), 7
    with flightrec.Recorder(config(iterations, after), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(14, 2), recorder, before_step=lambda i: recorder.trigger("now") if i == fault else None)
    incident = only(tmp_path)
    expected = list(range(fault - iterations + 1, fault + after + 1))
    assert [entry.iteration for entry in incident.iterations] == expected
    assert incident.trigger.iteration == fault
    assert not incident.blind

    per_iteration = {i: {record.key for record in incident.records(iteration=i)} for i in expected}
    assert len({frozenset(keys) for keys in per_iteration.values()} - {frozenset(per_iteration[expected[0]])}) <= 1
    common = set.intersection(*per_iteration.values())
    for tensor in ("activation", "weight", "gradient", "output", "wgrad", "dgrad", "input", "parameter"):
        assert any(key.tensor == tensor for key in common), tensor
    for layer in ("blocks.0.fc1", "blocks.1.fc2"):
        for tensor in ("activation", "weight", "gradient"):
            for record in incident.records(layer=layer, tensor=tensor):
                assert record.high_precision.shape == record.shape
                assert record.quantized.components["data"].shape == record.shape
                assert record.quantized.components["scale"].size == 1
                assert record.quantized.metadata["scale_direction"] == "multiply_to_encode"


def test_the_tensors_are_those_of_the_run(tmp_path):
    net, seen = make("fp32"), {}
    with flightrec.Recorder(config(2, 0), directory=tmp_path) as recorder:
        recorder.attach(net)
        net.blocks[1].fc1.register_forward_hook(
            lambda m, a, o: (
                (
                    seen.setdefault("output", []).append(o.detach().clone()),
                    seen.setdefault("weight", []).append(m.weight.detach().clone()),
                )[:0]
                or None
            )
        )
        train(
            net,
            batches(4),
            recorder,
            before_step=lambda i: (
                seen.setdefault("wgrad", []).append(net.blocks[1].fc1.weight.grad.clone()),
                recorder.trigger("now") if i == 2 else None,
            ),
        )
    for record in only(tmp_path).records(layer="blocks.1.fc1", part=""):
        if record.key.tensor in seen:
            assert np.array_equal(record.high_precision, seen[record.key.tensor][record.iteration].numpy())


def test_ten_lines_of_plain_h5py_decode_an_incident(tmp_path):
    codes, scales, values = [], [], []
    with flightrec.Recorder(config(2, 0), directory=tmp_path) as recorder:
        for iteration in range(3):
            x = (torch.arange(48).reshape(6, 8) - 20.0 + iteration).to(torch.bfloat16)
            scale = 448 / x.abs().max().float()
            q = (x.float() * scale).to(torch.float8_e4m3fn)
            values.append(x), codes.append(q), scales.append(scale)
            recorder.record("fc", "weight", high_precision=x, quantized=flightrec.Quantized(q, "float8_e4m3fn", scale))
            if iteration == 2:
                recorder.trigger("now")
            recorder.step()
    (folder,) = tmp_path.iterdir()

    import ml_dtypes

    with h5py.File(next(folder.glob("*.facts.h5"))) as facts, h5py.File(next(folder.glob("*.tensors.h5"))) as tensors:
        names = facts["names"].asstr()[()]
        for row in facts["records"][()]:
            group = tensors[names[row["path"]]]
            high_precision = (group["high_precision"][()].astype("u4") << 16).view("f4")
            data = group["data"][()].view(ml_dtypes.float8_e4m3fn).astype("f4")
            decoded = data / group["scale"][()]
            iteration = row["iteration"]
            assert np.array_equal(high_precision, values[iteration].float().numpy())
            assert np.array_equal(group["data"][()], codes[iteration].view(torch.uint8).numpy())
            assert np.array_equal(decoded, (codes[iteration].float() / scales[iteration]).numpy())
        assert set(facts["records"]["iteration"]) == {1, 2}


def test_all_codes_survive_to_disk_and_back(tmp_path):
    fp8 = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    with flightrec.Recorder(config(1, 0), directory=tmp_path) as recorder:
        recorder.record("bf16", "weight", high_precision=bf16.view(torch.bfloat16))
        recorder.record("fp8", "weight", quantized=flightrec.Quantized(fp8.view(torch.float8_e4m3fn), "float8_e4m3fn"))
        recorder.trigger("now")
        recorder.step()
    incident = only(tmp_path)
    (record,) = incident.records(layer="bf16")
    assert np.array_equal(record.raw("high_precision"), np.arange(65536, dtype=np.uint16))
    (record,) = incident.records(layer="fp8")
    assert np.array_equal(record.raw("data"), np.arange(256, dtype=np.uint8))
    decoded = record.quantized.dequantize()
    reference = fp8.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(decoded, reference, equal_nan=True)


def test_copies_are_deep_and_in_logical_order(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    with flightrec.Recorder(config(1, 0), directory=tmp_path) as recorder:
        recorder.record("transposed", "output", high_precision=base.t())
        recorder.record("strided", "output", high_precision=base[::2, 1::3])
        recorder.record("expanded", "output", high_precision=torch.ones(1).expand(1000))
        recorder.record("scalar", "output", high_precision=torch.tensor(7.0))
        recorder.record("empty", "output", high_precision=torch.zeros(0, 5))
        base.zero_()
        recorder.trigger("now")
        recorder.step()
    got = {record.key.layer: record for record in only(tmp_path).records(tensor="output")}
    original = np.arange(24.0, dtype="f4").reshape(4, 6)
    assert np.array_equal(got["transposed"].high_precision, original.T)
    assert np.array_equal(got["strided"].high_precision, original[::2, 1::3])
    assert np.array_equal(got["expanded"].high_precision, np.ones(1000))
    assert got["scalar"].high_precision.shape == () and got["scalar"].high_precision == 7
    assert got["empty"].high_precision.shape == (0, 5) and got["empty"].statistics["amax"] is None


# -- who triggers -----------------------------------------------------------------------------------------------------


def test_a_fault_in_the_very_first_iteration_is_recorded(tmp_path):
    net = make()
    poison(net)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(3), recorder)
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 0)
    first = incident.blame()[0]
    assert (first.key.layer, first.key.tensor, first.key.stage) == ("blocks.1.fc2", "parameter", Stage.START)
    (weight,) = incident.records(layer="blocks.1.fc2", tensor="weight", iteration=0)
    assert np.isnan(weight.high_precision[0, 0]) and np.isfinite(weight.high_precision[1:]).all()


def test_a_model_of_one_layer(tmp_path):
    layer = nn.Linear(4, 4)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(layer)
        for iteration in range(3):
            loss = layer(torch.full((2, 4), math.inf if iteration == 1 else 1.0)).sum()
            loss.backward()
            recorder.step(loss=loss)
    first = only(tmp_path).blame()[0]
    assert (first.iteration, first.key.layer, first.key.tensor) == (1, "", "activation")


def test_an_exception_writes_what_the_ring_holds_and_goes_on(tmp_path):
    net = make()
    with (
        pytest.raises(ZeroDivisionError, match="boom"),
        flightrec.Recorder(config(2, 1), directory=tmp_path) as recorder,
    ):
        recorder.attach(net)
        train(net, batches(4), recorder)
        loss_of(net, batches(1)[0][0]).backward()
        raise ZeroDivisionError("boom")
    incident = only(tmp_path)
    assert incident.trigger.kind == "exception" and "ZeroDivisionError: boom" in incident.trigger.message
    assert "ZeroDivisionError: boom" in incident.environment["stack"]
    assert [(entry.iteration, bool(entry.partial)) for entry in incident.iterations] == [
        (2, False),
        (3, False),
        (4, True),
    ]
    (wgrad,) = incident.records(layer="blocks.0.fc1", tensor="wgrad", part="", iteration=4)
    assert wgrad.high_precision.shape == (64, 32)
    assert not incident.records(tensor="parameter", iteration=4)


def test_a_loop_that_raises_on_the_nan_itself_gets_the_nan_blamed(tmp_path):
    net = make()
    with pytest.raises(RuntimeError), flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(2), recorder)
        poison(net)
        loss = loss_of(net, batches(1)[0][0])
        recorder.loss(loss)
        if not torch.isfinite(loss):
            raise RuntimeError("loss is nan")
    incident = only(tmp_path)
    assert incident.trigger.kind == "nonfinite"
    assert {firing.kind for firing in incident.firings} == {"nonfinite", "exception"}
    assert incident.blame()[0].key.layer == "blocks.1.fc2"


def test_an_exception_in_the_first_iteration_is_recorded(tmp_path):
    net = make()
    with pytest.raises(ValueError, match="first"), flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        loss_of(net, batches(1)[0][0])
        raise ValueError("the first")
    assert only(tmp_path).records(layer="blocks.0.fc1", tensor="activation")


SCRIPT = """
    import sys, torch
    sys.path.insert(0, {tests!r})
    import flightrec
    from models import *
    net = make()
    recorder = flightrec.Recorder(directory={directory!r})
    recorder.attach(net)
    train(net, batches(3), recorder)
    {end}
"""


def run_script(tmp_path, end):
    text = textwrap.dedent(SCRIPT).format(tests=sys.path[0] + "/tests", directory=str(tmp_path / "out"), end=end)
    text = text.replace(sys.path[0] + "/tests", __file__.rsplit("/", 1)[0])
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=200, check=False)


def test_an_uncaught_exception_without_a_context_manager_is_recorded(tmp_path):
    ended = run_script(tmp_path, "raise ValueError('not caught')")
    assert ended.returncode == 1 and "not caught" in ended.stderr
    assert "not caught" in only(tmp_path / "out").trigger.message


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyboardInterrupt", "pass"])
def test_a_normal_end_writes_nothing(end, tmp_path):
    ended = run_script(tmp_path, end)
    assert ended.returncode != 0 or end == "pass"
    assert not (tmp_path / "out").exists()


def test_an_uncaught_exception_of_a_thread_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    net = make()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)

        def work() -> None:
            train(net, batches(2), recorder)
            raise LookupError("in a thread")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "in a thread" in only(tmp_path).trigger.message


def test_limit_and_cooldown_count_and_a_fault_is_never_kept_out_by_warnings(tmp_path):
    rules = [
        {"kind": "amax_spike", "min_samples": 1, "window": 1, "min_numel": 1, "confirm": 1, "rearm": 1},
        {"kind": "nonfinite"},
    ]
    made = config(1, 0, triggers=rules, incident={"after": 0, "limit": 4, "cooldown": 0})
    made["select"] = [{"layers": "x", "tensors": ["activation"]}]
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(40):
            value = 1000.0 if iteration % 4 == 3 else 1.0
            recorder.record("x", "activation", high_precision=torch.full((8,), value))
            recorder.step()
        recorder.record("x", "activation", high_precision=torch.full((8,), math.nan))
        recorder.step()
    found = incidents(tmp_path)
    kinds = [incident.trigger.kind for incident in found]
    assert kinds.count("amax_spike") == 3  # a quarter of the limit, at least one, is kept for faults
    assert kinds.count("nonfinite") == 1


def test_a_second_fault_during_after_joins_and_a_later_one_is_an_incident_of_its_own(tmp_path):
    made = config(2, 2, triggers=[{"kind": "nonfinite"}])
    made["select"] = [{"layers": "*", "tensors": ["activation"]}]
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(20):
            for layer, bad in (("a", (5,)), ("b", (6,)), ("c", (12,))):
                value = math.nan if iteration in bad else 1.0
                recorder.record(layer, "activation", high_precision=torch.tensor([value]))
            recorder.step()
    first, second = sorted(incidents(tmp_path), key=lambda incident: incident.trigger.iteration)
    assert [(f.key.layer, f.iteration) for f in first.firings] == [("a", 5), ("b", 6)]
    assert [entry.iteration for entry in first.iterations] == [4, 5, 6, 7]
    assert [entry.iteration for entry in second.iterations] == [11, 12, 13, 14]


def test_watch_is_noted_in_the_next_incident_and_writes_none(tmp_path):
    made = config(
        1,
        0,
        triggers=[{"kind": "amax_spike", "severity": "watch", "min_samples": 1, "min_numel": 1, "confirm": 1}],
    )
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(4):
            value = 100.0 if iteration == 2 else 1.0
            recorder.record("x", "activation", high_precision=torch.tensor([value]))
            recorder.step()
        assert not incidents(tmp_path)
        recorder.trigger("now")
        recorder.step()
    firings = only(tmp_path).firings
    assert [(firing.kind, firing.severity) for firing in firings] == [
        ("amax_spike", Severity.WATCH),
        ("manual", Severity.FAULT),
    ]


def test_loss_jump_in_a_real_run_names_the_numbers(tmp_path):
    made = config(2, 1, triggers=[{"kind": "loss_jump", "min_samples": 4, "window": 8}])
    net, data = make(), batches(1)[0]
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        for iteration in range(12):
            loss = loss_of(net, data[0] * (30 if iteration == 9 else 1))
            loss.backward()
            net.zero_grad()
            recorder.step(loss=loss, metrics={"grad_norm": 1.5, "tokens": torch.tensor(7)})
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("loss_jump", 9)
    iterations, losses = incident.history["loss"]
    assert iterations.tolist() == list(range(10)) and losses[9] > 100 * losses[8]
    assert incident.history["metric.grad_norm"][1].tolist() == [1.5] * 10
    assert incident.records(tensor="metric", part="tokens")[0].high_precision == 7


# -- position ---------------------------------------------------------------------------------------------------------


def test_iterations_resume_and_a_rewind_is_a_new_attempt(tmp_path):
    def run(recorder, steps):
        for _ in range(steps):
            recorder.record("x", "output", high_precision=torch.tensor([1.0]))
            recorder.step()

    with flightrec.Recorder(config(3, 0), directory=tmp_path, run_id="r", iteration=5000) as recorder:
        run(recorder, 3)
        assert recorder.iteration == 5003 and recorder.attempt == 0
        recorder.iteration = 5001
        assert recorder.attempt == 1
        run(recorder, 1)
        recorder.trigger("now")
        run(recorder, 1)
    entries = only(tmp_path).iterations
    assert [(entry.attempt, entry.iteration) for entry in entries] == [(0, 5002), (1, 5001), (1, 5002)]


def test_windows_survive_a_restart_through_state_dict(tmp_path):
    made = config(1, 0, triggers=[{"kind": "amax_spike", "min_samples": 8, "min_numel": 1, "confirm": 1}])

    def run(recorder, values):
        for value in values:
            recorder.record("x", "activation", high_precision=torch.tensor([value]))
            recorder.step(loss=value)

    with flightrec.Recorder(made, directory=tmp_path / "a") as recorder:
        run(recorder, [1.0] * 10)
        state = recorder.state_dict()
    with flightrec.Recorder(made, directory=tmp_path / "b") as recorder:
        recorder.load_state_dict(state)
        run(recorder, [1.0, 50.0])
    incident = only(tmp_path / "b")
    assert incident.trigger.iteration == 11 and incident.attempt == 1
    assert incident.history["loss"][0].tolist() == list(range(12))
    with flightrec.Recorder(made, directory=tmp_path / "c") as recorder:
        run(recorder, [1.0, 50.0])
    assert not incidents(tmp_path / "c")


def test_implicit_microbatches_are_counted_and_explicit_ones_named(tmp_path):
    net = make()
    with flightrec.Recorder(config(1, 0), directory=tmp_path) as recorder:
        recorder.attach(net)
        for x in batches(1, 3)[0]:
            loss_of(net, x).backward()
        recorder.step()
        recorder.trigger("explicit")
        for index, x in enumerate(batches(1, 2)[0]):
            with recorder.microbatch(index, data={"ids": [index, 7]}):
                loss_of(net, x).backward()
        recorder.step()
    incident = only(tmp_path)
    assert {r.key.microbatch for r in incident.records(layer="blocks.0.fc1", tensor="gradient")} == {0, 1}
    assert [r.high_precision.tolist() for r in incident.records(part="data.ids")] == [[0, 7], [1, 7]]
    assert incident.iterations[0].num_microbatches == 2


# -- what is refused, what is survived --------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="windw"):
        flightrec.Recorder({"triggers": [{"kind": "loss_jump", "windw": 3}]}, directory=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(AttachError, match="not a directory"):
        flightrec.Recorder(directory=tmp_path / "file" / "x")
    with flightrec.Recorder({"select": [{"layers": "decoder.*"}]}, directory=tmp_path) as recorder:
        with pytest.raises(AttachError, match=r"blocks\.0"):
            recorder.attach(make())
        with pytest.raises(AttachError, match="expected a torch"):
            recorder.attach("net")
    with flightrec.Recorder(directory=tmp_path) as recorder:
        with pytest.raises(AttachError, match="real device"):
            recorder.attach(nn.Linear(2, 2, device="meta"))
        recorder.attach(make())
        with pytest.raises(AttachError, match="already"):
            recorder.attach(make())


def test_a_ring_that_must_hold_everything_and_cannot_is_refused_in_the_first_step(tmp_path):
    made = config(4, 1, ring={"memory": "64 KiB", "on_out_of_memory": "error"})
    net = make()
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        with pytest.raises(RingMemoryError, match=r"blocks\.\d\.fc"):
            train(net, batches(2), recorder)


@pytest.mark.parametrize("policy", ["statistics_only", "fewer_iterations"])
def test_a_small_ring_degrades_as_told_and_says_so(policy, tmp_path):
    made = config(4, 1, ring={"memory": "3 MiB", "on_out_of_memory": policy})
    net = make()
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(9, 2), recorder, before_step=lambda i: recorder.trigger("now") if i == 6 else None)
        assert "ring.memory does not hold" in recorder.summary() or "statistics only" in recorder.summary()
    incident = only(tmp_path)
    without = [r for r in incident.records() if r.high_precision is None and r.quantized is None]
    if policy == "statistics_only":
        assert [entry.iteration for entry in incident.iterations] == [3, 4, 5, 6, 7]
        assert without and all(record.why_absent for record in without)
    else:
        assert 1 < len(incident.iterations) < 5
        assert not without


def test_a_failing_part_is_disarmed_once_and_training_goes_on(tmp_path, caplog):
    plain = train(make(), batches(5))
    net = make()
    with flightrec.Recorder(config(2, 0), directory=tmp_path) as recorder, caplog.at_level(logging.ERROR):
        recorder.attach(net)
        ring = recorder._capture.engine.ring
        original = ring.record

        def broken(key, **arguments):
            if key.layer == "blocks.0.fc1" and key.tensor == "activation":
                raise RuntimeError("planted")
            return original(key, **arguments)

        ring.record = broken
        recorded = train(net, batches(5), recorder, before_step=lambda i: recorder.trigger("n") if i == 4 else None)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert len([r for r in caplog.records if "planted" in r.getMessage()]) == 1
    incident = only(tmp_path)
    assert not incident.records(layer="blocks.0.fc1", tensor="activation")
    assert incident.records(layer="blocks.0.fc1", tensor="output")
    assert any("planted" in entry.reason for entry in incident.blind)


def test_a_step_that_fails_ends_recording_and_not_training(tmp_path, caplog):
    plain = train(make(), batches(4))
    net = make()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net)
        recorder._capture.engine.evaluator.evaluate = None
        recorded = train(net, batches(4), recorder)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert sum("is disarmed" in r.getMessage() for r in caplog.records) == 1
    assert not any(module._forward_hooks for module in net.modules())


def test_unknown_things_handed_to_record_are_blind_and_do_not_raise(tmp_path, caplog):
    with flightrec.Recorder(config(1, 0), directory=tmp_path) as recorder:
        recorder.record("a", "output", high_precision=torch.ones(2))
        recorder.record("a", "no_such_tensor", high_precision=torch.ones(2))
        recorder.record("b", "output", quantized=object())
        recorder.record("c", "output", high_precision="text")
        recorder.record("d", "output")
        recorder.record("e", "output", high_precision=torch.ones(3).to_sparse())
        recorder.record("f", "output", quantized=flightrec.Quantized(torch.ones(2), "float7"))
        recorder.trigger("now")
        recorder.step()
    incident = only(tmp_path)
    assert [record.key.layer for record in incident.records(tensor="output")] == ["a", "e"]
    assert {entry.layer for entry in incident.blind} >= {"a", "b", "c", "d", "f"}


def test_padding_rows_do_not_count(tmp_path):
    x = torch.ones(6, WIDTH)
    x[4:] = math.nan
    made = config(1, 0, triggers=[{"kind": "nonfinite"}])
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for _ in range(2):
            recorder.valid_rows("op", 4)
            recorder.record("op", "output", high_precision=x)
            recorder.record("other", "output", high_precision=x, valid_rows=torch.tensor(4))
            recorder.step()
        assert not incidents(tmp_path)
        recorder.record("op", "output", high_precision=x)  # nobody says that rows are padding here
        recorder.step()
    assert only(tmp_path).trigger.iteration == 2


def test_tensors_of_ever_new_shapes_take_a_bounded_number_of_layouts(tmp_path):
    from flightrec.ring.registry import MAX_LAYOUTS

    with flightrec.Recorder(config(2, 0), directory=tmp_path) as recorder:
        for length in range(1, MAX_LAYOUTS + 200):
            recorder.record("x", "output", high_precision=torch.full((length,), 2.0))
            recorder.record(
                "y", "output", quantized=flightrec.Quantized(torch.ones(length).to(torch.float8_e5m2), "float8_e5m2")
            )
            recorder.step()
        assert len(recorder._capture.engine.ring.layouts) == 2 * MAX_LAYOUTS + 2
        recorder.trigger("now")
        recorder.record("x", "output", high_precision=torch.full((5000,), 3.0))
        recorder.step()
    (last,) = only(tmp_path).records(layer="x", iteration=MAX_LAYOUTS + 199)
    assert last.statistics["numel"] == 5000 and last.statistics["amax"] == 3
    assert last.high_precision is None and "shapes" in last.why_absent


def test_a_layer_called_without_end_in_one_iteration_is_recorded_up_to_a_bound(tmp_path):
    from flightrec.ring.registry import MAX_CALLS

    with flightrec.Recorder(config(1, 0), directory=tmp_path) as recorder:
        for _ in range(MAX_CALLS + 50):
            recorder.record("x", "output", high_precision=torch.ones(1))
        recorder.trigger("now")
        recorder.step()
    incident = only(tmp_path)
    assert len(incident.records(layer="x")) == MAX_CALLS
    assert any(str(MAX_CALLS) in entry.reason for entry in incident.blind)
