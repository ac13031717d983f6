from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from writer_support import gone, incident_folders, introduce, make_layouts, send_incident, until, wait_for
from writer_support import identity as make_identity

from flightrec.errors import WriterError
from flightrec.storage.read import open_incident
from flightrec.writer import launch, messages, shared
from flightrec.writer.client import MessageTooLargeError, WriterClient


@pytest.fixture
def client(tmp_path):
    client = WriterClient.start(tmp_path / "incidents", make_identity(), staging_bytes=1 << 20)
    yield client
    client.close(30)


def test_start_does_not_wait_and_ready_comes(client):
    assert client.alive
    assert client.mode == "process"
    assert client.pid != os.getpid()
    assert client.staging.nbytes == 1 << 20
    assert client.wait_ready(60)
    message, _ = wait_for(client, "ready")
    assert message.header == {"pid": client.pid}


def test_close_stops_everything_and_is_idempotent(client):
    descriptors = len(os.listdir("/proc/self/fd"))
    assert client.close(30)
    assert client.close(30)
    assert not client.alive
    assert gone(client.pid)
    assert not client.send("config", {"text": "", "environment": {}})
    assert client.allocate(1) is None
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2  # doorbell and memory


def test_answers_that_came_during_close_are_not_lost(client, tmp_path):
    layouts = make_layouts(2)
    introduce(client, layouts)
    send_incident(client, 1, layouts)
    assert client.close(30)
    assert [message.kind for message in client.poll()][-1] == "incident_done"
    assert client.poll() == []


def test_free_answers_return_staging_memory(client):
    layouts = make_layouts(2)
    introduce(client, layouts)
    first = client.allocate(512 << 10)
    assert client.allocate(513 << 10) is None
    client.release(first)
    send_incident(client, 1, layouts)
    wait_for(client, "incident_done")
    assert client.allocate(1 << 20) == 0


def test_payload_of_an_unknown_incident_is_freed(client):
    offset = client.allocate(1 << 20)
    assert client.send(*messages.payload(99, 0, [(0, 0, offset, 1 << 20)], last=True))
    message, _ = wait_for(client, "free")
    assert message.header == {"incident": 99, "tick": 0, "offsets": [offset]}
    assert client.allocate(1 << 20) == offset


def test_a_dead_writer_is_seen_and_never_kills_the_trainer(client):
    assert client.wait_ready(60)
    assert client.send("nonsense", {})
    wait_for(client, "error")
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a trainer that did not leave it ignored
    try:
        os.kill(client.pid, signal.SIGKILL)
        until(lambda: not client.alive, "its death is not seen")
        for _ in range(3):
            client.send("config", {"text": "x", "environment": {}})
        assert not client.close(5)
    finally:
        signal.signal(signal.SIGPIPE, previous)
    assert "nonsense" in client.log_tail()


def test_close_after_its_time_leaves_the_writer_at_work(client, tmp_path):
    layouts = make_layouts(4)
    assert client.wait_ready(60)
    os.kill(client.pid, signal.SIGSTOP)
    introduce(client, layouts)
    send_incident(client, 1, layouts)
    assert not client.close(0.1)
    assert not client.alive
    os.kill(client.pid, signal.SIGCONT)
    until(lambda: gone(client.pid), "the writer does not end")
    (folder,) = incident_folders(tmp_path / "incidents")
    with open_incident(folder) as incident:
        assert incident.ended == ""
        assert not incident.blind


def test_a_forked_child_is_inert(client):
    """The child sends nothing, and neither its exit nor its close disturbs the parent's writer."""
    layouts = make_layouts(2)
    introduce(client, layouts)
    pid = os.fork()
    if pid == 0:
        fine = not client.alive and not client.send("stop", {}) and client.allocate(1) is None
        fine = fine and client.poll() == [] and not client.close(1)
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    send_incident(client, 1, layouts)
    done, _ = wait_for(client, "incident_done")
    assert done.header["error"] == ""


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_sends_does_not_lock_the_child(client):
    assert client.wait_ready(60)
    ended = threading.Event()

    def talk() -> None:
        while not ended.is_set():
            client.send("config", {"text": "x" * 1000, "environment": {}})
            client.poll()

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                client.release(0)
                os._exit(len(client.poll()))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        ended.set()
        thread.join()


def test_messages_of_many_threads_stay_whole(client):
    """Backward runs on autograd's threads."""
    assert client.wait_ready(60)
    counts = [0, 0, 0, 0]

    def talk(number: int) -> None:
        while counts[number] < 200:
            counts[number] += client.send(f"kind{number}", {"n": counts[number]}, [bytes(counts[number])])

    threads = [threading.Thread(target=talk, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    answers: list[str] = []
    deadline = time.monotonic() + 60
    while len(answers) < 800 and time.monotonic() < deadline:
        answers += [message.header["stage"] for message in client.poll() if message.kind == "error"]
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted(f"kind{number}" for number in range(4) for _ in range(200))


def test_two_ranks_in_one_directory(tmp_path):
    layouts = make_layouts(4)
    clients = [WriterClient.start(tmp_path, make_identity(rank=rank), staging_bytes=1 << 20) for rank in (0, 1)]
    for client in clients:
        introduce(client, layouts)
    for number in range(3):
        for client in clients:
            send_incident(client, number, layouts)
    for client in clients:
        wait_for(client, "incident_done", 2)
        assert client.close(30)
    names = [folder.name for folder in incident_folders(tmp_path)]
    assert len(names) == 6
    assert {name.split(".r")[1][0] for name in names} == {"0", "1"}
    for folder in incident_folders(tmp_path):
        with open_incident(folder) as incident:
            assert incident.incident_id == folder.name
            assert not any(record.why_absent for record in incident.records())


def test_refusals_before_training():
    with pytest.raises(WriterError, match="expected 'process' or 'thread', got 'fork'"):
        WriterClient.start("x", make_identity(), staging_bytes=4096, mode="fork")
    with pytest.raises(WriterError, match=r"incident\.staging_memory"):
        WriterClient.start("x", make_identity(), staging_bytes=1 << 62)


def test_no_interpreter_is_told_and_nothing_leaks(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WriterError, match=r"'/no/such/python'.*incident\.writer: thread"):
        WriterClient.start("x", make_identity(), staging_bytes=4096)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the log, until the client is collected


def test_a_writer_that_cannot_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "h5py.py").write_text("raise ImportError('no HDF5 here')")
    environment = launch.environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    monkeypatch.setattr(launch, "environment", lambda: environment)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=4096)
    assert not client.wait_ready(60)
    assert "no HDF5 here" in client.log_tail()
    assert not client.close(5)


def test_the_client_imports_neither_torch_nor_hdf5():
    program = "import sys, flightrec.writer.client; sys.exit(bool({'torch', 'h5py'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], env=launch.environment(), check=False).returncode == 0


def test_an_oversized_message_is_known_beforehand(client):
    assert client.max_message_bytes < shared.INBOX_BYTES
    assert client.send("nonsense", {}, [bytes(client.max_message_bytes - 4096)])
    wait_for(client, "error")
    with pytest.raises(MessageTooLargeError, match="nonsense"):  # trying again would be of no use
        client.send("nonsense", {}, [bytes(shared.INBOX_BYTES)])


def test_thread_mode_ends_with_the_interpreter(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from writer_support import *
client = WriterClient.start({str(tmp_path)!r}, identity(), staging_bytes=1 << 20, mode="thread")
layouts = make_layouts(4)
introduce(client, layouts)
send_incident(client, 1, layouts)
"""
    result = subprocess.run([sys.executable, "-c", program], env=launch.environment(), timeout=60, check=False)
    assert result.returncode == 0
    (folder,) = incident_folders(tmp_path)
    with open_incident(folder) as incident:
        assert not incident.blind
