"""Recording while a CUDA graph is captured: gives each record its places, and puts its launches into the graph.

On the thread and stream that capture, under the ring's lock. Memory comes from beside the capture, never from the
graph's pool, and the host waits for it: once for each record, and never when a graph is replayed. No stream of the
capture waits for one outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from weakref import WeakMethod

import torch

from flightrec.kernels import driver, ops
from flightrec.kernels import replays as words_of
from flightrec.kernels.formats import dtype_name
from flightrec.kernels.plan import Destination
from flightrec.records import Component, Key, RecordLayout, Representation
from flightrec.ring import graph_class
from flightrec.ring.captured import CapturedGraph, Recorded
from flightrec.ring.experts import WHERE, Experts
from flightrec.ring.layout import Place, QuantizedParts, build_components, build_plan
from flightrec.ring.registry import MAX_CALLS, Registry, _in_order, _logical_shape, _representation
from flightrec.ring.replays import MAX_GRAPHS, Replays
from flightrec.ring.slots import SlotTable
from flightrec.ring.streams import Streams
from flightrec.ring.turns import ALWAYS, NO_TURNS, Turn


class GraphRecords:
    """See the module.

    Args:
        replays: the graphs.
        registry: of the ring.
        streams: of the ring.
        experts: of the ring.
        device: of the ring.
    """

    def __init__(
        self, replays: Replays, registry: Registry, streams: Streams, experts: Experts, device: torch.device
    ) -> None:
        self._replays, self._registry, self._streams, self._experts = replays, registry, streams, experts
        self._device = device
        self._capture = ops.choose(device)
        self._begin_replay = words_of.choose(device)
        self._captures: dict[int, CapturedGraph] = {}
        self._side: torch.cuda.Stream | None = None

    def record(
        self,
        key: Key,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        valid_rows: int | torch.Tensor | None,
        splits: torch.Tensor | None,
        *,
        tick: int,
        slots: SlotTable,
        num_microbatches: int | None,
        on_replay: WeakMethod[Callable[[CapturedGraph], None]],
        turn: Turn,
    ) -> str:
        """Put one record into the graph that the current stream captures.

        Args:
            key: as of ``Ring.record``, and so the following.
            high_precision: a replay finds its own values in the same memory.
            quantized: likewise.
            keep: which bytes.
            valid_rows: a number holds for all replays; a tensor is kept alive with the graph.
            splits: on the device.
            tick: the current one.
            slots: the table that says where it goes.
            num_microbatches: of an iteration, None if not known yet.
            on_replay: told of each replay, as long as the recorder lives.
            turn: what it takes turns with.

        Returns:
            Why it is not recorded, or not whole; empty if it is.
        """
        missing = driver.why_missing()
        if missing:
            return missing
        with driver.relaxed():
            stream = torch.cuda.current_stream(self._device)
            graph = self._graph(stream, tick, slots, num_microbatches, on_replay, turn.num_units)
            if graph is None:
                return f"{MAX_GRAPHS} CUDA graphs have records in them already"
            recorded = self.add(graph, key, high_precision, quantized, keep, splits, self._aside, turn)
            if recorded is None:
                return f"beyond {MAX_CALLS} calls in a graph further ones are left out"
            if recorded.destination is not None:
                graph.enter(stream)
                if isinstance(valid_rows, torch.Tensor):
                    graph.keep.append(valid_rows)
                self.launch(graph, recorded, high_precision, quantized, valid_rows, splits)
            return recorded.templates[0].reason

    def _graph(
        self,
        stream: torch.cuda.Stream,
        tick: int,
        slots: SlotTable,
        num_microbatches: int | None,
        on_replay: WeakMethod[Callable[[CapturedGraph], None]],
        num_units: int,
    ) -> CapturedGraph | None:
        """The graph of the capture that the current stream is part of; its first node is launched at first sight."""
        number = driver.capture_id(stream.cuda_stream)
        graph = self._captures.get(number)
        if graph is None:
            graph = self._replays.open_graph(tick, slots, num_microbatches, self._aside, num_units)
            if graph is None:
                return None
            graph.on_replay = on_replay
            graph_class.hold(number, graph)
            self._captures[number] = graph
            graph.begin(self._begin_replay)
        return graph

    @contextmanager
    def _aside(self) -> Iterator[None]:
        if self._side is None:
            self._side = driver.own_stream(self._device, "memory")
        self._streams.follow(self._side)
        with driver.aside(self._side):
            yield

    def add(
        self,
        graph: CapturedGraph,
        key: Key,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        splits: torch.Tensor | None,
        allocating: Callable[[], AbstractContextManager[None]],
        turn: Turn = NO_TURNS,
    ) -> Recorded | None:
        """Places for one record of a graph in every virtual slot; None for one call too many. Launches nothing."""
        claimed = graph.claim(key)
        if claimed is None:
            return None
        kept_tensor = high_precision if "high_precision" in keep else None
        kept_parts = quantized if "quantized" in keep else None
        tensors = [] if high_precision is None else [high_precision]
        tensors += [] if quantized is None else list(quantized.components.values())
        foreign = reason = self._registry._foreign(tensors)
        components: tuple[Component, ...] = ()
        place: Place | None = None
        with allocating():
            if not foreign and (kept_tensor is not None or kept_parts is not None):
                components, num_bytes = build_components(kept_tensor, kept_parts)
                place, reason = self._place(num_bytes)
                components = components if place is not None else ()
            assert self._replays.virtual is not None
            rows = self._replays.virtual.take_rows(1 + (0 if splits is None else len(splits)))
            assert self._replays.turns is not None
            slot = self._replays.turns.slot(graph.groups, turn)
        layout = RecordLayout(
            layout_id=-1,
            key=claimed,
            representation=_representation({component.name for component in components}),
            shape=_logical_shape(high_precision, quantized),
            dtype="" if high_precision is None else dtype_name(high_precision.dtype),
            quantizer=-1 if quantized is None else self._registry.quantizer_id(quantized.info),
            components=components,
            segment=-1,
            offset_bytes=0,
            row=-1,
            reason=reason,
        )
        recorded = Recorded(
            key=claimed,
            plan=build_plan(high_precision, quantized),
            destination=None,
            place=place,
            unit=ALWAYS if slot is None else turn.unit,
            slot=graph.slot if slot is None else slot,
            rows=rows,
            templates=[layout, *_experts(layout, splits)],
        )
        if not foreign:
            dtypes = [tensor.dtype for tensor in _in_order(kept_tensor, kept_parts)]
            names = () if quantized is None else tuple(quantized.components)
            recorded.destination = self._bind(recorded, dtypes, names)
        graph.add(recorded)
        return recorded

    def launch(
        self,
        graph: CapturedGraph,
        recorded: Recorded,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        valid_rows: int | torch.Tensor | None,
        splits: torch.Tensor | None,
    ) -> None:
        """Launch one record on the current stream, to wherever the graph's words point when it runs."""
        assert recorded.destination is not None
        parts = () if quantized is None else tuple(quantized.components.values())
        valid_rows = splits.sum() if splits is not None and valid_rows is None else valid_rows
        plan, slot, tick = recorded.plan, recorded.slot, graph.tick
        self._capture(plan, recorded.destination, high_precision, parts, slot, tick, valid_rows)
        if splits is not None:
            views = recorded.rows.values[:, 1:], recorded.rows.stamps[:, 1:]
            self._experts.write(views, plan, high_precision, parts, splits, words_of.place_of(slot), tick)

    def _place(self, num_bytes: int) -> tuple[Place | None, str]:
        virtual = self._replays.virtual
        assert virtual is not None
        try:
            place = virtual.take_bytes(num_bytes)
        except (RuntimeError, MemoryError):
            return None, "the device had no memory left for the ring; statistics are kept of every replay"
        if place is None:
            why = f"ring.memory does not hold it for {virtual.num_replays} replays of a CUDA graph in an iteration"
            return None, f"{why}; statistics are kept of every replay. Set ring.graph_replays, or raise ring.memory"
        return place, ""

    def _bind(self, recorded: Recorded, dtypes: list[torch.dtype], names: tuple[str, ...]) -> Destination:
        views: dict[str, torch.Tensor] = {}
        if recorded.place is not None:
            assert self._replays.virtual is not None
            segment = self._replays.virtual.segment(recorded.place)
            for component, dtype in zip(recorded.templates[0].components, dtypes, strict=True):
                if component.num_bytes:
                    offset = recorded.place.offset_bytes + component.offset_bytes
                    views[component.name] = segment.view(offset, component.shape, dtype)
        return Destination(
            high_precision=views.get("high_precision"),
            parts=[views.get(name) for name in names],
            statistics=recorded.rows.values[:, 0],
            stamp=recorded.rows.stamps[:, 0],
        )


def _experts(layout: RecordLayout, splits: torch.Tensor | None) -> list[RecordLayout]:
    prefix = f"{layout.key.part}." if layout.key.part else ""
    return [
        replace(
            layout,
            key=replace(layout.key, part=f"{prefix}expert.{number}"),
            representation=Representation.STATISTICS,
            shape=(),
            quantizer=-1,
            components=(),
            reason=WHERE,
        )
        for number in range(0 if splits is None else len(splits))
    ]
