"""Transformer Engine's real quantizers on a GPU: what is recorded decodes to the GPU's own ``dequantize``."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

import flightrec
from flightrec.sources.extract import extract


def is_there() -> bool:
    """Whether the package can be used: its compiled extension is found by the package only."""
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not is_there(), reason="needs Transformer Engine with its compiled extension"),
]

SHAPES = [(128, 256), (144, 176), (2, 32, 272)]
RECIPES = ["delayed", "current", "block1", "block2"]


def quantizer_of(recipe: str, element: str, **sides: bool):
    import transformer_engine.pytorch  # noqa: F401  loads the extension
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    dtype = getattr(tex.DType, element)
    if recipe == "delayed":
        scale, amax = torch.tensor([3.5], device="cuda"), torch.zeros(1, device="cuda")
        return Float8Quantizer(scale, amax, dtype, **sides)
    if recipe == "current":
        return Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **sides)
    return Float8BlockQuantizer(dtype, **sides, block_scaling_dim=int(recipe[-1]), force_pow_2_scales=False)


def values_of(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape, device="cuda") * torch.logspace(-6, 3, shape[-1], device="cuda")
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("element", ["kFloat8E4M3", "kFloat8E5M2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_incident_holds_what_the_gpu_decodes(recipe, shape, element, tmp_path) -> None:
    kept = {}
    for internal in (False, True):
        for name, sides in {"both": (True, True), "row": (True, False), "column": (False, True)}.items():
            if name == "column" and recipe in ("delayed", "current"):
                continue  # this chip holds per-tensor codes once, row-wise
            quantizer = quantizer_of(recipe, element, rowwise=sides[0], columnwise=sides[1])
            quantizer.internal = internal
            kept[f"{name}.{'storage' if internal else 'tensor'}"] = quantizer(values_of(shape))
    config = {"budget": "none", "select": [{"tensors": "*"}], "incident": {"after": 0}}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        for name, tensor in kept.items():
            recorder.record(name, "activation", quantized=tensor)
        recorder.trigger("look")
        recorder.step()
    with flightrec.open(next(tmp_path.iterdir())) as incident:
        assert not incident.blind
        for name, tensor in kept.items():
            (record,) = incident.records(layer=name)
            found, expected = record.quantized.dequantize(), tensor.dequantize(dtype=torch.float32).cpu().numpy()
            assert found.shape == expected.shape == shape
            assert found.tobytes() == expected.tobytes(), name
            assert record.metadata["metadata"]["quantizer"]["class"] == type(tensor._quantizer).__name__
        if recipe.startswith("block"):
            assert_the_columnwise_side(incident, kept)


def assert_the_columnwise_side(incident: flightrec.Incident, kept: dict[str, object]) -> None:
    """What the GPU gives once the row-wise side is dropped."""
    tensor = kept["both.storage"]
    (record,) = incident.records(layer="both.storage")
    tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
    expected = tensor.dequantize(dtype=torch.float32).cpu().numpy()
    found = record.quantized.dequantize(side="columnwise")
    assert np.array_equal(found.view("u4"), expected.reshape(found.shape).view("u4"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_taking_apart_does_not_wait_for_the_device(recipe) -> None:
    quantizer = quantizer_of(recipe, "kFloat8E4M3", rowwise=True, columnwise=True)
    quantizer.internal = True
    tensor = quantizer(values_of((128, 256)))
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    parts, reason = extract(tensor)
    torch.cuda.set_sync_debug_mode("default")
    assert parts is not None, reason
    assert torch.cuda.memory_allocated() == before, "views only"
