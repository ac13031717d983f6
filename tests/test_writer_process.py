from __future__ import annotations

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from writer_support import (
    AREA_BYTES,
    area,
    gone,
    incident_folders,
    introduce,
    make_layouts,
    send_incident,
    stopped,
    trainer,
    until,
    wait_for,
)
from writer_support import identity as make_identity

from flightrec.storage.read import open_incident
from flightrec.writer import shared
from flightrec.writer.client import MessageTooLargeError, WriterClient
from flightrec.writer.process import WriterLoop

NUM_RECORDS = 8


def check_tick(incident, tick: int) -> None:
    """Every record of the tick is there, bit for bit."""
    records = incident.records(iteration=100 + tick)
    assert len(records) == NUM_RECORDS
    data = area(tick, NUM_RECORDS)
    for number, record in enumerate(records):
        start = number * AREA_BYTES
        assert record.raw("high_precision").tobytes() == data[start : start + 256]
        assert record.raw("data").tobytes() == data[start + 256 : start + 384]
        assert record.raw("scale").tobytes() == data[start + 384 : start + 388]
        assert record.statistics["amax"] == tick + number / 1024


def written_ticks(incident) -> list[int]:
    """Ticks whose records all have bytes; asserts that no iteration is half there."""
    result = []
    for tick in range(3):
        absent = [bool(record.why_absent) for record in incident.records(iteration=100 + tick)]
        assert len(set(absent)) == 1
        if not absent[0]:
            result.append(tick)
    return result


@pytest.mark.parametrize(
    ("scenario", "status", "ticks", "ended"),
    [
        ("before_it_started", -signal.SIGKILL, [1, 2], "trainer died"),
        ("forked_child", -signal.SIGKILL, [1, 2], ""),
        ("no_pidfd", -signal.SIGKILL, [1, 2], ""),
        ("facts_committed", -signal.SIGKILL, [2], ""),
        ("os_exit", 3, [0, 1, 2], ""),
        ("normal_end", 0, [0, 1, 2], ""),
        ("exception", 5, [0, 1, 2], ""),
    ],
)
def test_a_dead_trainer_leaves_a_whole_incident(tmp_path, scenario, status, ticks, ended):
    """The trainer dies without ``end``: facts, staged tensors and index are committed, the rest is told as blind."""
    with trainer(scenario, tmp_path) as (process, (writer, *others)):
        assert process.wait(60) == status
        until(lambda: gone(writer), "the writer does not end")
        assert not any(gone(pid) for pid in others)  # whoever inherited the descriptors still lives
    (folder,) = incident_folders(tmp_path)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank00000.{folder.name}.facts.h5",
        f"rank00000.{folder.name}.tensors.h5",
        f"{folder.name}.index.h5",
    ]
    with open_incident(folder) as incident:
        assert incident.ended == ended  # an incident whose facts stood before the death cannot tell
        assert [entry.iteration for entry in incident.iterations] == [100, 101, 102]
        assert incident.trigger.record == 2 * NUM_RECORDS
        assert written_ticks(incident) == ticks
        for tick in ticks:
            check_tick(incident, tick)
        assert sorted(blind.iteration for blind in incident.blind) == [100 + n for n in range(3) if n not in ticks]
        if scenario not in {"normal_end", "exception"}:
            assert all("trainer died" in blind.reason for blind in incident.blind)


def test_exec_in_the_trainer_ends_the_recording(tmp_path):
    """The process number lives on, but the doorbell is closed."""
    with trainer("exec", tmp_path) as (process, (writer,)):
        until(lambda: gone(writer), "the writer does not end")
        assert process.poll() is None
    (folder,) = incident_folders(tmp_path)
    with open_incident(folder) as incident:
        assert incident.ended == "trainer died"
        assert written_ticks(incident) == [0, 1, 2]


def test_an_idle_writer_leaves_with_the_trainer_and_writes_nothing(tmp_path):
    directory = tmp_path / "never made"
    with trainer("idle", directory) as (process, (writer,)):
        assert process.wait(60) == -signal.SIGKILL
        until(lambda: gone(writer), "the writer does not end")
    assert not directory.exists()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_whole_incident(tmp_path, mode):
    layouts = make_layouts(NUM_RECORDS)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=1 << 20, mode=mode)
    introduce(client, layouts)
    send_incident(client, 5, layouts)
    done, seen = wait_for(client, "incident_done")
    assert [message.kind for message in seen] == ["ready", "facts_committed", "free", "free", "free", "incident_done"]
    assert done.header["error"] == ""
    assert done.header["num_written"] == done.header["num_records"] == 3 * NUM_RECORDS
    assert client.close(30)
    (folder,) = incident_folders(tmp_path)
    assert str(folder) == done.header["path"]
    assert folder.name == "run.0.0000102.nan.r0"
    with open_incident(folder) as incident:
        assert incident.ended == ""
        assert not incident.blind
        assert incident.trigger.key == layouts[0].key
        assert incident.config_text == "budget: none\n"
        assert incident.environment["argv"] == ["train.py"]
        assert incident.ranks[0].quantizers[0]["class_name"] == "torchao.Float8"
        assert written_ticks(incident) == [0, 1, 2]
        for tick in range(3):
            check_tick(incident, tick)


def test_signals_that_end_a_job_do_not_end_the_writer(tmp_path):
    layouts = make_layouts(NUM_RECORDS)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=1 << 20)
    assert client.wait_ready(60)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(client.pid, number)
    introduce(client, layouts)
    send_incident(client, 1, layouts)
    wait_for(client, "incident_done")
    os.kill(client.pid, signal.SIGTERM)
    assert client.alive
    assert client.close(30)


def test_the_writer_has_its_own_session_low_priority_and_no_torch(tmp_path):
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=1 << 20)
    assert client.wait_ready(60)
    assert os.getsid(client.pid) == client.pid
    assert os.getpriority(os.PRIO_PROCESS, client.pid) >= 5
    if os.path.exists("/proc/self/autogroup"):
        with open(f"/proc/{client.pid}/autogroup") as group:
            assert group.read().endswith("nice 10\n")
    with open(f"/proc/{client.pid}/maps") as maps:
        assert "torch" not in maps.read()
    inherited = [os.readlink(f"/proc/{client.pid}/fd/{fd}") for fd in (0, 1, 2)]
    assert inherited[0] == "/dev/null"
    assert all("memfd:flightrec-log" in name for name in inherited[1:])
    assert client.close(30)


def test_a_full_outbox_delays_answers_and_loses_none(tmp_path):
    """The trainer does not poll for a long time; every staged byte is freed in the end."""
    layouts = make_layouts(2)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=4 << 20, outbox_bytes=4096)
    introduce(client, layouts)
    for number in range(20):
        send_incident(client, number, layouts)
    until(lambda: len(list(tmp_path.glob("*/*.index.h5"))) == 20, "the writer waits for the trainer")
    kinds = []
    while kinds.count("incident_done") < 20:
        kinds += [message.kind for message in client.poll()]
        assert client.alive
        time.sleep(0.001)
    assert (kinds.count("facts_committed"), kinds.count("free")) == (20, 60)
    assert client.allocate(4 << 20) == 0
    assert client.close(30)


def test_a_full_inbox_never_blocks(tmp_path):
    """``send`` says no while the writer stands still, and goes on when there is room."""
    layouts = make_layouts(4)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=1 << 20, inbox_bytes=64 << 10)
    assert client.wait_ready(60)
    introduce(client, layouts)
    os.kill(client.pid, signal.SIGSTOP)
    until(lambda: stopped(client.pid), "the writer does not stop")
    sent = 0
    while client.send("unknown", {}, [np.zeros(100)]):
        sent += 1
    assert 0 < sent < 100
    assert not client.send("unknown", {}, [np.zeros(100)])
    with pytest.raises(MessageTooLargeError):
        client.send("unknown", {}, [np.zeros(1 << 20)])
    os.kill(client.pid, signal.SIGCONT)
    until(lambda: client.send("unknown", {}, [np.zeros(100)]), "the inbox stays full")
    send_incident(client, 1, layouts)
    _, seen = wait_for(client, "incident_done")
    assert sum(message.kind == "error" and "unknown" in message.header["message"] for message in seen) == sent + 1
    assert client.close(30)


def test_damaged_messages_are_dropped_and_told():
    memory = shared.SharedMemory.create(8192, 8192, 4096)
    ours, theirs = socket.socketpair()
    assert memory.inbox.put(shared.encode("config", {"text": "x", "environment": {}}))
    memory.words[8] += 8  # a position without its bytes
    loop = WriterLoop(memory, theirs)
    thread = threading.Thread(target=loop.run_in_thread)
    thread.start()
    answers = []
    until(lambda: answers.append(memory.outbox.get()) or any(a and a.kind == "error" for a in answers), "no error told")
    ours.close()
    thread.join(60)
    assert not thread.is_alive()
    assert memory.state == shared.STATE_STOPPED
    memory.close()
