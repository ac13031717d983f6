"""Opens one file of an incident and says clearly why it cannot be read. Read-only; no state."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h5py

from flightrec.errors import FlightrecError, IncidentError
from flightrec.storage import schema, text

_DAMAGE = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    MemoryError,
)
_MAX_REASON = 500


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turn whatever h5py, numpy or JSON say about a damaged file into an ``IncidentError`` that names it."""
    try:
        yield
    except FlightrecError:
        raise
    except json.JSONDecodeError as error:
        raise IncidentError(f"{path}: {what or 'metadata'} is damaged: {error}") from error
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__)[:_MAX_REASON]
        raise IncidentError(
            f"{path}: {what or 'the file'} cannot be read, it is damaged or incomplete: {reason}"
        ) from error


def open_file(path: Path, kinds: Sequence[str], *, salvaged: bool = False) -> h5py.File:
    """Open a file for reading and check that it is one of ours, whole, and of a version that this code reads.

    Args:
        path: the file.
        kinds: acceptable values of its attribute ``kind``.
        salvaged: accept a file that was never completed.

    Raises:
        IncidentError: it is missing, not HDF5, not ours, of another kind or version, or not complete.
    """
    if not path.is_file():
        what = "is no file" if path.exists() else "no such file"
        raise IncidentError(f"{path}: {what}")
    with reading(path):
        file = _open(path)
    try:
        with reading(path, "the root attributes"):
            _check(path, file, kinds, salvaged)
    except IncidentError:
        file.close()
        raise
    return file


def _open(path: Path) -> h5py.File:
    """Open as plain ``h5py.File(path)`` does, since HDF5 refuses a second opening in one process with other flags.

    Where that fails (a file system without locks, or a first opening without), open without locking.
    """
    try:
        return h5py.File(path, "r")
    except OSError:
        return h5py.File(path, "r", locking=False)


def beside(path: Path, name: str) -> Path:
    """Give the path of a file that a file of an incident names: it stands in the same folder, nowhere else.

    Args:
        path: of the file that names it.
        name: the file's name; a path is refused.

    Raises:
        IncidentError: the name leads elsewhere; whether the file is there is not asked.
    """
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise IncidentError(f"{path}: names {name[:200]!r}, expected the name of a file beside it")
    return inside(path.with_name(name))


def inside(path: Path) -> Path:
    """Give a path back if it is no symbolic link out of its folder.

    Raises:
        IncidentError: it is one.
    """
    if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise IncidentError(
            f"{path}: is a symbolic link out of the incident's folder, expected a file in it; copy the file there"
        )
    return path


def check_identity(path: Path, file: h5py.File, incident_id: str, rank: int | None = None) -> None:
    """Refuse a file that belongs to another incident or rank (``IncidentError``)."""
    with reading(path, "the root attributes"):
        found = text.read_attribute(file, "incident_id")
        if found != incident_id:
            raise IncidentError(f"{path}: belongs to incident {found}, expected {incident_id}; was the file moved?")
        if rank is not None and text.read_attribute(file, "rank") != rank:
            raise IncidentError(
                f"{path}: was written by rank {text.read_attribute(file, 'rank')}, expected rank {rank}"
            )


def _check(path: Path, file: h5py.File, kinds: Sequence[str], salvaged: bool) -> None:
    if "format" not in file.attrs or text.read_attribute(file, "format") != schema.FORMAT:
        raise IncidentError(f"{path}: is HDF5 but no flightrec incident (root attribute format is not {schema.FORMAT})")
    version = str(text.read_attribute(file, "format_version"))
    major = schema.FORMAT_VERSION.split(".", maxsplit=1)[0]
    if version.split(".", maxsplit=1)[0] != major:
        raise IncidentError(
            f"{path}: has format version {version}, this flightrec reads {schema.FORMAT_VERSION} and other versions "
            f"{major}.x; install the flightrec that wrote it"
        )
    kind = text.read_attribute(file, "kind")
    if kind not in kinds:
        raise IncidentError(f"{path}: is a {kind} file, expected {' or '.join(kinds)}")
    if text.read_attribute(file, "complete") != 1 and not salvaged:
        raise IncidentError(
            f"{path}: was never completed (attribute complete is 0); its writer died or the disk was full"
        )
