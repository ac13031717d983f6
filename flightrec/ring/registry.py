"""All keys that were ever recorded: their rows, layouts and places; and the re-placing that ends the first iteration.

Host bookkeeping under the ring's lock. Owns segments and statistics matrix.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from flightrec.kernels.formats import dtype_name
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.records import NO_MICROBATCH, Component, Key, QuantizerInfo, RecordLayout, Representation
from flightrec.ring.layout import Place, QuantizedParts, Segments, build_components, build_plan
from flightrec.ring.looks import Latest, looks_of
from flightrec.ring.memory import Contributor
from flightrec.ring.statistics import StatisticsMatrix

Group = tuple[str, str, str]
"""(layer, tensor, part): what is kept or left out together."""


MAX_CALLS = 1024
"""Records of one key (layer, tensor, part, stage) in a microbatch; further ones are dropped."""

MAX_KEYS = 200_000
"""Keys that are recorded; a key is never forgotten, so that microbatches counted on for ever must have an end."""

MAX_LAYOUTS = 512
"""Shapes of one key that are remembered."""

MAX_LAYOUTS_IN_ALL = 50_000
"""Layouts of all keys (some 6 KB each), beyond which a key is granted ``FEW_LAYOUTS`` only."""

FEW_LAYOUTS = 4

TOO_MANY_LAYOUTS = "this tensor had many other shapes before; of further shapes only statistics are kept"


@dataclass(slots=True)
class Placed:
    """A layout with what the kernels need; ``destination`` is None where nothing can be captured."""

    layout: RecordLayout
    plan: CapturePlan
    destination: Destination | None
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]


@dataclass(slots=True)
class Entry:
    """One key: its statistics row, its places and all layouts it has had, by signature."""

    key: Key
    row: int
    places: list[Place] = field(default_factory=list)
    placed: dict[Hashable, Placed] = field(default_factory=dict)
    last_tick: int = -1
    last_call: int = 0
    wanted_bytes: int = 0
    reason: str = ""
    info: QuantizerInfo | None = None
    quantizer: int = -1
    latest: Latest | None = None

    @property
    def group(self) -> Group:
        """What it is kept or left out with."""
        return (self.key.layer, self.key.tensor, self.key.part)


class Registry:
    """Keys, layouts, quantizers; see ``Ring`` for the attributes of the same names."""

    def __init__(
        self,
        device: torch.device,
        segments: Segments,
        statistics: StatisticsMatrix,
        on_layout: Callable[[RecordLayout], None] | None,
        allocating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.segments, self.statistics = segments, statistics
        self.entries: dict[Key, Entry] = {}
        self.layouts: list[RecordLayout] = []
        self.quantizers: list[QuantizerInfo] = []
        self.dropped: dict[Group, str] = {}
        self._on_layout, self._num_announced = on_layout, 0
        self.shares_places = False
        self._device, self._allocating = device, allocating
        self._quantizer_ids: dict[str, int] = {}
        self._shared_places: dict[Key, list[Place]] = {}

    # -- every record

    def claim(self, key: Key, tick: int) -> Entry | None:
        """The entry of ``key`` for one record in ``tick``; a key that was seen in it gets the first free ``call``.

        None beyond ``MAX_CALLS`` and ``MAX_KEYS``: rows are never given back, so that their number must have an end.
        """
        if key.call >= MAX_CALLS:
            return None
        entry = self.entries.get(key)
        if entry is None:
            if len(self.entries) >= MAX_KEYS:
                return None
            entry = self._add(key)
        elif entry.last_tick == tick:
            first = entry
            call = max(first.last_call, key.call)
            while entry.last_tick == tick:
                call += 1
                if call >= MAX_CALLS:
                    return None
                raised = dataclasses.replace(key, call=call)
                entry = self.entries.get(raised) or self._add(raised)
            first.last_call = call
        entry.last_tick, entry.last_call = tick, entry.key.call
        return entry

    def find(
        self,
        entry: Entry,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        left_out: str,
    ) -> Placed:
        """The layout that fits these tensors, made at first sight; ``left_out`` says why bytes are not wanted now."""
        latest = entry.latest
        if latest is not None and latest.fits(high_precision, quantized, keep, left_out):
            return latest.placed
        placed = self._find(entry, high_precision, quantized, keep, left_out)
        entry.latest = Latest(placed, high_precision, quantized, keep, left_out)
        return placed

    def _find(
        self,
        entry: Entry,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        left_out: str,
    ) -> Placed:
        signature: Hashable = (
            None if high_precision is None else looks_of(high_precision),
            None if quantized is None else self._quantized_signature(entry, quantized),
            keep,
            left_out,
        )
        placed = entry.placed.get(signature)
        if placed is None and self._has_too_many_layouts(entry):
            signature = _without_shape(entry, high_precision, quantized)
            keep, left_out = frozenset(), TOO_MANY_LAYOUTS
            placed = entry.placed.get(signature)
        if placed is None:
            with self._allocating():
                placed = entry.placed[signature] = self._register(entry, high_precision, quantized, keep, left_out)
            self.announce()
        return placed

    def _has_too_many_layouts(self, entry: Entry) -> bool:
        crowded = len(self.layouts) >= MAX_LAYOUTS_IN_ALL and len(entry.placed) >= FEW_LAYOUTS
        return crowded or len(entry.placed) >= MAX_LAYOUTS

    def announce(self) -> None:
        """Tell ``on_layout`` of the layouts that it does not know yet."""
        while self._num_announced < len(self.layouts):
            self._num_announced += 1
            if self._on_layout is not None:
                self._on_layout(self.layouts[self._num_announced - 1])

    def quantizer_id(self, info: QuantizerInfo) -> int:
        """Dense number of this metadata."""
        text = json.dumps(info.to_json(), sort_keys=True, default=repr)
        number = self._quantizer_ids.setdefault(text, len(self.quantizers))
        if number == len(self.quantizers):
            self.quantizers.append(info)
        return number

    def add_rows(self, num_rows: int) -> int:
        """First of ``num_rows`` new rows of the statistics matrix, one after the other."""
        with self._allocating():
            return self.statistics.add_rows(num_rows)

    def _add(self, key: Key) -> Entry:
        with self._allocating():
            entry = self.entries[key] = Entry(key, self.statistics.add_row())
        if self.shares_places:
            entry.places = self._places_of_all_microbatches(key)
        return entry

    def _places_of_all_microbatches(self, key: Key) -> list[Place]:
        if key.microbatch != NO_MICROBATCH:  # takes no turns with the microbatches' own records
            key = dataclasses.replace(key, microbatch=0)
        return self._shared_places.setdefault(key, [])

    def _quantized_signature(self, entry: Entry, quantized: QuantizedParts) -> Hashable:
        if entry.info is not quantized.info and entry.info != quantized.info:
            entry.info, entry.quantizer = quantized.info, self.quantizer_id(quantized.info)
        looks = tuple((name, *looks_of(tensor)) for name, tensor in quantized.components.items())
        return (entry.quantizer, quantized.pair_codes, looks, tuple(quantized.formats.items()))

    # -- at first sight

    def _register(
        self,
        entry: Entry,
        high_precision: torch.Tensor | None,
        quantized: QuantizedParts | None,
        keep: frozenset[str],
        left_out: str,
    ) -> Placed:
        kept_tensor = high_precision if "high_precision" in keep else None
        kept_parts = quantized if "quantized" in keep else None
        tensors = [] if high_precision is None else [high_precision]
        tensors += [] if quantized is None else list(quantized.components.values())
        foreign = self._foreign(tensors)
        components: tuple[Component, ...] = ()
        place, reason = None, foreign
        without_shape = left_out == TOO_MANY_LAYOUTS
        if without_shape:
            reason = reason or left_out
        if not foreign and (kept_tensor is not None or kept_parts is not None):
            components, num_bytes = build_components(kept_tensor, kept_parts)
            reason = left_out or self.dropped.get(entry.group, "")
            entry.wanted_bytes = max(entry.wanted_bytes, num_bytes)
            if not reason:
                place, reason = self._place(entry, num_bytes)
            components = components if place is not None else ()
        entry.reason = reason
        stored = {component.name for component in components}
        layout = RecordLayout(
            layout_id=len(self.layouts),
            key=entry.key,
            representation=_representation(stored),
            shape=() if without_shape else _logical_shape(high_precision, quantized),
            dtype="" if high_precision is None else dtype_name(high_precision.dtype),
            quantizer=-1 if quantized is None else entry.quantizer,
            components=components,
            segment=-1 if place is None else place.segment,
            offset_bytes=0 if place is None else place.offset_bytes,
            row=entry.row,
            reason=reason,
        )
        placed = Placed(
            layout=layout,
            plan=build_plan(high_precision, quantized),
            destination=None,
            dtypes=tuple(tensor.dtype for tensor in _in_order(kept_tensor, kept_parts)),
            names=() if quantized is None else tuple(quantized.components),
        )
        if not foreign:
            placed.destination = self._bind(placed)
        self.layouts.append(layout)
        return placed

    def _foreign(self, tensors: list[torch.Tensor]) -> str:
        for tensor in tensors:
            if tensor.device != self._device:
                return f"the tensor lies on {tensor.device}, the ring on {self._device}"
            if tensor.layout != torch.strided:
                return f"a tensor of layout {tensor.layout} is not strided"
        return "" if tensors else "nothing was given"

    def _place(self, entry: Entry, num_bytes: int) -> tuple[Place | None, str]:
        try:
            place = self.segments.find(entry.places, num_bytes)
        except (RuntimeError, MemoryError):
            return None, "the device had no memory left for the ring"
        if place is None:
            return None, f"ring.memory of {self.segments.memory_bytes} bytes is full"
        if place not in entry.places:
            entry.places.append(place)
        return place, ""

    def _bind(self, placed: Placed) -> Destination:
        """Views of the ring's memory for a layout; made again whenever the memory was."""
        layout = placed.layout
        values, stamps = self.statistics.row(layout.row)
        views: dict[str, torch.Tensor] = {}
        if layout.segment >= 0:
            segment = self.segments.items[layout.segment]
            for component, dtype in zip(layout.components, placed.dtypes, strict=True):
                if component.num_bytes:
                    offset = layout.offset_bytes + component.offset_bytes
                    views[component.name] = segment.view(offset, component.shape, dtype)
        return Destination(
            high_precision=views.get("high_precision"),
            parts=[views.get(name) for name in placed.names],
            statistics=values,
            stamp=stamps,
        )

    # -- at the end of the first iteration

    def resize(self, num_slots: int) -> None:
        """Give every segment ``num_slots`` slots and scrap; layouts stay as they are.

        Raises:
            RuntimeError, MemoryError: the device refused the memory.
        """
        self._unbind()
        self.segments.resize(num_slots)
        self._rebind()

    def replace(self, segments: Segments, left_out: Mapping[Key, str]) -> dict[int, int]:
        """Move everything to ``segments`` (empty), without the bytes of the keys in ``left_out`` (with the reason).

        Returns:
            the new id of each layout that changed.

        Raises:
            RuntimeError, MemoryError: the device refused the memory; nothing has changed then.
        """
        moves = self._plan_moves(segments, left_out)
        changed: dict[int, int] = {}
        self.segments, self._shared_places = segments, {}
        for entry in self.entries.values():
            entry.places = self._places_of_all_microbatches(entry.key) if self.shares_places else []
            entry.reason = left_out.get(entry.key, entry.reason)
            place = moves.get(entry.key)
            if place is not None and place not in entry.places:
                entry.places.append(place)
            for placed in list(entry.placed.values()):
                if placed.layout.segment >= 0:
                    old = placed.layout.layout_id
                    placed.layout = self._moved(placed.layout, place, entry.reason)
                    changed[old] = placed.layout.layout_id
                    self.layouts.append(placed.layout)
            # Signatures whose bytes were left out for this tick alone must find a place the next time they come.
            if place is None and entry.group not in self.dropped:
                entry.placed.clear()
                entry.latest = None
        self._rebind()
        return changed

    def _plan_moves(self, segments: Segments, left_out: Mapping[Key, str]) -> dict[Key, Place]:
        kept = [entry for entry in self.entries.values() if entry.places and entry.key not in left_out]
        moves = segments.fill({entry.key: entry.places[-1].capacity_bytes for entry in kept})
        for entry in kept:
            old, new = entry.places[-1], moves[entry.key]
            segments.items[new.segment].copy_from(new, self.segments.items[old.segment], old)
        return moves

    def _moved(self, layout: RecordLayout, place: Place | None, reason: str) -> RecordLayout:
        number = len(self.layouts)
        if place is not None:
            return dataclasses.replace(layout, layout_id=number, segment=place.segment, offset_bytes=place.offset_bytes)
        return dataclasses.replace(
            layout,
            layout_id=number,
            representation=Representation.STATISTICS,
            components=(),
            segment=-1,
            offset_bytes=0,
            reason=reason,
        )

    def _unbind(self) -> None:
        """Let go of all views, so that memory that is replaced is free at once."""
        for entry in self.entries.values():
            for placed in entry.placed.values():
                if placed.destination is not None:
                    placed.destination.high_precision, placed.destination.parts = None, ()
                    placed.destination.cache.clear()

    def _rebind(self) -> None:
        for entry in self.entries.values():
            for placed in entry.placed.values():
                if placed.destination is not None:
                    if not placed.layout.components:
                        placed.dtypes = ()
                    placed.destination = self._bind(placed)

    # -- what it comes to

    def contributors(self) -> list[Contributor]:
        """Bytes an iteration by (layer, tensor, part), the largest first."""
        totals: dict[Group, list[Any]] = {}
        for entry in self.entries.values():
            if entry.wanted_bytes:
                row = totals.setdefault(entry.group, [0, 0, ""])
                row[0] += entry.wanted_bytes
                row[1] += 1
                row[2] = row[2] or entry.reason
        whole = sum(row[0] for row in totals.values())
        rows = [
            Contributor(*group, num_bytes=size, share=size / whole, num_records=count, what=reason or "kept")
            for group, (size, count, reason) in totals.items()
        ]
        return sorted(rows, key=lambda row: -row.num_bytes)


def _without_shape(entry: Entry, high_precision: torch.Tensor | None, quantized: QuantizedParts | None) -> Hashable:
    """Signature of all further shapes of a key, whose statistics one plan can make."""
    dtype = None if high_precision is None else high_precision.dtype
    if quantized is None:
        return (TOO_MANY_LAYOUTS, dtype)
    return (
        TOO_MANY_LAYOUTS,
        dtype,
        entry.quantizer,
        tuple(quantized.components),
        build_plan(high_precision, quantized),
    )


def _in_order(kept_tensor: torch.Tensor | None, kept_parts: QuantizedParts | None) -> Iterator[torch.Tensor]:
    if kept_tensor is not None:
        yield kept_tensor
    if kept_parts is not None:
        yield from kept_parts.components.values()


def _representation(stored: set[str]) -> Representation:
    if "high_precision" in stored:
        return Representation.BOTH if len(stored) > 1 else Representation.HIGH_PRECISION
    return Representation.QUANTIZED if stored else Representation.STATISTICS


def _logical_shape(high_precision: torch.Tensor | None, quantized: QuantizedParts | None) -> tuple[int, ...]:
    if high_precision is not None:
        return tuple(high_precision.shape)
    if quantized is None or not quantized.components:
        return ()
    told = quantized.info.metadata.get("logical_shape")  # codes that are held flattened or transposed
    if told:
        return tuple(told)
    plan = build_plan(None, quantized)
    codes = list(quantized.components.values())[max(plan.codes, 0)]
    shape = tuple(codes.shape)
    return (*shape[:-1], shape[-1] * 2) if plan.format == "float4_e2m1fn_x2" and shape else shape
