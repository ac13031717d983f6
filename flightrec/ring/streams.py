"""Order between the CUDA streams that record and the stream that calls ``step``.

Host bookkeeping and stream waits only; the host itself never waits. Does nothing on a CPU. Runs under the ring's lock.
"""

from __future__ import annotations

import torch


class Streams:
    """Remembers who recorded since the last step, and whom the last step has to be waited for by."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._seen: dict[int, torch.cuda.Stream] = {}
        self._step_event: torch.cuda.Event | None = None
        self._step_stream = 0

    def enter(self) -> None:
        """Before a record: the current stream waits for the last step, once."""
        if not self._is_cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        handle = stream.cuda_stream
        if handle in self._seen:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a wait for an event from outside would end the capture
        self._seen[handle] = stream
        if self._step_event is not None and handle != self._step_stream:
            stream.wait_event(self._step_event)

    def join(self) -> None:
        """At a step: the current stream waits for every stream that recorded."""
        if not self._is_cuda:
            return
        current = torch.cuda.current_stream(self._device)
        for handle, stream in self._seen.items():
            if handle != current.cuda_stream:
                current.wait_event(stream.record_event())

    def stepped(self) -> None:
        """The step's work is launched: the next records, on whatever stream, come after it."""
        if not self._is_cuda:
            return
        current = torch.cuda.current_stream(self._device)
        self._step_event = current.record_event(self._step_event)
        self._step_stream = current.cuda_stream
        self._seen.clear()
