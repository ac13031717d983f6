"""Which rows of the statistics matrix form which series, for one rule; the index tables that the device gathers by.

Registration runs on the host, on whatever thread a key is first seen; the tables are built by ``step()``'s thread when
something new came. Uploads go through pinned memory and do not synchronise.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flightrec.config.expert_rule import whole_expert
from flightrec.records import NO_MICROBATCH, Key, Phase
from flightrec.rules.siblings import Siblings, build_siblings

_SERIES: Callable[[Key], Key] = operator.attrgetter("series")


def series_name(series: Key) -> str:
    """A text that names the series unambiguously, whatever characters its layer has."""
    return json.dumps([series.layer, series.tensor, series.part, series.phase.value, series.call, series.stage.value])


@dataclass(frozen=True, slots=True)
class SeriesTables:
    """Device tables for one rule; S series, K the most rows of any, R rows of the statistics matrix.

    Attributes:
        shape: (S, K).
        rows: int64 [S * K], row of each place, 0 where there is none.
        real: bool [S, K], false where a place has no row; None when each place has one.
        whole: bool [S, K], the place's key has no microbatch.
        feeds: bool [S], the series' samples enter the history (phase ``train``); None when all do.
        twin: int64 [S], the series whose history judges this one; None when each has its own.
        groups: int64 [G, M], series of each tensor (layer, tensor, part), or of each expert, 0-padded; None when each
            has one.
        groups_real: bool [G, M], padding is false.
        place_of_row: int64 [R], place of each row, 0 where there is none.
        row_is_seen: bool [R].
        row_of_place: int64 [S * K] on the host, -1 where a place has no row.
        fingerprint: equal for tables whose places have the same rows.
        siblings: the same tensor of several experts; None when the rule asks for none, or none has a sibling.
    """

    shape: tuple[int, int]
    rows: Tensor
    real: Tensor | None
    whole: Tensor
    feeds: Tensor | None
    twin: Tensor | None
    groups: Tensor | None
    groups_real: Tensor | None
    place_of_row: Tensor
    row_is_seen: Tensor
    row_of_place: NDArray[np.int64]
    fingerprint: bytes
    siblings: Siblings | None = None

    def feeding(self, samples: Tensor) -> Tensor:
        """Those of ``samples`` (bool [S]) that enter the history."""
        return samples if self.feeds is None else samples & self.feeds

    def num_tensors(self, flagged: Tensor) -> Tensor:
        """How many different tensors have a series in ``flagged`` (bool [S]): an int64 scalar on the device.

        All tensors of one expert are one: what its few tokens do shows in each of them.
        """
        if self.groups is None or self.groups_real is None:
            return flagged.sum()
        members = flagged.index_select(0, self.groups.view(-1)).view(self.groups.shape)
        return (members & self.groups_real).any(1).sum()


class SeriesIndex:
    """The rows that one rule sees, grouped into series.

    Args:
        device: where the tables go.
        grouping: maps a key to its series (a key whose microbatch is ``NO_MICROBATCH``).
        relatives: what a series has in common with its siblings, or None; see ``DeviceRule``.
    """

    def __init__(
        self,
        device: torch.device,
        grouping: Callable[[Key], Key] = _SERIES,
        relatives: Callable[[Key], Hashable | None] | None = None,
    ) -> None:
        self._device = device
        self._grouping = grouping
        self._relatives = relatives
        self._series: dict[Key, int] = {}
        self._widths: list[int] = []  # rows of each series
        self._places: dict[int, tuple[int, int, bool]] = {}  # of each row: series, column, has no microbatch
        self._tables: SeriesTables | None = None
        self._num_rows = -1

    @property
    def num_series(self) -> int:
        """How many series there are."""
        return len(self._widths)

    @property
    def series(self) -> list[Key]:
        """All series, in the order of their numbers."""
        return list(self._series)

    def add(self, key: Key, row: int) -> None:
        """Add a row; one that is known already is left as it is."""
        if row in self._places:
            return
        number = self._series.setdefault(self._grouping(key), len(self._series))
        if number == len(self._widths):
            self._widths.append(0)
        self._places[row] = (number, self._widths[number], key.microbatch == NO_MICROBATCH)
        self._widths[number] += 1
        self._tables = None

    def tables(self, num_rows: int) -> SeriesTables:
        """The tables for a statistics matrix of ``num_rows`` rows; a row beyond them waits until the matrix grew."""
        if self._tables is None or num_rows != self._num_rows:
            self._tables = self._build(num_rows)
            self._num_rows = num_rows
        return self._tables

    def _build(self, num_rows: int) -> SeriesTables:
        num_series, width = self.num_series, max(self._widths)
        known = np.fromiter(self._places, np.int64, len(self._places))
        places = np.array(list(self._places.values()), np.int64)[known < num_rows]
        known = known[known < num_rows]
        number, column, is_whole = places.T
        rows = np.zeros((num_series, width), np.int64)
        real = np.zeros((num_series, width), bool)
        whole = np.zeros((num_series, width), bool)
        rows[number, column] = known
        real[number, column] = True
        whole[number, column] = is_whole
        place_of_row = np.zeros(num_rows, np.int64)
        place_of_row[known] = number * width + column
        row_is_seen = np.zeros(num_rows, bool)
        row_is_seen[known] = True
        row_of_place = np.where(real, rows, -1).reshape(-1)
        series = list(self._series)
        groups, groups_real = self._build_groups(series)
        feeds = np.array([key.phase is Phase.TRAIN for key in series], bool)
        return SeriesTables(
            shape=(num_series, width),
            rows=self._upload(rows.reshape(-1)),
            real=None if real.all() else self._upload(real),
            whole=self._upload(whole),
            feeds=None if feeds.all() else self._upload(feeds),
            twin=None if feeds.all() else self._upload(self._build_twins(series)),
            groups=groups,
            groups_real=groups_real,
            place_of_row=self._upload(place_of_row),
            row_is_seen=self._upload(row_is_seen),
            row_of_place=row_of_place,
            fingerprint=hashlib.sha256(row_of_place.tobytes()).digest(),
            siblings=None if self._relatives is None else build_siblings(series, self._relatives, self._upload),
        )

    def _build_twins(self, series: list[Key]) -> np.ndarray:
        """A recompute or eval series is judged by the history of the same tensor in training, if that is seen."""
        twins = [self._series.get(replace(key, phase=Phase.TRAIN), number) for number, key in enumerate(series)]
        return np.array(twins, np.int64)

    def _build_groups(self, series: list[Key]) -> tuple[Tensor | None, Tensor | None]:
        members: dict[tuple[str, ...], list[int]] = {}
        for number, key in enumerate(series):
            name = whole_expert(key) or (key.layer, key.tensor, key.part)
            members.setdefault(name, []).append(number)
        if len(members) == len(series):
            return None, None
        groups = np.zeros((len(members), max(map(len, members.values()))), np.int64)
        groups_real = np.zeros(groups.shape, bool)
        for group, numbers in enumerate(members.values()):
            groups[group, : len(numbers)] = numbers
            groups_real[group, : len(numbers)] = True
        return self._upload(groups), self._upload(groups_real)

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self._device)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for it (through pinned memory on CUDA)."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
