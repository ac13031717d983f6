"""Triton's kernel for FP4 codes, MXFP8, MXFP4 and NVFP4 beside the reference: interpreted where there is no GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernels_support import CUDA, destination_for
from test_kernels_device import DEVICE, _reference, _works, assert_same, by_reference, compare
from test_kernels_scales import E4M3, E8M0, FP4, make

from flightrec.kernels import arguments, device, launch
from flightrec.kernels.plan import CapturePlan
from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts, build_plan

__all__ = ["_works", "by_reference"]

pytestmark = [
    pytest.mark.gpu
    if DEVICE == "cuda"
    else pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
]


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 lanes, two programs joined at once: small tensors have many blocks, and interpreting is quick."""
    monkeypatch.setattr(arguments, "SIZES", dict.fromkeys(arguments.SIZES, (1, 1, 3)))
    monkeypatch.setattr(launch, "GROUP", 2)
    monkeypatch.setattr(launch, "_scratch", {})


def parts_of(case) -> tuple[list[torch.Tensor], CapturePlan]:
    return list(case.parts.components.values()), build_plan(case.x, case.parts)


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize(
    ("kind", "shape", "second", "dtype"),
    [
        ("nvfp4 1x16", (5, 80), "tensor", torch.bfloat16),
        ("nvfp4 1x16", (2, 3, 48), "row", torch.float32),
        ("nvfp4 16x16", (33, 16), "tensor", torch.float16),
        ("mxfp8", (3, 112), "tensor", torch.bfloat16),
        ("mxfp8 columnwise", (40, 16), "tensor", torch.bfloat16),
        ("mxfp4", (2, 2, 32), "tensor", torch.float32),
    ],
)
def test_values_beside_their_codes(kind, shape, second, dtype, by_reference):
    """Random codes: zeros, the largest and NaN among them, clipped values, a last block that is not full."""
    case = make(kind, shape, 3, second)
    compare(case.x.to(dtype), *parts_of(case))
    assert not by_reference


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("kind", ["nvfp4 1x16", "mxfp8"])
def test_codes_alone(kind, by_reference):
    """With and without a scale; the copy of NVFP4's second level is made on the side."""
    case = make(kind, (6, 96), 5)
    parts, plan = parts_of(case)
    compare(None, parts, plan)
    if plan.format == FP4:
        compare(None, parts[:1], CapturePlan(codes=0, format=FP4))
    assert not by_reference


@pytest.mark.usefixtures("few_at_once")
def test_every_code_and_every_word(by_reference):
    """256 pairs of FP4 codes, 256 words of E8M0 with its NaN, 256 of E4M3 with its signs."""
    codes = torch.arange(256, dtype=torch.uint8)
    for format_name, block in ((E8M0, 2), (E4M3, 2)):
        plan = CapturePlan(codes=0, format=FP4, scale=1, scales=((1, format_name),), block_shape=(1, block))
        compare(None, [codes.view(1, 256), codes.view(1, 256).clone()], plan)
    assert not by_reference


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("word", [0.0, math.nan])
def test_a_second_level_that_is_no_number(word, by_reference):
    case = make("nvfp4 1x16", (3, 32), 3)
    case.parts.components["tensor_scale_inv"].fill_(word)
    case.x.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    case.parts.components["scale_inv"][1] = 0  # a block that underflowed
    compare(case.x.bfloat16(), *parts_of(case))
    assert not by_reference


@pytest.mark.usefixtures("few_at_once")
def test_ratios_at_the_edge_of_clipping_are_told_by_division(by_reference):
    """Around 448 x 2^k, which no reciprocal decides; the others are clipped or not at the first look."""
    case = make("mxfp8", (2, 64), 1)
    case.parts.components["data"].fill_(0x7E)
    case.parts.components["scale_inv"].fill_(127)
    edge = 448 * (1 + torch.arange(64) * 2.0**-23)
    for x in (torch.stack([edge, -edge]), torch.full((2, 64), 500.0), torch.full((2, 64), 447.0)):
        compare(x, *parts_of(dataclasses.replace(case, x=x)))
    assert not by_reference


@pytest.mark.usefixtures("few_at_once")
def test_both_sides_of_a_tensor_as_transformer_engine_holds_them(by_reference):
    """Padded scales with strides, column-wise codes and scales beside them, the amax that the second level is from."""
    case = make("nvfp4 1x16", (6, 64), 7)
    own = case.parts.components
    padded = torch.full((8, 8), 0x7F, dtype=torch.uint8)  # NaN, which nobody may count
    padded[:6, :4] = own["scale_inv"]
    column = torch.full((64, 4), 0x38, dtype=torch.uint8)
    column[3, 0] = 0x7F
    components = {
        "data": own["data"], "scale_inv": padded[:6, :4], "amax": torch.tensor([2.5]),
        "tensor_scale_inv": own["tensor_scale_inv"], "columnwise_data": torch.ones(64, 4, dtype=torch.uint8),
        "columnwise_scale_inv": column[:, :1],
    }  # fmt: skip
    formats = {**case.parts.formats, "columnwise_data": FP4, "columnwise_scale_inv": E4M3}
    parts = QuantizedParts(case.parts.info, components, formats, pair_codes="data")
    plan = build_plan(case.x, parts)
    compare(case.x.bfloat16(), list(components.values()), plan)
    two = dataclasses.replace(plan, pairs=False)  # values that are not theirs: two launches, one row
    compare(values_of_their_own(), list(components.values()), two)
    assert not by_reference


def values_of_their_own() -> torch.Tensor:
    return torch.arange(64.0).view(4, 16).bfloat16()


@pytest.mark.usefixtures("few_at_once")
def test_statistics_alone_write_no_copies(by_reference):
    case = make("mxfp8", (3, 64), 2)
    parts, plan = parts_of(case)
    slot, tick = torch.tensor([2], device=DEVICE), torch.tensor([9], device=DEVICE)
    x, parts, found = case.x.bfloat16().to(DEVICE), [part.to(DEVICE) for part in parts], []
    for capture in (_reference, device.capture):
        whole = destination_for(x, parts, DEVICE)
        bare = dataclasses.replace(whole, high_precision=None, parts=[None] * len(parts))
        capture(plan, bare, x, parts, slot, tick)
        found += [bare, bare.statistics[2].tolist()]
    assert_same(*found[2:], *found[:2])
    assert not by_reference


def test_codes_in_types_that_triton_does_not_know(by_reference):
    case = make("mxfp8", (2, 32), 2)
    parts, plan = parts_of(case)
    typed = [parts[0].view(torch.float8_e4m3fn), parts[1].view(torch.float8_e8m0fnu)]
    compare(case.x.bfloat16(), typed, plan)
    assert not by_reference


def test_what_the_kernel_does_not_know_is_the_references(by_reference):
    nvfp4, mxfp8 = make("nvfp4 1x16", (4, 32), 1), make("mxfp8", (4, 32), 1)
    (fp4, fp4_plan), (fp8, fp8_plan) = parts_of(nvfp4), parts_of(mxfp8)
    tiles = [fp8[0], torch.full((512,), 120, dtype=torch.uint8)]
    odd = make("nvfp4 1x16", (4, 20), 1)
    unknown = [
        (mxfp8.x, tiles, dataclasses.replace(fp8_plan, scale_shape=(4, 1))),
        (nvfp4.x, fp4, dataclasses.replace(fp4_plan, multiply_to_decode=False)),
        (odd.x, *parts_of(odd)),  # lanes of eight do not end where rows do
        (nvfp4.x.double(), fp4, fp4_plan),
        (nvfp4.x, [fp4[0], fp4[1], fp4[2].double()], fp4_plan),
        (nvfp4.x, [fp4[0], fp4[1], torch.ones(1, 2)], fp4_plan),
    ]
    for number, (x, parts, plan) in enumerate(unknown, start=1):
        compare(x, parts, plan)
        assert by_reference, number
        by_reference.clear()
    compare(nvfp4.x, fp4, fp4_plan, 2)
    assert by_reference, "rows that count, among blocks"


@pytest.mark.parametrize("where", [CUDA])
@pytest.mark.parametrize(("kind", "second"), [("nvfp4 1x16", "tensor"), ("nvfp4 1x16", "row"), ("mxfp8", "tensor")])
def test_large_tensors(where, kind, second, by_reference):
    assert where == DEVICE
    for shape in ((1000, 4096), (3, 257, 1040)):
        case = make(kind, shape, 3, second)
        compare(case.x.bfloat16(), *parts_of(case))
        compare(None, *parts_of(case))
    assert not by_reference


def test_the_format_of_the_columns_words_is_that_of_its_family():
    """What ``packed`` is asked to judge: E4M3 beside E4M3, and no words of which only the bytes are known."""
    case = make("nvfp4 1x16", (4, 32), 1)
    components = case.parts.components | {"columnwise_swizzled_scale_inv": torch.zeros(512, dtype=torch.uint8)}
    info = QuantizerInfo("x", FP4, "multiply_to_decode", (1, 16), {"scheme": "nvfp4"})
    plan = build_plan(case.x, QuantizedParts(info, components, case.parts.formats, pair_codes="data"))
    assert dict(plan.scales) == {1: E4M3, 2: "float32", 3: "uint8"}


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("unscaled", [True, False])
def test_codes_without_a_scale(unscaled, by_reference):
    """Their values are the values, or what they mean is not known."""
    codes = torch.arange(48, dtype=torch.uint8).view(3, 16)
    x = torch.linspace(-8, 8, 96).view(3, 32).bfloat16()
    compare(x, [codes], CapturePlan(codes=0, format=FP4, pairs=True, unscaled=unscaled))
    assert not by_reference
