from __future__ import annotations

import numpy as np
import pytest
import torch
from rules_support import DEVICES
from torch.utils._python_dispatch import TorchDispatchMode

from flightrec.kernels import segments
from flightrec.kernels.plan import CapturePlan
from flightrec.kernels.reference import statistics
from flightrec.records import Statistic

OF_THE_WHOLE = [int(statistic) for statistic in segments._OF_THE_WHOLE]


def implementations(device):
    return [segments.reference, segments.host] if device == "cpu" else [segments.reference]


def pieces(tensor, splits):
    start = 0
    for count in splits:
        stop = min(start + max(count, 0), len(tensor))
        yield tensor[start:stop]
        start = stop


def spoiled(generator, *shape, dtype=torch.float32):
    x = torch.randn(*shape, generator=generator) * 3
    x[torch.rand(*shape, generator=generator) < 0.1] = 0
    x[torch.rand(*shape, generator=generator) < 0.01] = float("nan")
    x[torch.rand(*shape, generator=generator) < 0.01] = float("inf")
    x[torch.rand(*shape, generator=generator) < 0.01] = -float("inf")
    return x.to(dtype)


def close(found, expected):
    np.testing.assert_allclose(found.cpu().numpy(), expected.cpu().numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [[3, 0, 10, 7], [0, 0, 5], [20], [30, 4], [-3, 8, 0], [0]])
@pytest.mark.parametrize("shape", [(20, 16), (20, 4, 5), (20,), (20, 0), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_each_segment_is_as_if_it_were_alone(device, splits, shape, dtype):
    x = spoiled(torch.Generator().manual_seed(0), *shape)
    if not dtype.is_floating_point:
        x = x.nan_to_num(7, 7, 7)
    x = x.to(dtype)
    expected = torch.stack([statistics(CapturePlan(), piece, []) for piece in pieces(x, splits)])
    for implementation in implementations(device):
        found = implementation(CapturePlan(), x.to(device), [], torch.tensor(splits, device=device))
        assert found.dtype == torch.float64
        close(found, expected)


FORMATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn_x2"]
SCALES = [("one", ()), ("rows", ()), ("columns", ()), ("blocks of a row", (1, 8)), ("blocks of rows", (4, 8))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("layout", "block"), SCALES, ids=[name for name, _ in SCALES])
@pytest.mark.parametrize("multiply", [True, False])
def test_codes_and_pairs(device, name, layout, block, multiply):
    generator = torch.Generator().manual_seed(1)
    x = spoiled(generator, 20, 32)
    packed = name == "float4_e2m1fn_x2"
    codes = torch.randint(0, 256, (20, 16 if packed else 32), dtype=torch.uint8, generator=generator)
    codes[torch.rand(codes.shape, generator=generator) < 0.2] = 0
    shapes = {"one": (), "rows": (20, 1), "columns": (1, 32), "blocks of a row": (20, 4), "blocks of rows": (5, 4)}
    scale = torch.rand(shapes[layout], generator=generator) + 0.1
    splits = [4, 0, 8, 3]  # the blocks of four rows are cut in the middle
    plan = CapturePlan(
        codes=0, format=name, pairs=True, scale=1, scales=((1, "float32"),), multiply_to_decode=multiply,
        block_shape=block,
    )  # fmt: skip
    whole = scale if not scale.dim() else scale.repeat_interleave(20 // scale.shape[0], 0)
    alone = CapturePlan(
        codes=0, format=name, pairs=True, scale=1, scales=((1, "float32"),), multiply_to_decode=multiply,
        block_shape=block[:0] if not block else (1, 8),
    )  # fmt: skip
    expected = []
    for rows, part, words in zip(
        pieces(x, splits), pieces(codes, splits), pieces(whole, splits) if whole.dim() else [whole] * 4, strict=True
    ):
        row = statistics(alone, rows, [part, words])
        row[OF_THE_WHOLE] = torch.nan
        expected.append(row)
    for implementation in implementations(device):
        found = implementation(
            plan, x.to(device), [codes.to(device), scale.to(device)], torch.tensor(splits).to(device)
        )
        np.testing.assert_allclose(found.cpu().numpy(), torch.stack(expected).numpy(), rtol=1e-5, atol=1e-6)
        assert found[0, Statistic.QUANTIZED_NUMEL] == 4 * 32
        alone_codes = implementation(plan, None, [codes.to(device), scale.to(device)], torch.tensor(splits).to(device))
        quantized = slice(Statistic.QUANTIZED_NUMEL, Statistic.UNDERFLOW_COUNT)
        np.testing.assert_array_equal(alone_codes[:, quantized].cpu().numpy(), found[:, quantized].cpu().numpy())
        assert alone_codes[:, : Statistic.QUANTIZED_NUMEL].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_coded_and_missing_scales_and_codes_that_do_not_lie_by_rows(device):
    x = torch.randn(6, 64)
    codes = torch.randint(1, 100, (6, 64), dtype=torch.uint8)
    splits = torch.tensor([2, 4], device=device)
    e8m0 = torch.full((6, 2), 127, dtype=torch.uint8)
    coded = CapturePlan(
        codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float8_e8m0fnu"),), block_shape=(1, 32)
    )
    unscaled = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, unscaled=True)
    without = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True)
    for plan, parts in ((coded, [codes, e8m0]), (unscaled, [codes]), (without, [codes])):
        found = [one(plan, x.to(device), [p.to(device) for p in parts], splits) for one in implementations(device)]
        for other in found:
            np.testing.assert_allclose(other.cpu().numpy(), found[0].cpu().numpy(), rtol=1e-5)
        assert found[0][:, Statistic.SQUARED_ERROR].isnan().any() == (plan is without)
        assert found[0][:, Statistic.ZERO_SCALE_COUNT].isnan().all()
    flat = CapturePlan(codes=0, format="float8_e4m3fn")
    for implementation in implementations(device):
        row = implementation(flat, x.to(device), [codes.reshape(-1).to(device)], splits)
        assert row[:, Statistic.QUANTIZED_NUMEL].isnan().all()
        assert row[:, Statistic.NUMEL].tolist() == [128, 256]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_no_operation_that_would_wait_for_a_device_and_none_a_segment():
    x = torch.randn(64, 64)
    parts = [torch.zeros(64, 64, dtype=torch.uint8), torch.tensor(2.0)]
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    numbers = []
    for num_segments in (2, 32):
        with Counting() as counting, torch.no_grad():
            segments.reference(plan, x, parts, torch.ones(num_segments, dtype=torch.int64))
        numbers.append(len(counting.names))
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "item", "index", "cumsum"} & set(counting.names)
    assert numbers[0] == numbers[1]


def test_which_one_is_chosen():
    assert segments.choose(torch.device("cpu")) is segments.host
    assert segments.choose(torch.device("cuda", 0)) is segments.reference
