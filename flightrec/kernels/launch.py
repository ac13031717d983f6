"""Launching the capture kernel: once by Triton, which compiles it, from then on by the compiled kernel itself.

Triton's own launcher binds, specialises and looks up at every call: 15 to 19 us with ten arguments. A ``Launch`` holds
what stays the same for one place in the ring and fills in the rest. Where Triton's compiled kernel looks different from
what is known here, each launch goes through Triton. Runs on any thread and the current stream; waits for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

GROUP = 64
"""Programs that are joined at once."""

_MAX_PROGRAMS = 4096
_ROW_BYTES = 256  # a program's partial results
_MAX_STREAMS = 64
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

Scratch = tuple[torch.Tensor, torch.Tensor]
"""Partial results, float64, and counters, int32, which are zero between launches."""

_scratch: dict[tuple[int, int], Scratch] = {}
_captured: list[Scratch] = []
"""What captured graphs use, which may outlive all else."""


def num_programs(blocks: int, programs_an_sm: int, device: torch.device) -> int:
    """A grid that stays: as many programs as the device runs at once, no more than there are blocks of work."""
    return max(1, min(blocks, programs_an_sm * _num_sms(device), _MAX_PROGRAMS))


_sms: dict[torch.device, int] = {}


def _num_sms(device: torch.device) -> int:
    if device not in _sms:
        has_sms = device.type == "cuda"
        _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if has_sms else 1
    return _sms[device]


def _raw_stream_of() -> Callable[[int], int]:
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


raw_stream = _raw_stream_of()


class Launch:
    """One launch of ``kernel`` with a grid of ``num`` programs.

    ``dynamic`` come first among the kernel's arguments, then scratch and counters, then ``static``; None is an absent
    pointer. Compile-time values come last, in the kernel's order.
    """

    __slots__ = (
        "_compiled",
        "_constants",
        "_device",
        "_kernel",
        "_num",
        "_options",
        "_own",
        "_run",
        "_static",
        "_values",
    )

    def __init__(
        self, kernel: Any, num: int, device: torch.device, static: list[Any], constants: dict[str, Any], num_warps: int
    ) -> None:
        self._kernel, self._num, self._device = kernel, num, device
        self._static, self._constants = static, constants
        self._options = {"num_warps": num_warps, "enable_fp_fusion": True}
        self._compiled: Any = None
        self._run: Callable[..., None] | None = None
        self._values: tuple[Any, ...] = ()
        self._own: Scratch | None = None

    def __call__(self, dynamic: list[torch.Tensor | int | None], captures: bool) -> None:
        """Queue it on the current stream of its device, which is current; ``captures``: a graph is being captured."""
        stream = raw_stream(self._device.index) if self._device.type == "cuda" else 0
        scratch = self._own_scratch() if captures else _scratch_of(self._device, stream, self._num)
        if self._run is None:
            with _relaxed() if captures else contextlib.nullcontext():
                self._first(dynamic, scratch)
            return
        compiled = self._compiled
        self._run(
            self._num, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *[given.data_ptr() if isinstance(given, torch.Tensor) else given for given in dynamic],
            scratch[0].data_ptr(), scratch[1].data_ptr(), *self._values,
        )  # fmt: skip

    def _first(self, dynamic: list[torch.Tensor | int | None], scratch: Scratch) -> None:
        compiled = self._kernel[(self._num,)](*dynamic, *scratch, *self._static, **self._constants, **self._options)
        if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
            return
        self._compiled, self._run = compiled, compiled.run
        given = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in self._static]
        self._values = (*given, *self._constants.values())

    def _own_scratch(self) -> Scratch:
        """Graphs captured on one stream may be replayed on several at once: each launch in them has its own."""
        if self._own is None:
            self._own = _new_scratch(self._num, self._device)
            _captured.append(self._own)
        return self._own


def _scratch_of(device: torch.device, stream: int, num: int) -> Scratch:
    """The current stream's; launches on it follow each other, whatever thread they come from."""
    key = (device.index or 0, stream)
    scratch = _scratch.get(key)
    if scratch is None:
        if len(_scratch) >= _MAX_STREAMS:
            return _new_scratch(num, device)  # queued work keeps it from being given to another stream
        scratch = _scratch.setdefault(key, _new_scratch(_MAX_PROGRAMS, device))
    return scratch


def _new_scratch(num: int, device: torch.device) -> Scratch:
    with torch.inference_mode(False):
        rows = num + -(-num // GROUP)
        partial = torch.empty(rows * _ROW_BYTES // 8, dtype=torch.float64, device=device)
        return partial, torch.zeros(1 + -(-num // GROUP), dtype=torch.int32, device=device)


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread load a kernel while one of its streams is being captured."""
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # gives back the mode that was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
