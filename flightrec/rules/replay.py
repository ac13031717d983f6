"""Device work that is captured once and replayed: one launch in place of hundreds.

``capture`` runs on the thread that calls ``step()``, on a stream of our own that carries no work of anybody else. A
capture executes nothing, neither allocates outside of its pool nor synchronises, and lets the calls of other threads
through (``thread_local``). On the CPU the functions themselves stand in.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

_ERROR_MODE = "thread_local"


class Replay:
    """A function of tensors, to be run again and again on the same memory.

    Args:
        body: what it does; without control flow that depends on the host.
        inputs: of every run; the body must not keep anything else that changes.
        stream: for the capture; None runs the body itself each time, as on the CPU.
        pool: of memory that captures share which never run at the same time.

    Raises:
        RuntimeError: something in the body cannot be captured.
    """

    def __init__(
        self, body: Callable[..., Any], *inputs: torch.Tensor | None, stream: torch.cuda.Stream | None, pool: Any = None
    ) -> None:
        self._body, self._inputs = body, inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Any = None
        if stream is not None:
            self._graph, self.outputs = _captured(body, inputs, stream, pool)

    def run(self, *inputs: torch.Tensor | None) -> Any:
        """Run it on the current stream; its outputs, which the next run overwrites. Returns at once.

        Args:
            inputs: those of the capture, which holds on to them; the body itself is given these.
        """
        if self._graph is None:
            return self._body(*inputs)
        self._graph.replay()
        return self.outputs


def _captured(
    body: Callable[..., Any], inputs: tuple[torch.Tensor | None, ...], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # what a collection frees now may be anybody's, and freeing some of it ends a capture
    try:
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)
                outputs = body(*inputs)
                graph.capture_end()
            except BaseException:
                _mend(graph, stream)
                raise
    finally:
        if collects:
            gc.enable()
    return graph, outputs


def _mend(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """End a capture that went wrong.

    One that CUDA calls invalid leaves the allocator and the random generator as if it still went on, and then the run's
    own dropout would raise. A capture of next to nothing, ended properly, sets them right.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(Exception):
            end = getattr(torch._C, "_cuda_endAllocateToPool")  # noqa: B009  not in every build
            end(stream.device_index, graph.pool())
        with contextlib.suppress(Exception):
            nothing = torch.cuda.CUDAGraph()
            nothing.capture_begin(capture_error_mode=_ERROR_MODE)
            torch.zeros((), device=stream.device)
            nothing.capture_end()
