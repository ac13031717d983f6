"""From a verdict to the writer: slots are held, copied one by one, released, and what cannot be kept is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flightrec

MIB = 1 << 20


def run(directory, *, staging="64 MiB", sizes=(1 * MIB,), iterations=3, after=1, steps=30, faults=(), **config):
    """Records float32 tensors of ``sizes`` bytes; the value is the iteration. Returns the slots at the end."""
    made = {
        "select": [{"tensors": ["output"]}],
        "ring": {"iterations": iterations, "memory": "512 MiB"},
        "triggers": [{"kind": "nonfinite"}],
        "incident": {"after": after, "cooldown": 0, "limit": 100, "staging_memory": staging},
        **config,
    }
    with flightrec.Recorder(made, directory=directory) as recorder:
        for step in range(steps):
            for index, num_bytes in enumerate(sizes):
                x = torch.full((num_bytes // 4,), float(step))
                if step in faults and index == 0:
                    x[5] = math.nan
                recorder.record(f"layer{index}", "output", high_precision=x)
            recorder.step()
        slots = recorder._capture.engine.ring.slots
        return slots.decode(slots.state)


def incidents(directory):
    found = [flightrec.open(folder) for folder in directory.iterdir()]
    return sorted(found, key=lambda incident: incident.trigger.iteration)


def test_evidence_is_not_lost_for_want_of_slots_when_faults_follow_each_other(tmp_path):
    faults = (6, 8, 10, 12, 14)
    run(tmp_path, faults=faults, triggers=[{"kind": "nonfinite", "rearm": 1}], iterations=4)
    found = incidents(tmp_path)
    told = {firing.iteration for incident in found for firing in incident.firings}
    assert told == set(faults)
    for incident in found:
        assert not incident.blind
        check_values(incident)
    kept = {entry.iteration for incident in found for entry in incident.iterations}
    assert set(range(3, 16)) <= kept


def check_values(incident):
    for record in incident.records(tensor="output"):
        values = record.high_precision
        assert values is not None, record.why_absent
        expected = np.full(record.shape, float(record.iteration), dtype="f4")
        where = ~np.isnan(values)
        assert np.array_equal(values[where], expected[where])


@pytest.mark.parametrize("staging", ["64 MiB", "2 MiB"])
def test_an_iteration_larger_than_the_staging_memory_goes_in_pieces(staging, tmp_path):
    run(tmp_path, staging=staging, sizes=(1 * MIB, 1 * MIB, 1 * MIB, 1 * MIB), faults=(9,))
    (incident,) = incidents(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [7, 8, 9, 10]
    check_values(incident)


def test_records_larger_than_the_staging_memory_are_written_whole(tmp_path):
    """Each goes through in pieces, as the writer gives the memory back; the ring is 20 times as large."""
    run(tmp_path, staging="2 MiB", sizes=(MIB // 2, 8 * MIB + 4), faults=(9,))
    (incident,) = incidents(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [7, 8, 9, 10]
    assert not incident.blind
    assert len(incident.records(layer="layer1")) == 4
    check_values(incident)


def test_faults_in_quick_succession_are_all_told_and_no_iteration_is_torn(tmp_path):
    faults = (6, 16, 18, 27)
    run(tmp_path, faults=faults, triggers=[{"kind": "nonfinite", "rearm": 1}], after=0)
    found = incidents(tmp_path)
    assert [incident.trigger.iteration for incident in found] == list(faults)
    for incident, fault in zip(found, faults, strict=True):
        assert [entry.iteration for entry in incident.iterations] == [fault - 2, fault - 1, fault]
        for record in incident.records(tensor="output"):
            if record.high_precision is None:  # its slot went to the incident before
                assert any(entry.iteration == record.iteration and entry.reason for entry in incident.blind)
        faulty = incident.records(tensor="output", iteration=fault)
        assert [np.isnan(record.high_precision[5]) for record in faulty] == [True]
    assert not any(incident.blind for incident in (found[0], found[1]))


def test_slots_are_given_back_so_that_later_incidents_are_whole(tmp_path):
    faults = tuple(range(5, 100, 15))
    run(tmp_path, steps=110, faults=faults, iterations=4)
    found = incidents(tmp_path)
    assert len(found) == len(faults)
    for incident, fault in zip(found, faults, strict=True):
        assert [entry.iteration for entry in incident.iterations] == list(range(fault - 3, fault + 2))
        assert not incident.blind
        check_values(incident)


def test_what_no_incident_may_be_written_for_does_not_keep_slots(tmp_path):
    faults = (5, 12, 19, 26)
    made = {"triggers": [{"kind": "nonfinite", "rearm": 2}, {"kind": "manual"}]}
    with_limit = {"incident": {"after": 1, "cooldown": 0, "limit": 1, "staging_memory": "64 MiB"}}
    slots = run(tmp_path, faults=faults, **made, **with_limit)
    (incident,) = incidents(tmp_path)
    assert incident.trigger.iteration == 5
    assert not any(slots.held)


def test_a_fault_in_the_last_iteration_is_written_by_close(tmp_path):
    run(tmp_path, steps=10, faults=(9,), after=2)
    (incident,) = incidents(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [7, 8, 9]
    check_values(incident)


def test_a_graver_fault_lengthens_an_open_incident(tmp_path):
    spike = {"kind": "amax_spike", "min_samples": 1, "min_numel": 1, "confirm": 1}
    made = {
        "select": [{"tensors": ["activation"]}],
        "ring": {"iterations": 2},
        "triggers": [spike, {"kind": "nonfinite"}],
        "incident": {"after": 2, "cooldown": 0},
    }
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for step in range(20):
            value = {8: 100.0, 10: math.nan}.get(step, 1.0)
            recorder.record("x", "activation", high_precision=torch.tensor([value]))
            recorder.step()
    (incident,) = incidents(tmp_path)
    assert [entry.iteration for entry in incident.iterations] == [7, 8, 9, 10, 11, 12]
    assert [(f.kind, f.iteration) for f in incident.firings] == [("amax_spike", 8), ("nonfinite", 10)]
    assert incident.trigger.kind == "nonfinite"
