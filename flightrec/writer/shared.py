"""The memory that trainer and writer share: header, two message rings, staging arena.

One memfd, ``[header | inbox | outbox | staging]``. The trainer produces into the inbox and consumes the outbox, the
writer the other way round: each ring has one producer and one consumer, no lock, and a position that is stored after
the bytes it covers. So every message whose ``put`` returned survives a SIGKILL of its producer, and one that was torn
is never seen. A crc32 guards each message against machines whose stores arrive out of order.

Owns the mapping and its views. Runs in both processes; makes no CUDA call.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAGIC = 0x31434552_54484C46  # "FLHTREC1", least significant byte first
VERSION = 1
PAGE_BYTES = 4096
INBOX_BYTES = 32 << 20
OUTBOX_BYTES = 1 << 20

# Words of the header (64 bits each). Each position has a cache line of its own.
_MAGIC, _VERSION, _INBOX_BYTES, _OUTBOX_BYTES, _STAGING_BYTES = range(5)
_INBOX_HEAD, _INBOX_TAIL, _OUTBOX_HEAD, _OUTBOX_TAIL, _STATE = 8, 16, 24, 32, 40

STATE_STARTING = 0
STATE_READY = 1
STATE_STOPPED = 2

_PREFIX_BYTES = 16
_WORD_BYTES = 8


class DamagedMessageError(Exception):
    """The next message fails its checksum: its bytes are not there yet, or never will be."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: what kind, its JSON header, and binary blobs (read-only ``memoryview`` of bytes, 8-byte aligned)."""

    kind: str
    header: dict[str, Any]
    blobs: tuple[memoryview, ...] = field(default=())


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % _WORD_BYTES)


def _as_bytes(blob: Any) -> memoryview:
    view = memoryview(blob)
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B")  # TypeError for what is not contiguous: a mistake of the caller's


def _jsonable(value: Any) -> Any:
    """What JSON does not know, as text; keys as text. Only called after plain encoding failed."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return _jsonable(item())
    return repr(value)


def encode(kind: str, header: Mapping[str, Any], blobs: Sequence[Any] = ()) -> list[bytes | memoryview]:
    """The parts of one message body, in order; their lengths are multiples of 8.

    ``header`` may hold anything: what JSON does not know is told as text. Blobs are C-contiguous buffers.
    """
    try:
        text = json.dumps([kind, header], separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError):
        text = json.dumps([kind, _jsonable(header)], separators=(",", ":")).encode()
    views = [_as_bytes(blob) for blob in blobs]
    words = [len(text), len(views), *(view.nbytes for view in views)]
    parts: list[bytes | memoryview] = [memoryview(b"".join(word.to_bytes(_WORD_BYTES, "little") for word in words))]
    pieces: list[bytes | memoryview] = [text, *views]
    for part in pieces:
        parts.append(part)
        if padding := _padding(len(part)):
            parts.append(padding)
    return parts


def decode(body: bytes) -> Message:
    """Reverse ``encode``. Blobs are views of ``body``."""
    words = memoryview(body)
    text_bytes = int.from_bytes(words[:8], "little")
    num_blobs = int.from_bytes(words[8:16], "little")
    position = 16 + num_blobs * _WORD_BYTES
    lengths = [int.from_bytes(words[i : i + _WORD_BYTES], "little") for i in range(16, position, _WORD_BYTES)]
    kind, header = json.loads(body[position : position + text_bytes])
    position += text_bytes + -text_bytes % _WORD_BYTES
    blobs = []
    for length in lengths:
        blobs.append(words[position : position + length])
        position += length + -length % _WORD_BYTES
    return Message(kind, header, tuple(blobs))


class ByteRing:
    """Framed messages in a byte ring with one producer and one consumer.

    A frame is ``u32 body bytes, u32 crc32, u64 position`` and the body. Positions only grow; a position modulo the
    capacity is the place. Nothing here waits.

    Args:
        data: the ring's bytes, a multiple of 8 long.
        words: the header's words.
        head: index of the producer's position in ``words``.
        tail: index of the consumer's position.
    """

    def __init__(self, data: memoryview, words: memoryview, head: int, tail: int) -> None:
        assert data.nbytes % _WORD_BYTES == 0
        self._data = data
        self._words = words
        self._head = head
        self._tail = tail

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that one message and its frame may take."""
        return self._data.nbytes

    @property
    def empty(self) -> bool:
        """Nothing to ``get``."""
        return bool(self._words[self._head] == self._words[self._tail])

    def put(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Append one message; ``False`` when there is no room now. Producer only."""
        body_bytes = sum(len(part) for part in parts)
        head = self._words[self._head]
        if head + _PREFIX_BYTES + body_bytes - self._words[self._tail] > self.capacity_bytes:
            return False
        crc, position = 0, head + _PREFIX_BYTES
        for part in parts:
            crc = zlib.crc32(part, crc)
            self._write(position, part)
            position += len(part)
        prefix = body_bytes.to_bytes(4, "little") + crc.to_bytes(4, "little") + head.to_bytes(8, "little")
        self._write(head, prefix)
        self._words[self._head] = position  # last: the message exists from here on
        return True

    def get(self) -> Message | None:
        """Take the oldest message, ``None`` when there is none. Consumer only.

        Raises:
            DamagedMessageError: the checksum does not fit; the message stays, ``skip`` drops it.
        """
        tail, head = self._words[self._tail], self._words[self._head]
        if head == tail:
            return None
        prefix = self._read(tail, _PREFIX_BYTES)
        body_bytes = int.from_bytes(prefix[:4], "little")
        end = tail + _PREFIX_BYTES + body_bytes
        if int.from_bytes(prefix[8:], "little") != tail or end > head:
            raise DamagedMessageError
        body = self._read(tail + _PREFIX_BYTES, body_bytes)
        if zlib.crc32(body) != int.from_bytes(prefix[4:8], "little"):
            raise DamagedMessageError
        self._words[self._tail] = end
        return decode(body)

    def skip(self) -> None:
        """Drop everything that is in the ring. Consumer only."""
        self._words[self._tail] = self._words[self._head]

    def _write(self, position: int, part: bytes | memoryview) -> None:
        start = position % self.capacity_bytes
        first = min(len(part), self.capacity_bytes - start)
        self._data[start : start + first] = part[:first]
        if first < len(part):
            self._data[: len(part) - first] = part[first:]

    def _read(self, position: int, num_bytes: int) -> bytes:
        start = position % self.capacity_bytes
        first = bytes(self._data[start : start + min(num_bytes, self.capacity_bytes - start)])
        return first if len(first) == num_bytes else first + bytes(self._data[: num_bytes - len(first)])


class SharedMemory:
    """The mapped memfd. ``create`` in the trainer, ``attach`` in the writer.

    Attributes:
        fd: the memfd; closed by ``close``.
        inbox: trainer to writer.
        outbox: writer to trainer.
        staging: writable bytes of the arena. Pages that were never touched take no memory.
    """

    def __init__(self, fd: int, inbox_bytes: int, outbox_bytes: int, staging_bytes: int) -> None:
        self.fd = fd
        total_bytes = PAGE_BYTES + inbox_bytes + outbox_bytes + staging_bytes
        self._map = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(self._map)
        self.words = view[:PAGE_BYTES].cast("Q")
        outbox_start = PAGE_BYTES + inbox_bytes
        staging_start = outbox_start + outbox_bytes
        self.inbox = ByteRing(view[PAGE_BYTES:outbox_start], self.words, _INBOX_HEAD, _INBOX_TAIL)
        self.outbox = ByteRing(view[outbox_start:staging_start], self.words, _OUTBOX_HEAD, _OUTBOX_TAIL)
        self.staging = view[staging_start:]

    @classmethod
    def create(cls, inbox_bytes: int, outbox_bytes: int, staging_bytes: int) -> SharedMemory:
        """Make a new memfd. Sizes are rounded up to pages.

        Raises:
            OSError: the kernel gives no memfd or no address space.
        """
        sizes = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in (inbox_bytes, outbox_bytes, staging_bytes)]
        fd = os.memfd_create("flightrec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES + sum(sizes))
            # Nobody may shrink it: touching what is gone would be a SIGBUS in the trainer.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            shared = cls(fd, *sizes)
        except BaseException:
            os.close(fd)
            raise
        shared.words[_INBOX_BYTES], shared.words[_OUTBOX_BYTES], shared.words[_STAGING_BYTES] = sizes
        shared.words[_VERSION] = VERSION
        shared.words[_MAGIC] = MAGIC
        return shared

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """Map a memfd that ``create`` made.

        Raises:
            ValueError: it is not one, or of another version.
        """
        words = memoryview(os.pread(fd, PAGE_BYTES, 0)).cast("Q")
        if words[_MAGIC] != MAGIC or words[_VERSION] != VERSION:
            found = f"magic {words[_MAGIC]:#x}, version {words[_VERSION]}"
            raise ValueError(f"shared memory: {found}; this writer needs magic {MAGIC:#x}, version {VERSION}")
        return cls(fd, words[_INBOX_BYTES], words[_OUTBOX_BYTES], words[_STAGING_BYTES])

    @property
    def state(self) -> int:
        """``STATE_STARTING``, ``STATE_READY`` or ``STATE_STOPPED``; written by the writer."""
        return int(self.words[_STATE])

    @state.setter
    def state(self, state: int) -> None:
        self.words[_STATE] = state

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last view of it goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
