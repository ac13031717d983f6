"""A trainer without a model, run as a process of its own so that it can be killed: ``SCENARIO DIRECTORY``.

Prints one line of process numbers (writer first) and then ends in the way that the scenario says.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from writer_support import introduce, make_firing, make_layouts, send_iteration, send_payload

from flightrec.writer import messages
from flightrec.writer.client import WriterClient

NUM_RECORDS = 8


def say(*pids: int) -> None:
    print(*pids, flush=True)


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def incident_in_progress(client: WriterClient, facts_end: bool, payload_ticks: int) -> None:
    """Three iterations, of which the last ``payload_ticks`` are staged."""
    layouts = make_layouts(NUM_RECORDS)
    introduce(client, layouts)
    firing = make_firing(iteration=102, key=layouts[0].key)
    assert client.send(*messages.open_incident(1, firing, [firing]))
    for tick in range(3):
        send_iteration(client, 1, tick, NUM_RECORDS)
    if facts_end:
        assert client.send(*messages.facts_end(1))
    for tick in reversed(range(3 - payload_ticks, 3)):
        send_payload(client, 1, tick, NUM_RECORDS)


def forked_child() -> int:
    """A data-loader worker: holds all descriptors that a fork inherits, and lives longer than the trainer."""
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(300)
        os._exit(0)
    return pid


def main(scenario: str, directory: str) -> None:
    if scenario == "no_pidfd":
        del os.pidfd_open
    identity = {"run_id": "run", "rank": 0, "world_size": 1, "host": "here", "versions": {}}
    client = WriterClient.start(directory, identity, staging_bytes=1 << 20)
    if scenario == "idle":
        assert client.wait_ready(60)
        say(client.pid)
        kill_oneself()
    if scenario == "before_it_started":
        incident_in_progress(client, facts_end=False, payload_ticks=2)
        say(client.pid)
        kill_oneself()
    assert client.wait_ready(60)
    if scenario in {"forked_child", "no_pidfd"}:
        child = forked_child()
        incident_in_progress(client, facts_end=True, payload_ticks=2)
        say(client.pid, child)
        kill_oneself()
    elif scenario == "facts_committed":
        incident_in_progress(client, facts_end=True, payload_ticks=0)
        while not any(message.kind == "facts_committed" for message in client.poll()):
            time.sleep(0.005)
        send_payload(client, 1, 2, NUM_RECORDS)
        say(client.pid)
        kill_oneself()
    elif scenario == "exec":
        incident_in_progress(client, facts_end=False, payload_ticks=3)
        say(client.pid)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)"])
    elif scenario == "os_exit":
        incident_in_progress(client, facts_end=True, payload_ticks=3)
        say(client.pid)
        os._exit(3)
    elif scenario == "normal_end":
        incident_in_progress(client, facts_end=True, payload_ticks=3)
        say(client.pid)
    elif scenario == "exception":
        incident_in_progress(client, facts_end=True, payload_ticks=3)
        say(client.pid)
        raise SystemExit(5)
    else:
        raise AssertionError(scenario)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
