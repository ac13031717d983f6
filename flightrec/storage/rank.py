"""One rank's files, read: tables at first use, payload only when a record asks. Any thread, one at a time."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from flightrec.errors import FlightrecError, IncidentError, MissingExtraError
from flightrec.records import Firing, Key, Phase, Severity, Stage
from flightrec.storage import commit, files, filters, guard, names, schema, text
from flightrec.storage.chunks import pieces
from flightrec.storage.facts import Blind
from flightrec.storage.series import History

_KEY_COLUMNS = ("layer", "tensor", "part", "microbatch", "phase", "call", "stage")
_PHASES = {phase.value.encode("ascii"): phase for phase in Phase}
_STAGES = {stage.value.encode("ascii"): stage for stage in Stage}
_TABLES = {
    "records": schema.RECORD,
    "iterations": schema.ITERATION,
    "firings": schema.FIRING,
    "blind": schema.BLIND,
    "quantizers": schema.QUANTIZER,
    "components": schema.COMPONENT,
}


@dataclass(frozen=True)
class Iteration:
    """One row of ``/iterations``.

    Attributes:
        attempt: see design words; (attempt, iteration) is unique.
        iteration: number of the optimizer step.
        tick: internal time.
        num_microbatches: how many had begun.
        loss: given to ``step``, None when there was none.
        partial: the iteration had not ended when the incident was written.
        blind: why its tensors are missing, or empty.
        num_records: how many records it has.
        metrics: values given to ``step``.
        step_time_s: from the ``step`` before to this one, on the host's clock; None if not known, as the next two.
        data_time_s: from the ``step`` before to the first forward.
        loss_scale: the metric of this name.
        optimizer: class, and settings of each group of parameters; scheduler.
        data: single values given to ``microbatch(data=...)``, by name and microbatch.
        tier: ``ring``, or ``host``: it came from the host tier.
        landmark: the age in iterations that it stands for as a landmark, 0 for none.
    """

    attempt: int
    iteration: int
    tick: int
    num_microbatches: int
    loss: float | None
    partial: bool
    blind: str
    num_records: int
    metrics: Mapping[str, Any]
    step_time_s: float | None = None
    data_time_s: float | None = None
    loss_scale: float | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    tier: str = "ring"
    landmark: int = 0


@dataclass(frozen=True)
class StoredComponent:
    """One array of a record as ``/records`` describes it: its name, shape, element format and length."""

    name: str
    shape: tuple[int, ...]
    format: str
    num_bytes: int


class Rank:
    """Facts and tensors of one rank.

    Attributes:
        rank: its number.
        facts_path: the facts file.
        tensors_path: the tensors file, None when there is none.
    """

    def __init__(self, facts_path: Path, tensors_path: Path | None, incident_id: str | None = None) -> None:
        self.facts_path = facts_path
        self.tensors_path = tensors_path
        self._facts = files.open_file(facts_path, [schema.FACTS])
        self._tensors: h5py.File | None = None
        self._components: dict[str, tuple[StoredComponent, ...]] = {}
        try:
            if incident_id is not None:
                files.check_identity(facts_path, self._facts, incident_id)
            self.rank = int(self.attribute("rank"))
            self.incident_id = str(self.attribute("incident_id"))
        except IncidentError:
            self._facts.close()
            raise

    def close(self) -> None:
        """Close both files; what was read stays usable."""
        self._facts.close()
        if self._tensors is not None:
            self._tensors.close()

    def attribute(self, name: str, default: Any = None) -> Any:
        """Give a root attribute of the facts file; one that is missing and has no default is damage."""
        with files.reading(self.facts_path, f"attribute {name}"):
            if name not in self._facts.attrs and default is None:
                raise ValueError("it is missing")
            return text.read_attribute(self._facts, name) if name in self._facts.attrs else default

    @cached_property
    def names(self) -> list[str]:
        """``/names``: the texts that the tables point to."""
        with files.reading(self.facts_path, "/names"):
            return text.read_text_table(self._facts)

    @cached_property
    def records(self) -> npt.NDArray[np.void]:
        """``/records`` as a structured array, columns as in ``docs/format.md``."""
        return self._table("records")

    @cached_property
    def iterations(self) -> list[Iteration]:
        """``/iterations``, in time order."""
        rows = self._table("iterations")
        with files.reading(self.facts_path, "/iterations"):
            return [
                Iteration(
                    attempt=int(row["attempt"]),
                    iteration=int(row["iteration"]),
                    tick=int(row["tick"]),
                    num_microbatches=int(row["num_microbatches"]),
                    loss=float(row["loss"]) if row["has_loss"] else None,
                    partial=bool(row["partial"]),
                    blind=self.names[row["blind"]],
                    num_records=int(row["num_records"]),
                    metrics=text.from_json_text(self.names[row["metrics"]]) or {},
                    **(self._later_columns(row) if "optimizer" in (rows.dtype.names or ()) else {}),
                    **(_tier_columns(row) if "tier" in (rows.dtype.names or ()) else {}),
                )
                for row in rows
            ]

    def _later_columns(self, row: Any) -> dict[str, Any]:
        """What ``/iterations`` has since format 1.1."""
        numbers = {name: float(row[name]) for name in ("step_time_s", "data_time_s", "loss_scale")}
        data = text.from_json_text(self.names[row["data"]]) or {}
        return {
            **{name: None if math.isnan(number) else number for name, number in numbers.items()},
            "optimizer": text.from_json_text(self.names[row["optimizer"]]) or {},
            "data": {name: {int(index): value for index, value in by.items()} for name, by in data.items()},
        }

    @cached_property
    def num_microbatches(self) -> dict[tuple[int, int], int]:
        """(attempt, iteration) -> how many microbatches had begun."""
        return {(entry.attempt, entry.iteration): entry.num_microbatches for entry in self.iterations}

    @cached_property
    def trigger(self) -> Firing:
        """The primary firing."""
        with files.reading(self.facts_path, "/trigger"):
            place = int(text.read_attribute(guard.need(self._facts, "trigger"), "firing"))
            if place < 0:
                raise ValueError(f"is firing {place}")
            return self._facts_firings[place]

    @cached_property
    def firings(self) -> list[Firing]:
        """All firings: those of the facts file, then the late ones of the tensors file, if it can be read."""
        late: list[Firing] = []
        if self.tensors_problem == "":
            file, path = self._tensors_file()
            with files.reading(path, "/firings"):
                if guard.find(file, "firings") is not None:
                    late = _firings(_read_table(file, "firings"), text.read_text_table(file))
        return [*self._facts_firings, *late]

    @cached_property
    def blind(self) -> list[Blind]:
        """What was not recorded: rows of both files' ``/blind``."""
        with files.reading(self.facts_path, "/blind"):
            found = _blind(_read_table(self._facts, "blind"), self.names)
        if self.tensors_problem == "":
            file, path = self._tensors_file()
            with files.reading(path, "/blind"):
                if guard.find(file, "blind") is not None:
                    found += _blind(_read_table(file, "blind"), text.read_text_table(file))
        return found

    @cached_property
    def quantizers(self) -> list[dict[str, Any]]:
        """``/quantizers``: ``class_name``, ``format``, ``scale_direction``, ``block_shape``, ``metadata`` of each."""
        rows = self._table("quantizers")
        with files.reading(self.facts_path, "/quantizers"):
            return [
                {
                    "class_name": self.names[row["class_name"]],
                    "format": self.names[row["format"]],
                    "scale_direction": row["scale_direction"].decode("ascii"),
                    "block_shape": tuple(text.from_json_text(self.names[row["block_shape"]]) or ()),
                    "metadata": text.from_json_text(self.names[row["metadata"]]) or {},
                }
                for row in rows
            ]

    @cached_property
    def config_text(self) -> str:
        """The configuration as YAML."""
        with files.reading(self.facts_path, "/config"):
            return text.read_text(self._facts, "config")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """argv, commit, topology, ..."""
        with files.reading(self.facts_path, "/environment"):
            return text.from_json_text(text.read_text(self._facts, "environment")) or {}

    @cached_property
    def problems(self) -> list[str]:
        """What could not be stored when the file was written."""
        with files.reading(self.facts_path, "/problems"):
            return text.read_text_table(self._facts, "problems")[1:] if "problems" in self._facts else []

    @cached_property
    def history(self) -> History:
        """Loss, metrics and statistics of the past iterations; read when asked for."""
        return History(self.facts_path, self._facts, self.names)

    def random_states(self, attempt: int, iteration: int) -> dict[str, npt.NDArray[np.uint8]]:
        """The random number generators' states as an iteration began, by name; empty if none were kept."""
        path = f"rng/{names.iteration_link(attempt, iteration)}"
        with files.reading(self.facts_path, path):
            group = guard.find(self._facts, path)
            entries = guard.members(group) if group is not None else ()
            return {guard.decoded(name): np.asarray(guard.checked(state)[()]) for name, state in entries}

    @cached_property
    def tensors_problem(self) -> str:
        """Why no payload can be read at all, or empty."""
        if self.tensors_path is None:
            name = str(self.attribute("tensors_file", ""))
            if name and commit.partial_path(self.facts_path.with_name(name)).exists():
                return f"the tensors file {name} is still being written, or its writer died"
            return f"there is no tensors file {name}: it could not be written, or was not moved along"
        try:
            self._tensors_file()
        except (IncidentError, MissingExtraError) as error:
            return str(error)
        return ""

    @property
    def salvaged(self) -> bool:
        """Whether the tensors file was left behind by a writer that died."""
        return self.tensors_path is not None and self.tensors_path.name.endswith(".salvaged.h5")

    def read_window(self, path: str, component: str, window: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Read a part of one component as it is stored; its checksum, which is of the whole, is not compared.

        Raises:
            IncidentError: it is not there, or cannot be read.
        """
        file, where = self._tensors_file()
        with files.reading(where, f"{path}/{component}"):
            return np.asarray(guard.checked(guard.need(file, f"{path}/{component}"))[window])

    def key(self, row: Any) -> Key:
        """Give the key of a row of ``/records``."""
        with files.reading(self.facts_path, "/records"):
            return _key(row, self.names)

    def keys(self, rows: npt.NDArray[np.intp]) -> list[Key]:
        """Give the keys of several rows of ``/records``."""
        table, names = self.records, self.names
        with files.reading(self.facts_path, "/records"):
            columns = [table[name][rows].tolist() for name in _KEY_COLUMNS]
            return [
                Key(names[layer], names[tensor], names[part], microbatch, _PHASES[phase], call, _STAGES[stage])
                for layer, tensor, part, microbatch, phase, call, stage in zip(*columns, strict=True)
            ]

    def components(self, row: Any) -> tuple[StoredComponent, ...]:
        """Give the arrays that a row of ``/records`` names."""
        with files.reading(self.facts_path, "/records"):
            described = self.names[row["components"]]
            if described not in self._components:
                parts = text.from_json_text(described) or ()
                self._components[described] = tuple(_stored_component(part) for part in parts)
            return self._components[described]

    def crc32(self, record: int, component: str) -> int | None:
        """The checksum of a component's bytes as the tensors file has it, None where it was never written."""
        return None if self.tensors_problem or not self._payload else self._payload.get((record, component))

    def payload_chunks(self, path: str, part: StoredComponent, max_elements: int) -> Iterator[npt.NDArray[Any]]:
        """Read one component piece by piece, its checksum not compared: flat arrays of stored elements, in C order.

        Raises:
            IncidentError: it is not there, has another shape than ``/records`` says, or cannot be read.
        """
        file, where = self._tensors_file()
        with files.reading(where, f"{path}/{part.name}"):
            dataset = guard.checked(guard.need(file, f"{path}/{part.name}"), max_bytes=part.num_bytes)
            if dataset.shape != part.shape:
                raise IncidentError(f"{where}: {path}/{part.name} is {dataset.shape}, /records says {part.shape}")
            for place in pieces(part.shape, max_elements):
                yield np.asarray(dataset[place]).reshape(-1)

    def has_payload(self, record: int, path: str, component: str) -> bool:
        """Whether the bytes of a record's component are in the tensors file."""
        if self.tensors_problem:
            return False
        if self._payload is not None:
            return (record, component) in self._payload
        file, where = self._tensors_file()
        with files.reading(where, path):
            return bool(path) and guard.find(file, f"{path}/{component}") is not None

    def read_payload(
        self, record: int, path: str, component: str, *, check: bool = True, max_bytes: int | None = None
    ) -> npt.NDArray[Any]:
        """Read one component as it is stored.

        Args:
            record: row of ``/records``.
            path: its group.
            component: the array's name.
            check: compare its checksum.
            max_bytes: what ``/records`` says of its length; one that claims more is not read.

        Raises:
            IncidentError: it is not there, or damaged (its checksum differs, when ``check``).
        """
        file, where = self._tensors_file()
        with files.reading(where, f"{path}/{component}"):
            item = guard.need(file, f"{path}/{component}")
            dataset = guard.checked(item) if max_bytes is None else guard.checked(item, max_bytes=max_bytes)
            if dataset.dtype.hasobject:
                raise ValueError(f"has elements of {dataset.dtype}")
            array = np.asarray(dataset[()])
        if check and self._payload is not None:
            expected = self._payload.get((record, component))
            found = zlib.crc32(np.ascontiguousarray(array).view("u1").data if array.size else b"")
            if expected != found:
                raise IncidentError(
                    f"{where}: {path}/{component} is damaged: crc32 is {found:08x}, "
                    + ("none was written" if expected is None else f"expected {expected:08x}")
                )
        return array

    def payload_in_pieces(
        self, record: int, path: str, component: str, *, piece_bytes: int = 64 << 20
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Read one component along its first dimension: (first index, array as it is stored) of each piece.

        Raises:
            IncidentError: it is not there; after the last piece, if its checksum differs.
        """
        file, where = self._tensors_file()
        name = f"{path}/{component}"
        with files.reading(where, name):
            dataset = guard.checked(guard.need(file, name))
            length = dataset.shape[0] if dataset.shape else 0
            step = max(1, piece_bytes // max(1, dataset.size * dataset.dtype.itemsize // max(1, length)))
        crc = 0
        for start in range(0, length, step):
            with files.reading(where, name):
                piece = np.ascontiguousarray(dataset[start : start + step])
            crc = zlib.crc32(piece.view("u1").data if piece.size else b"", crc)
            yield start, piece
        if not dataset.shape:
            piece = self.read_payload(record, path, component)
            yield 0, piece
        elif self._payload is not None and self._payload.get((record, component)) != crc:
            raise IncidentError(f"{where}: {name} is damaged: crc32 is {crc:08x}, another was written")

    @cached_property
    def _payload(self) -> dict[tuple[int, str], int] | None:
        """(record, component) -> crc32; None in a salvaged file, where it was never written."""
        file, path = self._tensors_file()
        with files.reading(path, "/components"):
            if guard.find(file, "components") is None:
                return None
            table, names = _read_table(file, "components"), text.read_text_table(file)
            columns = (table["record"].tolist(), table["component"].tolist(), table["crc32"].tolist())
            return {(record, names[name]): crc for record, name, crc in zip(*columns, strict=True)}

    @cached_property
    def _facts_firings(self) -> list[Firing]:
        rows = self._table("firings")
        with files.reading(self.facts_path, "/firings"):
            return _firings(rows, self.names)

    def _table(self, name: str) -> npt.NDArray[np.void]:
        with files.reading(self.facts_path, f"/{name}"):
            table = _read_table(self._facts, name)
            for column in _TABLES[name].names or ():
                if _TABLES[name][column] == schema.TEXT_ID and column in (table.dtype.names or ()) and len(table):
                    self.names[int(table[column].max())]  # what points to no text is told once, here
            return table

    def _tensors_file(self) -> tuple[h5py.File, Path]:
        if self.tensors_path is None:
            raise IncidentError(f"{self.facts_path}: has no tensors file beside it")
        if self._tensors is None:
            file = files.open_file(self.tensors_path, [schema.TENSORS], salvaged=self.salvaged)
            try:
                files.check_identity(self.tensors_path, file, self.incident_id, self.rank)
                filters.need(self.tensors_path, file)
            except FlightrecError:
                file.close()
                raise
            self._tensors = file
        return self._tensors, self.tensors_path


def _read_table(file: h5py.File, name: str) -> npt.NDArray[np.void]:
    return guard.read_table(file, name, _TABLES[name], schema.LATER)


def _stored_component(part: Mapping[str, Any]) -> StoredComponent:
    """One entry of the column ``components`` (``ValueError`` if it is none)."""
    name, form, num_bytes = part["name"], part["format"], part["bytes"]
    if not isinstance(name, str) or not isinstance(form, str) or type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"a component is {str(part)[:200]}")
    return StoredComponent(name, text.sizes(part["shape"]), form, num_bytes)


def _key(row: Any, names: list[str]) -> Key:
    return Key(
        layer=names[row["layer"]],
        tensor=names[row["tensor"]],
        part=names[row["part"]],
        microbatch=int(row["microbatch"]),
        phase=_PHASES[row["phase"]],
        call=int(row["call"]),
        stage=_STAGES[row["stage"]],
    )


def _firings(rows: npt.NDArray[np.void], names: list[str]) -> list[Firing]:
    return [
        Firing(
            rule=names[row["rule"]],
            kind=names[row["kind"]],
            severity=Severity(row["severity"].decode("ascii")),
            attempt=int(row["attempt"]),
            iteration=int(row["iteration"]),
            key=_key(row, names) if row["has_key"] else None,
            sequence=int(row["sequence"]),
            value=float(row["value"]),
            threshold=float(row["threshold"]),
            message=names[row["message"]],
            record=int(row["record"]),
        )
        for row in rows
    ]


def _blind(rows: npt.NDArray[np.void], names: list[str]) -> list[Blind]:
    def entries() -> Iterator[Blind]:
        for row in rows:
            texts = (names[row["layer"]], names[row["tensor"]], names[row["reason"]])
            yield Blind(int(row["attempt"]), int(row["iteration"]), *texts)

    return list(entries())


def _tier_columns(row: Any) -> dict[str, Any]:
    """What ``/iterations`` has since format 1.3."""
    return {"tier": row["tier"].decode("ascii"), "landmark": int(row["landmark"])}
