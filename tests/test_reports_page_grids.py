"""Heat maps: history and records in one grid, made small by the largest of each group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report_support import FAULTY, LAYERS, history, write_report_incident
from storage_samples import firing, plain, write_incident

from flightrec.records import Key
from flightrec.reports.page import grids, measures
from flightrec.storage.read import open_incident
from flightrec.storage.schema import HISTORY_STATISTICS


@pytest.fixture
def maps(tmp_path: Path) -> dict[str, object]:
    with open_incident(write_report_incident(tmp_path)) as incident:
        return grids.heat_maps(incident.ranks[0])


def test_history_and_records_share_a_grid(maps: dict) -> None:
    assert [row["name"] for row in maps["rows"]] == [*LAYERS, "head"]
    assert maps["columns"] == [str(iteration) for iteration in range(FAULTY - 40, FAULTY + 1)]
    assert (maps["merged_rows"], maps["merged_columns"]) == (0, 0)
    assert list(maps["maps"]) == list(measures.MEASURES)
    amax = maps["maps"]["amax"]["activation"]
    past = history(LAYERS).quantized[:, HISTORY_STATISTICS.index("amax"), 1]
    assert np.allclose(amax[1][:39], past[:39], rtol=1e-3)  # the 40th iteration is recorded too: the larger counts
    assert amax[1][40] == 900
    assert maps["maps"]["nonfinite"]["activation"][1][38:] == [0, 0, 3]  # NaN and Inf, and a NaN code
    assert maps["maps"]["amax"]["output"][4][40] is None


def test_many_layers_and_iterations_are_merged_by_their_largest(tmp_path: Path) -> None:
    layers = [f"layer.{number}" for number in range(200)]
    samples = {
        iteration: [
            plain(Key(layer, "output", microbatch=0), [1.0], amax=float(place)) for place, layer in enumerate(layers)
        ]
        for iteration in (1, 2)
    }
    folder = write_incident(tmp_path, samples, [firing(None, 2)], history={}, statistics=[_long_history(400)])
    with open_incident(folder) as incident:
        found = grids.heat_maps(incident.ranks[0])
    assert found["merged_rows"] == 201
    assert found["merged_columns"] == 400
    assert len(found["rows"]) <= grids.MAX_ROWS
    assert len(found["columns"]) <= grids.MAX_COLUMNS
    assert [layer for row in found["rows"] for layer in row["layers"]] == [*layers, "head"]
    assert found["rows"][0]["name"] == "layer.0 to layer.2 (3)"
    last = 0  # iterations 1 to 5
    assert [row[last] for row in found["maps"]["amax"]["output"]][:2] == [2, 5]
    assert found["columns"][-grids.NUM_SINGLE :] == [str(n) for n in range(353, 401)]
    assert found["columns"][0] == "1 to 5"


def _long_history(samples: int):
    piece = history((), samples)
    return type(piece)(**{**vars(piece), "iterations": np.arange(1, samples + 1)})


def test_measures_of_records_are_the_formulas_of_the_format(tmp_path: Path) -> None:
    with open_incident(write_report_incident(tmp_path)) as incident:
        table = incident.ranks[0].records
        found = measures.of_records(table)
        row = int(np.flatnonzero(table["nan_count"] == 1)[0])
    assert found["nonfinite"][row] == 3
    assert found["error"][row] == pytest.approx(np.sqrt(0.5 / table["sum_of_squares"][row]))
    assert found["saturated"][row] == 2 / 128
    assert found["zero"][row] == 1 / 128


def test_numbers_are_short_and_never_what_json_lacks() -> None:
    assert measures.rounded(1 / 3) == 0.3333
    assert measures.rounded(7.0) == 7
    assert measures.rounded(1e300) == 1e300
    assert measures.rounded(float("nan")) is None
    assert measures.rounded_list(np.array([1.5, np.inf])) == [1.5, None]
