"""The torch reference, and every implementation beside it, against numpy and ml_dtypes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_support import (
    CODE_TYPES,
    DEVICES,
    IMPLEMENTATIONS,
    assert_row,
    bits,
    decode,
    expected_codes,
    expected_high_precision,
    expected_pair,
    expected_range,
    expected_scale,
    run_capture,
)

from flightrec.kernels import reference
from flightrec.kernels.formats import CODE_FORMATS
from flightrec.kernels.plan import CapturePlan
from flightrec.records import Statistic

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -3.5, 6e-8, 1e-38, 65504.0, -65504.0]


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().to(torch.float64).numpy()


def check(implementation, x: torch.Tensor, **more) -> None:
    destination, row = run_capture(implementation, x, **more)
    expected = as_numpy(x)
    assert_row(row, expected_high_precision(expected), expected)
    np.testing.assert_array_equal(bits(destination.high_precision[2].view(x.dtype)), bits(x))
    assert bool((destination.high_precision[[0, 1, 3]] == 7).all())


@all_implementations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 5, 1024, 1025, 8192, 65536, 65537, 300_001])
def test_finite_values(implementation, dtype, num):
    x = torch.randn(num, generator=torch.Generator().manual_seed(num)).to(dtype)
    x[:: max(num // 7, 2)] = 0
    check(implementation, x)


@all_implementations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_special_values(implementation, dtype):
    x = torch.tensor(SPECIAL * 3, dtype=torch.float64).to(dtype).reshape(3, -1)
    check(implementation, x)
    check(implementation, torch.full((4,), math.nan, dtype=dtype))  # nothing finite: amax is absent
    check(implementation, torch.zeros(4, 4, dtype=dtype))


@all_implementations
@pytest.mark.parametrize("where", [0, 70_000, 199_999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_value_in_any_block(implementation, where, value):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    x[where] = value
    check(implementation, x)


@all_implementations
@pytest.mark.parametrize("magnitude", [1e-40, 1e-25, 1e-13, 1e15, 1e20, 3e38])
def test_sums_neither_overflow_nor_vanish(implementation, magnitude):
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(2)).clamp(-1, 1) * magnitude
    check(implementation, x)


@all_implementations
def test_all_bfloat16_codes(implementation):
    x = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
    check(implementation, x)
    finite = x[torch.isfinite(x)].contiguous()
    check(implementation, finite)


@all_implementations
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers(implementation, dtype):
    x = torch.tensor([[0, 1, 1], [0, 100, 3]]).to(dtype)
    destination, row = run_capture(implementation, x)
    assert_row(row, expected_high_precision(as_numpy(x)))
    np.testing.assert_array_equal(bits(destination.high_precision[2]), bits(x))


@all_implementations
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_complex_element_counts_once(implementation, dtype):
    inf, nan = math.inf, math.nan
    values = [3 + 4j, 0j, complex(nan, 1), complex(1, nan), complex(nan, inf), complex(-inf, 2), complex(-inf, inf)]
    x = torch.tensor(values, dtype=dtype)
    destination, row = run_capture(implementation, x.conj())
    assert row[Statistic.NUMEL] == 7
    assert row[Statistic.NAN_COUNT] == 3
    assert row[Statistic.POSITIVE_INF_COUNT] + row[Statistic.NEGATIVE_INF_COUNT] == 2
    assert row[Statistic.ZERO_COUNT] == 1
    assert row[Statistic.AMAX] == 5
    assert row[Statistic.SUM_OF_SQUARES] == 25
    np.testing.assert_array_equal(bits(destination.high_precision[2]), bits(x.conj().resolve_conj()))


@all_implementations
def test_a_finite_magnitude_beyond_float32_is_finite(implementation):
    _, row = run_capture(implementation, torch.tensor([complex(3e38, 3e38)], dtype=torch.complex64))
    assert row[Statistic.NAN_COUNT] == row[Statistic.POSITIVE_INF_COUNT] == 0
    assert row[Statistic.AMAX] == pytest.approx(math.hypot(3e38, 3e38), rel=1e-6)


@all_implementations
def test_shapes_and_strides(implementation):
    whole = torch.randn(12, 10, 6, generator=torch.Generator().manual_seed(3))
    for x in (
        whole.permute(2, 0, 1),
        whole[::3, 1::2],
        whole[:, :, 0],
        torch.randn(5, 1).expand(5, 1000),
        torch.zeros(1).expand(1000),
        torch.tensor(3.25),
        torch.tensor(math.inf),
        torch.as_strided(torch.arange(10.0), (8, 3), (1, 1)),  # overlapping windows
        whole.bfloat16().transpose(0, 2),
    ):
        check(implementation, x)


@all_implementations
@pytest.mark.parametrize("shape", [(0,), (0, 16), (7, 0), (3, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_empty_tensors_have_no_amax(implementation, shape, dtype):
    _, row = run_capture(implementation, torch.empty(shape, dtype=dtype))
    assert row[Statistic.NUMEL] == row[Statistic.SUM] == row[Statistic.ZERO_COUNT] == row[Statistic.NAN_COUNT] == 0
    assert math.isnan(row[Statistic.AMAX])


@all_implementations
def test_copy_is_deep(implementation):
    x = torch.ones(2, 3, device=implementation[1])
    destination, _ = run_capture(implementation, x)
    x.fill_(5)
    assert destination.high_precision[2].tolist() == [[1.0] * 3] * 2


# -- codes


def packed_plan(name: str, **more) -> CapturePlan:
    return CapturePlan(codes=0, format=name, **more)


@all_implementations
@pytest.mark.parametrize("name", sorted(CODE_TYPES))
@pytest.mark.parametrize("typed", [True, False])
def test_all_codes(implementation, name, typed):
    codes = torch.arange(256, dtype=torch.uint8).repeat(3)
    data = codes.view(CODE_FORMATS[name].dtype or torch.float4_e2m1fn_x2) if typed else codes
    destination, row = run_capture(implementation, None, [data], packed_plan(name))
    assert_row(row, expected_codes(codes.numpy(), name))
    np.testing.assert_array_equal(bits(destination.parts[0][2]), codes.numpy())


@all_implementations
@pytest.mark.parametrize("name", sorted(CODE_TYPES))
def test_each_code_alone(implementation, name):
    for code in range(256):
        codes = torch.tensor([code], dtype=torch.uint8)
        _, row = run_capture(implementation, None, [codes], packed_plan(name))
        assert_row(row, expected_codes(codes.numpy(), name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(CODE_TYPES))
def test_decode_is_exact(device, name):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = reference.decode(codes.to(device), CODE_FORMATS[name]).cpu().numpy()
    with np.errstate(invalid="ignore"):
        decoded = decoded.astype(np.float64)
    np.testing.assert_array_equal(decoded, decode(codes.numpy(), name))


@all_implementations
def test_unknown_code_format_tells_the_number_of_elements_only(implementation):
    _, row = run_capture(implementation, None, [torch.zeros(3, 5, dtype=torch.int8)], packed_plan("int8"))
    assert_row(row, {Statistic.QUANTIZED_NUMEL: 15})


# -- pairs

PAIR_FORMATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"]


def quantize(x: torch.Tensor, name: str, factor: torch.Tensor) -> torch.Tensor:
    """Codes of ``x * factor``, uint8."""
    scaled = (x.to(torch.float32) * factor).numpy()
    if name == "float4_e2m1fn_x2":
        codes = np.clip(scaled, -6, 6).astype(CODE_TYPES[name]).view(np.uint8)
        return torch.from_numpy(codes[..., 0::2] | (codes[..., 1::2] << 4))
    limit = torch.finfo(CODE_FORMATS[name].dtype).max
    return torch.from_numpy(scaled).clamp(-limit, limit).to(CODE_FORMATS[name].dtype).view(torch.uint8)


def check_pair(implementation, x, codes, name, scale, factor, *, decodes, **plan):
    """``factor``: float64, full size, multiplies to decode."""
    made = CapturePlan(
        codes=0, format=name, pairs=True, scale=1, multiply_to_decode=decodes, scales=((1, "float32"),), **plan
    )
    _, row = run_capture(implementation, x, [codes, scale], made)
    values = as_numpy(x)
    expected = expected_high_precision(values) | expected_codes(codes.numpy(), name)
    expected |= expected_pair(values, decode(codes.numpy(), name) * factor)
    expected |= expected_range(values, factor, name) | expected_scale(scale.numpy())
    expected[Statistic.ZERO_SCALE_COUNT] = 0
    expected[Statistic.SCALE_NONFINITE_COUNT] = int((~torch.isfinite(scale)).sum())
    np.testing.assert_allclose(
        row[Statistic.SQUARED_ERROR],
        expected[Statistic.SQUARED_ERROR],
        rtol=2e-5,
        atol=1e-12 * float(np.nansum(values[np.isfinite(values)] ** 2)),
    )
    expected[Statistic.SQUARED_ERROR] = row[Statistic.SQUARED_ERROR]
    assert_row(row, expected, values)


@all_implementations
@pytest.mark.parametrize("name", PAIR_FORMATS)
@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("scale_shape", ["scalar", "row", "column", "block1", "block2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pair(implementation, name, decodes, scale_shape, dtype):
    rows, columns = 96, 1024
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[:, 7] *= 1000  # an outlier channel: much else underflows
    x[5] = 0
    shape = {
        "scalar": (), "row": (rows, 1), "column": (1, columns), "block1": (rows, columns // 32), "block2": (3, 8)
    }[scale_shape]  # fmt: skip
    limit = 6.0 if name.startswith("float4") else float(torch.finfo(CODE_FORMATS[name].dtype).max)
    encode = torch.rand(shape, generator=torch.Generator().manual_seed(5)) + limit / 100
    full = np.broadcast_to(encode.numpy(), (rows, columns)) if scale_shape in ("scalar", "row", "column") else np.kron(
        encode.numpy(), np.ones((rows // shape[0], columns // shape[1]), np.float32)
    )  # fmt: skip
    codes = quantize(x, name, torch.from_numpy(full.copy()))
    scale = 1 / encode if decodes else encode
    factor = (1 / full).astype(np.float64) if decodes else 1 / full.astype(np.float64)
    check_pair(implementation, x, codes, name, scale, factor, decodes=decodes)


@all_implementations
def test_pair_with_padded_blocks(implementation):
    x = torch.randn(70, 130, generator=torch.Generator().manual_seed(6))
    scale = torch.rand(2, 2) + 0.5  # blocks of 64 x 128, the last ones not full
    full = np.kron(scale.numpy(), np.ones((64, 128), np.float32))[:70, :130]
    codes = quantize(x, "float8_e4m3fn", torch.from_numpy(1 / full))
    factor = full.astype(np.float64)
    check_pair(implementation, x, codes, "float8_e4m3fn", scale, factor, decodes=True, block_shape=(64, 128))


@all_implementations
@pytest.mark.parametrize("where", ["x", "codes", "scale"])
def test_pair_leaves_out_what_is_not_finite(implementation, where):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    codes = quantize(x, "float8_e4m3fn", torch.tensor(10.0))
    scale = torch.full((8, 1), 0.1)
    if where == "x":
        x[1, 2], x[3, 3] = math.nan, math.inf
    elif where == "codes":
        codes[2, 2] = 0x7F
    else:
        scale[4] = math.inf
    check_pair(implementation, x, codes, "float8_e4m3fn", scale, scale.double().numpy(), decodes=True)


@all_implementations
def test_underflow_of_everything_and_of_legal_zeros(implementation):
    """F06: all codes zero under a non-zero tensor is underflow, zeros under zeros are not."""
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True)
    zeros = torch.zeros(64, 64, dtype=torch.uint8)
    _, row = run_capture(implementation, torch.full((64, 64), 1e-3), [zeros], plan)
    assert row[Statistic.UNDERFLOW_COUNT] == 4096
    _, row = run_capture(implementation, torch.zeros(64, 64), [zeros + 0x80], plan)
    assert row[Statistic.UNDERFLOW_COUNT] == 0
    assert row[Statistic.QUANTIZED_ZERO_COUNT] == 4096
    assert math.isnan(row[Statistic.SQUARED_ERROR])  # no scale: nothing to decode with
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, unscaled=True)
    _, row = run_capture(implementation, torch.full((64, 64), 0.5), [zeros], plan)
    assert row[Statistic.SQUARED_ERROR] == 1024


@all_implementations
def test_pair_of_three_and_two_dimensions(implementation):
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(8))
    codes = quantize(x.reshape(32, 16), "float8_e5m2", torch.tensor(1.0))
    plan = CapturePlan(codes=0, format="float8_e5m2", pairs=True, scale=1)
    _, row = run_capture(implementation, x, [codes, torch.ones(1)], plan)
    values = x.double().numpy().reshape(32, 16)
    expected = ((decode(codes.numpy(), "float8_e5m2") - values) ** 2).sum()
    np.testing.assert_allclose(row[Statistic.SQUARED_ERROR], expected, rtol=1e-5)


@all_implementations
@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e4m3fn"])
def test_scales_that_are_codes(implementation, name):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    scale = torch.tensor([[0x7D], [0x7B], [0x7C], [0x7E if name == "float8_e4m3fn" else 0x80]], dtype=torch.uint8)
    factor = decode(scale.numpy(), name)
    codes = quantize(x, "float8_e4m3fn", torch.from_numpy(1 / factor).float())
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, name),))
    _, row = run_capture(implementation, x, [codes, scale], plan)
    expected = ((decode(codes.numpy(), "float8_e4m3fn") * factor - x.double().numpy()) ** 2).sum()
    np.testing.assert_allclose(row[Statistic.SQUARED_ERROR], expected, rtol=1e-5)
    assert row[Statistic.SCALE_NONFINITE_COUNT] == 0
    bad = torch.full((4, 1), 0xFF, dtype=torch.uint8)
    _, row = run_capture(implementation, x, [codes, bad], plan)
    assert row[Statistic.SCALE_NONFINITE_COUNT] == 4


@all_implementations
def test_scale_nonfinite_counts_all_scales(implementation):
    scales = [torch.tensor([1.0, math.inf, math.nan]), torch.tensor(math.inf), torch.ones(2, dtype=torch.int32)]
    plan = CapturePlan(scales=tuple((at, "float32") for at in range(3)))
    _, row = run_capture(implementation, torch.ones(3), scales, plan)
    assert row[Statistic.SCALE_NONFINITE_COUNT] == 3


@all_implementations
@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("shape", [(), (4, 1), (4, 2), (1, 64)])
def test_values_beyond_the_range(implementation, decodes, shape):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(11))
    x[0, 0], x[1] = 0, 0
    encode = torch.full(shape, 300.0)  # clips beyond 1.49
    if len(shape) > 1 and shape[1] <= 2:
        encode[0, 0] = 1e-3
    scale = 1 / encode if decodes else encode
    repeated = np.kron(encode.numpy(), np.ones((1, 32))) if shape == (4, 2) else encode.numpy()
    plan = CapturePlan(0, "float8_e4m3fn", True, 1, multiply_to_decode=decodes, scales=((1, "float32"),))
    codes = quantize(x, "float8_e4m3fn", torch.from_numpy(np.broadcast_to(repeated, (4, 64)).astype("f4")))
    for tensor in (x, x.double()):
        _, row = run_capture(implementation, tensor, [codes, scale], plan)
        expected = np.abs(x.double().numpy()) * repeated / 448
        assert row[Statistic.CLIPPED_COUNT] == (expected > 1 + 2.0**-20).sum() > 0
        np.testing.assert_allclose(row[Statistic.RANGE_RATIO], expected.max(), rtol=1e-6)
        assert row[Statistic.ZERO_SCALE_COUNT] == 0
        extremes = [row[Statistic.SCALE_MIN], row[Statistic.SCALE_MAX]]
        assert extremes == [scale.min().item(), scale.max().item()]


@all_implementations
def test_a_scale_that_just_fits_clips_nothing(implementation):
    for seed in range(50):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        for decodes in (True, False):
            scale = x.abs().amax() / 448 if decodes else 448 / x.abs().amax()
            codes = quantize(x, "float8_e4m3fn", 448 / x.abs().amax())
            plan = CapturePlan(0, "float8_e4m3fn", True, 1, multiply_to_decode=decodes)
            _, row = run_capture(implementation, x, [codes, scale], plan)
            assert row[Statistic.CLIPPED_COUNT] == 0
            np.testing.assert_allclose(row[Statistic.RANGE_RATIO], 1, rtol=1e-6)


@all_implementations
def test_a_scale_of_zero(implementation):
    """A zero scale for a zero block is legal; a coded scale may underflow."""
    x = torch.ones(4, 64)
    x[1] = 0
    x[2, :10] = 0
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    for decodes in (True, False):
        scale = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
        plan = CapturePlan(0, "float8_e4m3fn", True, 1, multiply_to_decode=decodes, scales=((1, "float32"),))
        _, row = run_capture(implementation, x, [codes, scale], plan)
        assert row[Statistic.ZERO_SCALE_COUNT] == 54
        _, row = run_capture(implementation, x, [codes, torch.tensor(0.0)], plan)
        assert row[Statistic.ZERO_SCALE_COUNT] == 182
        assert row[Statistic.CLIPPED_COUNT] == row[Statistic.RANGE_RATIO] == 0
    plan = CapturePlan(0, "float8_e4m3fn", True, 1, scales=((1, "float8_e4m3fn"),))
    _, row = run_capture(implementation, x, [codes, torch.zeros(4, 1, dtype=torch.uint8)], plan)
    assert math.isnan(row[Statistic.ZERO_SCALE_COUNT])
    assert row[Statistic.SCALE_MAX] == 0


@all_implementations
@pytest.mark.parametrize("scale_is_inverse", [True, False])
def test_scale_beside_its_inverse(implementation, scale_is_inverse):
    x, codes = torch.ones(4, 8), torch.zeros(4, 8, dtype=torch.uint8)
    plan = CapturePlan(
        0, "float8_e4m3fn", True, 1, multiply_to_decode=scale_is_inverse, scales=((1, "float32"), (2, "float32")),
        inverse=2,
    )  # fmt: skip
    words = torch.tensor([[2.0], [0.1], [3.0], [0.0]])
    inverse = torch.tensor([[0.5], [10.0], [0.4], [0.0]])  # the last: an empty block
    _, row = run_capture(implementation, x, [codes, words, inverse], plan)
    np.testing.assert_allclose(row[Statistic.SCALE_INVERSE_ERROR], 0.2, rtol=1e-6)
    for rows in (2, torch.tensor([2])):
        _, row = run_capture(implementation, x, [codes, words, inverse], plan, valid_rows=rows)
        assert row[Statistic.SCALE_INVERSE_ERROR] < 1e-6
        assert row[Statistic.SCALE_MAX] == 2
    words[2], inverse[1] = math.nan, math.inf
    _, row = run_capture(implementation, x, [codes, words, inverse], plan)
    assert row[Statistic.SCALE_INVERSE_ERROR] == 0
    assert row[Statistic.SCALE_NONFINITE_COUNT] == 2
    nothing = torch.full((4, 1), math.nan)
    _, row = run_capture(implementation, x, [codes, nothing, nothing], plan)
    assert math.isnan(row[Statistic.SCALE_MIN]) and math.isnan(row[Statistic.SCALE_MAX])


@all_implementations
@pytest.mark.parametrize("decodes", [True, False])
def test_past_amax_against_the_range(implementation, decodes):
    x, codes = torch.ones(4, 8), torch.zeros(4, 8, dtype=torch.uint8)
    plan = CapturePlan(0, "float8_e4m3fn", True, 1, multiply_to_decode=decodes, scales=((1, "float32"),), history=2)
    scale = torch.tensor(0.5 if decodes else 2.0)
    for history, expected in (([0.0, 448.0, 2.0], 2.0), ([0.0, 0.0], 0.0), ([math.nan, 56.0], 0.25)):
        _, row = run_capture(implementation, x, [codes, scale, torch.tensor(history)], plan)
        assert row[Statistic.HISTORY_RATIO] == expected
    _, row = run_capture(implementation, x, [codes, torch.tensor(math.nan), torch.ones(3)], plan)
    assert math.isnan(row[Statistic.HISTORY_RATIO])
    _, row = run_capture(implementation, x, [codes, torch.ones(4, 1), torch.ones(3)], plan)
    assert math.isnan(row[Statistic.HISTORY_RATIO])


@all_implementations
def test_codes_whose_values_count_as_they_are_have_a_range_too(implementation):
    x = torch.tensor([[1.0, 500.0, math.inf, 7.0]])
    plan = CapturePlan(0, "float8_e4m3fn", True, unscaled=True)
    _, row = run_capture(implementation, x, [torch.zeros(1, 4, dtype=torch.uint8)], plan)
    assert row[Statistic.CLIPPED_COUNT] == 1
    np.testing.assert_allclose(row[Statistic.RANGE_RATIO], 500 / 448, rtol=1e-6)
    assert math.isnan(row[Statistic.ZERO_SCALE_COUNT])


# -- valid rows


@all_implementations
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num", [-1, 0, 1, 4, 6, 9])
def test_only_valid_rows_count(implementation, on_device, num):
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(10))
    x[2, 3] = 0
    x[4:] = math.nan
    codes = quantize(torch.nan_to_num(x), "float8_e4m3fn", torch.tensor(2.0))
    codes[4:] = 0x7F
    scale = torch.full((6, 1), 0.5)
    scale[4:] = math.nan
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    valid_rows = torch.tensor([num]) if on_device else num
    destination, row = run_capture(implementation, x, [codes, scale], plan, valid_rows=valid_rows)
    count = min(max(num, 0), 6)
    kept, kept_codes, kept_scale = x[:count].double().numpy(), codes[:count].numpy(), scale[:count].double().numpy()
    expected = expected_high_precision(kept) | expected_codes(kept_codes, "float8_e4m3fn")
    expected |= expected_pair(kept, decode(kept_codes, "float8_e4m3fn") * kept_scale)
    expected |= expected_range(kept, kept_scale, "float8_e4m3fn") | expected_scale(kept_scale)
    expected[Statistic.ZERO_SCALE_COUNT] = 0
    expected[Statistic.SCALE_NONFINITE_COUNT] = max(count - 4, 0)
    assert_row(row, expected, kept)
    np.testing.assert_array_equal(bits(destination.high_precision[2]), bits(x))  # copies are whole


@all_implementations
def test_valid_rows_of_packed_codes(implementation):
    codes = torch.full((4, 3), 0x77, dtype=torch.uint8)
    codes[2:] = 0
    for valid_rows in (2, torch.tensor(2)):
        _, row = run_capture(implementation, None, [codes], packed_plan("float4_e2m1fn_x2"), valid_rows=valid_rows)
        assert row[Statistic.QUANTIZED_NUMEL] == row[Statistic.QUANTIZED_SATURATED_COUNT] == 12
        assert row[Statistic.QUANTIZED_ZERO_COUNT] == 0


# -- callers' modes


@all_implementations
@pytest.mark.parametrize("mode", ["inference", "autocast", "deterministic", "grad"])
def test_same_numbers_in_every_mode(implementation, mode):
    device = implementation[1]
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(11), requires_grad=mode == "grad")
    codes = quantize(x.detach(), "float8_e4m3fn", torch.tensor(3.0))
    plan = CapturePlan(
        codes=0, format="float8_e4m3fn", pairs=True, scale=1, multiply_to_decode=False, scales=((1, "float32"),)
    )
    parts = [codes, torch.tensor(3.0)]
    _, quiet = run_capture(implementation, x.detach(), parts, plan)
    if mode == "inference":
        with torch.inference_mode():
            _, row = run_capture(implementation, x, parts, plan)
    elif mode == "autocast":
        with torch.autocast(device, dtype=torch.bfloat16):
            _, row = run_capture(implementation, x, parts, plan)
    elif mode == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            _, row = run_capture(implementation, x, parts, plan)
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        destination, row = run_capture(implementation, x, parts, plan)
        assert not destination.high_precision.requires_grad
    np.testing.assert_array_equal(row, quiet)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32) | st.sampled_from(SPECIAL), max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_any_values(values, dtype):
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    for parameter in IMPLEMENTATIONS[:2]:
        _, row = run_capture(parameter.values[0], x)
        expected = as_numpy(x)
        assert_row(row, expected_high_precision(expected), expected)
