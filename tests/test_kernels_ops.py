from __future__ import annotations

import pytest
import torch
from kernels_support import GPU

from flightrec.kernels import host, ops, reference


def test_the_cpu_has_its_own_implementation():
    assert ops.choose(torch.device("cpu")) is host.capture


@pytest.mark.gpu
@GPU
def test_cuda_takes_tritons_kernels():
    from flightrec.kernels import device

    assert ops.choose(torch.device("cuda")) is device.capture


def test_another_device_takes_the_reference():
    assert ops.choose(torch.device("meta")) is reference.capture
