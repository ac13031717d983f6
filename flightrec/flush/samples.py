"""One sample an iteration of every series' statistics, into the memory that the writer reads.

Training thread only; host arithmetic on a verdict that has arrived, about a microsecond a record. Nothing goes through
the writer's inbox. An error here ends the history and nothing else. Owns the places of the series in the memory; the
memory is the recorder's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flightrec.records import Key, Phase, RecordLayout, Stage, Statistic
from flightrec.rules.series import series_name
from flightrec.storage.facts import HistoryPiece
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS
from flightrec.writer.history import BLOCK_SERIES, NUM_COLUMNS, PLAIN, QUANTIZED, HistoryMemory

logger = logging.getLogger("flightrec")

SCALARS = ("loss", "metric")
"""Tensors without a layer that have a history of their own (``ScalarHistory``)."""

_NO_PLACE = -1
_MAX_KNOWN = 4096
_NUMEL, _MEAN, _SCALE_MIN = map(HISTORY_STATISTICS.index, ("numel", "mean", "scale_min"))

Floats = NDArray[np.float64]


def derive(rows: Floats, kind: int) -> Floats:
    """What the history keeps of statistics rows; formulas as in ``docs/format.md``.

    Args:
        rows: float64 [n, NUM_STATISTICS].
        kind: ``PLAIN`` or ``QUANTIZED``.

    Returns:
        float64 [NUM_COLUMNS[kind], n], NaN for what is absent or 0 of 0.
    """
    column = np.ascontiguousarray(rows.T)
    out = np.empty((NUM_COLUMNS[kind], len(rows)))
    numel, nan_count, zero_count = column[Statistic.NUMEL], column[Statistic.NAN_COUNT], column[Statistic.ZERO_COUNT]
    inf_count = column[Statistic.POSITIVE_INF_COUNT] + column[Statistic.NEGATIVE_INF_COUNT]
    finite = numel - nan_count - inf_count
    out[0] = numel
    out[1], out[2], out[3] = nan_count, inf_count, zero_count / numel
    out[4] = column[Statistic.AMAX]
    out[5] = np.sqrt(column[Statistic.SUM_OF_SQUARES] / finite)
    out[6] = column[Statistic.SUM] / finite
    if kind == QUANTIZED:
        codes = column[Statistic.QUANTIZED_NUMEL]
        np.copyto(out[0], codes, where=np.isnan(numel))
        derived = (
            column[Statistic.QUANTIZED_NAN_COUNT],
            column[Statistic.QUANTIZED_INF_COUNT],
            column[Statistic.QUANTIZED_ZERO_COUNT] / codes,
            column[Statistic.QUANTIZED_SATURATED_COUNT] / codes,
            column[Statistic.CLIPPED_COUNT] / finite,
            column[Statistic.UNDERFLOW_COUNT] / (finite - zero_count),
            np.sqrt(column[Statistic.SQUARED_ERROR] / column[Statistic.SUM_OF_SQUARES]),
            column[Statistic.RANGE_RATIO],
            column[Statistic.HISTORY_RATIO],
            column[Statistic.SCALE_MIN],
            column[Statistic.SCALE_MAX],
            column[Statistic.SCALE_INVERSE_ERROR],
            column[Statistic.SCALE_NONFINITE_COUNT],
            column[Statistic.ZERO_SCALE_COUNT],
            column[Statistic.QUANTIZER_AMAX],
        )
        for number, values in enumerate(derived, len(PLAIN_STATISTICS)):
            out[number] = values
    # A tensor that could not be read (on another device, say) never wrote its row; an empty one has no amax.
    out[:, (numel == 0) & (column[Statistic.AMAX] == 0)] = np.nan
    return out


def worst(values: Floats, sizes: Sequence[int]) -> Floats:
    """Reduce over microbatches: the largest; of ``mean`` that farthest from 0, ``scale_min`` least, ``numel`` summed.

    Args:
        values: float64 [C, n]: the first record of each series, then the second of those that have one, ...
        sizes: how many there are of each; not increasing.

    Returns:
        float64 [C, sizes[0]]; NaN only where all are.
    """
    out = values[:, : sizes[0]].copy()
    start = sizes[0]
    for size in sizes[1:]:
        part, target = values[:, start : start + size], out[:, :size]
        start += size
        total = _sum(target[_NUMEL], part[_NUMEL])
        farthest = np.where(~(np.abs(part[_MEAN]) <= np.abs(target[_MEAN])), part[_MEAN], target[_MEAN])
        farthest = np.where(np.isnan(part[_MEAN]), target[_MEAN], farthest)
        least = np.fmin(target[_SCALE_MIN], part[_SCALE_MIN]) if len(target) > _SCALE_MIN else None
        np.fmax(target, part, out=target)
        target[_NUMEL], target[_MEAN] = total, farthest
        if least is not None:
            target[_SCALE_MIN] = least
    return out


def _sum(one: Floats, other: Floats) -> Floats:
    return np.where(np.isnan(one), other, one + np.nan_to_num(other))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the records of one kind become samples: rows in the order that ``worst`` wants, and the series' places."""

    kind: int
    rows: NDArray[np.int64]
    sizes: list[int]
    places: NDArray[np.int64]


class SampleHistory:
    """Fills a ``HistoryMemory``.

    Args:
        memory: as yet without samples.
        told: given a reason once if something has no history.
    """

    def __init__(self, memory: HistoryMemory, told: Callable[[str], None]) -> None:
        self._memory = memory
        self._told = told
        self._places: tuple[dict[Key, int], dict[Key, int]] = ({}, {})
        self._blocks: tuple[list[int], list[int]] = ([], [])
        self._full = False
        self._dead = False
        self._num_layouts = 0
        self._kind_of = np.empty(0, np.int64)
        self._place_of = np.empty(0, np.int64)
        self._row_of = np.empty(0, np.int64)
        self._ids: Sequence[int] = []
        self._plans: list[_Plan] = []
        self._known: dict[bytes, list[_Plan]] = {}  # by layout ids: turns come again

    def add(
        self,
        attempt: int,
        iteration: int,
        statistics: Floats,
        layout_ids: Sequence[int],
        layouts: Sequence[RecordLayout],
    ) -> None:
        """Take one iteration. Never raises.

        Args:
            attempt: of the iteration.
            iteration: its number.
            statistics: float64 [R, NUM_STATISTICS] of all rows.
            layout_ids: its records.
            layouts: all layouts by id.
        """
        if self._dead:
            return
        try:
            self._add(attempt, iteration, statistics, layout_ids, layouts)
        except Exception as error:
            self._die(error)

    def _add(
        self,
        attempt: int,
        iteration: int,
        statistics: Floats,
        layout_ids: Sequence[int],
        layouts: Sequence[RecordLayout],
    ) -> None:
        if len(layouts) != self._num_layouts:
            self._see_layouts(layouts)
        if layout_ids != self._ids:
            ids = np.fromiter(layout_ids, np.int64, len(layout_ids))
            plans = self._known.get(ids.tobytes())
            if plans is None:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                plans = self._known[ids.tobytes()] = [self._plan(kind, ids) for kind in (PLAIN, QUANTIZED)]
            self._plans = plans
            self._ids = list(layout_ids)
        matrices = []
        with np.errstate(all="ignore"):
            for plan in self._plans:
                # All blocks of a kind are written in every iteration: what stood there is of another time.
                matrix = np.full(
                    (NUM_COLUMNS[plan.kind], len(self._blocks[plan.kind]) * BLOCK_SERIES), np.nan, np.float32
                )
                known = plan.rows < len(statistics)
                if len(plan.rows) and known.all():
                    values = derive(statistics.take(plan.rows, axis=0), plan.kind)
                    matrix[:, plan.places] = worst(values, plan.sizes)
                matrices.append((self._blocks[plan.kind], matrix))
        self._memory.add(attempt, iteration, matrices)

    # -- places ------------------------------------------------------------------------------------------------------

    def _see_layouts(self, layouts: Sequence[RecordLayout]) -> None:
        """Give places to the series of layouts that are new; hardly ever after the first iterations."""
        new = layouts[self._num_layouts :]
        kinds, places = np.zeros(len(new), np.int64), np.full(len(new), _NO_PLACE, np.int64)
        for number, layout in enumerate(new):
            if layout.key.tensor in SCALARS and not layout.key.layer:
                continue
            kinds[number] = PLAIN if layout.quantizer < 0 else QUANTIZED
            places[number] = self._place(layout.key.series, int(kinds[number]))
        rows = np.fromiter((layout.row for layout in new), np.int64, len(new))
        self._kind_of = np.concatenate([self._kind_of, kinds])
        self._place_of = np.concatenate([self._place_of, places])
        self._row_of = np.concatenate([self._row_of, rows])
        self._num_layouts += len(new)
        self._ids = []
        self._known.clear()
        self._plans = [self._plan(kind, np.empty(0, np.int64)) for kind in (PLAIN, QUANTIZED)]

    def _place(self, series: Key, kind: int) -> int:
        """Column of a series among all columns of its kind; -1: the memory is full."""
        places, blocks = self._places[kind], self._blocks[kind]
        place = places.get(series)
        if place is not None:
            return place
        place = len(places)
        if not self._full and place == len(blocks) * BLOCK_SERIES:
            block = self._memory.open_block(kind)
            if block is None:
                self._fill_up(series)
                return _NO_PLACE
            blocks.append(block)
        if place == len(blocks) * BLOCK_SERIES or not self._memory.name(blocks[-1], place % BLOCK_SERIES, series):
            self._fill_up(series)
            return _NO_PLACE
        places[series] = place
        return place

    def _fill_up(self, series: Key) -> None:
        if not self._full:
            self._tell(
                f"history.memory is full: {sum(map(len, self._places))} series have a history of "
                f"{self._memory.iterations} iterations, further ones (the first is {series.tensor} of "
                f"{series.layer!r}) have none; raise history.memory, or lower history.iterations"
            )
        self._full = True

    def _tell(self, reason: str) -> None:
        logger.warning("flightrec: %s", reason)
        self._told(reason)

    def _plan(self, kind: int, ids: NDArray[np.int64]) -> _Plan:
        ids = ids[(self._kind_of[ids] == kind) & (self._place_of[ids] != _NO_PLACE)]
        places, inverse, counts = np.unique(self._place_of[ids], return_inverse=True, return_counts=True)
        if not len(ids):
            return _Plan(kind, np.empty(0, np.int64), [0], places)
        by_series = np.argsort(inverse, kind="stable")
        rank = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a record within its series
        by_count = np.argsort(-counts, kind="stable")
        position = np.empty(len(places), np.int64)
        position[by_count] = np.arange(len(places))
        order = np.lexsort((position[inverse[by_series]], rank))
        sizes = np.bincount(rank).tolist()
        return _Plan(kind, self._row_of[ids[by_series[order]]], sizes, places[by_count])

    def _die(self, error: Exception) -> None:
        self._dead = True
        logger.error(
            "flightrec: the history of statistics failed and ends; all else goes on: %s", error, exc_info=error
        )
        self._told(f"the history of statistics failed and ended: {type(error).__name__}: {error}")

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All samples for a checkpoint: tensors on the host and plain lists; at most ``history.memory`` bytes."""
        piece = self._memory.read()
        state: dict[str, Any] = {
            "attempts": torch.from_numpy(piece.attempts.copy()),
            "iterations": torch.from_numpy(piece.iterations.copy()),
            "statistics": list(HISTORY_STATISTICS),
        }
        for name, series, values in (
            ("plain", piece.plain_series, piece.plain),
            ("quantized", piece.quantized_series, piece.quantized),
        ):
            state[name] = {"series": [series_name(key) for key in series], "values": torch.from_numpy(values)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the samples of ``state`` that are not here already (in a rewind they are). Never raises."""
        if self._dead:
            return
        try:
            self._load(state)
        except Exception as error:
            self._die(error)

    def _load(self, state: Mapping[str, Any]) -> None:
        now = self._memory.read()
        pieces = [_piece_of(state), now]
        samples: dict[tuple[int, int], tuple[int, int]] = {}  # (attempt, iteration) -> piece and row
        for number, piece in enumerate(pieces):
            times = zip(piece.attempts.tolist(), piece.iterations.tolist(), strict=True)
            samples |= {time: (number, row) for row, time in enumerate(times)}
        chosen = sorted(samples)[-self._memory.iterations :]
        values: dict[int, NDArray[np.float32]] = {}
        for number, piece in enumerate(pieces):
            targets = [at for at, time in enumerate(chosen) if samples[time][0] == number]
            rows = [samples[chosen[at]][1] for at in targets]
            for kind, series, source in (
                (PLAIN, piece.plain_series, piece.plain),
                (QUANTIZED, piece.quantized_series, piece.quantized),
            ):
                places = np.array([self._place(key, kind) for key in series], np.int64)
                for position, block in enumerate(self._blocks[kind]):
                    shape = (len(chosen), NUM_COLUMNS[kind], BLOCK_SERIES)
                    whole = values.setdefault(block, np.full(shape, np.nan, np.float32))
                    inside = np.flatnonzero((places >= 0) & (places // BLOCK_SERIES == position))
                    columns = np.arange(NUM_COLUMNS[kind])
                    into = np.ix_(np.array(targets, np.int64), columns, places[inside] % BLOCK_SERIES)
                    whole[into] = source[np.ix_(np.array(rows, np.int64), columns, inside)]
        attempts, iterations = np.array(chosen, np.int64).reshape(-1, 2).T
        self._memory.refill(attempts, iterations, values)


def _piece_of(state: Mapping[str, Any]) -> HistoryPiece:
    """What ``state_dict`` gave; of another version's statistics those that this one knows."""
    names = list(state["statistics"])
    found = {}
    for name, wanted in (("plain", PLAIN_STATISTICS), ("quantized", HISTORY_STATISTICS)):
        given = state[name]["values"].cpu().numpy()
        values = np.full((given.shape[0], len(wanted), given.shape[2]), np.nan, np.float32)
        for column, statistic in enumerate(wanted):
            if statistic in names[: given.shape[1]]:
                values[:, column] = given[:, names.index(statistic)]
        found[name] = values
    return HistoryPiece(
        last=0,
        attempts=state["attempts"].cpu().numpy(),
        iterations=state["iterations"].cpu().numpy(),
        plain_series=[_key_of(name) for name in state["plain"]["series"]],
        plain=found["plain"],
        quantized_series=[_key_of(name) for name in state["quantized"]["series"]],
        quantized=found["quantized"],
    )


def _key_of(name: str) -> Key:
    layer, tensor, part, phase, call, stage = json.loads(name)
    return Key(layer, tensor, part, phase=Phase(phase), call=call, stage=Stage(stage))
