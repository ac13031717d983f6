"""Which records belong to a fault's way, and the statistics around the blamed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from incident_support import FAULTY_ITERATION, FIRST_ITERATION, SPOILED, layouts, write_incident

from flightrec.analysis.blame import blame
from flightrec.reports.way import NUM_NEIGHBOURS, around, steps
from flightrec.storage.read import Incident, open_incident


@pytest.fixture
def incident(incident_folder: Path) -> Incident:
    with open_incident(incident_folder) as opened:
        yield opened


def test_way_keeps_blame_order(incident: Incident) -> None:
    found = list(steps(incident, blame(incident)))
    assert [step["sequence"] for step in found] == list(range(SPOILED, len(layouts())))
    assert all(step["iteration"] == FAULTY_ITERATION for step in found)
    assert found[0]["reasons"] == ["nonfinite", "rule nan"]
    assert found[1]["reasons"] == ["nonfinite"]


def test_finite_records_are_on_the_way_when_their_amax_grew(tmp_path: Path) -> None:
    with open_incident(write_incident(tmp_path, amax_grows=True)) as incident:
        found = list(steps(incident, blame(incident)))
    assert (found[0]["sequence"], found[0]["reasons"]) == (0, ["amax"])


def test_around_goes_through_time_and_neighbours(incident: Incident) -> None:
    rows = list(around(incident, blame(incident)))
    through = [row for row in rows if row["role"] == "through_time"]
    beside = [row for row in rows if row["role"] == "neighbour"]
    assert [row["iteration"] for row in through] == list(range(FIRST_ITERATION, FAULTY_ITERATION + 1))
    assert {row["key"] for row in through} == {layouts()[SPOILED].key}
    assert [row["sequence"] for row in beside] == list(range(SPOILED + NUM_NEIGHBOURS + 1))


def test_statistics_are_derived_from_counts(incident: Incident) -> None:
    rows = [row for row in around(incident, blame(incident)) if row["role"] == "through_time"]
    assert rows[0]["rms"] == pytest.approx((8 / 32) ** 0.5)
    assert rows[2]["rms"] == pytest.approx((8 / 30) ** 0.5)
    assert (rows[2]["nan"], rows[2]["inf"]) == (1, 1)
    assert rows[0]["saturated_share"] is None


def test_nothing_without_findings(incident: Incident) -> None:
    assert list(steps(incident, [])) == []
    assert list(around(incident, [])) == []
