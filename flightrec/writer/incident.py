"""One incident in the writer: what has arrived, what is written, what is missing.

Owns the incident's folder, its facts while they are collected, and its tensors file. Runs in the writer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError
from flightrec.records import NUM_STATISTICS, Firing, Key, RecordLayout
from flightrec.storage.facts import Blind, Identity, IncidentFacts, IterationFacts, RankFiles
from flightrec.storage.write import TensorsFile, write_facts, write_index
from flightrec.writer import folders, messages
from flightrec.writer.shared import Message

NEVER_ARRIVED = "its bytes never reached the writer"


@dataclass
class Payload:
    """Segments of one tick in the staging arena: (segment, staging offset, bytes)."""

    tick: int
    segments: list[tuple[int, int, int]]
    last: bool


@dataclass
class RunFacts:
    """What is the same in all incidents of a run: where, who, configuration, layouts, quantizers."""

    directory: Path
    identity: dict[str, Any]
    disk_quota_bytes: int | None = None
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    layouts: dict[int, RecordLayout] = field(default_factory=dict)
    quantizers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    used_names: set[str] = field(default_factory=set)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return str(self.identity.get("run_id", ""))

    @property
    def rank(self) -> int:
        """Our rank."""
        return int(self.identity.get("rank", 0))

    def identity_of(self, incident_id: str, trigger: Firing, created_ns: int) -> Identity:
        """Root attributes of an incident's files."""
        versions = self.identity.get("versions") or {}
        return Identity(
            incident_id=incident_id,
            run_id=self.run_id,
            attempt=trigger.attempt,
            rank=self.rank,
            world_size=int(self.identity.get("world_size", 1)),
            host=str(self.identity.get("host", "")),
            created_ns=created_ns,
            versions={str(name): str(version) for name, version in versions.items()},
        )

    def quantizer_rows(self) -> list[Mapping[str, Any]]:
        """Rows by id; an id that never arrived gives an empty description, so that later ids keep their place."""
        unknown = {"class_name": "", "format": "", "scale_direction": "none", "block_shape": [], "metadata": {}}
        return [self.quantizers.get(number, unknown) for number in range(max(self.quantizers, default=-1) + 1)]


class Iteration:
    """One iteration of an incident, possibly sent in pieces; and which of its records have bytes on disk."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.header = header
        self.layouts: list[RecordLayout] = []
        self._statistics: list[npt.NDArray[np.float64]] = []
        self.first_record = 0
        self.paths: list[str] = []
        self.by_segment: dict[int, list[int]] = {}
        self.written: set[int] = set()
        self.complete = False

    @property
    def place(self) -> tuple[int, int]:
        """Attempt and iteration."""
        return self.header["attempt"], self.header["iteration"]

    def append(self, header: Mapping[str, Any], layouts: list[RecordLayout], rows: npt.NDArray[np.float64]) -> None:
        """Add records after those that are here; the newest header holds."""
        self.header = header
        self.layouts += layouts
        self._statistics.append(rows)

    def freeze(self, first_record: int) -> IterationFacts:
        """No more records: give its facts, and index the records by segment for the payload."""
        header = self.header
        statistics = np.concatenate([np.empty((0, NUM_STATISTICS)), *self._statistics])
        self._statistics = [statistics]
        facts = IterationFacts(
            attempt=header["attempt"],
            iteration=header["iteration"],
            tick=header["tick"],
            num_microbatches=header["num_microbatches"],
            loss=header["loss"],
            layouts=self.layouts,
            statistics=statistics,
            partial=bool(header["partial"]),
            blind=str(header["blind"]),
            metrics=header["metrics"],
        )
        self.first_record = first_record
        self.paths = facts.record_paths()
        for sequence, (layout, path) in enumerate(zip(self.layouts, self.paths, strict=True)):
            if path:
                self.by_segment.setdefault(layout.segment, []).append(sequence)
        return facts

    def missing(self, reason: str) -> list[Blind]:
        """Rows for what should have bytes in the tensors file and has none."""
        expected = [sequence for sequence, path in enumerate(self.paths) if path]
        lost = [sequence for sequence in expected if sequence not in self.written]
        if not lost:
            return []
        reason = self.header["blind"] or reason
        if not self.written:
            return [Blind(*self.place, "", "", reason)]
        keys = dict.fromkeys((self.layouts[n].key.layer, self.layouts[n].key.tensor) for n in lost)
        return [Blind(*self.place, layer, tensor, reason) for layer, tensor in keys]


class Incident:
    """From ``open`` to the committed files.

    Args:
        message: the ``open`` message.
        run: what is the same for all incidents; read until the facts are written.
    """

    def __init__(self, message: Message, run: RunFacts) -> None:
        header = message.header
        self.run = run
        self.number: int = header["incident"]
        self.trigger_json = header["trigger"]
        self.firings_json: list[Mapping[str, Any]] = list(header["firings"])
        self.extra: dict[str, Any] = header["extra"]
        self.created_ns: int = header["created_ns"]
        self.history = _history(message)
        self.iterations: dict[int, Iteration] = {}
        self.blind: list[Blind] = []
        self.late_firings: list[Mapping[str, Any]] = []
        self.waiting: list[Payload] = []
        self.folder: Path | None = None
        self.identity: Identity | None = None
        self.facts_name = ""
        self.tensors_name = ""
        self.tensors: TensorsFile | None = None
        self.error = ""
        self._records: dict[tuple[int, int, Key], int] = {}
        self._began_s = time.monotonic()

    @property
    def facts_committed(self) -> bool:
        """The facts file has its final name."""
        return bool(self.facts_name)

    def add_iteration(self, message: Message) -> None:
        """Take an ``iteration`` message. After the facts it is only told as blind."""
        header = message.header
        if self.facts_committed:
            place = header["attempt"], header["iteration"]
            self.blind.append(Blind(*place, "", "", "arrived after the facts were written"))
            return
        ids = np.frombuffer(message.blobs[0], dtype=np.int32).tolist()
        rows = np.frombuffer(message.blobs[1], dtype=np.float64).reshape(-1, NUM_STATISTICS)
        known = [number for number, layout_id in enumerate(ids) if layout_id in self.run.layouts]
        if len(known) < len(ids):
            reason = f"{len(ids) - len(known)} records whose layout never reached the writer"
            self.blind.append(Blind(header["attempt"], header["iteration"], "", "", reason))
            rows = rows[known]
        layouts = [self.run.layouts[ids[number]] for number in known]
        self.iterations.setdefault(header["tick"], Iteration(header)).append(header, layouts, rows)

    def write_facts(self, ended: str = "") -> None:
        """Write and commit the facts file, then begin the tensors file.

        Raises:
            OSError: the folder cannot be made.
            WriterError: the facts cannot be written; nothing is left under a final name.
        """
        run, trigger = self.run, messages.firing_from_json(self.trigger_json)
        self.iterations = dict(sorted(self.iterations.items()))
        facts_of, row = [], 0
        for iteration in self.iterations.values():
            facts_of.append(iteration.freeze(row))
            for sequence, layout in enumerate(iteration.layouts):
                self._records[(*iteration.place, layout.key)] = row + sequence
            row += len(iteration.layouts)
        problem = self._room_problem()
        name = folders.incident_name(run.run_id, run.rank, trigger)
        self.folder = folders.make_folder(run.directory, name, run.used_names)
        incident_id = self.folder.name
        self.identity = run.identity_of(incident_id, trigger, self.created_ns)
        stem = f"rank{run.rank:05d}.{incident_id}"
        self.tensors_name = f"{stem}.tensors.h5"
        folders.write_marker(self.folder, run.rank)
        if problem:
            self.blind.append(Blind(-1, -1, "", "", problem))
        facts = IncidentFacts(
            identity=self.identity,
            config_text=run.config_text,
            environment={**run.environment, **self.extra},
            trigger=self._firing(self.trigger_json),
            firings=[self._firing(data) for data in self.firings_json],
            iterations=facts_of,
            quantizers=run.quantizer_rows(),
            blind=self.blind,
            history=self.history,
            tensors_file="" if problem else self.tensors_name,
            ended=ended,
        )
        write_facts(self.folder / f"{stem}.facts.h5", facts)
        self.facts_name = f"{stem}.facts.h5"
        self.blind = []  # told; what comes now goes into the tensors file
        self.history = {}
        if problem:
            self.error = problem
        else:
            self._begin_tensors()

    def write_payload(self, payload: Payload, staging: memoryview) -> None:
        """Write the records that lie in these segments. Errors end the tensors file, not the incident."""
        iteration = self.iterations.get(payload.tick)
        if iteration is None or self.tensors is None:
            return
        iteration.complete = iteration.complete or payload.last
        try:
            for segment, offset, num_bytes in payload.segments:
                self._write_segment(self.tensors, iteration, segment, staging[offset : offset + num_bytes])
            self.tensors.flush()  # the staging memory is about to be reused: from here on only the file has the bytes
        except Exception as error:
            self.fail_tensors(error)

    def fail_tensors(self, error: BaseException) -> None:
        """Give up the tensors file; facts and index remain."""
        self.error = f"tensors file: {type(error).__name__}: {error}"
        tensors, self.tensors = self.tensors, None
        if tensors is not None:
            try:
                tensors.abort()
            except Exception as second:
                self.error += f" (and while it was given up: {second})"

    def finish(self, reason: str = NEVER_ARRIVED) -> dict[str, Any]:
        """Commit the tensors file and the index; header of ``incident_done``.

        Args:
            reason: why records without bytes have none.

        Raises:
            WriterError: the index cannot be written.
        """
        assert self.folder is not None
        assert self.identity is not None
        blind = [*self.blind, *(row for iteration in self.iterations.values() for row in iteration.missing(reason))]
        if self.tensors is not None:
            try:
                self.tensors.commit([self._firing(data) for data in self.late_firings], blind)
                self.tensors = None
            except Exception as error:
                self.fail_tensors(error)
        tensors_name = "" if self.error else self.tensors_name
        rank = self.run.rank
        write_index(self.folder, self.identity.incident_id, [RankFiles(rank, self.facts_name, tensors_name)])
        folders.remove_marker(self.folder, rank)
        return {
            "incident": self.number,
            "incident_id": self.identity.incident_id,
            "path": str(self.folder),
            "bytes": sum(entry.stat().st_size for entry in self.folder.iterdir()),
            "seconds": time.monotonic() - self._began_s,
            "num_records": len(self._records),
            "num_written": sum(len(iteration.written) for iteration in self.iterations.values()),
            "error": self.error,
        }

    def abandon(self) -> None:
        """Stop working on it: what is committed stays, the rest goes."""
        tensors, self.tensors = self.tensors, None
        if tensors is not None:
            tensors.abort()
        if self.folder is not None and self.folder.exists():
            folders.remove_marker(self.folder, self.run.rank)

    def _write_segment(self, tensors: TensorsFile, iteration: Iteration, segment: int, area: memoryview) -> None:
        for sequence in iteration.by_segment.get(segment, ()):
            layout = iteration.layouts[sequence]
            buffers = _component_buffers(layout, area)
            if buffers is None or sequence in iteration.written:
                continue
            try:
                tensors.add(iteration.first_record + sequence, iteration.paths[sequence], layout, buffers)
            except FormatError as error:  # this record only
                self.blind.append(Blind(*iteration.place, layout.key.layer, layout.key.tensor, str(error)))
            else:
                iteration.written.add(sequence)

    def _begin_tensors(self) -> None:
        assert self.folder is not None
        assert self.identity is not None
        try:
            self.tensors = TensorsFile.create(self.folder / self.tensors_name, self.identity, self.facts_name)
        except Exception as error:
            self.fail_tensors(error)

    def _firing(self, data: Mapping[str, Any]) -> Firing:
        firing = messages.firing_from_json(data)
        if firing.key is None:
            return firing
        record = self._records.get((firing.attempt, firing.iteration, firing.key), -1)
        return messages.firing_from_json(data, record)

    def _room_problem(self) -> str:
        """Why the tensors file is not written, or empty. Makes room within the quota."""
        run = self.run
        sizes = (
            layout.num_bytes
            for iteration in self.iterations.values()
            for layout, path in zip(iteration.layouts, iteration.paths, strict=True)
            if path
        )
        needed = sum(sizes) + folders.RESERVE_BYTES
        if run.disk_quota_bytes is not None:
            rule = self.trigger_json["rule"]
            if not folders.make_room(run.directory, run.run_id, run.rank, rule, needed, run.disk_quota_bytes):
                return f"no tensors: {needed} bytes do not fit into incident.disk_quota of {run.disk_quota_bytes}"
        free = folders.free_bytes(run.directory)
        if free is not None and free < needed:
            return f"no tensors: {needed} bytes needed, {free} free in {run.directory}"
        return ""


def _component_buffers(layout: RecordLayout, area: memoryview) -> Sequence[memoryview] | None:
    """The bytes of each component, ``None`` when they do not all lie in ``area``."""
    buffers = []
    for component in layout.components:
        start = layout.offset_bytes + component.offset_bytes
        if start + component.num_bytes > area.nbytes:
            return None
        buffers.append(area[start : start + component.num_bytes])
    return buffers


def _history(message: Message) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    history = {}
    for number, (name, shape) in enumerate(message.header["history"]):
        iterations = np.frombuffer(message.blobs[2 * number], dtype=np.int64)
        history[name] = (iterations, np.frombuffer(message.blobs[2 * number + 1], dtype=np.float64).reshape(shape))
    return history
