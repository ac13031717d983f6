"""Tensors that are not plain on a CUDA device: nothing waits, nothing of their logical size is allocated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import flightrec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
]

CONFIG = {"select": [{"tensors": "*"}], "ring": {"iterations": 2}, "incident": {"after": 0}}


def only(directory):
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


def train(recorder=None, iterations=8):
    """An embedding with sparse gradients, and a record of every other kind, under the ban on synchronisation."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 16)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tokens = torch.randint(0, 50, (iterations, 32)).cuda()
    odd = {
        "complex": torch.randn(8, 8, dtype=torch.complex64, device="cuda"),
        "integers": torch.arange(64, device="cuda"),
        "csr": torch.eye(8, device="cuda").to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(8, 8, device="cuda"), 0.02, 1, torch.qint8),
        "expanded": torch.ones(1, device="cuda").expand(1 << 18, 1 << 17),
    }
    if recorder is not None:
        recorder.attach(net)
    trace = []
    for iteration in range(iterations):
        if iteration == 4:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        loss = net(tokens[iteration]).square().mean()
        loss.backward()
        if recorder is not None:
            for layer, value in odd.items():
                recorder.record(layer, "activation", high_precision=value)
            recorder.step(loss=loss)
        trace += [loss.detach().clone(), net[0].weight.grad._values().clone(), net[1].weight.grad.clone()]
        torch.cuda.set_sync_debug_mode("default")  # the optimizer coalesces, which waits
        optimizer.step()
        optimizer.zero_grad()
        if iteration >= 4:
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    return trace + [p.detach().clone() for p in net.parameters()], odd


def test_nothing_waits_and_the_run_is_the_same(tmp_path, caplog):
    plain, _ = train()
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        watched, odd = train(recorder)
        recorder.trigger("look")
        for layer, value in odd.items():
            recorder.record(layer, "activation", high_precision=value)
        recorder.step()
    assert "disarmed" not in caplog.text
    assert all(map(torch.equal, plain, watched))
    incident = only(tmp_path)
    assert {firing.kind for firing in incident.firings} == {"manual"}
    held = {r.key.layer: r for r in incident.records(tensor="activation", iteration=8)}
    np.testing.assert_array_equal(held["complex"].high_precision, odd["complex"].cpu().numpy())
    np.testing.assert_array_equal(held["csr"].high_precision, odd["csr"].values().cpu().numpy())
    assert held["quantized"].quantized.dequantize().tobytes() == odd["quantized"].cpu().dequantize().numpy().tobytes()
    assert held["expanded"].high_precision is None
    assert held["expanded"].statistics["numel"] == 1 << 35
    assert incident.records(layer="0", tensor="wgrad", iteration=7)[0].metadata["metadata"]["layout"] == "sparse_coo"


def test_an_expanded_tensor_takes_no_memory_of_its_size(tmp_path):
    with flightrec.Recorder({**CONFIG, "ring": {"iterations": 2, "memory": "64 MiB"}}, directory=tmp_path) as recorder:
        huge = torch.full((1,), math.nan, device="cuda").expand(1 << 18, 1 << 17)
        recorder.record("start", "activation", high_precision=torch.ones(2, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        recorder.record("huge", "activation", high_precision=huge)
        recorder.step()
        assert torch.cuda.max_memory_allocated() - before < 256 << 20
        recorder.step()
    incident = only(tmp_path)
    assert incident.trigger.key.layer == "huge"
    (record,) = incident.records(layer="huge", iteration=0)
    assert record.statistics["nan_count"] == 1 << 35
    assert "memory" in record.why_absent


def test_more_than_two_to_the_31_elements(tmp_path):
    """The faulty one is the last: any index that overflowed would miss it."""
    codes = torch.zeros((1 << 31) + 8, dtype=torch.uint8, device="cuda")
    codes[-1] = 0x7F
    halves = torch.zeros((1 << 31) + 8, dtype=torch.float16, device="cuda")
    halves[-1] = 60000
    config = {**CONFIG, "select": [{"tensors": "*", "keep": ["statistics"]}]}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        recorder.record("codes", "activation", quantized=flightrec.Quantized(codes, "float8_e4m3fn"))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        recorder.record("halves", "activation", high_precision=halves)
        assert torch.cuda.max_memory_allocated() - before < 2 << 30  # pieces, not the whole
        recorder.step()
        recorder.step()
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.key.layer) == ("nonfinite", "codes")
    (record,) = incident.records(layer="codes", iteration=0)
    assert record.statistics["quantized_nan_count"] == 1
    (record,) = incident.records(layer="halves", iteration=0)
    assert record.statistics["amax"] == 60000
