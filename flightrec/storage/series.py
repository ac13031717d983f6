"""The histories of an incident, read: the loss, metrics, and the statistics of every series. Read when asked for.

Files of format 1.0 have the loss and the metrics only, without attempts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from flightrec.errors import IncidentError
from flightrec.records import Key, Phase, Stage
from flightrec.storage import files, guard, schema, text
from flightrec.storage.select import Texts, matching

Column = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]


class Series:
    """The statistics of one tensor over the past iterations: the worst over the microbatches of each.

    Attributes:
        key: layer, tensor, part, phase, call and stage; its microbatch means nothing.
        column: in the arrays that ``History`` gives.
    """

    def __init__(self, history: History, key: Key, column: int) -> None:
        self._history = history
        self.key = key
        self.column = column

    def __repr__(self) -> str:
        return f"<Series {_describe(self.key)}>"

    def __getitem__(self, statistic: str) -> npt.NDArray[np.float32]:
        """One statistic, float32 [n], NaN for iterations without the tensor; KeyError for an unknown word."""
        if statistic not in schema.HISTORY_STATISTICS:
            raise KeyError(f"no statistic {statistic!r}; there are {', '.join(schema.HISTORY_STATISTICS)}")
        return self._history.read_column(statistic, self.column)

    @property
    def iterations(self) -> npt.NDArray[np.int64]:
        """Iteration numbers, int64 [n]; not increasing where a restart or rewind began a new attempt."""
        return self._history.iterations

    @property
    def attempts(self) -> npt.NDArray[np.int64]:
        """Attempts, int64 [n]; (attempt, iteration) is unique."""
        return self._history.attempts


class History(Mapping[str, Column]):
    """Name to (iterations int64 [n], values): ``loss``, ``metric.<name>``, [n]; statistics, [n, series].

    Args:
        path: of the facts file.
        file: it, open.
        names: its texts.
    """

    def __init__(self, path: Path, file: h5py.File, names: list[str]) -> None:
        self._path, self._file, self._names = path, file, names

    def __getitem__(self, name: str) -> Column:
        entry = self._entry(name)
        with files.reading(self._path, f"/history/{name}"):
            iterations, values = guard.read_array(entry, "iterations"), guard.read_array(entry, "values", sparse=True)
            if iterations.ndim != 1 or iterations.dtype.kind not in "iu" or values.dtype.kind not in "fiu":
                raise ValueError(f"{iterations.dtype} iterations and values of {values.dtype}")
            if values.ndim not in (1, 2) or len(values) != len(iterations):
                raise ValueError(f"{len(iterations)} iterations with values of shape {values.shape}")
            return iterations, values

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<History of {', '.join(self.scalars) or 'no value'}, and {len(self.all_series)} series>"

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """Names with one value an iteration: the loss and the metrics."""
        with files.reading(self._path, "/history"):
            return tuple(name for name, entry in self._entries.items() if guard.need(entry, "values").ndim == 1)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that at least one series has."""
        return tuple(name for name in schema.HISTORY_STATISTICS if name in self._entries and self.all_series)

    def attempts_of(self, name: str) -> npt.NDArray[np.int64]:
        """Attempts of the samples of ``history[name]``, int64 [n]; 0 in files of format 1.0, which do not say."""
        entry = self._entry(name)
        with files.reading(self._path, f"/history/{name}"):
            if guard.find(entry, "attempts") is not None:
                return guard.read_array(entry, "attempts")
            return np.zeros(len(guard.read_array(entry, "iterations")), int)

    @cached_property
    def iterations(self) -> npt.NDArray[np.int64]:
        """Iteration numbers of the statistics, int64 [n]."""
        return self[self.statistics[0]][0] if self.statistics else np.empty(0, np.int64)

    @cached_property
    def attempts(self) -> npt.NDArray[np.int64]:
        """Attempts of the statistics, int64 [n]."""
        return self.attempts_of(self.statistics[0]) if self.statistics else np.empty(0, np.int64)

    @cached_property
    def all_series(self) -> list[Series]:
        """All series with statistics, in the order of the arrays' columns."""
        with files.reading(self._path, "/series"):
            if "series" not in self._file:
                return []
            rows = guard.read_table(self._file, "series", schema.SERIES, schema.LATER)
            return [Series(self, self._key(row), column) for column, row in enumerate(rows)]

    def find(
        self,
        *,
        layer: Texts | None = None,
        tensor: Texts | None = None,
        part: Texts | None = None,
        phase: Phase | Texts | None = None,
        call: int | None = None,
        stage: Stage | Texts | None = None,
    ) -> list[Series]:
        """Select series; texts as in ``Incident.records``."""
        wanted = {"layer": layer, "tensor": tensor, "part": part, "phase": phase, "stage": stage}
        tests = {name: matching(_words(words)) for name, words in wanted.items() if words is not None}
        return [
            series
            for series in self.all_series
            if (call is None or series.key.call == call)
            and all(test(_text(getattr(series.key, name))) for name, test in tests.items())
        ]

    def series(
        self,
        *,
        layer: Texts | None = None,
        tensor: Texts | None = None,
        part: Texts | None = None,
        phase: Phase | Texts | None = None,
        call: int | None = None,
        stage: Stage | Texts | None = None,
    ) -> Series:
        """Give the one series that is selected; arguments as in ``find``.

        Raises:
            IncidentError: there is none, or there are several.
        """
        found = self.find(layer=layer, tensor=tensor, part=part, phase=phase, call=call, stage=stage)
        if len(found) == 1:
            return found[0]
        near = found or self.all_series
        some = "; ".join(_describe(series.key) for series in near[:5]) + ("; ..." if len(near) > 5 else "")
        raise IncidentError(
            f"{self._path}: {len(found) or 'no'} series of {len(self.all_series)} are selected, expected one"
            + (f": {some}" if some else "")
        )

    def read_column(self, statistic: str, column: int) -> npt.NDArray[np.float32]:
        """One series' values of a statistic, float32 [n]; NaN where no series has it. Reads that column only."""
        if statistic not in self._entries:
            return np.full(len(self.iterations), np.nan, np.float32)
        with files.reading(self._path, f"/history/{statistic}"):
            values = guard.checked(guard.need(self._entries[statistic], "values"), sparse=True)
            if values.dtype.kind != "f" or values.ndim != 2 or len(values) != len(self.iterations):
                raise ValueError(f"{values.dtype} of shape {values.shape} for {len(self.iterations)} iterations")
            return np.asarray(values[:, column])

    def read_rows(self, statistic: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """A statistic in some samples, float32 [stop - start, series]; quantized ones: of the first series only."""
        if statistic not in self._entries:
            return np.full((stop - start, len(self.all_series)), np.nan, np.float32)
        with files.reading(self._path, f"/history/{statistic}"):
            return np.asarray(self._entries[statistic]["values"][start:stop])

    @cached_property
    def _entries(self) -> dict[str, h5py.Group]:
        with files.reading(self._path, "/history"):
            group = guard.find(self._file, "history")
            entries = guard.members(group) if group is not None else ()
            return {str(text.read_attribute(entry, "name")): entry for _, entry in entries}

    def _entry(self, name: str) -> h5py.Group:
        if name not in self._entries:
            raise KeyError(f"no history of {name!r}; there is {', '.join(self._entries) or 'none'}")
        return self._entries[name]

    def _key(self, row: Any) -> Key:
        layer, tensor, part = (self._names[row[column]] for column in ("layer", "tensor", "part"))
        phase, stage = Phase(row["phase"].decode("ascii")), Stage(row["stage"].decode("ascii"))
        return Key(layer, tensor, part, phase=phase, call=int(row["call"]), stage=stage)


def _text(value: Any) -> str:
    return str(value.value) if isinstance(value, (Phase, Stage)) else str(value)


def _words(words: Phase | Stage | Texts) -> list[str]:
    return [_text(words)] if isinstance(words, str) else [_text(word) for word in words]


def _describe(key: Key) -> str:
    part = f" {key.part!r}" if key.part else ""
    call = f", call {key.call}" if key.call else ""
    return f"{key.tensor}{part} of {key.layer!r} in {key.phase.value}, {key.stage.value}{call}"
