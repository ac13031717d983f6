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
    "LOCAL_WORLD_SIZE",
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
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
)
"""Environment variables that are copied into incidents; no others are, since they hold secrets."""

COMMIT_VARIABLES = ("GIT_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
"""Environment variables that name the source's commit, where there is no repository to ask; the first one counts."""

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


def environment(device: torch.device | None, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Plain facts about the process for ``/environment``; no synchronisation, no other program is asked.

    Args:
        device: of the model.
        model: tells the device mesh, if its parameters are distributed over one.
    """
    facts: dict[str, Any] = {
        "argv": list(sys.argv),
        "executable": sys.executable,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "pid": os.getpid(),
        "working_directory": _working_directory(),
        "main": _main_script(),
        "topology": _topology(model),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    facts |= _commit()
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


def _main_script() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path and _working_directory() else ""


def _commit() -> dict[str, Any]:
    """The commit as the environment tells it; otherwise the writer asks git."""
    found = next((name for name in COMMIT_VARIABLES if os.environ.get(name)), None)
    return {} if found is None else {"commit": os.environ[found], "commit_from": found}


def _topology(model: torch.nn.Module | None) -> dict[str, Any]:
    rank, world_size = _rank()
    facts: dict[str, Any] = {"rank": rank, "world_size": world_size, "local_rank": _count("LOCAL_RANK")}
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        facts["backend"] = str(distributed.get_backend())
    if local := _count("LOCAL_WORLD_SIZE"):
        facts["local_world_size"] = local
    if nodes := _count("SLURM_NNODES") or (-(-world_size // local) if local else 0):
        facts["num_nodes"] = nodes
    if torch.cuda.is_initialized():
        facts["num_gpus"] = torch.cuda.device_count()
    meshes = [] if model is None else _meshes(model)
    if meshes:
        facts["meshes"] = meshes
    return facts


def _meshes(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Names and shape of the device meshes that parameters are distributed over."""
    found = []
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            shape = [int(size) for size in getattr(mesh, "shape", ())]
            names = [str(name) for name in getattr(mesh, "mesh_dim_names", None) or ()]
            if (facts := {"names": names, "shape": shape}) not in found:
                found.append(facts)
    return found


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
