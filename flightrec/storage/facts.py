"""What the writer must know to write an incident's files: plain Python and numpy, no HDF5 objects.

Filled by the writer process from what reached the shared memory. Owns no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flightrec.records import Firing, Key, RecordLayout, Representation
from flightrec.storage import names


class Blind(NamedTuple):
    """What was not recorded, and why. ``attempt`` or ``iteration`` -1 means all of them; texts may be empty."""

    attempt: int
    iteration: int
    layer: str
    tensor: str
    reason: str


class RankFiles(NamedTuple):
    """File names (no folders) of one rank in the incident's folder; ``tensors`` may be empty."""

    rank: int
    facts: str
    tensors: str


@dataclass(frozen=True)
class Identity:
    """The root attributes that all files of one rank's incident share."""

    incident_id: str
    run_id: str
    attempt: int
    rank: int
    world_size: int
    host: str
    created_ns: int
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class IterationFacts:
    """One iteration: its records in the order in which they were seen, with their statistics.

    Attributes:
        attempt: see design words.
        iteration: number of the optimizer step.
        tick: internal time.
        num_microbatches: how many had begun.
        loss: the loss given to ``step``, None when there was none.
        layouts: layout of each record; the position in this list is the record's sequence number.
        statistics: float64 [len(layouts), NUM_STATISTICS], NaN for absent.
        partial: the iteration had not ended.
        blind: why its tensors will not be in the tensors file, or empty.
        metrics: values given to ``step(metrics=...)`` and other small facts; anything, unknown types become text.
        facts: ``step_time_s``, ``data_time_s``, ``optimizer``, ``data``: columns of ``/iterations``.
        random_states: random number generators as they were when the iteration began, by name: uint8 [n].
        tier: ``ring``, or ``host``: it was in no slot of the device's ring any more and came from the host tier.
        landmark: the age in iterations that it stands for as a landmark, 0 if it is none.
    """

    attempt: int
    iteration: int
    tick: int
    num_microbatches: int
    loss: float | None
    layouts: Sequence[RecordLayout]
    statistics: npt.NDArray[np.float64]
    partial: bool = False
    blind: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    random_states: Mapping[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    tier: str = "ring"
    landmark: int = 0

    def record_paths(self) -> list[str]:
        """Group of each record in the tensors file, empty text for records without bytes; parallel to ``layouts``."""
        known = max((layout.key.microbatch for layout in self.layouts), default=-1) + 1
        num_microbatches = max(self.num_microbatches, known)  # a record outside them must not meet a real microbatch
        return [
            ""
            if layout.representation is Representation.STATISTICS or not layout.components
            else names.record_path(self.attempt, self.iteration, layout.key, num_microbatches)
            for layout in self.layouts
        ]


@dataclass(frozen=True)
class HistoryPiece:
    """Statistics of past iterations, n samples in the order in which they were taken.

    Attributes:
        last: number of the last one.
        attempts: int64 [n].
        iterations: int64 [n].
        plain_series: keys without microbatch.
        plain: float32 [n, len(PLAIN_STATISTICS), len(plain_series)], NaN for no sample.
        quantized_series: keys without microbatch; a series whose tensor was quantized only later is in both.
        quantized: float32 [n, len(HISTORY_STATISTICS), len(quantized_series)].
    """

    last: int
    attempts: npt.NDArray[np.int64]
    iterations: npt.NDArray[np.int64]
    plain_series: Sequence[Key]
    plain: npt.NDArray[np.float32]
    quantized_series: Sequence[Key]
    quantized: npt.NDArray[np.float32]


@dataclass(frozen=True)
class IncidentFacts:
    """Everything in a rank's facts file.

    Attributes:
        identity: root attributes.
        config_text: the configuration as YAML text.
        environment: argv, commit, topology, ...; anything, unknown types become text.
        trigger: the primary firing.
        firings: all firings known now, the primary one among them (added in front when it is missing).
        iterations: in time order.
        quantizers: ``QuantizerInfo.to_json()`` of each, at the position that layouts name.
        blind: what is not in the incident, and why.
        history: name -> (iterations int64 [n], values [n] or [n, rows]), or (iterations, values, attempts int64 [n]).
        statistics: the history of the records' statistics, in one or several pieces, a later one with more series.
        tensors_file: name of the tensors file beside this one, empty when none will be written.
        ended: why the incident ended early (``trainer died``), or empty.
    """

    identity: Identity
    config_text: str
    environment: Mapping[str, Any]
    trigger: Firing
    firings: Sequence[Firing]
    iterations: Sequence[IterationFacts]
    quantizers: Sequence[Mapping[str, Any]] = ()
    blind: Sequence[Blind] = ()
    history: Mapping[str, tuple[npt.ArrayLike, ...]] = field(default_factory=dict)
    statistics: Sequence[HistoryPiece] = ()
    tensors_file: str = ""
    ended: str = ""

    def first_records(self) -> list[int]:
        """Row of ``/records`` at which each iteration begins; a record's row is that plus its sequence number."""
        rows, row = [], 0
        for iteration in self.iterations:
            rows.append(row)
            row += len(iteration.layouts)
        return rows
