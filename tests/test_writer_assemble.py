"""The writer's state machine, fed with real messages; what it leaves is read back from disk."""

from __future__ import annotations

import os
import resource
import subprocess

import pytest
from writer_support import (
    Writer,
    area,
    incident_folders,
    introduce,
    make_firing,
    make_layouts,
    only_incident,
    send_incident,
    send_iteration,
    send_payload,
    until,
    wait_for,
)
from writer_support import identity as make_identity

from flightrec.storage.read import open_incident
from flightrec.writer import messages
from flightrec.writer.client import WriterClient

NUM_RECORDS = 4


@pytest.fixture
def layouts():
    return make_layouts(NUM_RECORDS)


@pytest.fixture
def writer(tmp_path, layouts):
    writer = Writer(tmp_path)
    introduce(writer, layouts)
    return writer


def kinds(seen, kind):
    return [message for message in seen if message.kind == kind]


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
    layouts = make_layouts(150)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=4 << 20)
    introduce(client, layouts)
    assert client.wait_ready(60)
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (320 << 10, resource.RLIM_INFINITY))
    send_incident(client, 1, layouts)
    done, seen = wait_for(client, "incident_done")
    until(lambda: seen.extend(client.poll()) or len(kinds(seen, "free")) == 3, "staging is not freed")
    assert [error.header["stage"] for error in kinds(seen, "error")] == ["tensors"]
    assert "tensors file" in done.header["error"]
    (folder,) = incident_folders(tmp_path)
    assert not list(folder.glob("*tensors*"))
    assert not list(folder.glob(".*"))
    with open_incident(folder) as incident:
        assert len(incident.records()) == 450
        assert all(record.why_absent for record in incident.records())
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    send_incident(client, 2, layouts)
    done, _ = wait_for(client, "incident_done", 2)
    assert done.header["error"] == ""
    assert done.header["num_written"] == 450
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
