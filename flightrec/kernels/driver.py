"""What torch does not tell or allow about a CUDA graph capture, asked of the CUDA driver that is loaded already.

And memory that belongs to none. Host calls on the thread that captures; each of them is legal during a capture.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_ACTIVE = 1
_RELAXED = 2
_NON_BLOCKING = 1  # does not wait for the default stream


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


def allocate(device: torch.device, make: Callable[[], _T]) -> _T:
    """What ``make`` allocates on ``device`` and fills on the current stream, from the process's own memory.

    Beside a capture, if the current stream is part of one; the host waits then.

    A thread that prepares a graph may have its allocations sent to the graph's pool, whatever the stream: inductor does
    so when it warms up, and takes what is left there for a fault of its own. So another thread allocates. For memory
    that is taken once; some 100 us.

    Raises:
        Exception: what ``make`` raised, such as ``torch.OutOfMemoryError``.
    """
    if device.type != "cuda":
        return make()
    is_aside = torch.cuda.is_current_stream_capturing()  # what is filled here must be so before the first replay
    stream = own_stream(device, "memory") if is_aside else torch.cuda.current_stream(device)
    done: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            # A graph may be captured by the thread that waits for this one.
            lax = nullcontext() if why_missing() else relaxed()
            with lax, aside(stream) if is_aside else torch.cuda.stream(stream):
                done.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="flightrec-memory")
    try:
        thread.start()
    except RuntimeError:  # a limit of the process, or the interpreter ends: the memory is needed all the same
        run()
    else:
        thread.join()
    if errors:
        raise errors[0]
    return done[0]


@cache
def _driver() -> Any:
    if torch.version.cuda is None:
        raise OSError("graphs are recorded with NVIDIA's CUDA only")
    driver = ctypes.CDLL("libcuda.so.1")
    for name in (
        "cuStreamGetCaptureInfo_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamSynchronize",
        "cuStreamCreateWithPriority",
    ):
        getattr(driver, name)
    return driver


_streams: dict[tuple[int, str, int], torch.cuda.Stream] = {}


def own_stream(device: torch.device, purpose: str, priority: int = 0) -> torch.cuda.Stream:
    """A stream that nobody else is given, one for a device and purpose, for the process's life. Does not wait.

    torch hands out 32 streams in turns: one of those may be the very stream on which the user computes, or captures a
    graph. Where the driver makes none, it is one of torch's all the same.
    """
    name = (device.index or 0, purpose, priority)
    stream = _streams.get(name)
    if stream is None:
        handle = ctypes.c_void_p()
        made = False
        if not why_missing():
            with torch.cuda.device(device), relaxed():
                made = _driver().cuStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority) == 0
        if made and handle.value:
            stream = torch.cuda.ExternalStream(handle.value, device)
        else:
            stream = torch.cuda.Stream(device, priority=priority)
        stream = _streams.setdefault(name, stream)
    return stream
