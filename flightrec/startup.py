"""What is checked and sized before training starts. Owns no state."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flightrec.config.model import HistoryConfig, Share
from flightrec.errors import AttachError, WriterError
from flightrec.ring.memory import free_memory_bytes
from flightrec.writer.history import HistoryMemory

MAX_STAGING_BYTES = 16 * 2**30
MIN_STAGING_BYTES = 64 * 2**20


def device_of(model: torch.nn.Module) -> torch.device:
    """The one device that a model lies on.

    Raises:
        AttachError: it has nothing on a real device, or lies on several.
    """
    devices = {parameter.device for parameter in model.parameters()} | {buffer.device for buffer in model.buffers()}
    devices.discard(torch.device("meta"))
    if not devices:
        raise AttachError(
            f"attach: {type(model).__name__} has no parameters on a real device; attach after it was made there"
        )
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise AttachError(f"attach: {type(model).__name__} lies on {names}; one Recorder serves one device")
    return devices.pop()


def check_writable(directory: Path) -> None:
    """Refuse a place where no incident could be written; makes nothing.

    Raises:
        AttachError: it, or the nearest folder above it that exists, is no folder or not writable.
    """
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise AttachError(f"directory={str(directory)!r}: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise AttachError(f"directory={str(directory)!r}: {place} is not writable for this user")


def history_memory(config: HistoryConfig) -> HistoryMemory:
    """The memory for statistics of past iterations, shared with the writer; pages come with the samples.

    Raises:
        WriterError: the kernel does not give it.
    """
    size = config.memory
    memory_bytes = size.of(free_memory_bytes(torch.device("cpu"))) if isinstance(size, Share) else size
    try:
        return HistoryMemory.create(memory_bytes, config.iterations)
    except (OSError, ValueError, OverflowError) as error:
        raise WriterError(f"no shared memory of {memory_bytes} bytes: {error}; lower history.memory") from error


def default_staging_bytes() -> int:
    """An eighth of the host's free memory; pages that no incident touches take none."""
    free = free_memory_bytes(torch.device("cpu")) // 8
    return max(MIN_STAGING_BYTES, min(MAX_STAGING_BYTES, free)) // 4096 * 4096
