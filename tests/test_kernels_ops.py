from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from kernels_support import GPU

from flightrec import kernels
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


def test_a_triton_that_cannot_be_imported_is_told_and_done_without(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "flightrec.kernels.device", None)
    monkeypatch.delattr(kernels, "device", raising=False)
    assert ops.choose(torch.device("cuda")) is reference.capture
    assert "Triton cannot be imported" in caplog.text
