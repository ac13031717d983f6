"""Opens an incident: a folder, its index, or one rank's file. Needs neither torch nor a GPU.

Opening reads a few attributes; tables are read at first use and tensors only when a record is asked for them. The
file is trusted: libhdf5 can crash on a deliberately broken file, so commands read in a child process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt

from flightrec.errors import IncidentError
from flightrec.records import Firing, Phase, Stage
from flightrec.storage import files, guard, schema, text
from flightrec.storage.facts import Blind
from flightrec.storage.rank import Iteration, Rank
from flightrec.storage.record import Record
from flightrec.storage.select import Texts, matching
from flightrec.storage.series import History

Numbers = int | Iterable[int]
IncidentT = TypeVar("IncidentT", bound="Incident")


class Incident:
    """A fired trigger with the iterations around it, from all ranks that wrote.

    A context manager; ``close`` closes its files.

    Attributes:
        path: what was opened.
        ranks: one reader a rank, by rank number.
    """

    def __init__(self, path: Path, ranks: Iterable[Rank]) -> None:
        self.path = path
        self.ranks: tuple[Rank, ...] = tuple(sorted(ranks, key=lambda rank: rank.rank))
        if not self.ranks:
            raise IncidentError(f"{path}: holds no facts file of any rank")

    def __enter__(self: IncidentT) -> IncidentT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Incident {self.incident_id}, {len(self.ranks)} rank(s)>"

    def close(self) -> None:
        """Close all files."""
        for rank in self.ranks:
            rank.close()

    @property
    def incident_id(self) -> str:
        """Unique name of the incident."""
        return self._first.incident_id

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self._first.attribute("run_id"))

    @property
    def attempt(self) -> int:
        """Attempt in which the trigger fired."""
        return int(self._first.attribute("attempt"))

    @property
    def world_size(self) -> int:
        """Number of ranks of the run (``ranks`` are those that wrote)."""
        return int(self._first.attribute("world_size"))

    @property
    def host(self) -> str:
        """Machine of the first rank that wrote."""
        return str(self._first.attribute("host"))

    @property
    def created_ns(self) -> int:
        """UTC in nanoseconds since 1970."""
        return int(self._first.attribute("created"))

    @property
    def ended(self) -> str:
        """Why the incident ended early (``trainer died``), or empty."""
        return str(self._first.attribute("ended", ""))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of flightrec, torch and others when it was written."""
        with files.reading(self._first.facts_path, "attribute versions"):
            return text.from_json_text(str(self._first.attribute("versions", ""))) or {}

    @property
    def trigger(self) -> Firing:
        """The primary firing: the highest severity, the earliest of them."""
        return min((rank.trigger for rank in self.ranks), key=_urgency)

    @property
    def firings(self) -> list[Firing]:
        """All firings of all ranks, in time order; ``ranks[i].firings`` has those of one."""
        found = [firing for rank in self.ranks for firing in rank.firings]
        return sorted(found, key=lambda firing: (firing.attempt, firing.iteration))

    @cached_property
    def iterations(self) -> list[Iteration]:
        """Iterations in time order, each as the lowest rank that has it tells it."""
        found: dict[tuple[int, int], Iteration] = {}
        for rank in self.ranks:
            for entry in rank.iterations:
                found.setdefault((entry.attempt, entry.iteration), entry)
        return [found[time] for time in sorted(found)]

    @property
    def history(self) -> History:
        """Loss, metrics and statistics of the past iterations of the first rank; ``ranks[i].history`` of another.

        ``history["loss"]`` is (iterations, values); ``history.series(layer="blocks.0.fc1", tensor="activation")``
        is one tensor's, with ``["amax"]`` and the other statistics of ``docs/format.md``.
        """
        return self._first.history

    @property
    def config_text(self) -> str:
        """The configuration as YAML."""
        return self._first.config_text

    @property
    def environment(self) -> Mapping[str, Any]:
        """argv, commit, topology, ... of the first rank."""
        return self._first.environment

    @property
    def blind(self) -> list[Blind]:
        """What was not recorded, from all ranks."""
        return [entry for rank in self.ranks for entry in rank.blind]

    def records(
        self,
        *,
        layer: Texts | None = None,
        tensor: Texts | None = None,
        part: Texts | None = None,
        attempt: Numbers | None = None,
        iteration: Numbers | None = None,
        microbatch: Numbers | None = None,
        rank: Numbers | None = None,
        phase: Phase | Texts | None = None,
        stage: Stage | Texts | None = None,
    ) -> list[Record]:
        """Select records, rank by rank and in the order in which they were seen; no payload is read.

        Args:
            layer: glob (``*`` crosses dots), regular expression after ``re:``, the very name, or several of these.
            tensor: as ``layer``.
            part: as ``layer``.
            attempt: number or numbers.
            iteration: number or numbers (a ``range`` too).
            microbatch: number or numbers, ``records.NO_MICROBATCH`` for records of a whole iteration.
            rank: number or numbers.
            phase: name or names.
            stage: name or names.

        Raises:
            IncidentError: a table is damaged.
        """
        ranks = None if rank is None else set(_numbers(rank))
        texts = {"layer": layer, "tensor": tensor, "part": part}
        numbers = {"attempt": attempt, "iteration": iteration, "microbatch": microbatch}
        words = {"phase": phase, "stage": stage}
        found: list[Record] = []
        for source in self.ranks:
            if ranks is not None and source.rank not in ranks:
                continue
            with files.reading(source.facts_path, "/records"):
                chosen = _select(source, texts, numbers, words)
            found.extend(Record(source, int(index)) for index in chosen)
        return found

    @property
    def _first(self) -> Rank:
        return self.ranks[0]


def open_incident(path: str | Path) -> Incident:
    """Open an incident for reading.

    Args:
        path: an incident's folder, its index, or a rank's facts or tensors file (then only that rank is read).

    Raises:
        IncidentError: there is none, or it is incomplete, damaged, of another version, or not one of ours.
    """
    return open_as(Incident, path)


def open_as(kind: type[IncidentT], path: str | Path) -> IncidentT:
    """Open an incident as a subclass of ``Incident``; otherwise as ``open_incident``."""
    path = Path(path)
    if path.is_dir():
        return kind(path, _open_ranks(_ranks_in_folder(path), None))
    if not path.exists():
        raise IncidentError(f"{path}: no such file or folder")
    with files.open_file(path, [schema.FACTS, schema.TENSORS, schema.INDEX]) as file, files.reading(path):
        incident_id = str(text.read_attribute(file, "incident_id"))
        found = text.read_attribute(file, "kind")
        if found == schema.INDEX:
            ranks = _ranks_in_index(path, file)
        elif found == schema.TENSORS:
            facts = files.beside(path, str(text.read_attribute(file, "facts_file")))
            if not facts.is_file():
                raise IncidentError(f"{path}: holds payload only; its facts file {facts.name} is not beside it")
            ranks = [(facts, path)]
        else:
            ranks = [(path, _tensors_beside(path))]
    return kind(path, _open_ranks(ranks, incident_id))


def list_incidents(directory: str | Path) -> list[Path]:
    """Folders of incidents in a run's directory (or the directory itself, if it is one), by name."""
    directory = Path(directory)
    if _is_incident(directory):
        return [directory]
    return sorted(folder for folder in directory.iterdir() if folder.is_dir() and _is_incident(folder))


def _urgency(firing: Firing) -> tuple[int, int, int]:
    return (-firing.severity.order, firing.attempt, firing.iteration)


def _select(
    source: Rank,
    texts: Mapping[str, Texts | None],
    numbers: Mapping[str, Numbers | None],
    words: Mapping[str, Texts | None],
) -> npt.NDArray[np.intp]:
    """Rows of a rank's ``/records`` that satisfy all filters, found in its columns."""
    table = source.records
    chosen = np.ones(len(table), dtype=bool)
    for column, patterns in texts.items():
        if patterns is not None:
            named = matching(patterns)
            chosen &= np.isin(table[column], [name for name in np.unique(table[column]) if named(source.names[name])])
    for column, values in numbers.items():
        if values is not None:
            chosen &= np.isin(table[column], _numbers(values))
    for column, names in words.items():
        if names is not None:
            wanted_words = [names] if isinstance(names, str) else list(names)
            chosen &= np.isin(table[column], [word.encode() for word in wanted_words])
    return np.flatnonzero(chosen)


def _numbers(values: Numbers) -> list[int]:
    return [values] if isinstance(values, int) else list(values)


def _is_incident(folder: Path) -> bool:
    return folder.is_dir() and any(not name.name.startswith(".") for name in folder.glob("*.facts.h5"))


def _ranks_in_folder(folder: Path) -> list[tuple[Path, Path | None]]:
    indices = [files.inside(path) for path in folder.glob("*.index.h5") if not path.name.startswith(".")]
    if len(indices) == 1:
        with files.open_file(indices[0], [schema.INDEX]) as file, files.reading(indices[0]):
            return _ranks_in_index(indices[0], file)
    facts = sorted(files.inside(path) for path in folder.glob("*.facts.h5") if not path.name.startswith("."))
    if facts and not indices:
        return [(path, _tensors_beside(path)) for path in facts]
    if indices:
        raise IncidentError(f"{folder}: holds {len(indices)} indexes; open one of them: {_some(indices)}")
    inside = list_incidents(folder)
    if inside:
        raise IncidentError(f"{folder}: holds {len(inside)} incident(s), is none itself; open one: {_some(inside)}")
    started = list(folder.glob(".*.partial"))
    reason = "only files that were never completed" if started else "no incident"
    raise IncidentError(f"{folder}: holds {reason}; expected *.index.h5 or *.facts.h5")


def _ranks_in_index(index: Path, file: h5py.File) -> list[tuple[Path, Path | None]]:
    names, rows = text.read_text_table(file), guard.read_table(file, "ranks", schema.RANK, schema.LATER)
    found: list[tuple[Path, Path | None]] = []
    for row in rows:
        facts, tensors = names[row["facts"]], names[row["tensors"]]
        if facts:
            path = files.beside(index, facts)
            found.append((path, files.beside(index, tensors) if tensors else _tensors_beside(path)))
    return found


def _tensors_beside(facts: Path) -> Path | None:
    """Give the tensors file that a facts file names, or what was salvaged of it."""
    with files.open_file(facts, [schema.FACTS]) as file, files.reading(facts):
        name = str(text.read_attribute(file, "tensors_file")) if "tensors_file" in file.attrs else ""
    if not name:
        return None
    path = files.beside(facts, name)
    salvaged = files.beside(facts, f"{path.stem}.salvaged.h5")
    return next((candidate for candidate in (path, salvaged) if candidate.is_file()), None)


def _open_ranks(paths: list[tuple[Path, Path | None]], incident_id: str | None) -> list[Rank]:
    ranks: list[Rank] = []
    try:
        for facts, tensors in paths:
            rank = Rank(facts, tensors, incident_id)
            incident_id = incident_id or rank.incident_id
            ranks.append(rank)
            if rank.rank in {other.rank for other in ranks[:-1]}:
                raise IncidentError(f"{facts}: a second facts file of rank {rank.rank}")
    except IncidentError:
        for rank in ranks:
            rank.close()
        raise
    return ranks


def _some(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:5])
    return f"{names}, ..." if len(paths) > 5 else names
