"""Fills ``/history``, ``/series`` and ``/rng`` of a facts file. Runs in the writer process; no torch, no state.

A series of one value an iteration (the loss, a metric) and a statistic of many series look alike: a group with
``iterations``, ``attempts`` and ``values``. All statistics share their axes by hard links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError
from flightrec.records import Key, Phase
from flightrec.storage import names, schema, text
from flightrec.storage.facts import HistoryPiece, IterationFacts

CHUNK = (250, 256)
"""Shape of a chunk of a wide history: 250 iterations of 256 series."""

_MAGNITUDES = ("amax", "rms", "scale_min", "scale_max", "quantizer_amax", "range_ratio")
"""Statistics that layers have of very different sizes: viewers draw them on a logarithmic scale."""

Floats = npt.NDArray[np.float32]


def fill_history(
    file: h5py.File,
    scalars: Mapping[str, tuple[npt.ArrayLike, ...]],
    statistics: Sequence[HistoryPiece],
    table: text.TextTable,
    problems: list[str],
) -> None:
    """Write the histories that there are; what cannot be written is noted in ``problems``."""
    group = file.create_group("history")
    for name, series in scalars.items():
        _attempt(f"history of {name!r}", problems, partial(_fill_scalar, group, name, series))
    _attempt("history of statistics", problems, partial(_fill_statistics, file, group, statistics, table))
    if not len(group):
        del file["history"]
        return
    default = "loss" if "loss" in group else next(iter(group))
    text.write_attributes(group, {"NX_class": "NXentry", "default": default})
    text.write_attributes(file, {"NX_class": "NXroot", "default": "history"})


def fill_random_states(file: h5py.File, iterations: Sequence[IterationFacts]) -> None:
    """Write ``/rng/<attempt>.<iteration>/<name>``: the random number generators' states as uint8."""
    for facts in iterations:
        for name, state in facts.random_states.items():
            group = file.require_group(f"rng/{names.iteration_link(facts.attempt, facts.iteration)}")
            if names.escape(name) not in group:
                group.create_dataset(names.escape(name), data=np.asarray(state, dtype=np.uint8))


def _attempt(what: str, problems: list[str], write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:  # one bad series must not lose the rest of the file
        problems.append(f"{what}: {type(error).__name__}: {error}")


class Columns:
    """The pieces of a history as one: n samples of all series, those with a quantized tensor first.

    Attributes:
        attempts: int64 [n].
        iterations: int64 [n].
        series: their keys.
        num_quantized: how many of them have quantized statistics.
    """

    def __init__(self, pieces: Sequence[HistoryPiece]) -> None:
        self._pieces = pieces
        self._rows = _new_samples(pieces)
        self.attempts = _joined([piece.attempts[rows] for piece, rows in zip(pieces, self._rows, strict=True)])
        self.iterations = _joined([piece.iterations[rows] for piece, rows in zip(pieces, self._rows, strict=True)])
        quantized = dict.fromkeys(key for piece in pieces for key in piece.quantized_series)
        plain = dict.fromkeys(key for piece in pieces for key in piece.plain_series if key not in quantized)
        self.series: list[Key] = [*quantized, *plain]
        self.num_quantized = len(quantized)
        has_sample = ~np.isnan(self.values("numel"))
        present = [bool(column.any()) for column in has_sample.T]
        self.series = [key for key, is_present in zip(self.series, present, strict=True) if is_present]
        self.num_quantized = sum(present[: self.num_quantized])

    def values(self, statistic: str) -> Floats:
        """One statistic, float32 [n, series]; [n, num_quantized] for one that only quantized series have."""
        column = schema.HISTORY_STATISTICS.index(statistic)
        is_plain = statistic in schema.PLAIN_STATISTICS
        width = len(self.series) if is_plain else self.num_quantized
        places = {key: place for place, key in enumerate(self.series[:width])}
        out = np.full((len(self.iterations), width), np.nan, np.float32)
        start = 0
        for piece, rows in zip(self._pieces, self._rows, strict=True):
            part = out[start : start + len(rows)]
            start += len(rows)
            if is_plain:
                _put(part, piece.plain[rows, column], piece.plain_series, places)
            _put(part, piece.quantized[rows, column], piece.quantized_series, places)
        return out


def _put(out: Floats, values: Floats, series: Sequence[Key], places: Mapping[Key, int]) -> None:
    """Write what is not NaN: a series whose tensor was quantized only later has its samples in two places."""
    known = [number for number, key in enumerate(series) if key in places]
    if not known:
        return
    targets = np.fromiter((places[series[number]] for number in known), np.int64, len(known))
    found = values[:, known]
    out[:, targets] = np.where(np.isnan(found), out[:, targets], found)


def _new_samples(pieces: Sequence[HistoryPiece]) -> list[npt.NDArray[np.int64]]:
    """The rows of each piece that no earlier one has."""
    seen: set[tuple[int, int]] = set()
    found = []
    for piece in pieces:
        times = list(zip(piece.attempts.tolist(), piece.iterations.tolist(), strict=True))
        found.append(np.array([row for row, time in enumerate(times) if time not in seen], np.int64))
        seen.update(times)
    return found


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _fill_statistics(file: h5py.File, group: h5py.Group, pieces: Sequence[HistoryPiece], table: text.TextTable) -> None:
    columns = Columns(pieces)
    if not columns.series:
        return
    rows = [
        (table.add(key.layer), table.add(key.tensor), table.add(key.part), key.phase.value, key.call, key.stage.value)
        for key in columns.series
    ]
    file.create_dataset("series", data=np.array(rows, dtype=schema.SERIES))
    shape = (len(columns.iterations), len(columns.series))
    axes: dict[str, h5py.Dataset] = {}
    for statistic in schema.HISTORY_STATISTICS:
        values = columns.values(statistic)
        if np.isnan(values).all():
            continue
        entry = _begin(group, statistic)
        if axes:
            for name, axis in axes.items():
                entry[name] = axis
        else:
            axes = _create_axes(entry, columns)
        # Chunks that no series with a quantized tensor reaches are never written: they read as NaN and take no room.
        wide = {"chunks": _chunks(shape), "fillvalue": np.nan}
        signal = entry.create_dataset("values", shape=shape, dtype=np.float32, **wide)
        signal[:, : values.shape[1]] = values
        _finish(entry, signal, [axes["iterations"], axes["series"]], statistic)


def _fill_scalar(group: h5py.Group, name: str, series: tuple[npt.ArrayLike, ...]) -> None:
    iterations, values = np.asarray(series[0], dtype=np.int64), np.asarray(series[1])
    if values.dtype.kind not in "biuf" or iterations.ndim != 1 or values.shape[:1] != iterations.shape:
        raise FormatError(f"{iterations.shape} iterations with {values.shape} values of {values.dtype}")
    if values.dtype.kind == "b":
        values = values.astype("u1")
    wide = values.ndim == 2 and values.size > math.prod(CHUNK)
    entry = _begin(group, name)
    axis = entry.create_dataset("iterations", data=iterations)
    _make_scale(axis, "iterations")
    if len(series) > 2:
        attempts = entry.create_dataset("attempts", data=np.asarray(series[2], dtype=np.int64))
        attempts.dims[0].attach_scale(axis)
    axes = [axis]
    for number, size in enumerate(values.shape[1:]):
        rows = "rows" if number == 0 else f"rows_{number + 1}"
        axes.append(entry.create_dataset(rows, data=np.arange(size)))
        _make_scale(axes[-1], rows)
    signal = entry.create_dataset("values", data=values, chunks=_chunks(values.shape) if wide else None)
    _finish(entry, signal, axes, name)


def _begin(group: h5py.Group, name: str) -> h5py.Group:
    entry = group.create_group(names.escape(name))
    text.write_attributes(entry, {"NX_class": "NXdata", "signal": "values", "name": name})
    return entry


def _create_axes(entry: h5py.Group, columns: Columns) -> dict[str, h5py.Dataset]:
    """What all statistics share: two dimension scales, and what tells more about each place on them."""
    axes = {
        "iterations": entry.create_dataset("iterations", data=columns.iterations),
        "series": entry.create_dataset("series", data=np.arange(len(columns.series))),
        "attempts": entry.create_dataset("attempts", data=columns.attempts),
    }
    axes["labels"] = text.write_texts(entry, "labels", [_label(key) for key in columns.series])
    for name in ("iterations", "series"):
        _make_scale(axes[name], name)
    axes["attempts"].dims[0].attach_scale(axes["iterations"])
    axes["labels"].dims[0].attach_scale(axes["series"])
    return axes


def _label(key: Key) -> str:
    """A series in words, as a viewer shows it; ``/series`` has the parts."""
    part = f"[{key.part}]" if key.part else ""
    phase = "" if key.phase is Phase.TRAIN else f" {key.phase.value}"
    call = f" call {key.call}" if key.call else ""
    return f"{key.layer} {key.tensor}{part} {key.stage.value}{phase}{call}".lstrip()


def _make_scale(axis: h5py.Dataset, name: str) -> None:
    axis.make_scale(name)
    text.write_attributes(axis, {"long_name": name.replace("_", " ")})


def _finish(entry: h5py.Group, signal: h5py.Dataset, axes: Sequence[h5py.Dataset], name: str) -> None:
    """Tell viewers what is plotted over what: dimension scales, names of axes, a logarithm for magnitudes."""
    names: list[Any] = [axis.name.rpartition("/")[2] for axis in axes]
    for dimension, axis, label in zip(signal.dims, axes, names, strict=True):
        dimension.attach_scale(axis)
        dimension.label = label
    text.write_attributes(signal, {"long_name": name})
    if name in _MAGNITUDES:
        text.write_attributes(entry, {"SILX_style": '{"signal_scale_type": "log"}'})
    entry.attrs.create("axes", np.array(names, dtype=object), dtype=h5py.string_dtype("utf-8"))


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, chunk) for size, chunk in zip(shape, CHUNK, strict=True))
