"""What the writer's tests share: a small model's records, a trainer that can be killed, ways to wait."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flightrec.records import (
    NUM_STATISTICS,
    Component,
    Firing,
    Key,
    Phase,
    QuantizerInfo,
    RecordLayout,
    Representation,
    Severity,
    Stage,
    Statistic,
)
from flightrec.storage.read import Incident, open_incident
from flightrec.writer import launch, messages, shared
from flightrec.writer.assemble import Assembler
from flightrec.writer.client import WriterClient
from flightrec.writer.shared import Message

AREA_BYTES = 512
LIMIT_S = 60.0
QUANTIZER = QuantizerInfo("torchao.Float8", "float8_e4m3fn", "multiply_to_encode", (), {"rounding": "nearest"})


def identity(run_id: str = "run", rank: int = 0) -> dict[str, Any]:
    return {"run_id": run_id, "rank": rank, "world_size": 2, "host": "somewhere", "versions": {"flightrec": "0.1.0"}}


def make_layouts(num_records: int, segment: int = 0) -> list[RecordLayout]:
    """Records with bfloat16 [8, 16] and its FP8 codes; ``AREA_BYTES`` apart in one segment."""
    components = (
        Component("high_precision", (8, 16), "bfloat16", 0, 256),
        Component("data", (8, 16), "float8_e4m3fn", 256, 128),
        Component("scale", (), "float32", 384, 4),
    )
    return [
        RecordLayout(
            layout_id=n,
            key=Key(f"layers.{n // 2}.fc", "activation", "", n % 2, Phase.TRAIN, 0, Stage.FORWARD),
            representation=Representation.BOTH,
            shape=(8, 16),
            dtype="bfloat16",
            quantizer=0,
            components=components,
            segment=segment,
            offset_bytes=n * AREA_BYTES,
            row=n,
        )
        for n in range(num_records)
    ]


def area(tick: int, num_records: int) -> bytes:
    """What a tick's segment holds: different bytes for every tick, the same whenever asked."""
    pieces = [hashlib.sha512(f"{tick}.{n}".encode()).digest() * (AREA_BYTES // 64) for n in range(num_records)]
    return b"".join(pieces)


def make_firing(
    iteration: int = 7,
    key: Key | None = None,
    rule: str = "nan",
    message: str = "3 NaN in layers.0.fc activation",
    severity: Severity = Severity.FAULT,
) -> Firing:
    return Firing(rule, "nonfinite", severity, 0, iteration, key, 0, 3.0, 0.0, message)


def statistics(tick: int, num_records: int) -> np.ndarray:
    rows = np.full((num_records, NUM_STATISTICS), np.nan)
    rows[:, Statistic.NUMEL] = 128
    rows[:, Statistic.AMAX] = tick + np.arange(num_records) / 1024
    return rows


def introduce(client: WriterClient, layouts: list[RecordLayout]) -> None:
    assert client.send(*messages.config("budget: none\n", {"argv": ["train.py"]}))
    assert client.send(*messages.layouts(layouts))
    assert client.send(*messages.quantizers(0, [QUANTIZER]))


def send_iteration(client: WriterClient, incident: int, tick: int, num_records: int, **options: Any) -> None:
    message = messages.iteration(
        incident,
        tick,
        attempt=0,
        iteration=100 + tick,
        num_microbatches=2,
        layout_ids=np.arange(num_records),
        statistics=statistics(tick, num_records),
        loss=float(tick),
        **options,
    )
    assert client.send(*message)


def send_payload(client: WriterClient, incident: int, tick: int, num_records: int) -> int:
    data = area(tick, num_records)
    offset = client.allocate(len(data))
    assert offset is not None
    client.staging[offset : offset + len(data)] = data
    assert client.send(*messages.payload(incident, tick, [(0, 0, offset, len(data))], last=True))
    return offset


def send_incident(
    client: WriterClient, incident: int, layouts: list[RecordLayout], ticks: int = 3, **options: Any
) -> None:
    """A whole incident, ``open`` to ``end``; fired in its last iteration on the first record."""
    firing = make_firing(iteration=100 + ticks - 1, key=layouts[0].key, **options)
    assert client.send(*messages.open_incident(incident, firing, [firing]))
    for tick in range(ticks):
        send_iteration(client, incident, tick, len(layouts))
    assert client.send(*messages.facts_end(incident))
    for tick in range(ticks):
        send_payload(client, incident, tick, len(layouts))
    assert client.send(*messages.end(incident))


def wait_for(client: WriterClient, kind: str, incident: int | None = None) -> tuple[Message, list[Message]]:
    """Poll until an answer of this kind; gives it and everything that came with it."""
    seen: list[Message] = []
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        seen += client.poll()
        for message in seen:
            if message.kind == kind and incident in (None, message.header.get("incident")):
                return message, seen
        assert client.alive, client.log_tail()
        time.sleep(0.005)
    raise AssertionError(f"no {kind!r} in {[message.kind for message in seen]}; {client.log_tail()}")


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """The process ended (a zombie counts)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@contextlib.contextmanager
def trainer(scenario: str, directory: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run ``writer_trainer.py``; gives the process and the numbers that it told, the writer's first."""
    command = [sys.executable, str(Path(__file__).with_name("writer_trainer.py")), scenario, str(directory)]
    environment = launch.environment() | {"PYTHONSAFEPATH": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        try:
            yield process, pids
        finally:
            for pid in pids[1:]:
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def incident_folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Writer:
    """An ``Assembler`` without a process; has the part of ``WriterClient`` that sends."""

    alive = True

    def __init__(self, directory, quota=None, staging_bytes=1 << 20):
        self.answers = []
        self.staging = memoryview(bytearray(staging_bytes))
        self.allocated = 0
        self.assembler = Assembler(self.staging, lambda kind, header: self.answers.append(shared.Message(kind, header)))
        self.send("start", {"directory": str(directory), "identity": identity(), "disk_quota_bytes": quota})

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


def only_incident(directory: Path) -> Incident:
    (folder,) = incident_folders(directory)
    return open_incident(folder)
