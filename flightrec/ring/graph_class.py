"""The class ``torch.cuda.CUDAGraph``, watched: whose memory a captured graph needs, and when one is replayed.

A captured graph goes on writing where it wrote when it was captured, whatever becomes of the recorder. So a graph that
holds records keeps their memory alive: it hangs on the graph's object, and goes with it. The class is changed when the
first graph with records is captured, and for good: graphs outlive the recorder, and a graph without records costs one
look into a dictionary. ``torch.cuda.graph``, ``make_graphed_callables``, Transformer Engine and inductor all use it. A
graph captured by other means is recorded too; its memory is kept until the process ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from flightrec.boundary import contained
from flightrec.kernels import driver

_ATTRIBUTE = "_flightrec_records"


class Captured(Protocol):
    """What a captured graph holds of one recorder."""

    def begin_replay(self) -> None:
        """A replay is about to be launched on the current stream."""


_open: dict[int, list[Captured]] = {}
"""By capture; what stays in here is never freed."""


def hold(capture: int, captured: Captured) -> None:
    """Keep ``captured`` alive as long as the graph of this capture, and tell it of the graph's replays."""
    _watch()
    _open.setdefault(capture, []).append(captured)


@functools.cache
def _watch() -> None:
    graph: Any = torch.cuda.CUDAGraph
    graph.capture_end = _ending(graph.capture_end)
    graph.replay = _replaying(graph.replay)


def _ending(capture_end: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(capture_end)
    def wrapper(self: Any, *args: Any, **named: Any) -> None:
        held = None
        with contained("the end of a graph's capture"):
            if _open:
                held = _open.pop(_capture_id(), None)
        try:
            capture_end(self, *args, **named)
        finally:
            if held is not None:  # also after an error: replayed or not, it goes with the graph
                setattr(self, _ATTRIBUTE, held)

    return wrapper


def _capture_id() -> int:
    return driver.capture_id(torch.cuda.current_stream().cuda_stream)


def _replaying(replay: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(replay)
    def wrapper(self: Any, *args: Any, **named: Any) -> None:
        held = self.__dict__.get(_ATTRIBUTE)
        if held is not None:
            with contained("noting a graph's replay"):
                for captured in held:
                    captured.begin_replay()
        replay(self, *args, **named)

    return wrapper
