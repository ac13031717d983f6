"""The writer's event loop, and the program ``python -m flightrec.writer.process``.

Takes messages from the shared memory, hands them to the ``Assembler``, and puts its answers into the outbox. Watches
the trainer by a pidfd (a forked child of the trainer may hold the doorbell open), by the doorbell's other end (an
``exec`` in the trainer closes it) and, where the kernel has no pidfd, by its parent's number. Ignores the signals that
end a job: it leaves when the trainer said ``stop`` or is gone, and everything that reached the memory is written.

Runs as a process of its own at low priority, or as a thread of the trainer. Never imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from flightrec.writer import shared
from flightrec.writer.assemble import Assembler
from flightrec.writer.history import HistoryMemory
from flightrec.writer.host_memory import HostMemory
from flightrec.writer.shared import DamagedMessageError, Message, SharedMemory

logger = logging.getLogger("flightrec.writer")

NICENESS = 10
IDLE_WAIT_S = 2.0
WATCH_WAIT_S = 0.2
DAMAGED_RETRIES = 40
DAMAGED_WAIT_S = 0.005
LAST_ANSWERS_S = 5.0

_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGXCPU")


class WriterLoop:
    """One writer: drains the inbox, answers, and ends with the trainer.

    Args:
        memory: the shared memory.
        doorbell: our end; readable when there is a message, at its end when the trainer closed its own.
        trainer_fd: pidfd of the trainer, -1 for none.
        trainer_pid: its number, to compare with our parent's where there is no pidfd; 0 in the trainer's own process.
        history: statistics of past iterations.
        host: the host tier, if there is one.
    """

    def __init__(
        self,
        memory: SharedMemory,
        doorbell: socket.socket,
        trainer_fd: int = -1,
        trainer_pid: int = 0,
        history: HistoryMemory | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self._memory = memory
        self._doorbell = doorbell
        self._trainer_fd = trainer_fd
        self._trainer_pid = trainer_pid
        self._answers: deque[list[bytes | memoryview]] = deque()
        self._assembler = Assembler(memory.staging, self._tell, history, host)
        self._stop = False
        self._poller = select.poll()
        self._poller.register(doorbell, select.POLLIN)
        if trainer_fd >= 0:
            self._poller.register(trainer_fd, select.POLLIN)
        doorbell.setblocking(False)

    def run(self) -> None:
        """Serve until the trainer says ``stop`` or is gone; then finish every open incident."""
        self._memory.state = shared.STATE_READY
        self._tell("ready", {"pid": os.getpid()})
        trainer_lives = True
        while True:
            self._drain()
            self._assembler.tell_salvaged()
            self._flush_answers()
            if self._stop or not trainer_lives:
                break
            # Once more through the loop after its death: what it put into the inbox last counts too.
            trainer_lives = self._wait()
        self._assembler.finish("the recorder was closed before the incident was complete" if self._stop else "")
        deadline = time.monotonic() + LAST_ANSWERS_S
        while self._stop and self._answers and time.monotonic() < deadline and self._wait(DAMAGED_WAIT_S):
            self._flush_answers()
        self._memory.state = shared.STATE_STOPPED
        self._ring()

    def run_in_thread(self) -> None:
        """``run`` as a thread of the trainer, at low priority where the kernel allows it."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self.run()
        except Exception:
            logger.exception("flightrec: the writer thread died")
        finally:
            self._doorbell.close()

    def _drain(self) -> None:
        while (message := self._next()) is not None:
            if message.kind == "stop":
                self._stop = True
                continue
            self._assembler.handle(message)
            self._flush_answers()

    def _next(self) -> Message | None:
        retries = 0
        while True:
            with contextlib.suppress(DamagedMessageError):
                message = self._memory.inbox.get()
                break
            retries += 1
            if retries > DAMAGED_RETRIES:
                self._memory.inbox.skip()
                self._tell("error", {"incident": -1, "stage": "inbox", "message": "damaged messages were dropped"})
                return None
            time.sleep(DAMAGED_WAIT_S)  # its bytes may not be visible here yet
        return message

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a message or the trainer's end; ``False`` when the trainer is gone."""
        if timeout_s is None:
            watching = self._answers or (self._trainer_fd < 0 and self._trainer_pid)
            timeout_s = WATCH_WAIT_S if watching else IDLE_WAIT_S
        for fd, _ in self._poller.poll(timeout_s * 1000):
            if fd == self._trainer_fd:
                return False
            try:
                while received := self._doorbell.recv(4096):
                    if len(received) < 4096:
                        break
                if not received:
                    return False
            except BlockingIOError:
                continue
            except OSError:
                return False
        return not (self._trainer_fd < 0 and self._trainer_pid and os.getppid() != self._trainer_pid)

    def _tell(self, kind: str, header: dict[str, Any]) -> None:
        self._answers.append(shared.encode(kind, header))
        self._flush_answers()

    def _flush_answers(self) -> None:
        told = False
        while self._answers and self._memory.outbox.put(self._answers[0]):
            self._answers.popleft()
            told = True
        if told:
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._doorbell.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def main(arguments: list[str]) -> int:
    """Run the writer process: memory, socket, pidfd or -1, the trainer's number, history or -1, host tier or -1."""
    for name in _IGNORED_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(format="%(asctime)s %(message)s")
    _lower_priority()
    memory_fd, socket_fd, trainer_fd, trainer_pid, history_fd, host_fd = map(int, arguments)
    memory = SharedMemory.attach(memory_fd)
    history = HistoryMemory.attach(history_fd) if history_fd >= 0 else None
    host = HostMemory.attach(host_fd) if host_fd >= 0 else None
    WriterLoop(memory, socket.socket(fileno=socket_fd), trainer_fd, trainer_pid, history, host).run()
    return 0


def _lower_priority() -> None:
    """Let the trainer go first, where both want the same core."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    # A session of its own is a scheduling group of its own (autogroup): between groups only the group's value counts.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(NICENESS))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # never preempts another on waking up


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
