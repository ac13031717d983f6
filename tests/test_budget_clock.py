from __future__ import annotations

import time

import pytest
import torch

from flightrec.budget.clock import LEAST_SHARE, MAX_PENDING, MIN_SAMPLES, NUM_WARM_UP, StepClock, StreamTimer

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_it_knows_a_step_after_a_few_and_takes_off_what_is_our_own(device):
    clock, seen = StepClock(torch.device(device)), []
    for _ in range(NUM_WARM_UP + MIN_SAMPLES + 3):
        time.sleep(0.02)
        clock.tick(0.0)
        if device == "cuda":
            torch.cuda.synchronize()
        seen.append(clock.step_s)
    assert seen[NUM_WARM_UP] is None
    assert seen[-1] is not None and seen[-1] > 0.015
    for _ in range(80):
        time.sleep(0.001)
        clock.tick(1.0)
        if device == "cuda":
            torch.cuda.synchronize()
    assert 0 < clock.step_s < 0.001 / LEAST_SHARE


@pytest.mark.gpu
def test_a_device_that_is_behind_is_not_waited_for():
    clock = StepClock(torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    began = time.perf_counter()
    for _ in range(3 * MAX_PENDING):
        clock.tick(0.0)
    assert clock.step_s is None
    assert len(clock._pending) == MAX_PENDING
    assert time.perf_counter() - began < 60
    torch.cuda.synchronize()
    for _ in range(3):
        clock.tick(0.0)
    assert clock.step_s is not None


@pytest.mark.gpu
def test_nothing_is_asked_while_a_graph_is_captured():
    clock = StepClock(torch.device("cuda"))
    x = torch.ones(8, device="cuda")
    clock.tick(0.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        clock.tick(0.0)
    graph.replay()
    clock.tick(0.0)
    torch.cuda.synchronize()
    assert x[0].item() == 2.0


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_is_timed_as_the_stream_takes_it(device):
    """On a device that waits for the host: the host's time."""
    timer = StreamTimer(torch.device(device))
    timer.end()  # never begun
    for number in range(NUM_WARM_UP + 4):
        assert (timer.median_s is None) == (number <= NUM_WARM_UP)
        timer.begin()
        time.sleep(0.3 if number < NUM_WARM_UP else 0.01)  # what compiles and allocates is no sample
        timer.end()
        if device == "cuda":
            torch.cuda.synchronize()
            timer._read()
    assert 0.009 < timer.median_s < 0.3


@pytest.mark.gpu
def test_a_part_is_timed_as_the_device_takes_it_where_the_host_runs_ahead():
    timer = StreamTimer(torch.device("cuda"))
    x = torch.ones(1 << 24, device="cuda")
    torch.cuda.synchronize()
    for _ in range(NUM_WARM_UP + 5):
        torch.cuda._sleep(50_000_000)
        timer.begin()
        x.mul_(1.0)  # some 30 us of the device
        time.sleep(0.005)
        timer.end()
    torch.cuda.synchronize()
    timer._read()
    assert 0 < timer.median_s < 0.004
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        timer.begin()
        x.mul_(1.0)
        timer.end()
    assert not timer._pending
