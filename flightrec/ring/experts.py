"""Rows of the statistics matrix for the experts of a grouped product: claimed together, written in one launch.

Host bookkeeping under the ring's lock; ``write`` launches on the caller's current stream and does not synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from flightrec.kernels import segments
from flightrec.kernels.plan import CapturePlan
from flightrec.records import Key, RecordLayout, Representation
from flightrec.ring.registry import MAX_KEYS, Entry, Registry

WHERE = "the record of all experts holds its rows"


@dataclass(slots=True)
class ExpertRows:
    """The rows of one grouped tensor's experts, one after the other."""

    entries: list[Entry]
    layout_ids: list[int]
    first_row: int
    views: tuple[torch.Tensor, torch.Tensor] | None = None
    generation: int = field(default=-1)


class Experts:
    """Statistics by expert, of all grouped tensors of a ring."""

    def __init__(self, registry: Registry, device: torch.device) -> None:
        self._registry = registry
        self._statistics = segments.choose(device)
        self._rows: dict[Key, ExpertRows] = {}

    def claim(self, key: Key, dtype: str, num_experts: int, tick: int) -> ExpertRows | None:
        """The experts' rows for one record of ``key`` in ``tick``, made at first sight. Under the lock.

        Returns:
            None where there are no rows: another number of experts than before, too many keys, or one of them was
            recorded by its own name.
        """
        rows = self._rows.get(key)
        if rows is None:
            rows = self._add(key, dtype, num_experts)
            if rows is None:
                return None
            self._rows[key] = rows
        if len(rows.entries) != num_experts or any(entry.last_tick == tick for entry in rows.entries):
            return None
        for entry in rows.entries:
            entry.last_tick, entry.last_call = tick, entry.key.call
        return rows

    def bind(self, rows: ExpertRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Values ``[planes, E, C]`` and stamps ``[planes, E]`` of the rows, views. Under the lock."""
        statistics = self._registry.statistics
        if rows.views is None or rows.generation != statistics.generation:
            rows.views, rows.generation = statistics.rows(rows.first_row, len(rows.entries)), statistics.generation
        return rows.views

    def write(
        self,
        views: tuple[torch.Tensor, torch.Tensor],
        plan: CapturePlan,
        high_precision: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        splits: torch.Tensor,
        slot: torch.Tensor,
        tick: torch.Tensor,
    ) -> None:
        """Write the statistics of each expert; arguments as of ``segments.reference`` and ``reference.capture``."""
        values, stamps = views
        values.index_copy_(0, slot, self._statistics(plan, high_precision, parts, splits).unsqueeze(0))
        stamps.index_copy_(0, slot, tick.expand(stamps.shape[1]).unsqueeze(0))

    def _add(self, key: Key, dtype: str, num_experts: int) -> ExpertRows | None:
        registry = self._registry
        prefix = f"{key.part}." if key.part else ""
        keys = [replace(key, part=f"{prefix}expert.{number}") for number in range(num_experts)]
        too_many = len(registry.entries) + num_experts > MAX_KEYS
        if not keys or too_many or any(name in registry.entries for name in keys):
            return None
        first_row = registry.add_rows(num_experts)
        entries = [Entry(name, first_row + number, reason=WHERE) for number, name in enumerate(keys)]
        layout_ids = []
        for entry in entries:
            registry.entries[entry.key] = entry
            layout_ids.append(len(registry.layouts))
            registry.layouts.append(
                RecordLayout(
                    layout_id=len(registry.layouts),
                    key=entry.key,
                    representation=Representation.STATISTICS,
                    shape=(),
                    dtype=dtype,
                    quantizer=-1,
                    components=(),
                    segment=-1,
                    offset_bytes=0,
                    row=entry.row,
                    reason=WHERE,
                )
            )
        registry.announce()
        return ExpertRows(entries, layout_ids, first_row)
