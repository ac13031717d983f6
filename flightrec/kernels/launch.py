"""Launching the capture kernel: once by Triton, which compiles it, from then on by the CUDA driver itself.

Triton's own launcher binds, specialises and looks up at every call: 15 to 19 us with ten arguments. A ``Launch`` holds
the parameters of one place in the ring in memory that the driver reads, and fills in what changes. Whether the driver
sees the same parameters as are known here is asked of the driver once; where it does not, or a launch is refused, it
goes through Triton's compiled kernel, and where that looks different, through Triton. Runs on any thread and the
current stream; waits for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flightrec.kernels import driver

GROUP = 64
"""Programs that are joined at once."""

_MAX_PROGRAMS = 4096
_ROW_BYTES = 256  # a program's partial results
_MAX_STREAMS = 64
_MAX_HIDDEN = 4  # parameters that Triton appends, all of them pointers to memory that these kernels do not ask for


class Scratch(NamedTuple):
    """Partial results, float64, and counters, int32, which are zero between launches; and where they lie."""

    partial: torch.Tensor
    counters: torch.Tensor
    pointers: tuple[int, int]


_scratch: dict[tuple[int, int], Scratch] = {}
_captured: list[Scratch] = []
"""What captured graphs use, which may outlive all else."""

_sms: dict[torch.device, int] = {}


def num_programs(blocks: int, programs_an_sm: int, device: torch.device) -> int:
    """A grid that stays: as many programs as the device runs at once, no more than there are blocks of work."""
    return max(1, min(blocks, programs_an_sm * _num_sms(device), _MAX_PROGRAMS))


def _num_sms(device: torch.device) -> int:
    if device not in _sms:
        has_sms = device.type == "cuda"
        _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if has_sms else 1
    return _sms[device]


def stream_of(device: torch.device) -> int:
    """The handle of the current stream."""
    return _raw_stream(device.index) if device.type == "cuda" else 0


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: int(torch.cuda.current_stream(index).cuda_stream)
)


class Launch:
    """Launches of ``kernel`` with a grid of ``num`` programs.

    The kernel's arguments are ``dynamic`` ones, pointers and integers, of which an absent pointer is None in every
    launch or in none; scratch and counters, if ``has_scratch``; ``static`` ones, tensors, integers and None; and
    compile-time ``constants``, in the kernel's order.
    """

    __slots__ = (
        "_compiled", "_constants", "_device", "_direct", "_given", "_has_scratch", "_kernel", "_num", "_options",
        "_own", "_static", "is_ready",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        num: int,
        device: torch.device,
        static: list[Any],
        constants: dict[str, Any],
        num_warps: int,
        *,
        has_scratch: bool = True,
    ) -> None:
        self._kernel, self._num, self._device, self._has_scratch = kernel, num, device, has_scratch
        self._static, self._constants = static, constants
        self._options = {"num_warps": num_warps, "enable_fp_fusion": True}
        self._compiled: Any = None
        self._direct: _Direct | None = None
        self._given: list[bool] = []
        self._own: Scratch | None = None
        self.is_ready = False
        """Compiled and loaded: ``again`` may be called."""

    def first(self, dynamic: list[torch.Tensor | int | None], stream: int, captures: bool) -> None:
        """Compile it and queue it on the current stream; ``captures``: that is being captured into a graph."""
        scratch = self._scratch(stream, captures)
        own = (scratch.partial, scratch.counters) if self._has_scratch else ()
        # A kernel is loaded at its first launch, which is legal beside a capture, not in it.
        with driver.relaxed() if captures and not driver.why_missing() else contextlib.nullcontext():
            compiled = self._kernel[(self._num,)](*dynamic, *own, *self._static, **self._constants, **self._options)
        if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata", "metadata")):
            return
        self._compiled, self._given = compiled, [value is not None for value in dynamic]
        num_dynamic = sum(self._given) + len(own)
        static = [_address(value) for value in self._static if value is not None]
        self._direct = _direct(compiled, self._num, num_dynamic, static)
        self.is_ready = True

    def again(self, dynamic: list[int], stream: int, captures: bool) -> None:
        """Queue it on the current stream, whose handle is ``stream``; ``dynamic`` are addresses, without the absent."""
        own = self._scratch(stream, captures).pointers if self._has_scratch else ()
        if self._direct is None or not self._direct(stream, *dynamic, *own):
            given = iter(dynamic)
            self._compiled.run(
                self._num, 1, 1, stream, self._compiled.function, self._compiled.packed_metadata, None, None, None,
                *[next(given) if is_given else None for is_given in self._given], *own,
                *map(_address, self._static), *self._constants.values(),
            )  # fmt: skip

    def _scratch(self, stream: int, captures: bool) -> Scratch:
        """The stream's; in a graph its own, since graphs captured on one stream may be replayed on several at once."""
        if not captures:
            return _scratch.get((self._device.index or 0, stream)) or _scratch_of(self._device, stream, self._num)
        if self._own is None:
            self._own = _new_scratch(self._num, self._device)
            _captured.append(self._own)
        return self._own


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _scratch_of(device: torch.device, stream: int, num: int) -> Scratch:
    """The stream's; launches on it follow each other, whatever thread they come from."""
    if len(_scratch) >= _MAX_STREAMS:
        return _new_scratch(num, device)  # the allocator gives it to nobody else before this stream is done with it
    return _scratch.setdefault((device.index or 0, stream), _new_scratch(_MAX_PROGRAMS, device))


def _new_scratch(num: int, device: torch.device) -> Scratch:
    groups = -(-num // GROUP)
    size = (num + groups) * _ROW_BYTES // 8
    with torch.inference_mode(False):
        partial = driver.allocate(device, lambda: torch.empty(size, dtype=torch.float64, device=device))
        counters = driver.allocate(device, lambda: torch.zeros(1 + groups, dtype=torch.int32, device=device))
    return Scratch(partial, counters, (partial.data_ptr(), counters.data_ptr()))


# -- the driver


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Direct:
    """A loaded kernel, its grid and its parameters."""

    __slots__ = ("_at", "_config", "_function", "_launch", "_lock", "_pack", "_parameters", "_values")

    def __init__(self, launch: Any, function: int, config: _Config, num_dynamic: int, values: list[int]) -> None:
        self._launch, self._function, self._config = launch, function, config
        self._values = (ctypes.c_uint64 * len(values))(*[value & 0xFFFFFFFFFFFFFFFF for value in values])
        start = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * len(values))(*[start + 8 * number for number in range(len(values))])
        self._at = ctypes.addressof(config), ctypes.addressof(self._parameters)
        self._pack = struct.Struct(f"<{num_dynamic}q").pack_into
        self._lock = threading.Lock()

    def __call__(self, stream: int, *dynamic: int) -> bool:
        """Whether the driver took it."""
        config, parameters = self._at
        with self._lock:  # the driver copies the parameters before it returns
            self._pack(self._values, 0, *dynamic)
            self._config.stream = stream
            taken: bool = self._launch(config, self._function, parameters, None) == 0
            return taken


@functools.cache
def _driver() -> Any:
    """The CUDA driver's library, which is loaded already; None without what is needed here."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
        library.cuFuncGetParamInfo.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


def _direct(compiled: Any, num: int, num_dynamic: int, static: list[int]) -> _Direct | None:
    """The kernel for the driver; None unless it takes these parameters, each at least as wide as its value."""
    metadata, library = compiled.metadata, _driver()
    plain = all(
        getattr(metadata, name, absent) == absent
        for name, absent in (
            ("global_scratch_size", 0), ("profile_scratch_size", 0), ("num_ctas", 1), ("launch_pdl", False),
            ("launch_cooperative_grid", False),
        )
    )  # fmt: skip
    if library is None or not plain or not isinstance(compiled.function, int):
        return None
    known = num_dynamic + len(static)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while len(sizes) <= known + _MAX_HIDDEN and not library.cuFuncGetParamInfo(
        compiled.function, len(sizes), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    hidden = len(sizes) - known
    fits = 0 <= hidden <= _MAX_HIDDEN and all(width == 8 for width in [*sizes[:num_dynamic], *sizes[known:]])
    narrow = zip(sizes[num_dynamic:known], static, strict=False)
    if not fits or any(width != 8 and not (width == 4 and -(2**31) <= value < 2**31) for width, value in narrow):
        return None
    block = 32 * metadata.num_warps
    config = _Config(num, 1, 1, block, 1, 1, metadata.shared, None, None, 0)
    values = [0] * num_dynamic + static + [0] * hidden
    return _Direct(library.cuLaunchKernelEx, compiled.function, config, num_dynamic, values)
