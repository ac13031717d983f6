"""Reads incidents in a child process with limits, so that a damaged file cannot take the command down with it.

libhdf5 was written for files that one trusts: damaged ones make it crash, loop, or ask for all memory. The parent
half runs on the command's only thread and never touches HDF5; ``main`` is what the child runs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flightrec.commands.progress import Channel
from flightrec.errors import FlightrecError, IncidentError

_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flightrec.commands.reading import main; main()"
_REFUSED = 3
_MAX_RESULT_BYTES = 256 << 20
"""Longest result: what an incident of 20 000 records gives has some megabytes."""

_MAX_MESSAGE = 4000


@dataclass(frozen=True, slots=True)
class Limits:
    """What the child may use.

    Attributes:
        memory_bytes: address space.
        cpu_s: seconds of CPU time.
        wall_s: seconds of real time, for a storage that no longer answers.
    """

    memory_bytes: int = 8 << 30
    cpu_s: int = 120
    wall_s: float = 600.0


def read_in_child(
    task: str,
    path: Path,
    *,
    options: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    channel: Channel | None = None,
) -> Any:
    """Call ``task(path, **options)`` in a child process and give its result.

    Args:
        task: ``package.module:function``; the function takes a ``Path`` and gives JSON data.
        path: what is read; also named in messages.
        options: further arguments of the function, JSON data.
        limits: defaults to ``Limits()``.
        channel: of a progress bar, see ``progress.bar``.

    Returns:
        What the function gave, through JSON.

    Raises:
        IncidentError: the function refused the input, or the child crashed or reached a limit; the message says which.
    """
    limits = limits or Limits()
    arguments = [json.dumps(sys.path), task, str(path), str(limits.memory_bytes), str(limits.cpu_s)]
    arguments.append(json.dumps(dict(options or {})))
    # One thread: the address space must not depend on the number of cores.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HDF5_USE_FILE_LOCKING": "FALSE"}
    if channel is not None:
        environment |= channel.environment
    # -I: no module of the folder that the command happens to stand in is imported in place of the real one.
    command = [sys.executable, "-I", "-c", _CHILD, *arguments]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            pass_fds=channel.descriptors if channel else (),
            timeout=limits.wall_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise IncidentError(f"{path}: reading did not end within {limits.wall_s:g} s and was stopped") from None
    if child.returncode == 0:
        return json.loads(child.stdout)
    raise IncidentError(_death(path, child, limits))


def _death(path: Path, child: subprocess.CompletedProcess[bytes], limits: Limits) -> str:
    told = child.stderr.decode(errors="replace").strip()
    if child.returncode == _REFUSED:
        return told
    if child.returncode == -signal.SIGXCPU:
        return f"{path}: reading took more than {limits.cpu_s} s of CPU time and was stopped; the file may be damaged"
    if child.returncode < 0:
        try:
            name = signal.Signals(-child.returncode).name
        except ValueError:
            name = f"signal {-child.returncode}"
        return (
            f"{path}: the process that read it was killed by {name}, most likely a crash inside libhdf5; "
            "expected an undamaged incident. The file was not changed; other ranks' files may be whole"
        )
    last = told.splitlines()[-1] if told else "no message"
    return f"{path}: the process that read it ended with code {child.returncode}: {last}"


def main() -> None:
    """Run in the child: set the limits, call the task, print its result as JSON; ends the process."""
    _, task, path, memory_bytes, cpu_s, options = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_AS, int(memory_bytes))
    _lower(resource.RLIMIT_CPU, int(cpu_s))
    gc.set_threshold(100_000)  # it makes one large document and ends: the cycles of a second are no burden
    module, _, name = task.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        result = json.dumps(function(Path(path), **json.loads(options)), allow_nan=False)
        if len(result) > _MAX_RESULT_BYTES:  # what the parent takes has no limit of its own
            _refuse(f"{path}: tells {len(result) >> 20} MiB, more than anybody reads; the file may be damaged")
        sys.stdout.write(result)
        sys.stdout.flush()
    except FlightrecError as error:
        _refuse(str(error))
    except MemoryError:
        _refuse(f"{path}: reading needs more than {int(memory_bytes) >> 20} MiB of memory; the file may be damaged")
    except Exception as error:
        if os.environ.get("FLIGHTREC_TRACEBACK"):
            raise
        # Damage shows in h5py and numpy as almost any exception; the type is worth telling.
        _refuse(f"{path}: cannot be read, {type(error).__name__}: {error} (FLIGHTREC_TRACEBACK=1 shows where)")


def _refuse(message: str) -> None:
    # One line: a name in the file may hold line breaks, and what follows them would look like words of ours.
    print(message[:_MAX_MESSAGE].replace("\r", "\\r").replace("\n", "\\n"), file=sys.stderr)
    raise SystemExit(_REFUSED)


def _lower(limit: int, value: int) -> None:
    """Set a soft limit; one that is already lower stays."""
    soft, hard = resource.getrlimit(limit)
    known = [number for number in (soft, hard, value) if number != resource.RLIM_INFINITY]
    resource.setrlimit(limit, (min(known), hard))
