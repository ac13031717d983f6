"""The watched class of captured graphs, on a class of the same shape: there is no CUDA graph without a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from flightrec.ring import graph_class


class Records:
    def __init__(self) -> None:
        self.replays = 0
        self.fails = False

    def begin_replay(self) -> None:
        self.replays += 1
        if self.fails:
            raise RuntimeError("of ours")


@pytest.fixture
def graph_type(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Graph:
        capture, launched = 7, 0

        def capture_end(self) -> None:
            if self.capture < 0:
                raise RuntimeError("the capture was invalidated")

        def replay(self) -> None:
            self.launched += 1

    current: list[Any] = []
    monkeypatch.setattr(graph_class, "_open", {})
    monkeypatch.setattr(graph_class, "_watch", lambda: None)
    monkeypatch.setattr(graph_class, "_capture_id", lambda: current[-1].capture)
    ending = graph_class._ending(Graph.capture_end)

    def capture_end(self: Any) -> None:
        current.append(self)
        try:
            ending(self)
        finally:
            current.clear()

    Graph.capture_end = capture_end  # type: ignore[method-assign]
    Graph.replay = graph_class._replaying(Graph.replay)  # type: ignore[method-assign]
    return Graph


def test_records_live_as_long_as_the_graph_and_hear_of_its_replays(graph_type: Any) -> None:
    graph, other, records = graph_type(), graph_type(), Records()
    other.capture = 8
    graph_class.hold(7, records)
    other.capture_end()
    other.replay()
    assert records.replays == 0
    graph.capture_end()
    graph.replay()
    graph.replay()
    assert (records.replays, graph.launched) == (2, 2)
    alive = weakref.ref(records)
    del records
    gc.collect()
    assert alive() is not None
    del graph
    gc.collect()
    assert alive() is None


def test_an_error_of_ours_stops_no_replay_and_one_of_the_capture_stays(graph_type: Any) -> None:
    graph, records = graph_type(), Records()
    records.fails = True
    graph_class.hold(7, records)
    graph.capture_end()
    graph.replay()
    assert graph.launched == 1
    broken = graph_type()
    broken.capture = -1
    graph_class.hold(-1, Records())
    with pytest.raises(RuntimeError, match="invalidated"):
        broken.capture_end()
    assert graph_class._open == {}
