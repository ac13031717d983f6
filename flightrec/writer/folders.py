"""Folders of incidents: names that never overwrite, free space, the quota, what a dead writer left.

``<directory>/<incident id>/rank<rank>.<incident id>.{facts,tensors}.h5`` and ``<incident id>.index.h5``. While a writer
works in a folder, a small marker file names its process. Runs in the writer; owns no state but the directory's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flightrec.records import Firing
from flightrec.storage import names

MAX_SUFFIX = 10_000
FOREIGN_IDLE_S = 3600.0
"""A writer that we cannot look up (another host or container) counts as gone when its folder is unchanged so long."""

RESERVE_BYTES = 16 << 20
"""Free space that is left alone, and room for tables beside the payload."""

_ID = re.compile(r"(?P<run>.+)\.(?P<attempt>\d+)\.(?P<iteration>\d+)\.(?P<rule>[^.]+)\.r(?P<rank>\d+)(?:\.\d+)?")
_OURS = re.compile(r".+\.(?:facts|tensors|index)(?:\.salvaged)?\.h5")


@dataclass(frozen=True)
class IncidentFolder:
    """A finished incident on disk."""

    path: Path
    rule: str
    rank: int
    modified_ns: int
    num_bytes: int


def incident_name(run_id: str, rank: int, trigger: Firing) -> str:
    """``<run id>.<attempt>.<iteration>.<rule>.r<rank>``, words made safe for file names."""
    run, rule = names.file_word(run_id), names.file_word(trigger.rule)
    return f"{run}.{trigger.attempt}.{trigger.iteration:07d}.{rule}.r{rank}"


def make_folder(directory: Path, name: str, used: set[str]) -> Path:
    """Make a folder of this name, or of the name with ``.2``, ``.3``, ... when it is taken.

    Args:
        directory: made if need be.
        name: the wanted name.
        used: names given before, also of folders that the quota deleted since; the new one is added.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(1, MAX_SUFFIX):
        folder = directory / (name if number == 1 else f"{name}.{number}")
        if folder.name in used:
            continue
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            used.add(folder.name)
            return folder
    raise FileExistsError(f"{directory / name}: {MAX_SUFFIX} incidents of this name")


def marker_path(folder: Path, rank: int) -> Path:
    """The file that says which writer works in a folder."""
    return folder / f".rank{rank:05d}.writer.json"


def write_marker(folder: Path, rank: int) -> None:
    """Say that this process works here.

    Raises:
        OSError: no space, no permission.
    """
    pid = os.getpid()
    text = json.dumps({"host": _host(), "pid": pid, "started": _process_start(pid)})
    marker_path(folder, rank).write_text(text)


def remove_marker(folder: Path, rank: int) -> None:
    """The work here is done; removes the folder too when nothing was written."""
    marker_path(folder, rank).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def abandoned(directory: Path) -> Iterator[Path]:
    """Markers of writers that are gone: same host and no such process, or another host and long unchanged."""
    for marker in sorted(directory.glob("*/.rank*.writer.json")):
        try:
            data = json.loads(marker.read_text())
            idle_s = time.time() - max(entry.stat().st_mtime for entry in marker.parent.iterdir())
            host, pid, started = data["host"], int(data["pid"]), data["started"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        gone = _process_start(pid) != started if host == _host() else idle_s > FOREIGN_IDLE_S
        if gone:
            yield marker


def partial_files(folder: Path) -> list[Path]:
    """Files in the folder that were never committed."""
    return sorted(folder.glob(".*.partial"))


def free_bytes(directory: Path) -> int | None:
    """Bytes that we may still write there, ``None`` when the file system does not say."""
    found = directory
    while not found.exists() and found != found.parent:
        found = found.parent
    try:
        status = os.statvfs(found)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def finished(directory: Path, run_id: str) -> list[IncidentFolder]:
    """The run's incidents, oldest first; those that a writer works in have size but cannot be deleted."""
    found = []
    for path in directory.glob(f"{names.file_word(run_id)}.*.r*"):
        match = _ID.fullmatch(path.name)
        if match is None:
            continue
        try:
            sizes = [entry.stat().st_size for entry in path.iterdir()]
            modified_ns = path.stat().st_mtime_ns
        except OSError:
            continue
        found.append(IncidentFolder(path, match["rule"], int(match["rank"]), modified_ns, sum(sizes)))
    return sorted(found, key=lambda folder: folder.modified_ns)


def make_room(directory: Path, run_id: str, rank: int, rule: str, needed_bytes: int, quota_bytes: int) -> bool:
    """Keep the run's incidents within the quota after ``needed_bytes`` more.

    Deletes the rank's oldest incidents of the same rule, never the first of a rule, and only folders that hold nothing
    but our finished files. ``False`` when it still does not fit.
    """
    incidents = finished(directory, run_id)
    used_bytes = sum(incident.num_bytes for incident in incidents)
    ours = [incident for incident in incidents if incident.rank == rank and incident.rule == names.file_word(rule)]
    for incident in ours[1:]:
        if used_bytes + needed_bytes <= quota_bytes:
            break
        if _delete(incident.path):
            used_bytes -= incident.num_bytes
    return used_bytes + needed_bytes <= quota_bytes


def _delete(folder: Path) -> bool:
    entries = list(folder.iterdir())
    if not all(_OURS.fullmatch(entry.name) and entry.is_file() for entry in entries):
        return False
    try:
        # The index first: without it and the facts nothing claims to be whole.
        for entry in sorted(entries, key=lambda path: (".tensors." in path.name, ".facts." in path.name)):
            entry.unlink()
        folder.rmdir()
    except OSError:
        return False
    return True


def _host() -> str:
    """Where process numbers mean the same: host name and process namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def _process_start(pid: int) -> str:
    """Boot and start time of a process, empty when there is none: tells a reused number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}.{stat.rpartition(')')[2].split()[19]}"
