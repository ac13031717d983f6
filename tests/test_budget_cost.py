from __future__ import annotations

import pytest
import torch

from flightrec.budget.cost import (
    FALLBACK,
    MAX_FACTOR,
    MAX_PENDING,
    NUM_EARLY_ITERATIONS,
    CostModel,
    Costs,
    calibrate,
    source_bytes,
)
from flightrec.records import Component, Key, RecordLayout, Representation
from flightrec.ring.ring import Ring

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


def layout(shape=(4, 8), dtype="bfloat16", quantizer=-1, components=(), number=0) -> RecordLayout:
    what = Representation.STATISTICS
    return RecordLayout(number, Key("fc", "output"), what, shape, dtype, quantizer, tuple(components), -1, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_calibration_measures_and_leaves_no_trace(device):
    device = torch.device(device)
    calibrate(device)  # whatever is loaded or kept for the process is there now
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = calibrate(device)
    assert model not in FALLBACK.values(), "it was not measured"
    assert 1e-7 < model.record_s < 0.1
    assert 0 <= model.byte_s < 1e-6
    after = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    if device.type == "cuda":
        assert torch.cuda.memory_allocated() == held


def test_calibration_works_in_the_modes_of_a_run():
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert calibrate(torch.device("cpu")) not in FALLBACK.values()


def test_a_device_that_cannot_be_measured_gets_typical_figures():
    assert calibrate(torch.device("cuda:99")) == FALLBACK["cuda"]


def test_bytes_that_are_read():
    kept = Component("high_precision", (4, 8), "bfloat16", 0, 64)
    codes = Component("data", (4, 8), "float8_e4m3fn", 64, 32)
    assert source_bytes(layout()) == 64
    assert source_bytes(layout(components=[kept])) == 64
    assert source_bytes(layout(quantizer=0, components=[kept, codes])) == 96
    assert source_bytes(layout(quantizer=0)) == 96
    assert source_bytes(layout(dtype="", quantizer=0)) == 32
    assert source_bytes(layout(dtype="no_dtype_at_all")) == 128
    assert source_bytes(layout(shape=())) == 2
    assert source_bytes(layout(shape=(0, 8))) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_prediction_is_corrected_by_what_was_observed(device):
    device = torch.device(device)
    ring, x = Ring(device, iterations=1, memory_bytes=64 << 20), torch.ones(1 << 16, device=device)
    wrong = CostModel(100.0, 0.0)
    costs = Costs(device, wrong)
    for tick in range(8):
        ring.begin(tick)
        for number in range(4):
            begun = costs.begin()
            costs.end(begun, ring.record(Key(f"{number}", "output"), high_precision=x))
        if device.type == "cuda":
            torch.cuda.synchronize()
        own_s = costs.end_iteration()
        assert own_s > 0
    assert costs.factor == 1 / MAX_FACTOR
    costs = Costs(device, CostModel(1e-12, 0.0))
    for tick in range(8, 12):
        ring.begin(tick)
        costs.end(costs.begin(), ring.record(Key("0", "output"), high_precision=x))
        if device.type == "cuda":
            torch.cuda.synchronize()
        costs.end_iteration()
    assert costs.factor == MAX_FACTOR
    assert costs.seconds(10, 0) == pytest.approx(MAX_FACTOR * 1e-11)


def test_nothing_recorded_costs_nothing():
    costs = Costs(torch.device("cpu"), FALLBACK["cpu"])
    costs.end(costs.begin(), None)
    assert costs.end_iteration() == 0.0
    assert costs.factor == 1.0


@pytest.mark.gpu
def test_first_iterations_are_probed_all_over_and_later_ones_once():
    costs, num_records = Costs(torch.device("cuda"), FALLBACK["cuda"]), 3 * MAX_PENDING
    probes = []
    for _ in range(NUM_EARLY_ITERATIONS + 4):
        places = []
        for number in range(num_records):
            begun = costs.begin()
            places += [number] * (begun is not None)
            costs.end(begun, layout(number=number))
        torch.cuda.synchronize()
        probes.append(places)
        costs.end_iteration()
    assert probes[0] == []
    assert all(len(places) == MAX_PENDING for places in probes[1:NUM_EARLY_ITERATIONS])
    assert all(len(places) == 1 for places in probes[NUM_EARLY_ITERATIONS + 1 :])
    assert len({places[0] for places in probes[NUM_EARLY_ITERATIONS + 1 :]}) == 3
    assert max(map(max, probes[1:NUM_EARLY_ITERATIONS])) > 2 * num_records // 3
