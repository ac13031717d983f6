"""Windows cover an array; values, codes and worst elements are counted as numpy counts them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightrec.codecs import base
from flightrec.reports.page.counting import NUM_WORST, Codes, Values, format_range, windows


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 20))
def test_windows_cover_the_array_once_and_know_where_they_start(shape: list[int], limit: int) -> None:
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    chosen, total = windows(shape, limit, 10_000)
    assert len(chosen) == total
    parts = [numbers[window.slices].reshape(-1) for window in chosen]
    assert np.array_equal(np.concatenate(parts or [np.empty(0)]), numbers.reshape(-1))
    for part, window in zip(parts, chosen, strict=True):
        assert part.size <= max(limit, 1)
        assert not part.size or part[0] == window.start


def test_too_many_windows_are_sampled_evenly_from_end_to_end() -> None:
    chosen, total = windows((1000, 10), 10, 5)
    assert total == 1000
    assert [window.start for window in chosen] == [0, 2490, 4990, 7490, 9990]


def test_values_are_counted_by_sign_and_binade() -> None:
    told = counted(np.array([0, 1, 1.5, 2, -3, 0.25, -0.0, np.nan, np.inf, -np.inf], np.float32))
    assert (told["num"], told["zeros"], told["nan"], told["inf"]) == (10, 2, 1, 2)
    assert told["first_binade"] == -2
    assert told["positive"] == [1, 0, 2, 1]
    assert told["negative"] == [0, 0, 0, 1]


def counted(values: np.ndarray, parts: int = 1) -> dict[str, object]:
    counter = Values(values.shape)
    start = 0
    for part in np.array_split(values.reshape(-1), parts):
        counter.add(part, start)
        start += part.size
    return counter.told()


@pytest.mark.parametrize("parts", [1, 7])
def test_worst_elements_are_found_over_all_parts(parts: int) -> None:
    values = np.random.default_rng(0).standard_normal((40, 50))
    values[3, 4], values[39, 49] = np.nan, -np.inf
    told = counted(values, parts)
    assert told["nonfinite"] == [{"index": [3, 4], "value": "NaN"}, {"index": [39, 49], "value": "-Infinity"}]
    flat = np.where(np.isfinite(values), np.abs(values), 0).reshape(-1)
    expected = np.argsort(-flat)[:NUM_WORST]
    assert [np.ravel_multi_index(entry["index"], values.shape) for entry in told["largest"]] == expected.tolist()
    assert [entry["value"] for entry in told["largest"]] == values.reshape(-1)[expected].tolist()


def test_extreme_values_of_every_type() -> None:
    for dtype in (np.float32, np.float64):
        limits = np.finfo(dtype)
        told = counted(np.array([limits.max, limits.smallest_subnormal], dtype))
        assert sum(told["positive"]) == 2
        assert told["first_binade"] == np.log2(float(limits.smallest_subnormal))
    assert counted(np.empty(0, np.float32))["positive"] == []
    assert counted(np.array([3, -4], np.int32))["negative"] == [0, 1]


@pytest.mark.parametrize("name", [name for name in base.FORMATS if Codes.can_count(name)])
def test_codes_are_counted_as_what_they_stand_for(name: str) -> None:
    element = base.FORMATS[name]
    highest = 1 << (8 if element.elements_per_item == 2 else element.bits)
    stored = np.random.default_rng(1).integers(0, highest, (32, 16)).astype(np.uint8).view(element.storage)
    counter = Codes(name)
    counter.add(stored[:20])
    counter.add(stored[20:])
    told = counter.told()
    decoded = base.decode(stored, name).astype(np.float64)
    assert told["num"] == decoded.size
    assert told["nan"] == np.isnan(decoded).sum()
    assert told["inf"] == np.isinf(decoded).sum()
    values, counts = np.unique(decoded[np.isfinite(decoded)], return_counts=True)
    assert {v: c for v, c in zip(told["values"], told["counts"], strict=True) if c} == dict(
        zip(values.tolist(), counts.tolist(), strict=True)
    )


def test_ends_of_a_format_are_told() -> None:
    counter = Codes("float8_e4m3fn")
    counter.add(np.array([0x7E, 0xFE, 0x7F, 0x00, 0x7D], "u1"))
    assert counter.told()["at_largest"] == 2
    assert format_range("float8_e4m3fn") == {"largest": 448, "smallest_normal": 2**-6, "smallest": 2**-9}
    assert format_range("float4_e2m1fn_x2") == {"largest": 6, "smallest_normal": 1, "smallest": 0.5}
    limits = format_range("bfloat16")
    assert limits is not None
    assert limits["largest"] == float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert format_range("int8") is None
    assert format_range("nobody's") is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_the_fast_way_counts_as_the_exact_one(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        assert counted(values) == counted(values.astype(np.float64))
