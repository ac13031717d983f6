"""The whole recorder on a CUDA device: the run unchanged, nothing waits, and the evidence is there."""

from __future__ import annotations

import gc
import itertools
import math

import numpy as np
import pytest
import torch
from models import RECORD_ALL, WIDTH, batches, loss_of, make
from torch import nn

import flightrec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

EVERYTHING = {**RECORD_ALL, "select": [{"tensors": "*", "phases": ["train", "recompute"]}]}


def fp8_net(**options) -> nn.Module:
    """Real FP8 products: torchao on the device's tensor cores."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    net = make("bf16_weights", **options).bfloat16()
    config = Float8LinearConfig(emulate=False)
    convert_to_float8_training(net.blocks, config=config, module_filter_fn=lambda m, _: isinstance(m, nn.Linear))
    return net


def net_of(precision: str, **options) -> nn.Module:
    return (fp8_net(**options) if precision == "fp8" else make(precision, **options)).cuda()


def train(net, data, recorder=None, *, precision="fp32", before_step=None, keep=True):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    dtype = next(net.parameters()).dtype
    seen = []
    for iteration, microbatches in enumerate(data):
        for x in microbatches:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_of(net, x.to(dtype))
            if recorder is not None:
                recorder.loss(loss)
            loss.backward()
            if keep:
                seen.append(loss.detach().clone())
        if before_step is not None:
            before_step(iteration)
        optimizer.step()
        if keep:
            seen += [parameter.grad.clone() for parameter in net.parameters()]
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
    return seen + [parameter.detach().clone() for parameter in net.parameters()]


def only(directory):
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_losses_gradients_and_parameters_are_bit_identical(precision, checkpointing, tmp_path):
    data = batches(6, 2, device="cuda", rows=64)
    for x in itertools.chain.from_iterable(data):
        x.requires_grad_(checkpointing == "reentrant")
    plain = train(net_of(precision, checkpointing=checkpointing), data, precision=precision)
    net = net_of(precision, checkpointing=checkpointing)
    with flightrec.Recorder(EVERYTHING, directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        recorded = train(net, data, recorder, precision=precision)
        assert recorder._capture.engine.ring.layouts
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("deterministic", "iterations", "config"), [(False, 1000, RECORD_ALL), (False, 1000, {}), (True, 200, RECORD_ALL)]
)
def test_healthy_iterations_wait_for_nothing_and_allocate_nothing_new(deterministic, iterations, config, tmp_path):
    net, data = net_of("fp8"), batches(1, 2, device="cuda", rows=64)
    sizes = []

    def measure(iteration: int) -> None:
        if iteration % 50 == 25:
            sizes.append(torch.cuda.memory_allocated())

    torch.use_deterministic_algorithms(deterministic, warn_only=False)
    try:
        with flightrec.Recorder(config, directory=tmp_path / "out") as recorder:
            recorder.attach(net)
            train(net, data * 10, recorder, keep=False)
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                train(net, data * iterations, recorder, before_step=measure, keep=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not recorder._capture.off
            assert recorder._capture.engine._judge.is_replayed
    finally:
        torch.use_deterministic_algorithms(False)
    # One verdict more or less may be on its way to the host, as the device happens to lag.
    assert max(sizes) - min(sizes) < 256 << 10, sizes
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]), sizes
    assert not (tmp_path / "out").exists()


def test_turns_under_a_budget_wait_for_nothing(tmp_path):
    """Calibration may wait, at attach; turns, their events and full coverage after a watch may not."""
    net, data = net_of("fp8", blocks=4), batches(1, 2, device="cuda", rows=64)
    rules = [
        {"kind": "nonfinite"}, {"kind": "missing_record", "consecutive": 2}, {"kind": "stale_scale"},
        {"kind": "metric_threshold", "above": 1.0, "severity": "watch"},
    ]  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    high, low = torch.tensor(2.0, device="cuda"), torch.tensor(0.5, device="cuda")

    def iterate(recorder: flightrec.Recorder, iterations: int) -> None:
        for iteration in range(iterations):
            for x in data[0]:
                loss_of(net, x.bfloat16()).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(metrics={"sign": high if iteration % 60 == 59 else low})

    with flightrec.Recorder({"budget": "1%", "triggers": rules}, directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        iterate(recorder, 80)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            iterate(recorder, 300)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not recorder._capture.off
        rotation = recorder._capture.rotation
        assert not recorder._capture._dead_parts
        assert rotation._clock.step_s > 0
        assert rotation._plan.measured and rotation._plan.num_turns > 1
        print(recorder.summary(), rotation.costs.model, rotation.costs.factor)
    assert not (tmp_path / "out").exists()


def test_nothing_waits_while_an_incident_is_staged_either(tmp_path):
    net, data = net_of("fp8"), batches(1, 2, device="cuda", rows=64)
    made = {**EVERYTHING, "ring": {"iterations": 3}}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, data * 10, recorder, keep=False)
        recorder.trigger("warm")  # the first incident pins its buffers
        train(net, data * 20, recorder, keep=False)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(
                net, data * 60, recorder, keep=False,
                before_step=lambda i: recorder.trigger("now") if i == 30 else None,
            )  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(list(tmp_path.iterdir())) >= 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_an_incident_holds_the_tensors_of_the_run(precision, tmp_path):
    net, seen = net_of(precision), {}
    made = {**EVERYTHING, "ring": {"iterations": 3}, "incident": {"after": 2}}
    layer = "blocks.1.fc1"
    net.get_submodule(layer).register_forward_hook(
        lambda m, a, o: seen.setdefault("output", []).append(o.detach().clone())
    )
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        train(
            net, batches(12, 1, device="cuda", rows=64), recorder, precision=precision, keep=False,
            before_step=lambda i: recorder.trigger("now") if i == 6 else None,
        )  # fmt: skip
    incident = only(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [4, 5, 6, 7, 8]
    outputs = incident.records(layer=layer, tensor="output")
    assert len(outputs) == 5
    for record in outputs:
        assert np.array_equal(record.high_precision, seen["output"][record.iteration].float().cpu().numpy())
    for record in incident.records():
        assert record.high_precision is not None or record.quantized is not None, (record, record.why_absent)
        values = record.high_precision
        if values is not None and values.size and record.dtype not in ("int64",):
            assert record.statistics["amax"] == np.abs(values).max()
            assert record.statistics["zero_count"] == (values == 0).sum()
            np.testing.assert_allclose(record.statistics["sum_of_squares"], np.square(values, dtype="f8").sum(), 1e-6)
    if precision == "fp8":
        for record in incident.records(layer=layer, tensor="activation"):
            decoded = record.quantized.dequantize()
            assert decoded.shape == record.shape
            error = np.linalg.norm(decoded - record.high_precision) / np.linalg.norm(record.high_precision)
            assert error < 0.05
            assert record.quantized.metadata["format"] == "float8_e4m3fn"
        assert incident.records(layer=layer, tensor="gradient")[0].quantized.metadata["format"] == "float8_e5m2"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_planted_nan_is_caught_and_blamed(precision, tmp_path):
    net = net_of(precision)
    made = {
        **RECORD_ALL,
        "select": [{"tensors": ["activation", "weight", "gradient", "output"]}],
        "ring": {"iterations": 2},
    }
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)

        def poison(iteration: int) -> None:
            if iteration == 4:
                with torch.no_grad():
                    net.blocks[1].fc2.weight[3, 5] = math.nan

        train(net, batches(8, 2, device="cuda", rows=64), recorder, precision=precision, before_step=poison, keep=False)
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 5)
    first = incident.blame()[0]
    assert (first.key.layer, first.key.tensor) == ("blocks.1.fc2", "weight")
    (weight,) = incident.records(layer="blocks.1.fc2", tensor="weight", iteration=5)
    assert np.argwhere(np.isnan(weight.high_precision)).tolist() == [[3, 5]]


def test_an_exception_is_flushed_from_the_device(tmp_path):
    net = net_of("bf16")
    with pytest.raises(RuntimeError), flightrec.Recorder(EVERYTHING, directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(5, device="cuda"), recorder, precision="bf16", keep=False)
        loss_of(net, torch.ones(4, WIDTH, device="cuda"))
        raise RuntimeError("on the device")
    incident = only(tmp_path)
    assert incident.trigger.kind == "exception"
    assert [(entry.iteration, bool(entry.partial)) for entry in incident.iterations][-1] == (5, True)
    assert incident.environment["gpu"]["name"]


def test_a_dead_context_is_told_and_trainings_own_error_stays(tmp_path):
    """A device-side assert destroys the context: no byte of device memory can be read, and training's error stays."""
    import subprocess
    import sys
    from pathlib import Path

    body = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, flightrec
from models import *
net = make().cuda()
with flightrec.Recorder(directory={str(tmp_path / "out")!r}) as recorder:
    recorder.attach(net)
    for x in sum(batches(4, device="cuda"), []):
        loss_of(net, x).backward()
        recorder.step()
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1, ended.stderr[-4000:]
    assert "device-side assert" in ended.stderr
    assert "cannot be read any more" in ended.stderr


def test_side_streams_are_ordered(tmp_path):
    stream = torch.cuda.Stream()
    made = {**RECORD_ALL, "select": [{"tensors": "*"}], "ring": {"iterations": 2}, "incident": {"after": 0}}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(6):
            x = torch.full((1 << 20,), float(iteration), device="cuda")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(20):
                    x = x * 1.0
                recorder.record("side", "output", high_precision=x)
                x.add_(100)  # after the record, on its stream
            del x
            recorder.record("main", "output", high_precision=torch.full((4,), float(iteration), device="cuda"))
            if iteration == 5:
                recorder.trigger("now")
            recorder.step()
    for record in only(tmp_path).records(tensor="output"):
        assert np.all(record.high_precision == record.iteration)
