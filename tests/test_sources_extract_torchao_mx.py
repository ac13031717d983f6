"""torchao's tensors with scales in blocks, taken apart and decoded with numpy: exactly what torchao dequantizes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import PerRow, PerTensor
from torchao.quantization.granularity import PerBlock
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

import flightrec
from flightrec.codecs import quantized
from flightrec.kernels import host, reference
from flightrec.records import Statistic
from flightrec.ring.layout import QuantizedParts, build_plan
from flightrec.sources.extract import extract
from flightrec.sources.extract_torchao_mx import is_torchao_blocks

ELEMENTS = [torch.float8_e4m3fn, torch.float8_e5m2, "fp6_e2m3", "fp6_e3m2", torch.float4_e2m1fn_x2]
SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1e30, 448.0, -6.0, 0.3]


def parts_of(tensor: torch.Tensor) -> QuantizedParts:
    found = extract(tensor)
    assert found.parts is not None, found.reason
    assert found.parts.is_understood
    return found.parts


def stored(parts: QuantizedParts) -> dict[str, np.ndarray]:
    """The components as a file holds them: contiguous, in logical order, 8-bit floats as bytes."""
    arrays = {}
    for name, tensor in parts.components.items():
        tensor = tensor.contiguous()
        arrays[name] = (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).numpy()
    return arrays


def decoded(tensor: torch.Tensor) -> np.ndarray:
    parts = parts_of(tensor)
    formats = {name: parts.format(name) for name in parts.components}
    shape = tuple(tensor.shape)
    return quantized.dequantize(stored(parts), parts.info.to_json(), formats=formats, shape=shape)


def assert_same(tensor: torch.Tensor) -> None:
    """To float32 bit for bit (any NaN for a NaN), and to bfloat16 after rounding."""
    ours, theirs = decoded(tensor), tensor.dequantize(torch.float32).contiguous()
    assert ours.shape == tuple(theirs.shape)
    nan = np.isnan(ours)
    np.testing.assert_array_equal(nan, np.isnan(theirs.numpy()))
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.numpy().view(np.uint32)[~nan])
    rounded, also = torch.from_numpy(ours).bfloat16(), tensor.dequantize(torch.bfloat16).contiguous()
    assert torch.equal(
        rounded.view(torch.int16)[torch.from_numpy(~nan)], also.view(torch.int16)[torch.from_numpy(~nan)]
    )


def values(shape: tuple[int, ...], seed: int, spread: float = 3.0) -> torch.Tensor:
    """Normal values over many binades, with a zero block, a special block, and signs of zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    flat = x.view(-1)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL)
    if x.numel() >= 128:
        flat[64:128] = 0
        flat[70] = -0.0
    return x


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("mode", [ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL, ScaleCalculationMode.EVEN])
@pytest.mark.parametrize("swizzled", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    leading=st.sampled_from([(1,), (3,), (33,), (129,), (2, 5)]),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_mx(element, mode, swizzled, leading, blocks, seed, dtype):
    if swizzled and len(leading) == 2:
        leading = (2, 128)  # torchao pads the leading dimensions together, and needs whole tiles of rows
    x = values((*leading, 32 * blocks), seed).to(dtype)
    assert_same(MXTensor.to_mx(x, element, 32, mode, is_swizzled_scales=swizzled))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_mx_blocks_of_another_size(element):
    assert_same(MXTensor.to_mx(values((5, 48), 1), element, 16))


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_mx_with_nan_and_infinity(element):
    x = values((4, 64), 0)
    x[0, 3], x[2, 40] = math.nan, math.inf
    tensor = MXTensor.to_mx(x, element, 32)
    assert np.isnan(decoded(tensor)[0, :32]).all()
    assert_same(tensor)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_every_code_under_extreme_scales(element):
    packed = element is torch.float4_e2m1fn_x2
    codes = torch.arange(256, dtype=torch.uint8) & (0x3F if isinstance(element, str) else 0xFF)
    codes = codes.reshape(8, 32)
    data = codes.view(element) if element in (torch.float8_e4m3fn, torch.float8_e5m2) else codes
    words = torch.tensor([0, 1, 126, 127, 128, 200, 253, 255], dtype=torch.uint8).reshape(8, 1)
    words = words.expand(8, 2 if packed else 1).contiguous().view(torch.float8_e8m0fnu)
    tensor = MXTensor(data, words, element, 32, torch.float32, None, None, False)
    with np.errstate(all="ignore"):
        assert_same(tensor)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("swizzled", [False, True])
def test_mx_transposed(element, swizzled):
    tensor = MXTensor.to_mx(values((64, 96), 3), element, 32, is_swizzled_scales=swizzled)
    turned = MXTensor(
        tensor.qdata.t(), tensor.scale.t(), element, 32, torch.float32, tensor.kernel_preference, None, swizzled
    )
    assert turned.shape == (96, 64)
    assert_same(turned)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("second", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    leading=st.sampled_from([(1,), (3,), (33,), (129,), (2, 5)]),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_nvfp4(swizzled, second, leading, blocks, seed, dtype):
    if swizzled and len(leading) == 2:
        leading = (2, 128)
    x = values((*leading, 16 * blocks), seed, spread=1.0).to(dtype)
    outer = per_tensor_amax_to_scale(x.abs().amax()) if second else None
    if len(leading) == 2 and second:
        outer = per_tensor_amax_to_scale(x.abs().amax((1, 2), keepdim=True))
    assert_same(NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer, is_swizzled_scales=swizzled))


@pytest.mark.parametrize("swizzled", [False, True])
def test_nvfp4_transposed(swizzled):
    x = values((64, 96), 3)
    scale = per_tensor_amax_to_scale(x.abs().amax())
    assert_same(NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=swizzled).t())


def test_the_two_scales_are_rounded_together_first():
    """The other order gives other bits; this is what tells them apart."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    tensor = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    parts = parts_of(tensor)
    one, two = decoded(tensor), stored(parts)["tensor_scale_inv"]
    alone = NVFP4Tensor.to_nvfp4(x)
    alone.qdata, alone.scale = tensor.qdata, tensor.scale
    assert (decoded(alone) * two != one).any()


def test_components_and_metadata():
    arguments = QuantizeTensorToMXKwargs()
    tensor = MXTensor.to_mx(values((6, 64), 0).bfloat16(), torch.float8_e4m3fn, 32, act_quant_kwargs=arguments)
    parts = parts_of(tensor)
    assert {name: tuple(part.shape) for name, part in parts.components.items()} == {
        "data": (6, 64),
        "scale_inv": (6, 2),
    }
    assert parts.format("scale_inv") == "float8_e8m0fnu"
    info = parts.info
    assert (info.class_name, info.format) == (f"{MXTensor.__module__}.MXTensor", "float8_e4m3fn")
    assert (info.scale_direction, info.block_shape) == ("multiply_to_decode", (1, 32))
    assert info.metadata["original_dtype"] == "bfloat16"
    assert json.loads(json.dumps(info.metadata))["kernel_preference"] == "emulated"
    assert info.metadata["act_quant_kwargs"]["block_size"] == 32
    assert parts_of(tensor).info is info  # cached: the ring tells layouts apart by it
    assert parts.components["data"].data_ptr() == tensor.qdata.data_ptr()


def test_nvfp4_components():
    x = values((2, 6, 32), 0)
    scale = per_tensor_amax_to_scale(x.abs().amax((1, 2), keepdim=True))
    other = torch.tensor(0.5)
    parts = parts_of(NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, act_per_tensor_scale=other))
    assert tuple(parts.components["tensor_scale_inv"].shape) == (2, 6, 1)
    assert parts.components["activation_tensor_scale_inv"] == 0.5
    assert (parts.info.format, parts.info.block_shape) == ("float4_e2m1fn_x2", (1, 1, 16))
    assert parts.info.metadata["use_triton_kernel"] is False
    assert parts.format("scale_inv") == "float8_e4m3fn"


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerRow(0), PerBlock([4, 16])])
def test_float8(granularity):
    x = values((8, 32), 2)
    x[1, 1] = math.nan
    tensor = Float8Tensor.from_hp(x, granularity=granularity)
    assert_same(tensor)
    parts = parts_of(tensor)
    assert (parts.info.scale_direction, parts.info.format) == ("multiply_to_decode", "float8_e4m3fn")
    assert set(parts.components) == {"data", "scale_inv"}


@pytest.mark.parametrize("capture", [host, reference])
@pytest.mark.parametrize(
    ("make", "error", "clipped"),
    [
        (lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, 32), 0.03, 0.02),
        (lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL), 0.03, 0.0),
        (lambda x: MXTensor.to_mx(x, "fp6_e2m3", 32, ScaleCalculationMode.RCEIL), 0.05, 0.0),
        (lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, is_swizzled_scales=True), 0.15, 0.04),
        (lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax())), 0.11, 0.05),
        (lambda x: NVFP4Tensor.to_nvfp4(x, is_swizzled_scales=True), 0.11, 0.05),
    ],
)
def test_statistics_of_healthy_data(capture, make, error, clipped):
    """The error is that of torchao's own dequantize, and next to nothing is clipped."""
    x = torch.randn(3, 128, 160, generator=torch.Generator().manual_seed(0))
    tensor = make(x)
    parts = parts_of(tensor)
    plan = build_plan(x, parts)
    assert plan.pairs
    with torch.no_grad():
        row = np.asarray(capture.statistics(plan, x, list(parts.components.values())))
    theirs = (tensor.dequantize(torch.float32) - x).double().square().sum()
    np.testing.assert_allclose(row[Statistic.SQUARED_ERROR], theirs, rtol=1e-6)
    assert math.sqrt(theirs / x.double().square().sum()) < error
    assert row[Statistic.CLIPPED_COUNT] <= clipped * x.numel()
    assert row[Statistic.SCALE_NONFINITE_COUNT] == 0
    assert 0.4 < row[Statistic.RANGE_RATIO] < 2


def test_recorded_and_read_back(tmp_path):
    x = values((5, 64), 1)
    tensors = {
        "mx": MXTensor.to_mx(x, torch.float8_e5m2, 32, is_swizzled_scales=True),
        "fp6": MXTensor.to_mx(x, "fp6_e3m2", 32),
        "nvfp4": NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax())),
        "turned": NVFP4Tensor.to_nvfp4(values((64, 32), 2)).t(),
    }
    config = {"budget": "none", "select": [{"tensors": "*"}], "incident": {"after": 0}}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        for name, tensor in tensors.items():
            recorder.record(name, "weight", quantized=tensor)
        recorder.trigger("look")
        recorder.step()
    (folder,) = tmp_path.iterdir()
    with flightrec.open(folder) as incident:
        for name, tensor in tensors.items():
            (record,) = incident.records(layer=name)
            assert record.shape == tuple(tensor.shape)
            np.testing.assert_array_equal(record.quantized.dequantize(), tensor.dequantize(torch.float32).numpy())


def test_what_is_laid_out_in_another_way_is_kept_raw():
    tensor = MXTensor.to_mx(values((6, 64), 0), torch.float8_e4m3fn, 32)
    odd = MXTensor(tensor.qdata, tensor.scale[:3], torch.float8_e4m3fn, 32, torch.float32, None, None, False)
    parts = extract(odd).parts
    assert not parts.is_understood
    assert set(parts.components) == {"qdata", "scale"}
    old = NVFP4Tensor.to_nvfp4(values((6, 64), 0))
    del old.use_triton_kernel
    assert is_torchao_blocks(old)
    assert not extract(old).parts or not extract(old).parts.is_understood
    assert not is_torchao_blocks(torch.ones(2))
