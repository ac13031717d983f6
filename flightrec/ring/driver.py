"""What torch does not tell or allow about a CUDA graph capture, asked of the CUDA driver that is loaded already.

Host calls on the thread that captures; each of them is legal during a capture. Owns no device memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_ACTIVE = 1
_RELAXED = 2


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream captures a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def why_missing() -> str:
    """Why captures cannot be told apart here, or empty."""
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver cannot be asked about the capture of a graph: {error}"
    return ""


def capture_id(stream: int) -> int:
    """The number of the capture that a stream is part of; one for all streams of it, and for no other capture.

    Args:
        stream: a stream's handle.

    Raises:
        RuntimeError: the stream captures nothing.
    """
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    code = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if code != 0 or status.value != _ACTIVE:
        raise RuntimeError(f"the stream is part of no CUDA graph capture (CUDA error {code}, status {status.value})")
    return number.value


@contextmanager
def relaxed() -> Iterator[None]:
    """Memory may be allocated and kernels loaded on this thread in here, as on a thread that captures nothing."""
    mode = ctypes.c_int(_RELAXED)
    driver = _driver()
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextmanager
def aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on a stream that captures nothing, while another one does; done on the device when this is left.

    The first replay may run on any stream, and no capture may wait for ``stream``: so the host does, once for a piece
    of memory. Inside ``relaxed``.
    """
    with torch.cuda.stream(stream):
        yield
    code = _driver().cuStreamSynchronize(ctypes.c_void_p(stream.cuda_stream))
    if code != 0:
        raise RuntimeError(f"memory for a captured graph could not be prepared (CUDA error {code})")


@cache
def _driver() -> Any:
    if torch.version.cuda is None:
        raise OSError("graphs are recorded with NVIDIA's CUDA only")
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamGetCaptureInfo_v2", "cuThreadExchangeStreamCaptureMode", "cuStreamSynchronize"):
        getattr(driver, name)
    return driver
