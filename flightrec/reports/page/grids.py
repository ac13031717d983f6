"""Heat maps, layers x iterations: from the history and from ``/records``, made small by taking the largest.

Offline, any thread, no state; reads tables only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.records import Phase
from flightrec.reports.page import measures
from flightrec.storage import files
from flightrec.storage.rank import Rank

MAX_ROWS = 96
"""More layers are merged, neighbours with neighbours."""

MAX_COLUMNS = 120
"""More iterations are merged, all but the last ``NUM_SINGLE``."""

NUM_SINGLE = 48

MAX_TENSORS = 8
"""Kinds of tensors with heat maps of their own, the most frequent ones."""

Document = dict[str, Any]
Floats = npt.NDArray[np.float64]
Time = tuple[int, int]


def heat_maps(rank: Rank) -> Document:
    """The heat maps of one rank.

    Returns:
        ``rows``: ``name`` and ``layers`` (all that were merged) of each; ``columns``: the iterations of each, as text;
        ``maps``: measure to tensor to rows of values, None where absent; ``merged_rows``, ``merged_columns``: how many
        there were before, if some were merged, else 0.

    Raises:
        IncidentError: a table is damaged.
    """
    grid = _Grid(rank)
    row_groups = _groups(len(grid.layers), MAX_ROWS, 0)
    column_groups = _groups(len(grid.times), MAX_COLUMNS, NUM_SINGLE)
    maps: dict[str, dict[str, list[list[float | int | None]]]] = {}
    for name in measures.MEASURES:
        cube = _shrink(_shrink(grid.cube(name), row_groups, 1), column_groups, 2)
        found = {
            tensor: [measures.rounded_list(row) for row in cube[place]]
            for place, tensor in enumerate(grid.tensors)
            if not np.isnan(cube[place]).all()
        }
        if found:
            maps[name] = found
    return {
        "rank": rank.rank,
        "rows": [_row([grid.layers[place] for place in group]) for group in row_groups],
        "columns": [_column([grid.times[place] for place in group]) for group in column_groups],
        "maps": maps,
        "merged_rows": len(grid.layers) if len(row_groups) < len(grid.layers) else 0,
        "merged_columns": len(grid.times) if len(column_groups) < len(grid.times) else 0,
    }


class _Grid:
    """Layers, tensors and times of a rank, and where each series and each record goes."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        table = rank.records
        with files.reading(rank.facts_path, "/records"):
            wanted = table["phase"] != Phase.WARMUP.value.encode()
            self._rows = np.flatnonzero(wanted)
            self._table = table[self._rows]
            names = [(rank.names[layer], rank.names[tensor]) for layer, tensor in self._pairs()]
        series = [entry for entry in rank.history.all_series if entry.key.phase is not Phase.WARMUP]
        self._series = np.array([entry.column for entry in series], np.int64)
        past = [(entry.key.layer, entry.key.tensor) for entry in series]
        self.layers = list(dict.fromkeys(layer for layer, _ in (*names, *past)))
        counts: dict[str, int] = {}
        for _, tensor in (*names, *past):
            counts[tensor] = counts.get(tensor, 0) + 1
        self.tensors = sorted(counts, key=lambda tensor: -counts[tensor])[:MAX_TENSORS]
        history = list(zip(rank.history.attempts.tolist(), rank.history.iterations.tolist(), strict=True))
        here = list(zip(self._table["attempt"].tolist(), self._table["iteration"].tolist(), strict=True))
        self.times: list[Time] = sorted({*history, *here})
        places = {time: place for place, time in enumerate(self.times)}
        self._history_times = np.array([places[time] for time in history], np.int64)
        self._record_times = np.array([places[time] for time in here], np.int64)
        self._record_places = self._places(names)
        self._series_places = self._places(past)
        self._measured = measures.of_records(self._table)

    def cube(self, name: str) -> Floats:
        """One measure, float64 [tensors, layers, times], NaN where absent: the largest of what falls together."""
        out = np.full((len(self.tensors), len(self.layers), len(self.times)), np.nan)
        tensors, layers = self._record_places
        known = tensors >= 0
        np.fmax.at(out, (tensors[known], layers[known], self._record_times[known]), self._measured[name][known])
        past = self._past(name)
        for column, (tensor, layer) in enumerate(zip(*(place.tolist() for place in self._series_places), strict=True)):
            if tensor >= 0 and past is not None:
                target = out[tensor, layer]
                target[self._history_times] = np.fmax(target[self._history_times], past[:, column])
        return out

    def _past(self, name: str) -> Floats | None:
        """The history's values of a measure, [samples, series]."""
        history = self._rank.history
        found: Floats | None = None
        for statistic in measures.HISTORY[name]:
            if statistic in history.statistics:
                held = np.asarray(history[statistic][1], np.float64)
                values = np.full((len(held), len(self._series)), np.nan)
                known = self._series < held.shape[1]  # a file may leave out the series without a quantized tensor
                values[:, known] = held[:, self._series[known]]
                both = values if found is None else np.nansum([found, values], axis=0)
                found = both if found is None else np.where(np.isnan(found) & np.isnan(values), np.nan, both)
        return found

    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._table["layer"].tolist(), self._table["tensor"].tolist(), strict=True))

    def _places(self, names: Sequence[tuple[str, str]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Places in ``tensors`` (-1 for one that is left out) and ``layers``."""
        tensors = {name: place for place, name in enumerate(self.tensors)}
        layers = {name: place for place, name in enumerate(self.layers)}
        found = [(tensors.get(tensor, -1), layers[layer]) for layer, tensor in names]
        pairs = np.array(found, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]


def _groups(count: int, limit: int, num_single: int) -> list[range]:
    """Neighbours that are merged into one, at most ``limit`` groups; the last ``num_single`` stay alone."""
    if count <= limit:
        return [range(place, place + 1) for place in range(count)]
    older = count - num_single
    size = -(-older // (limit - num_single))
    merged = [range(start, min(start + size, older)) for start in range(0, older, size)]
    return merged + [range(place, place + 1) for place in range(older, count)]


def _shrink(cube: Floats, groups: Sequence[range], axis: int) -> Floats:
    """The largest of each group along an axis: a mean would hide the one value that matters."""
    if len(groups) == cube.shape[axis]:
        return cube
    starts = np.array([group.start for group in groups], np.int64)
    return np.asarray(np.fmax.reduceat(cube, starts, axis=axis))


def _row(layers: Sequence[str]) -> Document:
    first = layers[0] or "the run"
    name = first if len(layers) == 1 else f"{first} to {layers[-1]} ({len(layers)})"
    return {"name": name, "layers": list(layers)}


def _column(times: Sequence[Time]) -> str:
    first, last = times[0], times[-1]
    span = str(first[1]) if first == last else f"{first[1]} to {last[1]}"
    return span if last[0] == 0 else f"{span} (attempt {last[0]})"
