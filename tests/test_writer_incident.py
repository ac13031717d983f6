"""What an incident holds, read back from disk: order, rows, firings, history, and what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from writer_support import (
    Writer,
    area,
    introduce,
    make_firing,
    make_layouts,
    only_incident,
    send_iteration,
    send_payload,
    statistics,
)

from flightrec.records import Key, Severity
from flightrec.storage.facts import Blind
from flightrec.writer import messages

NUM_RECORDS = 4


@pytest.fixture
def layouts():
    return make_layouts(NUM_RECORDS)


@pytest.fixture
def writer(tmp_path, layouts):
    writer = Writer(tmp_path)
    introduce(writer, layouts)
    return writer


def test_an_iteration_in_pieces_keeps_its_order(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100)))
    for part in ([2, 0], [3], [1]):
        values = statistics(0, NUM_RECORDS)[part]
        writer.send(
            *messages.iteration(1, 0, attempt=0, iteration=100, num_microbatches=2, layout_ids=part, statistics=values)
        )
    send_payload(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.end(1))
    with only_incident(tmp_path) as incident:
        records = incident.records()
        assert [record.key for record in records] == [layouts[n].key for n in (2, 0, 3, 1)]
        assert [record.statistics["amax"] for record in records] == [n / 1024 for n in (2, 0, 3, 1)]
        assert records[0].raw("data").tobytes() == area(0, NUM_RECORDS)[2 * 512 + 256 : 2 * 512 + 384]


def test_iterations_are_stored_in_time_order(tmp_path, writer):
    writer.send(*messages.open_incident(1, make_firing(102)))
    for tick in (2, 0, 1):
        send_iteration(writer, 1, tick, NUM_RECORDS, metrics={"grad_norm": float(tick)}, partial=tick == 2)
    writer.send(*messages.end(1))
    with only_incident(tmp_path) as incident:
        assert [entry.iteration for entry in incident.iterations] == [100, 101, 102]
        assert [entry.partial for entry in incident.iterations] == [False, False, True]
        assert [entry.metrics["grad_norm"] for entry in incident.iterations] == [0.0, 1.0, 2.0]


def test_firings_before_and_after_the_facts(tmp_path, writer, layouts):
    first = make_firing(100, layouts[1].key)
    writer.send(*messages.open_incident(1, first, [first]))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.firing(1, [make_firing(100, layouts[2].key, rule="early")]))
    writer.send(*messages.facts_end(1, [make_firing(100, layouts[3].key, rule="at the end")]))
    writer.send(*messages.firing(1, [make_firing(100, layouts[0].key, rule="late")]))
    writer.send(*messages.firing(1, [make_firing(100, Key("elsewhere", "output"), rule="unknown record")]))
    writer.send(*messages.end(1))
    with only_incident(tmp_path) as incident:
        found = {firing.rule: firing.record for firing in incident.firings}
        assert found == {"nan": 1, "early": 2, "at the end": 3, "late": 0, "unknown record": -1}


def test_history_extra_and_blind_are_stored(tmp_path, writer):
    history = {"loss": (np.arange(3), np.array([1.0, np.nan, 3.0])), "amax": (np.arange(2), np.ones((2, 5)))}
    extra = {"stack": "line 1\nline 2", "bad\0": "a\ud800", "large": 2**63}
    writer.send(*messages.open_incident(1, make_firing(100), history=history, extra=extra))
    send_iteration(writer, 1, 0, NUM_RECORDS, blind="no memory")
    writer.send(*messages.facts_end(1, blind=[Blind(0, 100, "fc", "output", "unsupported")]))
    writer.send(*messages.end(1, [Blind(0, 100, "", "", "gone")]))
    with only_incident(tmp_path) as incident:
        assert np.array_equal(incident.history["loss"][1], [1.0, np.nan, 3.0], equal_nan=True)
        assert incident.history["amax"][1].shape == (2, 5)
        assert incident.environment["stack"] == "line 1\nline 2"
        assert incident.environment["large"] == 2**63
        reasons = {blind.reason for blind in incident.blind}
        assert {"unsupported", "gone", "no memory"} <= reasons
        assert all("never reached" not in reason for reason in reasons)


def test_pieces_in_any_order_make_whole_records(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100)))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.facts_end(1))
    data = area(0, NUM_RECORDS)
    writer.staging[: len(data)] = data
    for start, stop in [(600, 700), (0, 300), (1024, len(data)), (700, 1024), (300, 600)]:
        writer.send(*messages.payload(1, 0, [(0, start, start, stop - start)], last=stop == 600))
    writer.send(*messages.end(1))
    assert writer.last("incident_done")["num_written"] == NUM_RECORDS
    with only_incident(tmp_path) as incident:
        for number, record in enumerate(incident.records()):
            at = number * 512
            assert record.raw("high_precision").tobytes() == data[at : at + 256]
            assert record.raw("data").tobytes() == data[at + 256 : at + 384]
            assert record.raw("scale").tobytes() == data[at + 384 : at + 388]


def test_missing_records_are_named(tmp_path, writer, layouts):
    """One tick without any payload, one of which only a part arrived."""
    writer.send(*messages.layouts(make_layouts(NUM_RECORDS + 2, segment=1)[NUM_RECORDS:]))
    writer.send(*messages.open_incident(1, make_firing(100)))
    for tick in (0, 1):
        send_iteration(writer, 1, tick, NUM_RECORDS + 2)
    writer.send(*messages.facts_end(1))
    send_payload(writer, 1, 1, NUM_RECORDS)
    writer.send(*messages.end(1))
    assert writer.last("incident_done")["num_written"] == NUM_RECORDS
    with only_incident(tmp_path) as incident:
        blind = {(row.iteration, row.layer, row.tensor) for row in incident.blind}
        assert blind == {(100, "", ""), (101, "layers.2.fc", "activation")}
        assert {row.iteration: row.reason for row in incident.blind} == {
            100: "its bytes never reached the writer",
            101: "its bytes were not staged with the rest of the iteration",
        }
        assert [bool(r.why_absent) for r in incident.records(iteration=101)] == [False] * 4 + [True] * 2


def test_what_does_not_belong_is_told_not_lost(tmp_path, writer, layouts):
    """Unknown layouts, segments that end too early, an unknown tick, an iteration after the facts."""
    writer.send(*messages.open_incident(1, make_firing(100)))
    ids, rows = [0, 77, 1], statistics(0, NUM_RECORDS)[:3]
    writer.send(
        *messages.iteration(1, 0, attempt=0, iteration=100, num_microbatches=2, layout_ids=ids, statistics=rows)
    )
    writer.send(*messages.facts_end(1))
    writer.send(*messages.payload(1, 0, [(0, 0, 0, 700), (9, 0, 0, 4096)], last=True))
    writer.send(*messages.payload(1, 55, [(0, 0, 4096, 100)], last=True))
    send_iteration(writer, 1, 1, NUM_RECORDS)
    writer.send(*messages.end(1))
    assert [a.header["offsets"] for a in writer.answers if a.kind == "free"] == [[0, 0], [4096]]
    assert writer.last("incident_done")["error"] == ""
    with only_incident(tmp_path) as incident:
        records = incident.records()
        assert [record.key for record in records] == [layouts[0].key, layouts[1].key]
        assert [record.statistics["amax"] for record in records] == [0.0, 2 / 1024]
        assert [bool(record.why_absent) for record in records] == [False, True]
        reasons = " | ".join(blind.reason for blind in incident.blind)
        assert "1 records whose layout never reached the writer" in reasons
        assert "arrived after the facts" in reasons


def test_the_gravest_firing_names_an_incident_that_ends_early(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100, rule="first", severity=Severity.WARNING)))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.firing(1, [make_firing(100, layouts[2].key, rule="graver")]))
    writer.assembler.finish()
    with only_incident(tmp_path) as incident:
        assert incident.trigger.rule == "graver"
        assert incident.incident_id == "run.0.0000100.graver.r0"
        assert incident.ended == "trainer died"


def test_a_graver_trigger_may_come_with_the_end_of_the_facts(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100, rule="first", severity=Severity.WARNING)))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.facts_end(1, trigger=make_firing(100, layouts[2].key, rule="graver")))
    writer.send(*messages.end(1))
    with only_incident(tmp_path) as incident:
        assert (incident.trigger.rule, incident.trigger.record) == ("graver", 2)
