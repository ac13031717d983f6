"""The writer's state machine, fed with real messages; what it leaves is read back from disk."""

from __future__ import annotations

import os
import resource
import subprocess

import numpy as np
import pytest
from writer_support import (
    area,
    incident_folders,
    introduce,
    make_firing,
    make_layouts,
    send_incident,
    send_iteration,
    send_payload,
    statistics,
    wait_for,
)
from writer_support import identity as make_identity

from flightrec.records import Key
from flightrec.storage.facts import Blind
from flightrec.storage.read import open_incident
from flightrec.writer import messages, shared
from flightrec.writer.assemble import Assembler
from flightrec.writer.client import WriterClient

NUM_RECORDS = 4


class Writer:
    """An ``Assembler`` without a process; has the part of ``WriterClient`` that sends."""

    alive = True

    def __init__(self, directory, quota=None, staging_bytes=1 << 20):
        self.answers = []
        self.staging = memoryview(bytearray(staging_bytes))
        self.allocated = 0
        self.assembler = Assembler(self.staging, lambda kind, header: self.answers.append(shared.Message(kind, header)))
        self.send("start", {"directory": str(directory), "identity": make_identity(), "disk_quota_bytes": quota})

    def send(self, kind, header, blobs=()):
        self.assembler.handle(shared.decode(b"".join(shared.encode(kind, header, blobs))))
        return True

    def allocate(self, num_bytes):
        offset, self.allocated = self.allocated, self.allocated + num_bytes
        return offset

    def kinds(self):
        return [answer.kind for answer in self.answers]

    def last(self, kind):
        return [answer.header for answer in self.answers if answer.kind == kind][-1]


@pytest.fixture
def layouts():
    return make_layouts(NUM_RECORDS)


@pytest.fixture
def writer(tmp_path, layouts):
    writer = Writer(tmp_path)
    introduce(writer, layouts)
    return writer


def only_incident(directory):
    (folder,) = incident_folders(directory)
    return open_incident(folder)


def test_payload_before_the_facts_waits_for_them(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100)))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    send_payload(writer, 1, 0, NUM_RECORDS)
    assert writer.kinds() == []
    assert incident_folders(tmp_path) == []
    writer.send(*messages.facts_end(1))
    assert writer.kinds() == ["facts_committed", "free"]
    writer.send(*messages.end(1))
    with only_incident(tmp_path) as incident:
        assert not any(record.why_absent for record in incident.records())


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
        assert [bool(r.why_absent) for r in incident.records(iteration=101)] == [False] * 4 + [True] * 2


def test_what_does_not_belong_is_told_not_lost(tmp_path, writer, layouts):
    """Unknown layouts, segments that end too early, an unknown tick, an iteration after the facts."""
    writer.send(*messages.open_incident(1, make_firing(100)))
    ids, rows = [0, 77, 1], statistics(0, NUM_RECORDS)[:3]
    writer.send(
        *messages.iteration(1, 0, attempt=0, iteration=100, num_microbatches=2, layout_ids=ids, statistics=rows)
    )
    writer.send(*messages.facts_end(1))
    writer.send(*messages.payload(1, 0, [(0, 0, 700), (9, 0, 4096)], last=True))
    writer.send(*messages.payload(1, 55, [(0, 4096, 100)], last=True))
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


def test_discard_frees_and_leaves_nothing(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100)))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    send_payload(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.discard(1))
    assert writer.kinds() == ["free", "discarded"]
    assert incident_folders(tmp_path) == []
    writer.send(*messages.facts_end(1))
    writer.send(*messages.end(1))
    assert writer.kinds() == ["free", "discarded"]


def test_discard_after_the_facts_keeps_them(tmp_path, writer):
    writer.send(*messages.open_incident(1, make_firing(100)))
    send_iteration(writer, 1, 0, NUM_RECORDS)
    writer.send(*messages.facts_end(1))
    writer.send(*messages.discard(1))
    (folder,) = incident_folders(tmp_path)
    assert [path.name for path in folder.iterdir()] == [f"rank00000.{folder.name}.facts.h5"]
    with open_incident(folder) as incident:
        assert len(incident.records()) == NUM_RECORDS


def test_same_name_again_never_overwrites(tmp_path, writer, layouts):
    for number in range(3):
        send_incident(writer, number, layouts)
        writer.allocated = 0
    names = [folder.name for folder in incident_folders(tmp_path)]
    assert names == ["run.0.0000102.nan.r0", "run.0.0000102.nan.r0.2", "run.0.0000102.nan.r0.3"]
    for folder in incident_folders(tmp_path):
        with open_incident(folder) as incident:
            assert incident.incident_id == folder.name


def test_interleaved_incidents_do_not_mix(tmp_path, writer, layouts):
    for number in (1, 2):
        writer.send(*messages.open_incident(number, make_firing(100 + number, rule=f"rule{number}")))
        send_iteration(writer, number, number, NUM_RECORDS)
    for number in (2, 1):
        writer.send(*messages.facts_end(number))
        send_payload(writer, number, number, NUM_RECORDS)
    for number in (1, 2):
        writer.send(*messages.end(number))
    for number, folder in enumerate(incident_folders(tmp_path), 1):
        with open_incident(folder) as incident:
            assert incident.trigger.rule == f"rule{number}"
            data = area(number, NUM_RECORDS)
            assert incident.records()[3].raw("data").tobytes() == data[3 * 512 + 256 : 3 * 512 + 384]


def test_a_broken_message_concerns_only_its_incident(tmp_path, writer, layouts):
    writer.send(*messages.open_incident(1, make_firing(100)))
    writer.send(*messages.open_incident(2, make_firing(101, rule="other")))
    writer.send("iteration", {"incident": 1})
    writer.send("layouts", {"layouts": [{"layout_id": "nonsense"}]})
    assert [(a.kind, a.header["incident"]) for a in writer.answers] == [("error", 1), ("error", -1)]
    send_iteration(writer, 2, 0, NUM_RECORDS)
    writer.send(*messages.end(2))
    assert writer.kinds()[-2:] == ["facts_committed", "incident_done"]


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_directory_that_cannot_be_used(tmp_path, layouts, obstacle):
    """The incident fails, its staging is freed, and the next one works once the directory does."""
    directory = tmp_path / "incidents"
    if obstacle == "file":
        directory.write_text("in the way")
    elif os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    else:
        directory.mkdir(mode=0o500)
    writer = Writer(directory)
    introduce(writer, layouts)
    send_incident(writer, 1, layouts)
    assert writer.kinds().count("free") == 3
    assert writer.last("error")["incident"] == 1
    assert "incident_done" not in writer.kinds()
    directory.unlink() if obstacle == "file" else directory.chmod(0o700)
    send_incident(writer, 2, layouts)
    assert writer.last("incident_done")["error"] == ""


def test_file_size_limit_then_a_second_incident(tmp_path):
    """Writing fails in the middle of the tensors: facts stand, nothing half has a final name, the next one is whole."""
    layouts = make_layouts(400)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=4 << 20)
    introduce(client, layouts)
    assert client.wait_ready(60)
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (640 << 10, resource.RLIM_INFINITY))
    send_incident(client, 1, layouts)
    done, seen = wait_for(client, "incident_done")
    errors = [message.header for message in seen if message.kind == "error"]
    assert [error["stage"] for error in errors] == ["tensors"]
    assert "tensors file" in done.header["error"]
    assert sum(message.kind == "free" for message in seen) == 3
    (folder,) = incident_folders(tmp_path)
    assert not list(folder.glob("*tensors*"))
    assert not list(folder.glob(".*"))
    with open_incident(folder) as incident:
        assert len(incident.records()) == 1200
        assert all(record.why_absent for record in incident.records())
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    send_incident(client, 2, layouts)
    done, _ = wait_for(client, "incident_done", 2)
    assert done.header["error"] == ""
    assert done.header["num_written"] == 1200
    assert client.close(30)


def test_even_the_facts_do_not_fit(tmp_path, layouts):
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=1 << 20)
    introduce(client, layouts)
    assert client.wait_ready(60)
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    send_incident(client, 1, layouts)
    error, _ = wait_for(client, "error", 1)
    assert error.header["stage"] == "facts_end"
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    send_incident(client, 2, layouts)
    done, _ = wait_for(client, "incident_done", 2)
    assert done.header["error"] == ""
    assert client.allocate(1 << 20) == 0
    assert incident_folders(tmp_path) == [tmp_path / done.header["incident_id"]]
    assert client.close(30)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_keeps_the_facts_and_frees(small_disk, layouts):
    """Free space is looked at first: no tensors then, and the incident says why."""
    (small_disk / "filler").write_bytes(bytes(4 << 20))
    writer = Writer(small_disk / "incidents")
    introduce(writer, layouts)
    send_incident(writer, 1, layouts)
    assert "free in" in writer.last("incident_done")["error"]
    assert writer.kinds().count("free") == 3
    with only_incident(small_disk / "incidents") as incident:
        assert any("bytes needed" in blind.reason for blind in incident.blind)
        assert all(record.why_absent for record in incident.records())
    (small_disk / "filler").unlink()
    send_incident(writer, 2, layouts)
    assert writer.last("incident_done")["error"] == ""


def test_the_quota_deletes_old_ones_of_the_same_rule_but_never_the_first(tmp_path, layouts):
    reserve = 16 << 20
    writer = Writer(tmp_path, quota=reserve + 240_000)
    introduce(writer, layouts)
    send_incident(writer, 0, layouts, rule="other")
    for number in range(1, 7):
        send_incident(writer, number, layouts)
    names = [folder.name for folder in incident_folders(tmp_path)]
    assert "run.0.0000102.other.r0" in names
    assert "run.0.0000102.nan.r0" in names  # the first of its rule
    assert len(names) < 7
    assert "run.0.0000102.nan.r0.2" not in names
    assert writer.last("incident_done")["error"] == ""
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= reserve + 240_000


def test_a_quota_that_nothing_fits_into_keeps_the_facts(tmp_path, layouts):
    writer = Writer(tmp_path, quota=1000)
    introduce(writer, layouts)
    send_incident(writer, 1, layouts)
    assert "disk_quota" in writer.last("incident_done")["error"]
    with only_incident(tmp_path) as incident:
        assert len(incident.records()) == 3 * NUM_RECORDS


def test_finish_commits_all_open_incidents(tmp_path, writer, layouts):
    for number in (1, 2):
        writer.send(*messages.open_incident(number, make_firing(100, rule=f"rule{number}")))
        send_iteration(writer, number, 0, NUM_RECORDS)
    send_payload(writer, 2, 0, NUM_RECORDS)
    writer.assembler.finish("the reason")
    for folder, absent in zip(incident_folders(tmp_path), (True, False), strict=True):
        with open_incident(folder) as incident:
            assert incident.ended == "the reason"
            assert {bool(record.why_absent) for record in incident.records()} == {absent}
    writer.assembler.finish("again")
    assert len(incident_folders(tmp_path)) == 2
