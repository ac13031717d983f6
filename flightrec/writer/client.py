"""The trainer's side of the writer: starts it, sends messages, hands out staging memory.

Nothing here waits, except ``start`` (a fork and exec) and ``close``. Owns the shared memory, the doorbell socket and
the child process. Called from the training thread and from autograd threads (a lock orders them); makes no CUDA call
and imports no torch. After ``os.fork`` the child's copy is inert: it sends nothing and keeps nothing alive.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flightrec.errors import WriterError
from flightrec.writer import launch, shared
from flightrec.writer.arena import Arena
from flightrec.writer.history import HistoryMemory
from flightrec.writer.host_memory import HostMemory
from flightrec.writer.shared import DamagedMessageError, Message, SharedMemory

logger = logging.getLogger("flightrec")

Mode = Literal["process", "thread"]

LOG_TAIL_BYTES = 4000
DAMAGED_POLLS = 50


class MessageTooLargeError(WriterError):
    """A message that the inbox can never hold."""


class WriterClient:
    """A running writer, seen from the trainer.

    Use ``WriterClient.start``.

    Attributes:
        staging: writable ``memoryview`` (format ``B``) of the staging arena; may be pinned by the caller.
        mode: ``process`` or ``thread``.
        pid: the writer's process, or our own in thread mode.
        history: statistics of past iterations that the writer reads, if there are any; the caller's.
        host: the host tier, which the writer reads, if there is one; the caller's.
    """

    def __init__(
        self,
        memory: SharedMemory,
        doorbell: socket.socket,
        mode: Mode,
        history: HistoryMemory | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.history = history
        self.host = host
        self.pid = os.getpid()
        self._memory = memory
        self._doorbell: socket.socket | None = doorbell
        self._arena = Arena(memory.staging.nbytes)
        self._lock = threading.Lock()
        self._inert = False
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._log_fd = -1
        self._late: list[Message] = []
        self._damaged_polls = 0
        self._finished = False
        _clients.add(self)

    @classmethod
    def start(
        cls,
        directory: str | os.PathLike[str],
        identity: Mapping[str, Any],
        *,
        staging_bytes: int,
        mode: Mode = "process",
        disk_quota_bytes: int | None = None,
        history: HistoryMemory | None = None,
        host: HostMemory | None = None,
        inbox_bytes: int = shared.INBOX_BYTES,
        outbox_bytes: int = shared.OUTBOX_BYTES,
    ) -> WriterClient:
        """Start a writer and return without waiting for it; messages may be sent at once.

        Args:
            directory: where incidents go; made by the writer with the first incident, not before.
            identity: ``run_id`` str, ``rank`` int, ``world_size`` int, ``host`` str, ``versions`` mapping to str.
            staging_bytes: size of the staging arena; untouched pages take no memory.
            mode: ``process``, or ``thread`` where none can be started (it slows the trainer, and dies with it).
            disk_quota_bytes: bytes that the run's incidents may take in ``directory``.
            history: statistics of past iterations, which the writer reads when an incident opens; stays the caller's.
            host: the host tier, whose iterations it takes when an incident ends; stays the caller's.
            inbox_bytes: ring for messages to the writer: the largest message must fit.
            outbox_bytes: ring for messages from the writer.

        Raises:
            WriterError: no shared memory, or no process.
        """
        if mode not in ("process", "thread"):
            raise WriterError(f"incident.writer: expected 'process' or 'thread', got {mode!r}")
        try:
            memory = SharedMemory.create(inbox_bytes, outbox_bytes, staging_bytes)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise WriterError(
                f"no shared memory of {staging_bytes} bytes for the writer: {error}; lower incident.staging_memory"
            ) from error
        ours.setblocking(False)
        client = cls(memory, ours, mode, history, host)
        header = {
            "directory": os.path.abspath(os.fspath(directory)),
            "identity": dict(identity),
            "disk_quota_bytes": disk_quota_bytes,
        }
        client.send("start", header)
        if mode == "thread":
            client._start_thread(theirs)
        else:
            client._start_process(theirs)
        atexit.register(_close_at_exit, weakref.ref(client))
        return client

    def _start_process(self, theirs: socket.socket) -> None:
        self._log_fd = os.memfd_create("flightrec-log", os.MFD_CLOEXEC)
        try:
            pidfd = os.pidfd_open(os.getpid())
        except (AttributeError, OSError):
            pidfd = -1  # the writer then watches its parent's number
        history_fd = -1 if self.history is None else self.history.fd
        host_fd = -1 if self.host is None else self.host.fd
        fds = [fd for fd in (self._memory.fd, theirs.fileno(), pidfd, history_fd, host_fd) if fd >= 0]
        numbers = (self._memory.fd, theirs.fileno(), pidfd, os.getpid(), history_fd, host_fd)
        try:
            self._process = subprocess.Popen(
                launch.command("flightrec.writer.process", *map(str, numbers)),
                stdin=subprocess.DEVNULL,
                stdout=self._log_fd,  # a descriptor of the trainer's own would keep its pipes open after its death
                stderr=self._log_fd,
                pass_fds=fds,
                close_fds=True,
                start_new_session=True,  # the terminal's Ctrl-C is not for the writer
                cwd="/",
                env=launch.environment(),
            )
        except (OSError, TypeError, ValueError) as error:
            self._release_resources()
            raise WriterError(
                f"the writer process cannot be started with {sys.executable!r}: {error}; use incident.writer: thread"
            ) from error
        finally:
            theirs.close()
            if pidfd >= 0:
                os.close(pidfd)
        self.pid = self._process.pid

    def _start_thread(self, theirs: socket.socket) -> None:
        from flightrec.writer import process  # h5py and numpy: only a writer needs them

        loop = process.WriterLoop(self._memory, theirs, history=self.history, host=self.host)
        self._thread = threading.Thread(target=loop.run_in_thread, name="flightrec-writer", daemon=True)
        self._thread.start()

    @property
    def staging(self) -> memoryview:
        """Writable bytes of the staging arena."""
        return self._memory.staging

    @property
    def max_message_bytes(self) -> int:
        """A message of more bytes than this can never be sent."""
        return self._memory.inbox.capacity_bytes - shared.PAGE_BYTES

    @property
    def alive(self) -> bool:
        """The writer runs (or is starting) and this is not a forked child. Costs one system call."""
        if self._inert or self._closed:
            return False
        return self._running()

    def _running(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return self._thread is not None and self._thread.is_alive()

    def send(self, kind: str, header: Mapping[str, Any], blobs: Sequence[Any] = ()) -> bool:
        """Queue a message (see ``flightrec.writer.messages``); never blocks.

        Args:
            kind: its name.
            header: JSON-able; what is not is told as text.
            blobs: C-contiguous buffers, copied here.

        Returns:
            ``False`` when the inbox is full (try again at the next step), the client is closed, or in a forked child.

        Raises:
            MessageTooLargeError: it is larger than ``max_message_bytes``: trying again is of no use.
        """
        if self._inert or self._closed:
            return False
        parts = shared.encode(kind, header, blobs)
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        if num_bytes > self.max_message_bytes:
            raise MessageTooLargeError(
                f"message {kind!r} has {num_bytes} bytes, the writer's inbox takes {self.max_message_bytes} at most"
            )
        with self._lock:
            if not self._memory.inbox.put(parts):
                return False
        self._ring()
        return True

    def _ring(self) -> None:
        # MSG_NOSIGNAL: after the writer's death this must not be a SIGPIPE. A full socket means it was told already.
        doorbell = self._doorbell
        if doorbell is not None:
            with contextlib.suppress(OSError):
                doorbell.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def allocate(self, num_bytes: int) -> int | None:
        """Reserve staging memory; ``None`` when none is free now. Freed by the writer's ``free``, or by ``release``."""
        if self._inert or self._closed:
            return None
        with self._lock:
            return self._arena.allocate(num_bytes)

    def release(self, offset: int) -> None:
        """Give back memory that was allocated and not sent in a ``payload``."""
        with self._lock:
            self._arena.release(offset)

    def poll(self) -> list[Message]:
        """What the writer told since the last call, oldest first. Offsets in ``free`` are already released here."""
        if self._inert:
            return []
        with self._lock:
            messages, self._late = self._late, []
            if not self._memory.outbox.empty:
                self._collect(messages)
        return messages

    def _collect(self, messages: list[Message]) -> None:
        """Move what is in the outbox to ``messages``; under the lock."""
        outbox = self._memory.outbox
        try:
            while (message := outbox.get()) is not None:
                if message.kind == "free":
                    for offset in message.header["offsets"]:
                        self._arena.release(offset)
                messages.append(message)
            self._damaged_polls = 0
        except DamagedMessageError:
            self._damaged_polls += 1
            if self._damaged_polls > DAMAGED_POLLS:
                logger.error("flightrec: the writer's answers are damaged; they are dropped")
                outbox.skip()
                self._damaged_polls = 0

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the writer has started (imports done); ``False`` when it died or time ran out."""
        deadline = time.monotonic() + timeout_s
        while self._memory.state == shared.STATE_STARTING:
            if not self.alive or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return self.alive

    def close(self, timeout_s: float = 60.0) -> bool:
        """Ask the writer to finish what it has and to stop, and wait for it. Idempotent.

        Returns:
            ``True`` when it finished. After ``False`` a writer process goes on by itself until it is done.
        """
        if self._inert or self._closed:
            return self._finished
        deadline = time.monotonic() + timeout_s
        parts = shared.encode("stop", {})
        stopped = False
        while self._running():
            with self._lock:
                self._closed = True
                stopped = stopped or self._memory.inbox.put(parts)
                self._collect(self._late)  # so that the outbox never holds the writer up
            self._ring()
            if self._memory.state == shared.STATE_STOPPED or time.monotonic() > deadline:
                break
            self._wait_for_bell(min(0.2, max(0.0, deadline - time.monotonic())))
        self._finished = self._join(max(0.1, deadline - time.monotonic()))
        with self._lock:
            self._closed = True
            self._collect(self._late)
        self._release_resources()
        return self._finished

    def _wait_for_bell(self, timeout_s: float) -> None:
        assert self._doorbell is not None
        poller = select.poll()  # select.select ends at descriptor 1024
        poller.register(self._doorbell, select.POLLIN)
        if poller.poll(timeout_s * 1000):
            with contextlib.suppress(OSError):
                if not self._doorbell.recv(4096):
                    time.sleep(0.005)  # its end is closed: it is about to exit

    def _join(self, timeout_s: float) -> bool:
        if self._memory.state != shared.STATE_STOPPED:
            if self._process is not None and self._running():
                # It goes on without us; a thread waits for it so that no zombie stays.
                with contextlib.suppress(RuntimeError):  # none can be started while the interpreter ends
                    threading.Thread(target=self._process.wait, name="flightrec-reaper", daemon=True).start()
            return False
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        assert self._process is not None
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False

    def _release_resources(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        if self._thread is None or not self._thread.is_alive():
            self._memory.close()

    def _become_inert(self) -> None:
        """In a forked child: send nothing, hold no descriptor, own no process."""
        self._inert = True
        self._lock = threading.Lock()  # another thread of the parent may have held it
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        self._memory.close()
        if self.history is not None:
            self.history.close()
        if self.host is not None:
            self.host.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child: never wait for it, never warn about it
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def log_tail(self) -> str:
        """The end of the writer process's standard error (empty in thread mode): why it died."""
        if self._log_fd < 0:
            return ""
        size_bytes = os.fstat(self._log_fd).st_size
        tail = os.pread(self._log_fd, LOG_TAIL_BYTES, max(0, size_bytes - LOG_TAIL_BYTES))
        return tail.decode(errors="replace")

    def __del__(self) -> None:
        if self._log_fd >= 0 and os is not None:  # at the interpreter's end modules lose their names
            os.close(self._log_fd)


_clients: weakref.WeakSet[WriterClient] = weakref.WeakSet()


def _close_at_exit(reference: weakref.ref[WriterClient]) -> None:
    client = reference()
    if client is not None:
        client.close()


def _after_fork() -> None:
    for client in list(_clients):
        client._become_inert()


os.register_at_fork(after_in_child=_after_fork)
