"""How long a quantizer's scale has stood still: from the words of the past iterations, when the facts are written.

Costs the training nothing: the smallest and the largest word of each scale are among the statistics of every iteration.
They are its fingerprint: a scale with one word is known by them exactly, one with a word a block could only change
unseen if both stayed the same. They are compared as float32. Runs in the writer process; numpy only, no state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightrec.records import Firing, Key, Statistic
from flightrec.storage.facts import IncidentFacts, IterationFacts
from flightrec.storage.history import Columns

UNKNOWN = -1
TOLD_OF = ("stale_scale",)
"""Kinds of rules whose message tells how long the scale has stood still."""

_CHUNK = 4096  # series that are compared at once

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Time = tuple[int, int]


class ScaleAge(NamedTuple):
    """How long a scale has stood still.

    Attributes:
        unchanged_iterations: since the earliest sample, back without a gap of other words, that has the same words; 0
            if the sample before has others, -1 if none before is known.
        differed_iterations: since the newest sample with other words; -1 if none is known.
    """

    unchanged_iterations: int = UNKNOWN
    differed_iterations: int = UNKNOWN

    def __str__(self) -> str:
        unchanged, differed = self
        if unchanged == UNKNOWN:
            return "no earlier scale is known"
        if unchanged == 0:
            return "changed in this iteration" if differed == 1 else f"changed within the last {differed} iterations"
        least = "" if differed == unchanged + 1 else "at least "
        return f"unchanged for {least}{unchanged} iteration{'' if unchanged == 1 else 's'}"


class ScaleAges:
    """The ages of all scales of an incident.

    Args:
        facts: the iterations of the incident, and the statistics of those before it, if a history is kept.
    """

    def __init__(self, facts: IncidentFacts) -> None:
        self._facts = facts
        self._columns = Columns(facts.statistics)
        told = zip(self._columns.attempts.tolist(), self._columns.iterations.tolist(), strict=True)
        self._rows: dict[Time, int] = {time: row for row, time in enumerate(told)}
        for entry in facts.iterations:
            self._rows.setdefault((entry.attempt, entry.iteration), len(self._rows))
        self._num_past = len(self._columns.series[: self._columns.num_quantized])
        self._places = {key: place for place, key in enumerate(self._columns.series[: self._num_past])}
        self._scaled = [self._scaled_records(entry) for entry in facts.iterations]
        self._known: dict[int, tuple[Integers, Integers]] = {}

    def columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Both numbers of ``ScaleAge`` for each record of the incident, in the order of ``/records``."""
        unchanged, differed = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for entry, (numbers, places) in zip(self._facts.iterations, self._scaled, strict=True):
            for found, ages in zip((unchanged, differed), self._of((entry.attempt, entry.iteration)), strict=True):
                column = np.full(len(entry.layouts), UNKNOWN, np.int32)
                column[numbers] = ages[places]
                found.append(column)
        return np.concatenate(unchanged), np.concatenate(differed)

    def age(self, attempt: int, iteration: int, key: Key) -> ScaleAge | None:
        """The age of the scale of a tensor in an iteration; None if it had none there that is known."""
        row, place = self._rows.get((attempt, iteration)), self._places.get(key.series)
        if row is None or place is None or np.isnan(self._words[0][row, place]):
            return None
        unchanged, differed = self._of((attempt, iteration))
        return ScaleAge(int(unchanged[place]), int(differed[place]))

    def told(self, firing: Firing) -> Firing:
        """The firing, its message with the age of the scale where that is what it is about."""
        if firing.kind not in TOLD_OF or firing.key is None:
            return firing
        age = self.age(firing.attempt, firing.iteration, firing.key)
        if age is None or age.unchanged_iterations < 1:
            return firing
        growth = self._growth(firing.attempt, firing.iteration, firing.key, age.unchanged_iterations)
        return replace(firing, message=f"{firing.message.rstrip('.')}; the scale is {age}{growth}")

    # -- words and ages ----------------------------------------------------------------------------------------------

    def _scaled_records(self, entry: IterationFacts) -> tuple[Integers, Integers]:
        """Which records of an iteration have a scale, and the columns of their series; new ones get the next."""
        numbers = np.flatnonzero(~np.isnan(_statistics(entry)[:, Statistic.SCALE_MIN]))
        keys = [entry.layouts[number].key.series for number in numbers.tolist()]
        places = [self._places.setdefault(key, len(self._places)) for key in keys]
        return numbers.astype(np.int64), np.array(places, np.int64)

    @cached_property
    def _words(self) -> tuple[Floats, Floats]:
        """Smallest and largest words, float32 [samples, series], NaN for no sample; the incident fills the gaps."""
        shape = len(self._rows), len(self._places)
        low, high = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        known = slice(len(self._columns.iterations)), slice(self._num_past)
        low[known], high[known] = self._columns.values("scale_min"), self._columns.values("scale_max")
        for entry, (numbers, places) in zip(self._facts.iterations, self._scaled, strict=True):
            row, found = self._rows[entry.attempt, entry.iteration], _statistics(entry)
            new = np.isnan(low[row, places])
            numbers, places = numbers[new], places[new]
            np.fmin.at(low[row], places, found[numbers, Statistic.SCALE_MIN].astype(np.float32))
            np.fmax.at(high[row], places, found[numbers, Statistic.SCALE_MAX].astype(np.float32))
        return low, high

    def _past(self, attempt: int, iteration: int) -> tuple[Integers, Integers]:
        """Rows and iterations of the samples that led here, newest first.

        A rewound attempt continues the one before it from where it began: what that one did later is not its past.
        """
        starts: dict[int, int] = {}
        for when, number in self._rows:
            starts[when] = min(starts.get(when, number), number)
        limit, rows, numbers, latest = iteration, [], [], attempt
        for (when, number), row in sorted(self._rows.items(), reverse=True):
            if when > attempt:
                continue
            if when < latest:
                limit = min(limit, *(start for other, start in starts.items() if when < other <= latest), limit)
                latest = when
            if number < limit:
                limit = number
                rows.append(row)
                numbers.append(number)
        return np.array(rows, np.int64), np.array(numbers, np.int64)

    def _of(self, time: Time) -> tuple[Integers, Integers]:
        """Ages of all series in an iteration."""
        row = self._rows[time]
        if row not in self._known:
            rows, numbers = self._past(*time)
            since = time[1] - numbers
            low, high = self._words
            parts = [
                _ages(low[:, part], high[:, part], row, rows, since)
                for part in (slice(start, start + _CHUNK) for start in range(0, low.shape[1], _CHUNK))
            ]
            unchanged = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
            differed = np.concatenate([np.empty(0, np.int64), *(part[1] for part in parts)])
            self._known[row] = unchanged, differed
        return self._known[row]

    # -- what else changed -------------------------------------------------------------------------------------------

    def _growth(self, attempt: int, iteration: int, key: Key, unchanged: int) -> str:
        """`` while amax rose from 1.2 to 37``, if both are known; of the quantizer where the tensor was not seen."""
        rows, numbers = self._past(attempt, iteration)
        then = rows[np.flatnonzero(numbers == iteration - unchanged)[0]]
        series = key.series
        for statistic, name in ((Statistic.AMAX, "amax"), (Statistic.QUANTIZER_AMAX, "quantizer_amax")):
            before = self._value(int(then), series, statistic, name)
            now = self._value(self._rows[attempt, iteration], series, statistic, name)
            if math.isfinite(before) and math.isfinite(now):
                moved = f"rose from {before:.4g} to" if now > before else f"fell from {before:.4g} to"
                return f", while amax {'stayed' if now == before else moved} {now:.4g}"
        return ""

    def _value(self, row: int, series: Key, statistic: Statistic, name: str) -> float:
        if row < len(self._columns.iterations) and series in self._columns.series:
            values = self._columns.values(name)
            place = self._columns.series.index(series)
            if place < values.shape[1] and not np.isnan(values[row, place]):
                return float(values[row, place])
        for entry in self._facts.iterations:
            if self._rows[entry.attempt, entry.iteration] == row:
                mine = [n for n, layout in enumerate(entry.layouts) if layout.key.series == series]
                found = _statistics(entry)[mine, statistic]
                return float(np.fmax.reduce(found, initial=-math.inf)) if len(found) else math.nan
        return math.nan


def describe(statistics: Mapping[str, float | int | None]) -> str:
    """The words of a scale for people: one number, or the smallest and the largest; empty without a scale."""
    low, high = statistics.get("scale_min"), statistics.get("scale_max")
    if low is None or high is None:
        return ""
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _statistics(entry: IterationFacts) -> npt.NDArray[np.float64]:
    return np.asarray(entry.statistics, np.float64).reshape(-1, len(Statistic))


def _ages(low: Floats, high: Floats, row: int, past: Integers, since: Integers) -> tuple[Integers, Integers]:
    """Ages of series, int64 [S] each.

    Args:
        low: float32 [samples, S].
        high: likewise.
        row: the sample whose ages are asked for.
        past: rows of the samples before it, newest first, n of them.
        since: how many iterations ago each was.
    """
    num_series = low.shape[1]
    if not len(past):
        return np.full(num_series, UNKNOWN), np.full(num_series, UNKNOWN)
    same = (low[past] == low[row]) & (high[past] == high[row])
    other = ~same & ~np.isnan(low[past])
    is_other = other.any(0)
    newest_other = np.where(is_other, other.argmax(0), len(past))
    same &= np.arange(len(past))[:, None] < newest_other
    oldest_same = len(past) - 1 - same[::-1].argmax(0)
    unchanged = np.where(same.any(0), since[oldest_same], np.where(is_other, 0, UNKNOWN))
    differed = np.where(is_other, since[np.minimum(newest_other, len(past) - 1)], UNKNOWN)
    absent = np.isnan(low[row])
    return np.where(absent, UNKNOWN, unchanged), np.where(absent, UNKNOWN, differed)
