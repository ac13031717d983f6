from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from sources_support import bits
from torch import nn

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract import FORMATS, extract, is_quantized
from flightrec.sources.quantized import Quantized


@dataclasses.dataclass
class Context:
    block: int
    dtype: torch.dtype


class Blocks(torch.Tensor):
    """A stranger's wrapper subclass: int8 codes and a scale for each row, nothing that flightrec knows."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes, scale):
        self._qdata, self._scale = codes, scale

    def __tensor_flatten__(self):
        return ["_qdata", "_scale"], {"layout": Context(16, torch.int8), "probe": self._scale}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError("no operation of this tensor may be needed")


def fp8(shape, dtype=torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_multiply_to_encode_with_one_scale():
    data, scale = fp8((4, 6)), torch.tensor(2.0, requires_grad=True)
    parts, reason = extract(Quantized(data, "float8_e4m3fn", scale=scale, amax_history=torch.zeros(16)))
    assert reason == ""
    assert parts.info == QuantizerInfo("flightrec.Quantized", "float8_e4m3fn", "multiply_to_encode", (), {})
    assert set(parts.components) == {"data", "scale", "amax_history"}
    assert torch.equal(bits(parts.components["data"]), bits(data))
    assert not parts.components["scale"].requires_grad
    assert parts.pair_codes == "data"
    assert parts.formats["data"] == "float8_e4m3fn"


def test_scale_inv_decodes_when_both_scales_are_given():
    parts, _ = extract(Quantized(fp8((2, 2)), "float8_e4m3fn", scale=torch.ones(1), scale_inv=torch.ones(1)))
    assert parts.info.scale_direction == "multiply_to_decode"
    assert {"scale", "scale_inv"} <= set(parts.components)
    parts, _ = extract(Quantized(fp8((2, 2)), "float8_e4m3fn"))
    assert parts.info.scale_direction == "none"


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((4, 64), (4, 2), (1, 32)),
        ((256, 128), (2, 1), (128, 128)),
        ((4, 64), (4, 1), (1, 64)),
        ((4, 64), (), ()),
        ((4, 64), (1, 1), ()),
        ((5, 64), (2, 2), ()),
        ((0, 64), (0, 2), ()),
        ((4, 64), (64,), ()),
    ],
)
def test_block_shape_is_the_ratio_of_the_shapes(shape, scale, block):
    parts, _ = extract(Quantized(fp8(shape), "float8_e4m3fn", scale_inv=torch.ones(scale)))
    assert parts.info.block_shape == block


def test_packed_fp4_counts_two_elements_a_byte():
    codes = torch.arange(4 * 8, dtype=torch.uint8).reshape(4, 8)
    scale = torch.ones(4, 1).to(torch.float8_e4m3fn)
    parts, _ = extract(Quantized(codes, "float4_e2m1fn_x2", scale_inv=scale))
    assert parts.info.block_shape == (1, 16)
    assert parts.formats["data"] == "float4_e2m1fn_x2"
    assert torch.equal(parts.components["data"], codes)


def test_codes_may_come_as_bytes():
    parts, _ = extract(Quantized(fp8((3,), torch.float8_e5m2).view(torch.uint8), "float8_e5m2"))
    assert parts.formats["data"] == "float8_e5m2"
    assert parts.components["data"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: Quantized(fp8((2,)), "e4m3"), "expected one of float8_e4m3fn"),
        (lambda: Quantized(fp8((2,)), "float8_e5m2"), "expected float8_e5m2 or uint8"),
        (lambda: Quantized(torch.zeros(2), "float8_e4m3fn"), "has dtype float32"),
        (lambda: Quantized([1, 2], "float8_e4m3fn"), "expected a tensor"),
        (lambda: Quantized(fp8((2,)), "float8_e4m3fn", scale=2.0), "Quantized.scale is not a plain dense tensor"),
        (lambda: torch.zeros(2), "plain tensor"),
        (lambda: nn.Parameter(torch.zeros(2)), "plain tensor"),
        (lambda: "text", "builtins.str"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_is_not_understood_gives_a_reason(made, why):
    parts, reason = extract(made())
    assert parts is None
    assert why in reason


def test_finished_parts_pass_through():
    parts = extract(Quantized(fp8((2,)), "float8_e4m3fn")).parts
    assert extract(parts).parts is parts


def test_columnwise_joins_under_its_own_names():
    row = Quantized(fp8((4, 6)), "float8_e4m3fn", scale_inv=torch.ones(4, 1))
    column = Quantized(fp8((6, 4), torch.float8_e5m2), "float8_e5m2", scale_inv=torch.ones(6, 1))
    for parts in (
        extract(row, column).parts,
        extract(dataclasses.replace(row, columnwise=column)).parts,
    ):
        assert set(parts.components) == {"data", "scale_inv", "columnwise_data", "columnwise_scale_inv"}
        assert parts.formats["columnwise_data"] == "float8_e5m2"
        assert parts.info.format == "float8_e4m3fn"
        assert parts.info.metadata["columnwise"]["format"] == "float8_e5m2"
        assert parts.pair_codes == "data"
    only = extract(None, column).parts
    assert set(only.components) == {"columnwise_data", "columnwise_scale_inv"}
    assert only.pair_codes == "columnwise_data"
    parts, reason = extract(row, torch.zeros(2))
    assert parts is None
    assert reason.startswith("columnwise: ")


def test_any_wrapper_is_kept_raw_under_its_class_name():
    codes, scale = torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.ones(2, 1)
    wrapper = Blocks(codes, scale)
    assert is_quantized(wrapper)
    parts, _ = extract(wrapper)
    assert set(parts.components) == {"qdata", "scale"}
    assert torch.equal(parts.components["qdata"], codes)
    assert parts.info.class_name.endswith("Blocks")
    assert parts.info.scale_direction == "unknown"
    assert not parts.is_understood
    assert parts.info.metadata["attributes"] == {"qdata": "_qdata", "scale": "_scale"}
    assert parts.pair_codes is None
    assert parts.info.metadata["original_dtype"] == "bfloat16"
    assert parts.info.metadata["context"]["layout"] == {"block": 16, "dtype": "int8"}
    json.dumps(parts.info.to_json())


def test_a_wrapper_that_fails_gives_a_reason(monkeypatch):
    def broken(self):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Blocks, "__tensor_flatten__", broken)
    parts, reason = extract(Blocks(torch.zeros(1, dtype=torch.int8), torch.ones(1)))
    assert parts is None
    assert "on purpose" in reason


def test_plain_tensors_and_modules_outputs_are_not_quantized():
    assert not is_quantized(torch.zeros(1))
    assert not is_quantized(nn.Parameter(torch.zeros(1)))
    assert not is_quantized(3)
    assert is_quantized(Quantized(fp8((1,)), "float8_e4m3fn"))
    assert is_quantized(QuantizedParts(QuantizerInfo("x", "y", "none", (), {}), {}))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_accepted_as_bytes(name):
    assert extract(Quantized(torch.zeros(2, 2, dtype=torch.uint8), name)).parts is not None


def test_torchao_float8_tensorwise_and_axiswise():
    module = pytest.importorskip("torchao.float8.float8_training_tensor")
    x = torch.randn(4, 6)
    tensor = module.hp_tensor_and_scale_to_float8(x, torch.tensor(3.0), torch.float8_e4m3fn)
    assert is_quantized(tensor)
    parts, _ = extract(tensor)
    assert torch.equal(bits(parts.components["data"]), bits((x * 3.0).to(torch.float8_e4m3fn)))
    assert parts.components["scale"].item() == 3.0
    assert parts.info.scale_direction == "multiply_to_encode"
    assert parts.info.metadata["original_dtype"] == "float32"
    scale = torch.rand(4, 1) + 1
    tensor = module.hp_tensor_and_scale_to_float8(x, scale, torch.float8_e5m2, axiswise_dim=-1)
    parts, _ = extract(tensor)
    assert parts.info.block_shape == (1, 6)
    assert parts.info.format == "float8_e5m2"
    assert parts.info.metadata["axiswise_dim"] == -1
    json.dumps(parts.info.to_json())


def test_attributes_that_differ_in_case_or_underscores_are_told_apart(monkeypatch):
    def flatten(self):
        return ["_scale", "scale", "high_precision"], None

    monkeypatch.setattr(Blocks, "__tensor_flatten__", flatten)
    wrapper = Blocks(torch.zeros(1, dtype=torch.int8), torch.ones(1))
    wrapper.scale, wrapper.high_precision = torch.full((1,), 2.0), torch.full((1,), 3.0)
    parts, _ = extract(wrapper)
    assert {name: tensor.item() for name, tensor in parts.components.items()} == {
        "scale": 1.0,
        "scale_": 2.0,
        "inner_high_precision": 3.0,
    }


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.filterwarnings("ignore")
def test_torchs_quantized_dtypes_dequantize_to_the_same_bits(dtype, axis):
    from flightrec.codecs import scaled

    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    step = 1e-7 if dtype is torch.qint32 else 0.03
    if axis is None:
        tensor = torch.quantize_per_tensor(x, step, 3, dtype)
    else:
        count = x.shape[axis]
        scales = torch.linspace(step, 2 * step, count, dtype=torch.float64)
        tensor = torch.quantize_per_channel(x, scales, torch.arange(count), axis % 2, dtype)
    parts, reason = extract(tensor)
    assert reason == ""
    components = {name: part.numpy() for name, part in parts.components.items()}
    numbers = scaled.dequantize(components, parts.info.to_json(), formats=parts.formats, shape=(5, 7))
    assert numbers.tobytes() == tensor.dequantize().numpy().tobytes()


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_dtype_without_plain_codes_gives_a_reason():
    x = torch.quantize_per_channel(torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)
    assert "quint4x2" in extract(x).reason


def test_parts_whose_memory_is_gone_give_a_reason():
    data = fp8((4, 4))
    data.untyped_storage().resize_(0)
    assert "freed" in extract(Quantized(data, "float8_e4m3fn")).reason
    huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 20, 1 << 20)
    assert "expanded" in extract(Quantized(huge, "float8_e4m3fn")).reason
