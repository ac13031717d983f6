from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_samples import firing, plain, write_incident

import flightrec
from flightrec.analysis.changes import MIN_SAMPLES, change_point, find_changes, growth, screen
from flightrec.records import Key, Stage
from flightrec.storage.history import HistoryPiece
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS

SERIES = [
    Key("blocks.0.fc1", "activation"),
    Key("blocks.0.fc1", "gradient", stage=Stage.BACKWARD),
    Key("blocks.1.fc1", "activation"),
]
NUM = 40


def incident_of(folder: Any, statistics: dict[str, np.ndarray], attempts: np.ndarray | None = None) -> Any:
    """An incident whose history has these statistics, float32 [n, series]; iterations from 100 on."""
    quantized = np.full((NUM, len(HISTORY_STATISTICS), len(SERIES)), np.nan, np.float32)
    quantized[:, HISTORY_STATISTICS.index("numel")] = 1
    for name, values in statistics.items():
        quantized[:, HISTORY_STATISTICS.index(name)] = values
    piece = HistoryPiece(
        last=NUM,
        attempts=np.zeros(NUM, np.int64) if attempts is None else attempts,
        iterations=np.arange(100, 100 + NUM),
        plain_series=[],
        plain=np.zeros((NUM, len(PLAIN_STATISTICS), 0), np.float32),
        quantized_series=SERIES,
        quantized=quantized,
    )
    key = SERIES[0]
    write_incident(folder, {139: [plain(key, [1.0])]}, [firing(key, 139)], statistics=[piece])
    return flightrec.open(folder)


def quiet(seed: int = 0) -> np.ndarray:
    return np.exp(0.1 * np.random.default_rng(seed).standard_normal((NUM, len(SERIES)))).astype(np.float32)


def test_healthy_wandering_is_no_change(tmp_path):
    with incident_of(tmp_path, {"amax": quiet(), "underflow_share": 0.01 * quiet(1)}) as incident:
        assert find_changes(incident.ranks[0], until=(0, 139)) == []


def test_jump_and_growth_are_told_in_causal_order_with_where_they_began(tmp_path):
    amax, error = quiet(), 0.03 * quiet(1)
    amax[34:, 1] *= 50
    amax[28:30, 0] = 1.2, 1.0  # a fall before it grows
    amax[30:, 0] *= 2.0 ** np.arange(1, 11)
    error[34:, 2] = 0.9
    with incident_of(tmp_path, {"amax": amax, "quantization_error": error}) as incident:
        changes = find_changes(incident.ranks[0], until=(0, 139))
        assert find_changes(incident.ranks[0], until=(0, 128)) == []
    told = [(c.iteration, c.key.layer, c.key.tensor, c.statistic, c.growing_iterations) for c in changes]
    assert told == [
        (129, "blocks.0.fc1", "activation", "amax", 10),
        (134, "blocks.1.fc1", "activation", "quantization_error", 0),
        (134, "blocks.0.fc1", "gradient", "amax", 0),
    ]
    assert changes[0].before == pytest.approx(1.0, rel=0.2)
    assert changes[0].after == amax[39, 0]
    assert "grew in each of the last 10 iterations" in changes[0].sentence
    assert "in iteration 134" in changes[1].sentence
    assert changes[1].before == pytest.approx(0.03, rel=0.2)


def test_what_came_back_and_other_attempts_are_no_change(tmp_path):
    amax = quiet()
    amax[20:25] *= 100
    amax[:10] *= 1e4
    attempts = (np.arange(NUM) >= 10).astype(np.int64)
    with incident_of(tmp_path, {"amax": amax}, attempts) as incident:
        assert find_changes(incident.ranks[0], until=(1, 139)) == []


def test_a_share_that_is_not_recorded_in_every_iteration(tmp_path):
    share = np.full((NUM, len(SERIES)), np.nan, np.float32)
    share[::2, 1] = 0.0
    share[36:, 1] = 0.6
    with incident_of(tmp_path, {"underflow_share": share}) as incident:
        (change,) = find_changes(incident.ranks[0], until=(0, 139))
    assert (change.iteration, change.before, change.after) == (136, 0.0, np.float32(0.6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=MIN_SAMPLES, max_size=40), st.floats(0.1, 5))
def test_a_change_point_is_the_start_of_a_last_stretch_that_is_unusual(samples, least):
    array = np.array(samples)
    start = change_point(array, least)
    middle = np.median(array[: len(array) // 2])
    if start is None:
        return
    assert 0 < start < len(array)
    assert (np.abs(array[start:] - middle) > least).all()
    wide = np.abs(array[: len(array) // 2] - middle).max()
    if abs(array[-1] - middle) > wide + 2 * least:
        assert 0 in screen(array[:, None].astype(np.float32), least)


def test_growth_counts_the_last_steps_up():
    assert growth(np.array([3.0, 1.0, 2.0, 3.0, 4.0])) == 3
    assert growth(np.array([1.0, 2.0, 2.0])) == 0
    assert growth(np.array([1.0, 2.0, 3.0])) == 2
