"""What is the host implementation's own; its results are compared beside the reference's in test_kernels_reference."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from kernels_support import destination_for, run_capture
from torch.utils._python_dispatch import TorchDispatchMode

from flightrec.kernels import host, reference
from flightrec.kernels.plan import CapturePlan
from flightrec.records import Statistic


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capture", [host.capture, reference.capture])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_no_operation_that_would_wait_for_a_device(capture, value):
    x = torch.full((64, 64), value)
    parts = [torch.zeros(64, 64, dtype=torch.uint8), torch.tensor(2.0)]
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    destination = destination_for(x, parts, "cpu")
    slot, tick = torch.tensor([1]), torch.tensor([4])
    with Counting() as counting, torch.no_grad():
        capture(plan, destination, x, parts, slot, tick)
    assert counting.names
    forbidden = {"_local_scalar_dense", "nonzero", "masked_select", "item", "index"}
    assert not forbidden & set(counting.names)


def test_finite_values_never_reach_the_reference(monkeypatch):
    """The quick path is really taken: otherwise the tests beside the reference would compare it with itself."""
    calls = []
    monkeypatch.setattr(reference, "statistics", lambda *args: calls.append(args))
    x = torch.randn(300, 300)
    codes = torch.full((300, 300), 0x38, dtype=torch.uint8)
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    for scale in (torch.tensor(2.0), torch.ones(300, 1), torch.ones(1, 300), torch.ones(3, 3)):
        run_capture((host.capture, "cpu"), x.bfloat16(), [codes, scale], plan)
    assert calls == []


def test_threads_do_not_share_scratch_memory():
    inputs = [torch.full((150_000,), float(number), dtype=torch.bfloat16) for number in range(1, 5)]
    sums: dict[int, set[float]] = {number: set() for number in range(1, 5)}

    def work(number: int) -> None:
        for _ in range(20):
            _, row = run_capture((host.capture, "cpu"), inputs[number - 1])
            sums[number].add(float(row[Statistic.SUM]))

    threads = [threading.Thread(target=work, args=(number,)) for number in sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {number: {150_000.0 * number} for number in sums}


def test_views_are_kept_by_slot():
    x = torch.randn(10)
    destination = destination_for(x, [], "cpu")
    for tick, slot in enumerate([0, 3, 0, 1]):
        host.capture(CapturePlan(), destination, x + tick, [], torch.tensor([slot]), torch.tensor([tick]))
    assert sorted(destination.cache) == [0, 1, 3]
    assert destination.stamp.tolist() == [2, 3, -1, 1]
    np.testing.assert_array_equal(destination.high_precision[0].numpy(), (x + 2).numpy())
    np.testing.assert_array_equal(destination.high_precision[3].numpy(), (x + 1).numpy())
