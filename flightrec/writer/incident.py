"""One incident in the writer: what has arrived, what is written, what is missing.

Owns the incident's folder, its facts while they are collected, and its tensors file. Runs in the writer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.errors import FormatError
from flightrec.records import NUM_STATISTICS, Firing, RecordLayout, Severity
from flightrec.storage.facts import Blind, HistoryPiece, Identity, IncidentFacts, RankFiles
from flightrec.storage.write import TensorsFile, write_facts, write_index
from flightrec.writer import folders, messages
from flightrec.writer.history import HistoryMemory
from flightrec.writer.iteration import Iteration, component_buffers, component_parts
from flightrec.writer.shared import Message
from flightrec.writer.surroundings import Surroundings

NEVER_ARRIVED = "its bytes never reached the writer"


@dataclass
class Payload:
    """Parts of a tick's slot in the staging arena: (segment, offset in the segment, staging offset, bytes)."""

    tick: int
    pieces: list[tuple[int, int, int, int]]
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
    surroundings: Surroundings = field(default_factory=Surroundings)

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


class Incident:
    """From ``open`` to the committed files.

    Args:
        message: the ``open`` message.
        run: what is the same for all incidents; read until the facts are written.
        memory: statistics of past iterations: read now, and once more for what came since when the facts are written.
    """

    def __init__(self, message: Message, run: RunFacts, memory: HistoryMemory | None = None) -> None:
        header = message.header
        self.run = run
        self.number: int = header["incident"]
        self.trigger_json: Mapping[str, Any] = header["trigger"]
        self.firings_json: list[Mapping[str, Any]] = list(header["firings"])
        self.extra: dict[str, Any] = header["extra"]
        self.created_ns: int = header["created_ns"]
        self.history = _history(message)
        self.iterations: dict[int, Iteration] = {}
        self.blind: list[Blind] = []
        self._memory = memory
        self._statistics: list[HistoryPiece] = []
        self._read_statistics()
        self.late_firings: list[Mapping[str, Any]] = []
        self.waiting: list[Payload] = []
        self.folder: Path | None = None
        self.identity: Identity | None = None
        self.facts_name = ""
        self.tensors_name = ""
        self.tensors: TensorsFile | None = None
        self.error = ""
        self._began_s = time.monotonic()
        run.surroundings.ask(run.environment)

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
        iteration = self.iterations.setdefault(header["tick"], Iteration(header))
        iteration.append(header, layouts, rows)
        for name, state in zip(header["random_states"], message.blobs[2:], strict=True):
            iteration.random_states[name] = np.frombuffer(state, dtype=np.uint8)

    def write_facts(self, ended: str = "") -> None:
        """Write and commit the facts file, then begin the tensors file.

        Raises:
            OSError: the folder cannot be made.
            WriterError: the facts cannot be written; nothing is left under a final name.
        """
        run = self.run
        self._read_statistics()
        if ended:  # the trainer had no time to name the gravest one
            self.trigger_json = self._gravest()
        trigger = messages.firing_from_json(self.trigger_json)
        self.iterations = dict(sorted(self.iterations.items()))
        facts_of, row = [], 0
        for iteration in self.iterations.values():
            facts_of.append(iteration.freeze(row))
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
            environment={**run.surroundings.facts(run.environment), **self.extra},
            trigger=self._firing(self.trigger_json),
            firings=[self._firing(data) for data in self.firings_json],
            iterations=facts_of,
            quantizers=run.quantizer_rows(),
            blind=self.blind,
            history=self.history,
            statistics=self._statistics,
            tensors_file="" if problem else self.tensors_name,
            ended=ended,
        )
        write_facts(self.folder / f"{stem}.facts.h5", facts)
        self.facts_name = f"{stem}.facts.h5"
        self.blind = []  # told; what comes now goes into the tensors file
        self.history, self._statistics = {}, []
        if problem:
            self.error = problem
        else:
            self._begin_tensors()

    def write_payload(self, payload: Payload, staging: memoryview) -> None:
        """Write what lies in these pieces. Errors end the tensors file, not the incident."""
        iteration = self.iterations.get(payload.tick)
        if iteration is None or self.tensors is None:
            return
        iteration.complete = iteration.complete or payload.last
        try:
            for segment, start, offset, num_bytes in payload.pieces:
                self._put_piece(self.tensors, iteration, segment, start, staging[offset : offset + num_bytes])
            self.tensors.write_out()
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
            "num_records": sum(len(iteration.layouts) for iteration in self.iterations.values()),
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

    def _put_piece(
        self, tensors: TensorsFile, iteration: Iteration, segment: int, start: int, area: memoryview
    ) -> None:
        for sequence in iteration.touching(segment, start, start + area.nbytes):
            if sequence in iteration.written or sequence in iteration.refused:
                continue
            layout = iteration.layouts[sequence]
            place = iteration.first_record + sequence, iteration.paths[sequence], layout
            buffers = component_buffers(layout, area, start)
            try:
                if buffers is not None:
                    tensors.put(*place, buffers)
                elif not tensors.put_parts(*place, component_parts(layout, area, start)):
                    continue
            except FormatError as error:  # this record only
                self.blind.append(Blind(*iteration.place, layout.key.layer, layout.key.tensor, str(error)))
                iteration.refused.add(sequence)
            else:
                iteration.written.add(sequence)

    def _read_statistics(self) -> None:
        """Copy what the history has beyond what was copied before; an error is told as blind."""
        if self._memory is None:
            return
        try:
            self._statistics.append(self._memory.read(self._statistics[-1].last if self._statistics else 0))
        except Exception as error:
            self._memory = None
            reason = f"the history of statistics cannot be read: {type(error).__name__}: {error}"
            self.blind.append(Blind(-1, -1, "", "history", reason))

    def _gravest(self) -> Mapping[str, Any]:
        """The trigger, or the first graver firing since."""

        def when(firing: Mapping[str, Any]) -> tuple[int, int]:
            return firing["attempt"], firing["iteration"]

        since = [firing for firing in self.firings_json if when(firing) >= when(self.trigger_json)]
        return max([self.trigger_json, *since], key=lambda firing: Severity(firing["severity"]).order)

    def _begin_tensors(self) -> None:
        assert self.folder is not None
        assert self.identity is not None
        try:
            self.tensors = TensorsFile.create(self.folder / self.tensors_name, self.identity, self.facts_name)
        except Exception as error:
            self.fail_tensors(error)

    def _firing(self, data: Mapping[str, Any]) -> Firing:
        firing = messages.firing_from_json(data)
        place = firing.attempt, firing.iteration
        found = [iteration for iteration in self.iterations.values() if iteration.place == place]
        if firing.key is None or not found:
            return firing
        return messages.firing_from_json(data, found[0].record_of(firing.key))

    def _room_problem(self) -> str:
        """Why the tensors file is not written, or empty. Makes room within the quota."""
        run = self.run
        sizes = (
            layout.num_bytes
            for iteration in self.iterations.values()
            for layout, path in zip(iteration.layouts, iteration.paths, strict=True)
            if path
        )
        history = sum(piece.plain.nbytes + piece.quantized.nbytes for piece in self._statistics)
        needed = sum(sizes) + history + folders.RESERVE_BYTES
        if run.disk_quota_bytes is not None:
            rule = self.trigger_json["rule"]
            if not folders.make_room(run.directory, run.run_id, run.rank, rule, needed, run.disk_quota_bytes):
                return f"no tensors: {needed} bytes do not fit into incident.disk_quota of {run.disk_quota_bytes}"
        free = folders.free_bytes(run.directory)
        if free is not None and free < needed:
            return f"no tensors: {needed} bytes needed, {free} free in {run.directory}"
        return ""


def _history(message: Message) -> dict[str, tuple[npt.NDArray[Any], ...]]:
    history: dict[str, tuple[npt.NDArray[Any], ...]] = {}
    blobs = iter(message.blobs)
    for name, shape, has_attempts in message.header["history"]:
        iterations = np.frombuffer(next(blobs), dtype=np.int64)
        values = np.frombuffer(next(blobs), dtype=np.float64).reshape(shape)
        attempts = (np.frombuffer(next(blobs), dtype=np.int64),) if has_attempts else ()
        history[name] = (iterations, values, *attempts)
    return history
