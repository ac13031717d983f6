"""Whether the machine has the memory that ``ring.host_memory`` asks for. Reads ``/proc`` and ``/sys``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from flightrec.errors import WriterError
from flightrec.ring.memory import format_bytes, free_memory_bytes
from flightrec.writer.host_memory import HostMemory

logger = logging.getLogger("flightrec")


def host_memory(num_bytes: int | None, older_iterations: int = 0) -> HostMemory | None:
    """The memory of the host tier, shared with the writer; None when none is asked for.

    Args:
        num_bytes: ``ring.host_memory``.
        older_iterations: ``incident.older_iterations``, which needs it.

    Raises:
        WriterError: the machine, or the control group that the process is in, does not have it.
    """
    if not num_bytes:
        if older_iterations:
            logger.warning(
                "flightrec: incident.older_iterations: %d is ignored: expected ring.host_memory beside it, which holds "
                "them; set ring.host_memory, such as 64 GiB, or remove incident.older_iterations",
                older_iterations,
            )
        return None
    check_room(num_bytes, _int_of("LOCAL_WORLD_SIZE"), *machine_memory())
    try:
        return HostMemory.create(num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise WriterError(
            f"ring.host_memory: {format_bytes(num_bytes)} of shared memory cannot be mapped: {error}; "
            "lower it, or raise the limit of the address space (ulimit -v)"
        ) from error


def check_room(num_bytes: int, num_ranks: int, free_bytes: int, limit_bytes: int) -> None:
    """Refuse what cannot be.

    Args:
        num_bytes: asked for, by each rank.
        num_ranks: of this machine.
        free_bytes: what this process may still take now.
        limit_bytes: what all ranks of the machine may take together.

    Raises:
        WriterError: with what was asked for, what there is, and what to do.
    """
    if num_bytes > free_bytes:
        raise WriterError(
            f"ring.host_memory: expected at most the {format_bytes(free_bytes)} of host memory that are free, got "
            f"{format_bytes(num_bytes)}; lower ring.host_memory, or raise the memory limit of the job or container"
        )
    if num_bytes * num_ranks > limit_bytes:
        raise WriterError(
            f"ring.host_memory: {num_ranks} ranks on this machine ask for {format_bytes(num_bytes)} each, "
            f"{format_bytes(num_bytes * num_ranks)} together; expected at most {format_bytes(limit_bytes)}, which they "
            f"may take; lower ring.host_memory to {format_bytes(limit_bytes // num_ranks)} or less"
        )


def machine_memory() -> tuple[int, int]:
    """Bytes that are free for this process now, and that the machine or its control group may hold at most."""
    free = free_memory_bytes(torch.device("cpu"))
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group_limit, used in _groups():
        limit = min(limit, group_limit)
        free = min(free, max(0, group_limit - used))
    return free, limit


def _groups() -> list[tuple[int, int]]:
    """Limit and use in bytes of each control group around this process that has a limit."""
    second = [_group(folder, "memory.max", "memory.current") for folder in _folders("", "/sys/fs/cgroup")]
    first = [
        _group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder in _folders("memory", "/sys/fs/cgroup/memory")
    ]
    return [group for group in (*second, *first) if group is not None]


def _group(folder: Path, limit: str, used: str) -> tuple[int, int] | None:
    try:
        return int((folder / limit).read_text()), _used(folder, used)
    except (OSError, ValueError):  # not there, or "max": no limit
        return None


def _used(folder: Path, name: str) -> int:
    """What a group holds, less the cache of files that the kernel would give up."""
    cached = 0
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            cached = max(cached, int(value))
    return max(0, int((folder / name).read_text()) - cached)


def _folders(controller: str, root: str) -> list[Path]:
    """The group of this process under ``root``, and those around it."""
    path = ""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controller in controllers.split(","):
                path = name
    except (OSError, ValueError):
        pass
    folder = Path(root, path.lstrip("/"))
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _int_of(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() and int(value) > 0 else 1
