"""Hardware and versions, for the head of a table."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from flightrec.writer.surroundings import git_facts

PACKAGES = (
    "torch-flightrec",
    "torch",
    "triton",
    "torchao",
    "transformer_engine",
    "nvdlfw-inspect",
    "transformers",
    "trainscope",
)


def machine(device: torch.device) -> dict[str, str]:
    """Device, Python, versions of what is installed, and the commit where this package lies in a checkout."""
    found = {"device": _device(device), "Python": platform.python_version()}
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
    found |= {name: told for name in PACKAGES if (told := _version(name))}
    facts = git_facts(str(Path(__file__).parent))
    if "commit" in facts:
        found["commit"] = facts["commit"][:12] + (" and changes" if facts.get("dirty") else "")
    return found


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} processors, {torch.get_num_threads()} threads"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
