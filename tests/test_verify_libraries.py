"""The encoders against the libraries' own quantizers on a CPU: torchao, and Transformer Engine's reference of NVFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import te_cpu
import torch
from storage_samples import Sample, statistics
from verify_samples import values_of, write

import flightrec
from flightrec.analysis.verify import verify
from flightrec.records import Key
from flightrec.sources.extract import extract
from flightrec.storage import read


def tensor_of(seed: int, shape: tuple[int, int] = (32, 64)) -> torch.Tensor:
    return torch.from_numpy(values_of(np.random.default_rng(seed), shape, False)).to(torch.bfloat16)


def agrees(folder: Path, x: torch.Tensor, made: Any) -> None:
    """Write both as a record, and verify it; then again with a flipped bit."""
    parts = extract(made).parts
    assert parts is not None
    arrays = {"high_precision": (x.view(torch.int16).numpy().view("<u2"), "bfloat16")}
    for name, tensor in parts.components.items():
        plain = tensor.detach().contiguous()
        form = (parts.formats or {}).get(name) or str(plain.dtype).removeprefix("torch.")
        stored = plain.view(torch.uint8) if plain.element_size() == 1 else plain
        arrays[name] = (stored.numpy(), form)
    info = parts.info.to_json()
    for name, flips in (("clean", False), ("flipped", True)):
        if flips:
            codes, form = arrays["data" if "data" in arrays else "columnwise_data"]
            codes = codes.copy()
            codes[3, 2] ^= 0x40
            arrays["data" if "data" in arrays else "columnwise_data"] = (codes, form)
        sample = Sample(Key("l", "activation", microbatch=0), arrays, statistics(), 0, shape=tuple(x.shape))
        write(folder / name, {1: [sample]}, [info])
        with read.open_incident(folder / name) as incident:
            found = verify(incident)
        assert all(not outcome.why_not for outcome in found.outcomes), found.outcomes
        wrong = [(mismatch.kind, mismatch.num_wrong) for mismatch in found.mismatches]
        assert wrong == ([("codes", 1)] if flips else []), found.mismatches


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("axis", [None, -1, 0])
def test_torchao_float8(tmp_path: Path, dtype: torch.dtype, axis: int | None) -> None:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    granularity = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    x = tensor_of(1)
    made = hp_tensor_to_float8_dynamic(x, dtype, LinearMMConfig(), scaling_granularity=granularity, axiswise_dim=axis)
    agrees(tmp_path, x, made)


@pytest.mark.parametrize("mode", ["FLOOR", "RCEIL", "CEIL", "EVEN"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2])
def test_torchao_mx(tmp_path: Path, mode: str, dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    x = tensor_of(2)
    agrees(tmp_path, x, MXTensor.to_mx(x, dtype, 32, scaling_mode=ScaleCalculationMode[mode]))


@pytest.mark.parametrize("with_second", [False, True])
def test_torchao_nvfp4(tmp_path: Path, with_second: bool) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = tensor_of(3)
    second = per_tensor_amax_to_scale(x.abs().max()) if with_second else None
    agrees(tmp_path, x, NVFP4Tensor.to_nvfp4(x, per_tensor_scale=second))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"quant_tile_shape": (16, 16)},
    {"with_rht": True},
    {"row_scaled_nvfp4": True},
    {"nvfp4_use_4over6": True},
    {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_nvfp4_of_transformer_engines_reference(tmp_path: Path, options: dict[str, Any]) -> None:
    te_cpu.install()
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    quantizer = reference_nvfp4.NVFP4QuantizerRef(dtype=reference_utils.Fp4Formats.E2M1, **options)
    x = tensor_of(4)
    agrees(tmp_path, x, quantizer.quantize(x))


def test_a_healthy_torchao_training_of_several_microbatches_agrees(tmp_path: Path) -> None:
    """What is recorded as wgrad is the parameter's gradient: from the second microbatch on a sum, and no fault."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    tensors = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]
    select = [{"layers": "*", "tensors": tensors}]
    with flightrec.Recorder({"select": select, "budget": "none"}, directory=tmp_path) as recorder:
        recorder.attach(model)
        for seed in (1, 2):
            model(tensor_of(seed).reshape(-1, 32).float().requires_grad_()).square().mean().backward()
        recorder.trigger("to look at")
        recorder.step()
    (folder,) = tmp_path.iterdir()
    with read.open_incident(folder) as incident:
        found = verify(incident)
    assert not found.mismatches, found.mismatches
    agreeing = {(one.where.key.tensor, one.where.key.microbatch) for one in found.outcomes if not one.why_not}
    assert {(tensor, number) for tensor in tensors for number in (0, 1)} - agreeing == {("wgrad", 1), ("weight", 1)}
    assert any("parameter.grad" in outcome.why_not for outcome in found.outcomes)
