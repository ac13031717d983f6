"""How scale and amax of single tensors went, and how the loss did: from the history and ``/records``, no payload.

Offline, any thread, no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.records import Key
from flightrec.reports.page.measures import rounded
from flightrec.reports.summary import key_of
from flightrec.storage.rank import Rank
from flightrec.storage.read import Incident
from flightrec.storage.record import Record

MAX_POINTS = 500
"""Of a curve: the last ones."""

CURVES = ("amax", "quantizer_amax", "scale_min", "scale_max", "range_ratio")

Document = dict[str, Any]
Time = tuple[int, int]


def scale_history(rank: Rank, key: Key, records: Sequence[Record]) -> Document:
    """One tensor's amax and scale over the past iterations, with what the incident's own records add.

    Args:
        rank: whose.
        key: of the tensor; its microbatch means nothing.
        records: those of the same series in the incident.

    Returns:
        ``key``, ``iterations``, ``attempts``, and a list for each of ``CURVES`` that has a value.

    Raises:
        IncidentError: a table is damaged.
    """
    series = next((entry for entry in rank.history.all_series if entry.key.series == key.series), None)
    points: dict[Time, dict[str, float]] = {}
    if series is not None:
        times = list(zip(series.attempts.tolist(), series.iterations.tolist(), strict=True))
        columns = {name: series[name].tolist() for name in CURVES}
        for place, time in enumerate(times[-MAX_POINTS:], start=max(0, len(times) - MAX_POINTS)):
            points[time] = {name: values[place] for name, values in columns.items()}
    past = set(points)
    for record in records:
        time = (record.attempt, record.iteration)
        if time in past:
            continue
        mine = points.setdefault(time, {})
        for name in CURVES:
            value = record.statistics[name]
            if value is not None:
                pick = min if name == "scale_min" else max
                mine[name] = pick(float(value), mine.get(name, float(value)))
    ordered = sorted(points)[-MAX_POINTS:]
    found = {name: [rounded(points[time].get(name, float("nan"))) for time in ordered] for name in CURVES}
    return {
        "key": key_of(key.series),
        "attempts": [attempt for attempt, _ in ordered],
        "iterations": [iteration for _, iteration in ordered],
        **{name: values for name, values in found.items() if any(value is not None for value in values)},
    }


def scalars(incident: Incident, limit: int = 6) -> list[Document]:
    """The loss and some metrics: ``name``, ``attempts``, ``iterations``, ``values``, ``num_nonfinite``.

    Raises:
        IncidentError: a table is damaged.
    """
    history = incident.history
    found = []
    for name in sorted(history.scalars, key=lambda name: name != "loss")[:limit]:
        iterations, values = history[name]
        numbers = np.asarray(values, np.float64)[-MAX_POINTS * 4 :]
        found.append(
            {
                "name": name,
                "attempts": history.attempts_of(name)[-len(numbers) :].tolist() if len(numbers) else [],
                "iterations": iterations[-len(numbers) :].tolist() if len(numbers) else [],
                "values": [rounded(value, 6) for value in numbers.tolist()],
                "num_nonfinite": int(_count_nonfinite(numbers)),
            }
        )
    return found


def _count_nonfinite(values: npt.NDArray[np.float64]) -> int:
    return int(np.count_nonzero(~np.isfinite(values)))
