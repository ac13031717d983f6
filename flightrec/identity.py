"""Who is recording: run, attempt, rank, host, versions and the environment that an incident carries.

Called when a recorder is made and attached; owns no state; waits for nothing.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "LOCAL_RANK",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_PROTO",
    "NVTE_DEBUG",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
)
"""Environment variables that are copied into incidents; no others are, since they hold secrets."""

PACKAGES = ("torch-flightrec", "torch", "torchao", "transformer-engine", "nvdlfw-inspect", "triton", "h5py", "numpy")


@dataclass(frozen=True)
class Identity:
    """Names this process within the run.

    Attributes:
        run_id: from ``TORCHELASTIC_RUN_ID``, ``SLURM_JOB_ID``, or drawn (then differing from rank to rank).
        attempt: restarts so far, from ``TORCHELASTIC_RESTART_COUNT`` or ``SLURM_RESTART_COUNT``.
        rank: global rank, 0 without torch.distributed.
        world_size: number of ranks.
        host: host name.
        versions: package name to version, of those installed.
    """

    run_id: str
    attempt: int
    rank: int
    world_size: int
    host: str
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What the writer is told."""
        return {
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "versions": self.versions,
        }


def identify(run_id: str | None = None) -> Identity:
    """The identity of this process; asks torch.distributed where it is initialised, else the launcher's variables."""
    rank, world_size = _rank()
    return Identity(
        run_id=run_id or _run_id(),
        attempt=_count("TORCHELASTIC_RESTART_COUNT") or _count("SLURM_RESTART_COUNT"),
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        versions=_versions(),
    )


def environment(device: torch.device | None) -> dict[str, Any]:
    """Plain facts about the process for ``/environment``; no synchronisation."""
    facts: dict[str, Any] = {
        "argv": list(sys.argv),
        "executable": sys.executable,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "pid": os.getpid(),
        "working_directory": _working_directory(),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if device is not None:
        facts["device"] = str(device)
    if device is not None and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "total_memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "uuid": str(getattr(properties, "uuid", "")),
            "cuda": torch.version.cuda,
        }
    return facts


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _count("RANK"), max(_count("WORLD_SIZE"), 1)


def _run_id() -> str:
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        value = os.environ.get(variable, "")
        if value and value != "none":  # torchrun's value for runs without a name
            return value
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def _count(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else 0


def _versions() -> dict[str, str]:
    return {package: found for package in PACKAGES if (found := _version(package))}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""
