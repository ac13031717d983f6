"""Order between the CUDA streams that record, the stream that calls ``step``, and the ring's own memory.

Host bookkeeping and stream waits only; the host itself never waits. Does nothing on a CPU. Runs under the ring's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flightrec.kernels import driver


class Streams:
    """Remembers who recorded since the last step, and what each stream still has to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._seen: dict[int, torch.cuda.Stream] = {}
        self._step_event: torch.cuda.Event | None = None
        self._step_stream = 0
        self._allocator: torch.cuda.Stream | None = None
        self._memory_event: torch.cuda.Event | None = None
        self._memory_version = 0
        self._known_memory: dict[int, int] = {}  # by stream: the version that it has waited for

    def enter(self) -> None:
        """Before a record: the current stream waits for the last step, and for new memory, once each."""
        if not self._is_cuda:
            return
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)  # a stream's object costs some microseconds
        if handle not in self._seen:
            stream = self._seen[handle] = torch.cuda.current_stream(self._device)
            if self._step_event is not None and handle != self._step_stream:
                stream.wait_event(self._step_event)
        if self._known_memory.get(handle) != self._memory_version:
            self._wait_for_memory(torch.cuda.current_stream(self._device))

    def follow(self, stream: torch.cuda.Stream) -> None:
        """A stream waits for the last step and for new memory, whether it will record or not."""
        for event in (self._step_event, self._memory_event):
            if event is not None:
                stream.wait_event(event)

    def join(self) -> None:
        """At a step: the current stream waits for every stream that recorded."""
        if not self._is_cuda:
            return
        current = torch.cuda.current_stream(self._device)
        for handle, stream in self._seen.items():
            if handle != current.cuda_stream:
                current.wait_event(stream.record_event())
        self._wait_for_memory(current)

    def stepped(self) -> None:
        """The step's work is launched: the next records, on whatever stream, come after it."""
        if not self._is_cuda:
            return
        current = torch.cuda.current_stream(self._device)
        self._step_event = current.record_event(self._step_event)
        self._step_stream = current.cuda_stream
        self._seen.clear()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Memory of the ring is allocated, initialised and moved in here: on a stream of its own.

        The caching allocator gives a stream memory whose last use by that stream may still be queued; another stream
        that records into it would overtake that use. Memory of a stream that computes nothing has no such past.
        """
        if not self._is_cuda:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        if self._allocator is None:
            self._allocator = driver.own_stream(self._device, "ring")
        self._allocator.wait_stream(current)
        try:
            with torch.cuda.stream(self._allocator):
                yield
        finally:
            self._memory_event = self._allocator.record_event()
            self._memory_version += 1
            self._wait_for_memory(current)

    def _wait_for_memory(self, stream: torch.cuda.Stream) -> None:
        if self._memory_event is not None:
            stream.wait_event(self._memory_event)
        self._known_memory[stream.cuda_stream] = self._memory_version
