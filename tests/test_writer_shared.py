from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.writer import launch, shared
from flightrec.writer.shared import ByteRing, DamagedMessageError, SharedMemory

CAPACITY_BYTES = 512


def make_ring(capacity_bytes: int = CAPACITY_BYTES, start: int = 0) -> tuple[ByteRing, memoryview, memoryview]:
    data = memoryview(bytearray(capacity_bytes))
    words = memoryview(bytearray(16)).cast("Q")
    words[0] = words[1] = start
    return ByteRing(data, words, 0, 1), data, words


@given(
    start=st.integers(0, 40).map(lambda n: 8 * n + (1 << 40)),
    steps=st.lists(st.none() | st.tuples(st.text(max_size=12), st.lists(st.binary(max_size=200), max_size=3))),
)
def test_ring_against_a_queue(start, steps):
    """Messages wrap around at every place, also in their prefix; a full ring refuses and stays whole."""
    ring, _, words = make_ring(start=start)
    model: deque = deque()
    for step in steps:
        if step is None:
            message = ring.get()
            if not model:
                assert message is None
                continue
            kind, blobs = model.popleft()
            assert message is not None
            assert (message.kind, message.header) == (kind, {"kind": kind})
            assert [bytes(blob) for blob in message.blobs] == blobs
        else:
            kind, blobs = step
            parts = shared.encode(kind, {"kind": kind}, blobs)
            frame_bytes = 16 + sum(map(len, parts))
            fits = words[0] - words[1] + frame_bytes <= CAPACITY_BYTES
            assert ring.put(parts) == fits
            if fits:
                model.append((kind, blobs))
        assert ring.empty == (not model)


def test_a_message_may_fill_the_ring_but_not_more():
    ring, _, _ = make_ring(1024)
    frame_bytes = 16 + sum(map(len, shared.encode("k", {}, [b""])))
    assert not ring.put(shared.encode("k", {}, [bytes(1024 - frame_bytes + 8)]))
    assert ring.put(shared.encode("k", {}, [bytes(1024 - frame_bytes)]))
    assert not ring.put(shared.encode("k", {}))
    message = ring.get()
    assert message is not None
    assert message.blobs[0].nbytes == 1024 - frame_bytes


@pytest.mark.parametrize("where", [0, 5, 8, 40, -1])
def test_a_changed_byte_is_noticed_and_skipped(where):
    ring, data, words = make_ring()
    assert ring.put(shared.encode("first", {"a": 1}, [b"12345678"]))
    place = where if where >= 0 else words[0] - 1
    data[place] ^= 0x40
    with pytest.raises(DamagedMessageError):
        ring.get()
    data[place] ^= 0x40  # late bytes: the message is still there
    assert ring.get().kind == "first"
    assert ring.put(shared.encode("second", {}))
    data[words[1] % CAPACITY_BYTES + 20] ^= 1
    with pytest.raises(DamagedMessageError):
        ring.get()
    ring.skip()
    assert ring.get() is None
    assert ring.put(shared.encode("third", {}))
    assert ring.get().kind == "third"


def test_what_json_does_not_know_is_told_as_text():
    header = {
        "nan": float("nan"),
        "large": 2**63,
        "text": "a\0b\ud800",
        "scalar": np.float64(2.5),
        "integer": np.int32(3),
        3: "number as key",
        "object": slice(1, 2),
        "nested": {"set": {1}, "tuple": (1, None)},
    }
    (body,) = [b"".join(shared.encode("kind", header, [np.arange(3, dtype=np.int32), np.empty((0, 4))]))]
    message = shared.decode(body)
    assert message.header["large"] == 2**63
    assert message.header["nan"] != message.header["nan"]
    assert message.header["text"] == "a\0b\ud800"
    assert (message.header["scalar"], message.header["integer"]) == (2.5, 3)
    assert message.header["3"] == "number as key"
    assert message.header["object"] == "slice(1, 2, None)"
    assert message.header["nested"] == {"set": [1], "tuple": [1, None]}
    assert np.frombuffer(message.blobs[0], dtype=np.int32).tolist() == [0, 1, 2]
    assert message.blobs[1].nbytes == 0


def test_blobs_are_aligned():
    body = b"".join(shared.encode("k", {"x": "odd"}, [b"1", b"22", np.ones(2)]))
    base = np.frombuffer(body, dtype=np.uint8).ctypes.data
    for blob in shared.decode(body).blobs:
        assert (np.frombuffer(blob, dtype=np.uint8).ctypes.data - base) % 8 == 0


def test_two_mappings_see_the_same_bytes():
    ours = SharedMemory.create(8192, 4096, 10_000)
    theirs = SharedMemory.attach(ours.fd)
    assert theirs.staging.nbytes == ours.staging.nbytes == 12_288
    ours.staging[10_000:10_003] = b"abc"
    assert bytes(theirs.staging[10_000:10_003]) == b"abc"
    assert ours.inbox.put(shared.encode("in", {}))
    assert theirs.outbox.put(shared.encode("out", {}))
    assert theirs.inbox.get().kind == "in"
    assert ours.outbox.get().kind == "out"
    theirs.state = shared.STATE_READY
    assert ours.state == shared.STATE_READY
    ours.close()
    ours.close()


def test_untouched_pages_take_no_memory_and_nobody_shrinks_it():
    memory = SharedMemory.create(32 << 20, 1 << 20, 8 << 30)
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)
    memory.close()


def test_attach_refuses_what_is_not_ours():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="magic 0x0"):
        SharedMemory.attach(fd)
    os.close(fd)


PRODUCER = """
import sys, os
from flightrec.writer import shared
memory = shared.SharedMemory.attach(int(sys.argv[1]))
number = 0
while True:
    blob = number.to_bytes(8, "little") * (1 + number * 7919 % 4000)
    if memory.inbox.put(shared.encode("n", {"n": number}, [blob])):
        number += 1
        memory.words[100] = number  # every message below this number was put
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_producer_loses_nothing_that_it_had_put(attempt):
    """SIGKILL in the middle of writing messages: what was put is whole and in order, what was torn is not seen."""
    memory = SharedMemory.create(256 << 10, 4096, 4096)
    command = [sys.executable, "-c", PRODUCER, str(memory.fd)]
    process = subprocess.Popen(command, pass_fds=[memory.fd], env=launch.environment())
    expected, alive, kill_after = 0, True, random.Random(attempt).randrange(200, 3000)
    while True:
        message = memory.inbox.get()
        if message is None:
            if not alive:
                break
            assert process.poll() is None
            continue
        assert message.header["n"] == expected
        assert bytes(message.blobs[0]) == expected.to_bytes(8, "little") * (1 + expected * 7919 % 4000)
        expected += 1
        if expected == kill_after:
            process.send_signal(signal.SIGKILL)
            process.wait()
            alive = False
    assert expected in {memory.words[100], memory.words[100] + 1}
    assert expected >= kill_after
    memory.close()


def test_header_is_plain_json():
    body = b"".join(shared.encode("k", {"a": [1, 2.5, None, True]}))
    assert json.loads(body[16 : 16 + int.from_bytes(body[:8], "little")]) == ["k", {"a": [1, 2.5, None, True]}]
