"""Messages on their way to the writer, and the writer's replacement if it dies.

Training thread only; never waits. What does not fit into the writer's inbox now is kept and sent later, in order; what
could never fit is dropped and told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from flightrec.errors import WriterError
from flightrec.ring.ring import Ring
from flightrec.writer import messages
from flightrec.writer.client import MessageTooLargeError, WriterClient
from flightrec.writer.shared import Message

logger = logging.getLogger("flightrec")

LAYOUTS_PER_MESSAGE = 2000
MAX_RESTARTS = 3


class Outbox:
    """See the module.

    Attributes:
        client: the running writer.
        dead: the writer died and is not replaced any more.

    Args:
        client: the first writer, running.
        start: starts another one after a death.
        ring: whose layouts and quantizers the writer is told.
    """

    def __init__(self, client: WriterClient, start: Callable[[], WriterClient], ring: Ring) -> None:
        self.client = client
        self.dead = False
        self._start = start
        self._ring = ring
        self._num_restarts = 0
        self._config: messages.Outgoing | None = None
        self._waiting: deque[messages.Outgoing] = deque()
        self._num_layouts = 0
        self._num_quantizers = 0

    @property
    def empty(self) -> bool:
        """Nothing waits to be sent."""
        return not self._waiting

    def post(self, message: messages.Outgoing) -> None:
        """Send a message, now or as soon as there is room."""
        self._waiting.append(message)
        self.send_waiting()

    def post_config(self, text: str, environment: Mapping[str, Any]) -> None:
        """Tell what every incident carries; a later call replaces it."""
        self._config = messages.config(text, environment)
        self.post(self._config)

    def post_tables(self) -> None:
        """Tell layouts and quantizers that are new: in the first iterations, hardly ever later."""
        quantizers, layouts = self._ring.quantizers, self._ring.layouts
        if len(quantizers) > self._num_quantizers:
            self.post(messages.quantizers(self._num_quantizers, quantizers[self._num_quantizers :]))
            self._num_quantizers = len(quantizers)
        while self._num_layouts < len(layouts):
            some = layouts[self._num_layouts : self._num_layouts + LAYOUTS_PER_MESSAGE]
            self.post(messages.layouts(some))
            self._num_layouts += len(some)

    def send_waiting(self) -> bool:
        """Send what there is room for; returns whether anything was sent."""
        moved = False
        while self._waiting:
            try:
                if not self.client.send(*self._waiting[0]):
                    break
            except MessageTooLargeError as error:
                logger.error("flightrec: %s; it is dropped", error)
            self._waiting.popleft()
            moved = True
        return moved

    def poll(self) -> list[Message]:
        """What the writer told since the last call."""
        return self.client.poll()

    def replace_dead_writer(self) -> bool:
        """Start a new writer if the old one died; returns whether that happened: open incidents must be told anew."""
        if self.dead or self.client.alive:
            return False
        said = self.client.log_tail().strip() or "it was killed"
        self.client.close(1.0)  # its process is gone: this only frees descriptors
        self._waiting.clear()
        self._num_layouts = self._num_quantizers = 0
        if self._num_restarts < MAX_RESTARTS:
            self._num_restarts += 1
            try:
                self.client = self._start()
            except WriterError as error:
                said = f"{said}; a new one cannot be started: {error}"
            else:
                logger.error("flightrec: the writer died and was started anew: %s", said)
                if self._config is not None:
                    self.post(self._config)
                self.post_tables()
                return True
        self.dead = True
        logger.error("flightrec: the writer died, no further incident will be written: %s", said)
        return False
