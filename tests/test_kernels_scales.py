"""Scales with two levels, in blocks along any axis, over flattened dimensions, in hardware order: against numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    decode,
    expected_codes,
    expected_high_precision,
    expected_range,
    expected_scale,
    run_capture,
)

from flightrec.kernels import host, reference, scales, segments
from flightrec.kernels.plan import CapturePlan
from flightrec.records import QuantizerInfo, Statistic
from flightrec.ring.layout import QuantizedParts, build_plan

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

FP4, E4M3, E5M2, E8M0 = "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
KINDS = {
    "nvfp4 1x16": (FP4, E4M3, (1, 16), True),
    "nvfp4 16x16": (FP4, E4M3, (16, 16), True),
    "nvfp4 one level": (FP4, E4M3, (1, 16), False),
    "mxfp8": (E4M3, E8M0, (1, 32), False),
    "mxfp8 columnwise": (E5M2, E8M0, (32, 1), False),
    "mxfp4": (FP4, E8M0, (1, 32), False),
    "blocks 1x128": (E4M3, "float32", (1, 128), False),
    "blocks 128x128": (E5M2, "float32", (128, 128), False),
}
COLUMNS = [16, 32, 48, 128, 144, 320]


@dataclass
class Case:
    """A quantized tensor with its pair, and what numpy says of both."""

    x: torch.Tensor
    parts: QuantizedParts
    factor: np.ndarray  # float64, decodes, [shape]
    words: np.ndarray  # float64, of both scales together
    name: str

    def expected(self, rows: int | None = None) -> dict[int, float]:
        """The whole row; ``rows`` of dimension 0 count."""
        count = self.x.shape[0] if rows is None else rows
        x = self.x.double().numpy()[:count]
        codes = self.parts.components["data"].view(torch.uint8).numpy()[:count]
        values, factor = decode(codes, self.name), self.factor[:count]
        with np.errstate(all="ignore"):
            dequantized = values * factor
            error = (dequantized - x)[np.isfinite(dequantized) & np.isfinite(x)]
        found = expected_high_precision(x) | expected_codes(codes, self.name) | expected_range(x, factor, self.name)
        found |= {
            Statistic.UNDERFLOW_COUNT: (np.isfinite(x) & (x != 0) & (values == 0)).sum(),
            Statistic.SQUARED_ERROR: (error**2).sum(),
        }
        return found


def make(kind: str, shape: tuple[int, ...], seed: int, second: str = "tensor", **more: torch.Tensor) -> Case:
    """Random codes and scales; scales of a tensor in three dimensions lie over the flattened leading two."""
    name, scale_name, blocks, has_second = KINDS[kind]
    rng = np.random.default_rng(seed)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    codes = rng.integers(0, 256, (rows, columns // 2 if name == FP4 else columns), dtype=np.uint8)
    count = (-(-rows // blocks[0]), -(-columns // blocks[1]))
    if scale_name == "float32":
        stored = rng.uniform(0.01, 2.0, count).astype(np.float32)
        words = stored.astype(np.float64)
    else:
        low, high = (118, 132) if scale_name == E8M0 else (0x20, 0x70)
        stored = rng.integers(low, high, count, dtype=np.uint8)
        words = stored.view(CODE_TYPES[scale_name]).astype(np.float64)
    components = {"data": torch.from_numpy(codes.reshape(*shape[:-1], -1)), "scale_inv": torch.from_numpy(stored)}
    if has_second:
        size = rows if second == "row" and blocks[0] == 1 else 1
        outer = rng.uniform(1e-4, 2e-3, size).astype(np.float32)
        components["tensor_scale_inv"] = torch.from_numpy(outer)
        words = (words.astype(np.float32) * outer.reshape(-1, 1)).astype(np.float64)
    factor = np.repeat(np.repeat(words, blocks[0], 0)[:rows], blocks[1], 1)[:, :columns].reshape(shape)
    with np.errstate(all="ignore"):
        near = np.nan_to_num(decode(codes, name).reshape(shape) * factor, nan=1.0, posinf=9.0, neginf=-9.0)
    x = torch.from_numpy((near * rng.normal(1, 0.3, shape)).astype(np.float32))
    info = QuantizerInfo("x", name, "multiply_to_decode", blocks, {})
    formats = {"data": name, "scale_inv": scale_name}
    parts = QuantizedParts(info, components | more, formats, pair_codes="data")
    return Case(x, parts, factor, words, name)


def scales_expected(case: Case, words: np.ndarray, scale_name: str, has_second: bool) -> dict[int, float]:
    found = {Statistic.SCALE_NONFINITE_COUNT: 0, **expected_scale(words)}
    if scale_name == "float32" or has_second:
        found[Statistic.ZERO_SCALE_COUNT] = 0
    return found


@all_implementations
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    leading=st.sampled_from([(1,), (2,), (31,), (33,), (129,), (200,), (2, 3), (3, 70)]),
    columns=st.sampled_from(COLUMNS),
    second=st.sampled_from(["tensor", "row"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_format_against_numpy(implementation, kind, leading, columns, second, seed):
    case = make(kind, (*leading, columns), seed, second)
    plan = build_plan(case.x, case.parts)
    assert (plan.tensor_scale >= 0) == KINDS[kind][3]
    _, row = run_capture(implementation, case.x, list(case.parts.components.values()), plan)
    _, scale_name, _, has_second = KINDS[kind]
    expected = case.expected() | scales_expected(case, case.words, scale_name, has_second)
    assert_row(row, expected, case.x.double().numpy())


@all_implementations
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape", "rows"),
    [
        ("blocks 128x128", (200, 320), 100),
        ("blocks 128x128", (200, 320), 130),
        ("blocks 128x128", (3, 70, 128), 1),
        ("nvfp4 1x16", (5, 6, 48), 2),
        ("nvfp4 16x16", (40, 48), 17),
        ("mxfp8", (4, 9, 48), 3),
        ("mxfp8 columnwise", (70, 48), 33),
    ],
)
def test_padding_rows_do_not_count(implementation, kind, shape, rows, on_device):
    case = make(kind, shape, 7)
    case.x[rows:] = math.nan
    blocks, has_second = KINDS[kind][2], KINDS[kind][3]
    used = -(-rows * math.prod(shape[1:-1]) // blocks[0])
    scale = case.parts.components["scale_inv"]
    if scale.dtype == torch.uint8:
        scale[used:] = 0xFF if KINDS[kind][1] == E8M0 else 0x7F
    else:
        scale[used:] = math.inf
    plan = build_plan(case.x, case.parts)
    valid = torch.tensor([rows]) if on_device else rows
    _, row = run_capture(implementation, case.x, list(case.parts.components.values()), plan, valid)
    words = case.words[:used]
    expected = case.expected(rows) | scales_expected(case, words, KINDS[kind][1], has_second)
    assert_row(row, expected, case.x[:rows].double().numpy())


@all_implementations
def test_a_second_scale_of_zero_or_nan(implementation):
    for bad, nonfinite in ((0.0, 0), (math.nan, 1)):
        case = make("nvfp4 1x16", (4, 32), 3)
        case.parts.components["tensor_scale_inv"].fill_(bad)
        case.x[0, 0], case.x[0, 1] = 0.0, 1.0
        plan = build_plan(case.x, case.parts)
        _, row = run_capture(implementation, case.x, list(case.parts.components.values()), plan)
        assert row[Statistic.SCALE_NONFINITE_COUNT] == nonfinite
        zero = int((case.x != 0).sum()) if bad == 0 else 0
        assert row[Statistic.ZERO_SCALE_COUNT] == zero
        assert row[Statistic.CLIPPED_COUNT] == 0  # no limit is known; the zero scale is its own fault
        np.testing.assert_equal(row[Statistic.SCALE_MAX], 0.0 if bad == 0 else math.nan)


@all_implementations
def test_clipped_is_what_lies_beyond_both_scales_together(implementation):
    """An NVFP4 tensor whose amax outgrew its second scale: 6 x 448 x 0.001 is the most that codes can say."""
    case = make("nvfp4 1x16", (2, 16), 0)
    case.parts.components["scale_inv"].fill_(0x7E)  # 448
    case.parts.components["tensor_scale_inv"].fill_(0.001)
    case.x.fill_(1.0)
    case.x[0, :3] = torch.tensor([2.688, 3.0, -26.88])
    plan = build_plan(case.x, case.parts)
    _, row = run_capture(implementation, case.x, list(case.parts.components.values()), plan)
    assert row[Statistic.CLIPPED_COUNT] == 2
    np.testing.assert_allclose(row[Statistic.RANGE_RATIO], 10, rtol=1e-6)


@all_implementations
@pytest.mark.parametrize("shape", [(5, 160), (130, 64), (2, 70, 96), (300, 288)])
def test_words_in_the_hardware_order(implementation, shape):
    case = make("mxfp8", shape, 11)
    rows = case.parts.components["scale_inv"]
    down, across = -(-rows.shape[0] // 128), -(-rows.shape[1] // 4)
    padded = torch.full((down * 128, across * 4), 0xFF, dtype=torch.uint8)  # NaN, which nobody may count
    padded[: rows.shape[0], : rows.shape[1]] = rows
    tiles = np.empty(down * across * 512, np.uint8)
    for row in range(down * 128):  # the layout as cuBLAS documents it
        for column in range(across * 4):
            tile = (row // 128) * across + column // 4
            tiles[tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4] = padded[row, column]
    info = QuantizerInfo("x", E4M3, "multiply_to_decode", (1, 32), {"swizzled": True})
    components = {**case.parts.components, "scale_inv": torch.from_numpy(tiles).reshape(down * 32, across * 16)}
    parts = QuantizedParts(info, components, case.parts.formats, pair_codes="data")
    plan = build_plan(case.x, parts)
    assert plan.scale_shape == tuple(rows.shape)
    _, found = run_capture(implementation, case.x, list(components.values()), plan)
    assert_row(found, case.expected() | scales_expected(case, case.words, E8M0, False), case.x.double().numpy())
    assert torch.equal(scales.in_rows(components["scale_inv"], rows.shape), rows)


@all_implementations
def test_the_words_of_columns_in_the_tensor_cores_order(implementation):
    """As Transformer Engine holds a column-wise MXFP8 tensor: plain bytes, the tiles of the transposed scales."""
    case = make("mxfp8 columnwise", (70, 144), 13)
    words = case.parts.components["scale_inv"].t()  # [144, 3]
    padded = torch.zeros(256, 4, dtype=torch.uint8)
    padded[:144, :3] = words
    tiles = padded.reshape(2, 4, 32, 1, 4).permute(0, 3, 2, 1, 4).reshape(-1)
    info = QuantizerInfo("x", E5M2, "multiply_to_decode", (32, 1), {"scheme": "mxfp8"})
    components = {"columnwise_data": case.parts.components["data"], "columnwise_swizzled_scale_inv": tiles}
    parts = QuantizedParts(info, components, {"columnwise_data": E5M2}, pair_codes="columnwise_data")
    plan = build_plan(case.x, parts)
    assert (plan.scale_shape, plan.scale_transposed, plan.scales) == ((144, 3), True, ((1, E8M0),))
    _, found = run_capture(implementation, case.x, list(components.values()), plan)
    assert_row(found, case.expected() | scales_expected(case, case.words, E8M0, False), case.x.double().numpy())


def test_words_in_an_order_that_is_not_known_are_kept_and_not_judged():
    case = make("mxfp8", (5, 160), 11)
    info = QuantizerInfo("x", E4M3, "multiply_to_decode", (1, 32), {"swizzled": True})
    parts = QuantizedParts(info, case.parts.components, case.parts.formats, pair_codes="data")
    plan = build_plan(case.x, parts)
    assert (plan.scale, plan.scale_shape, plan.unscaled) == (-1, (), False)


@all_implementations
def test_the_second_scale_goes_the_other_way_where_the_first_encodes(implementation):
    x = torch.tensor([[8.0, 4.0], [2.0, 1.0]])
    codes = torch.full((2, 2), 0x38, dtype=torch.uint8)  # 1.0
    info = QuantizerInfo("x", E4M3, "multiply_to_encode", (), {})
    components = {"data": codes, "scale": torch.tensor(0.5), "tensor_scale_inv": torch.tensor([2.0])}
    plan = build_plan(x, QuantizedParts(info, components, {"data": E4M3}, pair_codes="data"))
    _, row = run_capture(implementation, x, list(components.values()), plan)
    np.testing.assert_allclose(row[Statistic.SQUARED_ERROR], 16 + 0 + 4 + 9)  # of codes / 0.5 * 2
    assert row[Statistic.SCALE_MIN] == row[Statistic.SCALE_MAX] == 0.25


@all_implementations
def test_the_quantizers_amax_and_its_history(implementation):
    x, codes = torch.ones(4), torch.full((4,), 0x38, dtype=torch.uint8)
    info = QuantizerInfo("x", E4M3, "multiply_to_decode", (), {})
    history = torch.tensor([3.0, math.nan, 11.0, math.inf])
    components = {"data": codes, "scale_inv": torch.tensor(1.0), "amax": torch.tensor([2.5]), "amax_history": history}
    plan = build_plan(x, QuantizedParts(info, components, {"data": E4M3}, pair_codes="data"))
    _, row = run_capture(implementation, x, list(components.values()), plan)
    assert (row[Statistic.QUANTIZER_AMAX], row[Statistic.AMAX_HISTORY_MAX]) == (2.5, 11.0)
    components["amax"] = torch.tensor([math.nan])
    _, row = run_capture(implementation, x, list(components.values()), plan)
    assert math.isnan(row[Statistic.QUANTIZER_AMAX])


def test_the_columnwise_codes_have_a_second_scale_of_their_own():
    components = {
        "columnwise_data": torch.zeros(4, 8, dtype=torch.uint8),
        "columnwise_scale_inv": torch.zeros(4, 1, dtype=torch.uint8),
        "tensor_scale_inv": torch.ones(1),
        "columnwise_tensor_scale_inv": torch.ones(1),
    }
    info = QuantizerInfo("x", FP4, "multiply_to_decode", (), {})
    plan = build_plan(None, QuantizedParts(info, components))
    assert (plan.codes, plan.scale, plan.tensor_scale) == (0, 1, 3)


def test_a_second_scale_without_a_first_one_is_not_taken_for_none():
    components = {"data": torch.zeros(4, dtype=torch.uint8), "tensor_scale_inv": torch.ones(1)}
    info = QuantizerInfo("x", E4M3, "none", (), {})
    plan = build_plan(torch.ones(4), QuantizedParts(info, components, {"data": E4M3}, pair_codes="data"))
    assert (plan.scale, plan.tensor_scale, plan.unscaled) == (-1, -1, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nvfp4 1x16", "nvfp4 16x16", "mxfp8", "blocks 128x128"])
def test_segments_agree_with_the_rows_cut_out(device, kind):
    case = make(kind, (160, 96), 5, "row")
    plan = build_plan(case.x, case.parts)
    splits = torch.tensor([30, 1, 100, 7])
    arguments = [case.x.to(device), [part.to(device) for part in case.parts.components.values()], splits.to(device)]
    found = segments.choose(torch.device(device))(plan, *arguments).cpu().numpy()
    also = segments.reference(plan, *arguments).cpu().numpy()
    np.testing.assert_allclose(found, also, rtol=1e-5, equal_nan=True)
    start = 0
    for number, count in enumerate(splits.tolist()):
        part = Case(case.x[start : start + count], cut(case.parts, start, count), case.factor[start : start + count],
                    case.words, case.name)  # fmt: skip
        for column, value in part.expected().items():
            np.testing.assert_allclose(found[number, column], value, rtol=1e-5, atol=1e-3, err_msg=f"{column!r}")
        start += count


def cut(parts: QuantizedParts, start: int, count: int) -> QuantizedParts:
    data = {"data": parts.components["data"][start : start + count]}
    return QuantizedParts(parts.info, data, parts.formats, pair_codes="data")


@pytest.mark.parametrize("second", [torch.ones(3), torch.ones(2, 5), torch.ones(2, 2, 2)])
def test_a_second_scale_of_another_shape_is_not_understood(second):
    plan = CapturePlan(codes=0, format=E4M3, scale=1, tensor_scale=2, scales=((1, "float32"), (2, "float32")))
    parts = [torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 2), second]
    assert scales.combined(plan, parts) is None
    assert scales.factor(plan, parts, (2, 4)) is None
    assert scales.scale_statistics(plan, parts, (2, 4), None) == {}


@pytest.mark.parametrize("second", [torch.tensor(2.0), torch.tensor([2.0, 3.0]), torch.tensor([[2.0], [3.0]])])
def test_shapes_of_a_second_scale(second):
    plan = CapturePlan(codes=0, format=E4M3, scale=1, tensor_scale=2, scales=((1, "float32"), (2, "float32")))
    parts = [torch.zeros(2, 4, dtype=torch.uint8), torch.full((2, 2), 5.0), second]
    last = 3.0 if second.numel() > 1 else 2.0
    assert scales.factor(plan, parts, (2, 4)).tolist() == [[10.0] * 4, [5 * last] * 4]
    found = scales.second_factor(plan, parts, (2, 4))
    assert found.expand(2, 4).tolist() == [[2.0] * 4, [last] * 4]


def test_two_levels_never_reach_the_reference_in_host_memory(monkeypatch):
    """Otherwise the tests beside the reference would compare it with itself."""
    calls = []
    monkeypatch.setattr(reference, "statistics", lambda *args: calls.append(args))
    for kind, shape in (("nvfp4 1x16", (4, 48)), ("nvfp4 16x16", (2, 9, 48)), ("mxfp8", (3, 5, 64))):
        case = make(kind, shape, 1)
        if kind == "mxfp8":
            case.parts.components["data"].fill_(0x38)
        parts = list(case.parts.components.values())
        run_capture((host.capture, "cpu"), case.x, parts, build_plan(case.x, case.parts))
    assert calls == []
