"""Quantizer rules on torchao's MX and NVFP4 data: healthy ones are silent, a second scale left behind is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

import flightrec

RULES = ["nonfinite", "saturation", "underflow", "quantization_error", "inconsistent_scale", "stale_scale"]
CONFIG = {
    "budget": "none",
    "select": [{"tensors": "*"}],
    "triggers": [{"kind": kind} for kind in RULES],
    "incident": {"after": 0, "cooldown": 0},
}


def nvfp4(x: torch.Tensor, second: torch.Tensor | None = None) -> NVFP4Tensor:
    scale = per_tensor_amax_to_scale(x.abs().amax()) if second is None else second
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)


HEALTHY = {
    "mxfp8": lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, 32),
    "mxfp8 rceil": lambda x: MXTensor.to_mx(x, torch.float8_e5m2, 32, ScaleCalculationMode.RCEIL),
    "mxfp6": lambda x: MXTensor.to_mx(x, "fp6_e2m3", 32),
    "mxfp4": lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, is_swizzled_scales=True),
    "nvfp4": nvfp4,
    "nvfp4 one level": NVFP4Tensor.to_nvfp4,
}


def run(directory: Path, quantize, num_iterations: int, growth: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(0)
    with flightrec.Recorder(CONFIG, directory=directory) as recorder:
        for iteration in range(num_iterations):
            x = torch.randn(16, 64, generator=generator) * torch.exp(torch.randn(16, 1, generator=generator))
            x = x * growth ** max(iteration - num_iterations + 8, 0)
            recorder.record("fc", "activation", high_precision=x, quantized=quantize(x))
            recorder.step()


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_data_are_silent(tmp_path, name):
    run(tmp_path / "x", HEALTHY[name], 100)
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_a_growing_tensor_whose_scales_follow_is_silent(tmp_path):
    run(tmp_path / "x", nvfp4, 80, growth=3.0)
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_a_second_scale_that_is_left_behind_is_found(tmp_path):
    frozen = per_tensor_amax_to_scale(torch.tensor(40.0))
    run(tmp_path, lambda x: nvfp4(x, frozen), 80, growth=3.0)
    kinds, messages = set(), []
    for folder in tmp_path.iterdir():
        with flightrec.open(folder) as incident:
            kinds |= {firing.kind for firing in incident.firings}
            messages += [firing.message for firing in incident.firings if firing.kind == "stale_scale"]
    assert {"saturation", "stale_scale"} <= kinds
    assert messages
