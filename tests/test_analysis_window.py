from __future__ import annotations

from pathlib import Path

import pytest
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.analysis.window import find_jumps
from flightrec.records import Key
from flightrec.storage.read import open_incident


def found(folder: Path, **columns: list[float]) -> list[tuple[str, int, float, float, int]]:
    """Changes of ``fc activation`` whose statistics take these values in iterations 3, 4, ...; a calm series beside."""
    length = len(next(iter(columns.values())))
    samples = {}
    for place in range(length):
        values = {name: column[place] for name, column in columns.items()}
        usual = {"numel": 100, "nan_count": 0, "amax": 1.0, "zero_count": 0, "quantized_numel": 100}
        keys = [Key("fc", "activation", microbatch=0), Key("calm", "activation", microbatch=0)]
        told = [usual | values, usual]
        samples[3 + place] = [Sample(key, {}, statistics(**one)) for key, one in zip(keys, told, strict=True)]
    write_incident(folder, samples, [firing(None, 3, kind="manual")], index=False)
    with open_incident(folder) as incident:
        changes = find_jumps(incident.ranks[0], until=(0, 2 + length))
    assert all(change.key == Key("fc", "activation") for change in changes)
    return [(c.statistic, c.iteration, c.before, c.after, c.growing_iterations) for c in changes]


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        ([4, 39, 372, 3412], [("amax", 3, 4, 3412, 3)]),  # grows in each iteration
        ([1, 1, 200, 200], [("amax", 5, 1, 200, 0)]),  # jumps
        ([1, 2, 3e9], [("amax", 5, 2, 3e9, 0)]),  # growth before a jump is wandering
        ([1, 2, 4, 8], []),  # too little in all
        ([8, 1, 5, 20], [("amax", 4, 1, 20, 2)]),  # from where it grows
        ([1, 30, 30, 31], []),  # has come to rest
        ([1, 1.1, 17], []),  # one step
    ],
)
def test_amax(amax: list[float], expected, tmp_path: Path) -> None:
    assert found(tmp_path, amax=amax) == expected


@pytest.mark.parametrize(
    ("column", "statistic"),
    [
        ("clipped_count", "clipped_share"),
        ("quantized_saturated_count", "saturated_share"),
        ("underflow_count", "underflow_share"),
    ],
)
def test_shares_that_rise(column: str, statistic: str, tmp_path: Path) -> None:
    assert found(tmp_path, **{column: [1, 2, 60]}) == [(statistic, 5, 0.02, 0.6, 0)]


def test_a_share_that_wanders_is_no_change(tmp_path: Path) -> None:
    assert found(tmp_path, clipped_count=[1, 4, 2]) == []


def test_the_error_that_rises_is_relative(tmp_path: Path) -> None:
    change = ("quantization_error", 4, 0.1, 0.5, 0)
    assert found(tmp_path, squared_error=[1, 25], sum_of_squares=[100, 100]) == [change]


def test_one_iteration_tells_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, amax=[1e9]) == []
