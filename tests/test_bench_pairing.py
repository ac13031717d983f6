"""The statistics of paired blocks: the interval holds the truth, pairs take a drift out, orders are balanced."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flightrec.bench.pairing import median_interval, orders, relative_overhead

TRUE = 0.02


def blocks(num_pairs: int, seed: int, *, drift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Seconds without and with, an overhead of 2%; blocks follow each other, pairs in alternating order."""
    draw = np.random.default_rng(seed)
    level = 0.025 * (1 + drift * np.linspace(0, 1, 2 * num_pairs)).reshape(num_pairs, 2)
    noisy = level * (1 + 0.01 * draw.standard_normal((num_pairs, 2)))
    first = np.array(list(orders(num_pairs, seed=seed)))
    off = np.where(first, noisy[:, 0], noisy[:, 1])
    on = np.where(first, noisy[:, 1], noisy[:, 0]) * (1 + TRUE)
    return off, on


def test_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        interval = relative_overhead(*blocks(24, seed), seed=seed)
        held += interval.low <= TRUE <= interval.high
    assert held >= 0.89 * 200  # 95%, less the percentiles' own error at 24 pairs and three deviations of a count
    assert held < 200, "an interval that always holds the truth is too wide"


def test_more_pairs_narrow_the_interval() -> None:
    few, many = (relative_overhead(*blocks(count, 1)).half_width for count in (10, 160))
    assert many < few / 2


def test_pairs_take_a_drift_out() -> None:
    """The machine slows down by 30% while it is measured: ten times what is looked for."""
    off, on = blocks(40, 3, drift=0.3)
    assert relative_overhead(off, on).median == pytest.approx(TRUE, abs=0.006)
    alone = np.median(on[20:]) / np.median(off[:20]) - 1  # first all without, then all with
    assert alone > 0.1


def test_orders_are_balanced_mixed_and_the_same_each_time() -> None:
    found = list(orders(40, seed=5))
    assert sum(found) == 20
    assert found == list(orders(40, seed=5))
    assert found != list(orders(40, seed=6))
    assert all(sum(found[at : at + 2]) == 1 for at in range(0, 40, 2))


def test_degenerate_input() -> None:
    one = median_interval([3.0])
    assert one.median == 3.0
    assert math.isnan(one.low) and math.isnan(one.half_width)
    same = median_interval([1.0, 1.0, 1.0])
    assert (same.low, same.high) == (1.0, 1.0)
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])
    with pytest.raises(ValueError, match="2 and 3"):
        relative_overhead([1.0] * 3, [1.0] * 2)
