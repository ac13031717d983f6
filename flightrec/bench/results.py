"""What a measurement gives: frozen types, and the JSON document that programs read. No torch.

Seconds are seconds of one step unless a name says otherwise; what could not be measured is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flightrec.bench.pairing import Interval, median_interval, relative_overhead

VERSION = 1
"""Of the JSON document; rises when a field changes its meaning or goes."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """What some healthy steps did beside computing, counted apart from the timing.

    Attributes:
        num_steps: that were counted.
        num_syncs: calls that waited for the device; None on the CPU.
        num_allocations: requests to the device's allocator, whether it had the memory or not; None on the CPU.
        num_device_allocations: those for which it asked the driver; None on the CPU.
        peak_bytes: most device memory that was allocated at a time; None on the CPU.
        num_files: files written.
    """

    num_steps: int
    num_syncs: int | None
    num_allocations: int | None
    num_device_allocations: int | None
    peak_bytes: int | None
    num_files: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recorder recorded and said.

    Attributes:
        num_records: an iteration, mean over the iterations that were looked at.
        num_bytes: kept an iteration.
        num_read_bytes: read for statistics only an iteration.
        predicted_s: what the recorder says that an iteration's recording and judging take.
        bound_s: time of ``copy_`` of the same records and a read of those kept as statistics only.
        told: the recorder's own sentences on budget and cost.
    """

    num_records: float
    num_bytes: float
    num_read_bytes: float
    predicted_s: float | None
    bound_s: float | None
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of recording beside the same model without it.

    Attributes:
        name: of the way.
        off_s, on_s: mean seconds of a step, by block; equal positions are a pair.
        host_off_s, host_on_s: seconds until a step returns to the caller, the device being idle when it begins.
        off, on: what healthy steps did beside computing; None if it was not counted.
        recorded: of a recorder of ours, else None.
        missing: why it could not be measured; then all else is empty.
    """

    name: str
    off_s: tuple[float, ...] = ()
    on_s: tuple[float, ...] = ()
    host_off_s: tuple[float, ...] = ()
    host_on_s: tuple[float, ...] = ()
    off: Quiet | None = None
    on: Quiet | None = None
    recorded: Recorded | None = None
    missing: str = ""

    @property
    def quiet_s(self) -> float:
        """Median step without it."""
        return median_interval(self.off_s).median

    @property
    def overhead(self) -> Interval:
        """By which share a step is longer with it."""
        return relative_overhead(self.off_s, self.on_s)

    @property
    def added_s(self) -> float:
        """Seconds added to a step."""
        return self.overhead.median * self.quiet_s

    @property
    def added_host_s(self) -> float | None:
        """Seconds of the host added to a step."""
        if not self.host_off_s:
            return None
        return median_interval(self.host_on_s).median - median_interval(self.host_off_s).median

    @property
    def bound_ratio(self) -> float | None:
        """The step with it, over the quiet step and the byte bound."""
        bound_s = None if self.recorded is None else self.recorded.bound_s
        return None if bound_s is None else (self.quiet_s + self.added_s) / (self.quiet_s + bound_s)

    @property
    def added_over_bound(self) -> float | None:
        """What it adds, over the byte bound."""
        bound_s = None if self.recorded is None else self.recorded.bound_s
        return self.added_s / bound_s if bound_s else None

    @property
    def prediction_error(self) -> float | None:
        """By which share of what was measured the prediction is off: 0.25 for a quarter too much."""
        predicted_s = None if self.recorded is None else self.recorded.predicted_s
        return None if predicted_s is None or self.added_s <= 0 else predicted_s / self.added_s - 1

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data: what was measured, and what follows from it."""
        data = dataclasses.asdict(self)
        if self.missing:
            return {"name": self.name, "missing": self.missing}
        del data["missing"]
        interval = self.overhead
        data.update(
            num_pairs=len(self.off_s),
            quiet_s=self.quiet_s,
            added_s=self.added_s,
            added_host_s=self.added_host_s,
            overhead={"median": interval.median, "low": _number(interval.low), "high": _number(interval.high)},
            bound_ratio=self.bound_ratio,
            added_over_bound=self.added_over_bound,
            prediction_error=self.prediction_error,
        )
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Build one from what ``to_json`` gave."""
        if "missing" in data:
            return cls(data["name"], missing=data["missing"])
        recorded = data["recorded"]
        off, on = (None if data[side] is None else Quiet(**data[side]) for side in ("off", "on"))
        return cls(
            data["name"],
            tuple(data["off_s"]),
            tuple(data["on_s"]),
            tuple(data["host_off_s"]),
            tuple(data["host_on_s"]),
            off,
            on,
            None if recorded is None else Recorded(**{**recorded, "told": tuple(recorded["told"])}),
        )


@dataclass(frozen=True, slots=True)
class Study:
    """Comparisons of one workload.

    Attributes:
        workload: in words.
        comparisons: one a way of recording.
    """

    workload: str
    comparisons: tuple[Comparison, ...]


def document(studies: Sequence[Study], machine: Mapping[str, str]) -> dict[str, Any]:
    """The JSON document of a run.

    Args:
        studies: what was measured.
        machine: hardware and versions, by name.
    """
    return {
        "format": "flightrec-bench",
        "version": VERSION,
        "machine": dict(machine),
        "studies": [
            {"workload": study.workload, "comparisons": [found.to_json() for found in study.comparisons]}
            for study in studies
        ],
    }


def studies_of(data: Mapping[str, Any]) -> list[Study]:
    """The studies of a JSON document.

    Raises:
        ValueError: it is no such document, or of another version.
    """
    if data.get("format") != "flightrec-bench" or data.get("version") != VERSION:
        raise ValueError(
            f"expected a document flightrec-bench of version {VERSION}, got {data.get('format')!r} of version "
            f"{data.get('version')!r}; make it again with this flightrec"
        )
    return [
        Study(study["workload"], tuple(Comparison.from_json(found) for found in study["comparisons"]))
        for study in data["studies"]
    ]


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if value == value else None
