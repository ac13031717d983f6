from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch
from rules_support import DEVICES, ReferenceArming

from flightrec.rules.state import BLOCK_SERIES, Arming, SeriesState


def tensor(values, device, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_window_equals_a_deque(device):
    generator = np.random.default_rng(0)
    state = SeriesState(torch.device(device))
    window = state.declare_window("w", 5)
    reference: list[deque[float]] = []
    for step in range(60):
        num_series = 3 + 100 * (step // 12)  # across several blocks
        state.grow(num_series)
        reference += [deque(maxlen=5) for _ in range(num_series - len(reference))]
        values, where = generator.random(num_series), generator.random(num_series) < 0.6
        pushed = np.where(where, values, np.nan)  # what is not taken may be anything
        window.push(tensor(pushed, device), tensor(where, device, torch.bool))
        for number in np.flatnonzero(where):
            reference[number].append(values[number])
        mean, std = window.mean_and_std()
        np.testing.assert_array_equal(window.maximum().cpu(), [max(w, default=0.0) for w in reference])
        np.testing.assert_allclose(mean.cpu(), [np.mean(w) if w else 0.0 for w in reference], rtol=1e-14)
        np.testing.assert_allclose(std.cpu(), [np.std(w) if w else 0.0 for w in reference], rtol=1e-12, atol=1e-15)
    assert state.num_series > BLOCK_SERIES


@pytest.mark.parametrize("size", [5, 3, 9])
def test_export_is_oldest_first_and_fits_windows_of_another_size(size):
    state = SeriesState(torch.device("cpu"))
    window = state.declare_window("w", 5)
    state.grow(3)
    for value in range(8):
        window.push(tensor([value] * 3, "cpu"), tensor([True, value < 2, False], "cpu", torch.bool))
    exported = state.export()
    assert exported["w"].tolist() == [[3, 4, 5, 6, 7], [0, 1, 0, 0, 0], [0] * 5]
    assert exported["w_count"].tolist() == [5, 2, 0]

    other = SeriesState(torch.device("cpu"))
    again = other.declare_window("w", size)
    other.declare("new", dtype=torch.int32, initial=4)
    other.grow(4)
    other.assign([2, 0, 3], other.adapt(exported, 3))
    kept = min(size, 5)
    assert other.export()["w"][2].tolist() == [3, 4, 5, 6, 7][-kept:] + [0] * (size - kept)
    assert other.export()["w_count"].tolist() == [2, 0, kept, 0]
    assert other["new"].tolist() == [4, 4, 4, 4]
    again.push(tensor([8.0] * 4, "cpu"), tensor([True] * 4, "cpu", torch.bool))
    newest = [0, 1, 3, 4, 5, 6, 7, 8]
    assert other.export()["w"][2].tolist()[: min(size, 6)] == newest[-min(size, 6) :]


def test_a_damaged_field_starts_afresh():
    state = SeriesState(torch.device("cpu"))
    state.declare("a", dtype=torch.int32, initial=3)
    assert state.adapt({"a": torch.zeros(2, 7), "gone": torch.zeros(2)}, 2)["a"].tolist() == [3, 3]
    assert state.export()["a"].shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rearm", [1, 2, 5])
def test_arming_equals_a_plain_one(device, rearm):
    generator = np.random.default_rng(rearm)
    state = SeriesState(torch.device(device))
    arming = Arming(state, "rearming", rearm)
    reference = [ReferenceArming(rearm) for _ in range(200)]
    state.grow(200)
    for _ in range(60):
        sampled = generator.random(200) < 0.8
        faulty = sampled & (generator.random(200) < 0.2)
        fires = arming.fire(tensor(sampled, device, torch.bool), tensor(faulty, device, torch.bool)).cpu().numpy()
        expected = [sampled[n] and reference[n].fire(bool(faulty[n])) for n in range(200)]
        np.testing.assert_array_equal(fires, expected)


def test_smallest_and_median_of_a_window():
    state = SeriesState(torch.device("cpu"))
    window = state.declare_window("x", 4)
    state.grow(2)
    assert window.minimum().tolist() == [math.inf, math.inf]
    both = torch.tensor([True, True])
    for number, value in enumerate((3.0, -1.0, 7.0, 2.0, 5.0)):
        if number < 4:
            assert not window.median().isfinite().any() or number == 3
        window.push(torch.tensor([value, 2 * value], dtype=torch.float64), both)
    assert window.minimum().tolist() == [-1.0, -2.0]
    assert window.median().tolist() == [3.5, 7.0]
