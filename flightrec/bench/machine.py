"""Hardware and versions, for the head of a table."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "torchao", "transformer_engine", "nvdlfw-inspect", "transformers", "trainscope", "h5py")


def machine(device: torch.device) -> dict[str, str]:
    """Device, Python, versions of what is installed, and the commit of a checkout."""
    from flightrec.version import __version__

    found = {"device": _device(device), "python": platform.python_version(), "flightrec": __version__}
    commit = _commit()
    if commit:
        found["commit"] = commit
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads"


def _commit() -> str:
    """Short hash of the checkout that this package lies in, with a mark if it was changed; empty elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607
            cwd=root, capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
