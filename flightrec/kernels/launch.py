"""Launching the capture kernel: once by Triton, which compiles it, from then on by the CUDA driver itself.

Triton's own launcher binds, specialises and looks up at every call: 15 to 19 us with ten arguments. So the parameters
lie in memory that the driver reads: those that stay beside their ``Launch``, those that change in ``Cells``, which the
launches of one record share. Whether the driver sees the same parameters as are known here is asked of the driver once;
where it does not, or a launch is refused, it goes through Triton's compiled kernel, and where that looks different,
through Triton. Runs on any thread and the current stream; waits for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: int(torch.cuda.current_stream(index).cuda_stream)
)
"""The handle of the current stream of a device, by its number."""


class Launch:
    """Launches of ``kernel`` with a grid of ``num`` programs.

    The kernel's arguments are ``dynamic`` ones, pointers and integers, of which an absent pointer is None in every
    launch or in none; scratch and counters, if ``has_scratch``; ``static`` ones, tensors, integers and None; and
    compile-time ``constants``, in the kernel's order.
    """

    __slots__ = (
        "_compiled", "_constants", "_device", "_given", "_has_scratch", "_kernel", "_options", "_own", "_static",
        "is_ready", "num",
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
        self._kernel, self.num, self._device, self._has_scratch = kernel, num, device, has_scratch
        self._static, self._constants = static, constants
        self._options = {"num_warps": num_warps, "enable_fp_fusion": True}
        self._compiled: Any = None
        self._given: list[bool] = []
        self._own: Scratch | None = None
        self.is_ready = False
        """Compiled and loaded: ``again`` and ``direct`` may be called."""

    def first(self, dynamic: list[torch.Tensor | int | None], stream: int, captures: bool) -> None:
        """Compile it and queue it on the current stream; ``captures``: that is being captured into a graph."""
        scratch = self._scratch(stream, captures)
        own = (scratch.partial, scratch.counters) if self._has_scratch else ()
        # A kernel is loaded at its first launch, which is legal beside a capture, not in it.
        with driver.relaxed() if captures and not driver.why_missing() else contextlib.nullcontext():
            compiled = self._kernel[(self.num,)](*dynamic, *own, *self._static, **self._constants, **self._options)
        if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata", "metadata")):
            return
        self._compiled, self._given = compiled, [value is not None for value in dynamic]
        self.is_ready = True

    def again(self, dynamic: list[int], stream: int, captures: bool) -> None:
        """Queue it on the current stream, whose handle is ``stream``; ``dynamic`` are addresses, without the absent."""
        own = self._scratch(stream, captures).pointers if self._has_scratch else ()
        given = iter(dynamic)
        self._compiled.run(
            self.num, 1, 1, stream, self._compiled.function, self._compiled.packed_metadata, None, None, None,
            *[next(given) if is_given else None for is_given in self._given], *own,
            *map(_address, self._static), *self._constants.values(),
        )  # fmt: skip

    def direct(self, cells: Cells, dynamic: list[int]) -> Direct | None:
        """For the driver itself, with the cells of the ``dynamic`` arguments; None where it sees other parameters."""
        if self._has_scratch:
            dynamic = [*dynamic, cells.partial, cells.counters]
        static = [_address(value) for value in self._static if value is not None]
        return _direct(self._compiled, self.num, cells, dynamic, static)

    def _scratch(self, stream: int, captures: bool) -> Scratch:
        """The stream's; in a graph its own, since graphs captured on one stream may be replayed on several at once."""
        if not captures:
            return scratch_of(self._device, stream, self.num)
        if self._own is None:
            self._own = _new_scratch(self.num, self._device)
            _captured.append(self._own)
        return self._own


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def scratch_of(device: torch.device, stream: int, num: int) -> Scratch:
    """The stream's; launches on it follow each other, whatever thread they come from."""
    scratch = _scratch.get((device.index or 0, stream))
    if scratch is not None:
        return scratch
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


class Cells:
    """The parameters of a record's launches that change: its tensors' addresses, then what the attributes number.

    Attributes:
        memory: eight bytes each.
        slot, tick: addresses of both.
        rows: those that count, or the address of their number.
        nothing: always 0.
        partial, counters: addresses of the stream's scratch.
    """

    __slots__ = ("counters", "memory", "nothing", "partial", "rows", "slot", "tick")

    def __init__(self, num_tensors: int) -> None:
        self.slot, self.tick, self.rows, self.nothing, self.partial, self.counters = range(num_tensors, num_tensors + 6)
        self.memory = (ctypes.c_uint64 * (num_tensors + 6))()


class Direct:
    """What the driver reads of a loaded kernel: its grid, and where its parameters lie.

    Attributes:
        launch: the driver's function, which takes the three ``arguments`` and a null pointer; 0 if it took them.
        arguments: address of the grid, the kernel, address of the parameters' addresses.
        config: the grid; its ``stream`` is to be set.
    """

    __slots__ = ("_kept", "arguments", "config", "launch")

    def __init__(
        self, launch: Any, function: int, config: _Config, cells: Cells, dynamic: list[int], values: list[int]
    ) -> None:
        self.launch, self.config = launch, config
        own = (ctypes.c_uint64 * len(values))(*[value & 0xFFFFFFFFFFFFFFFF for value in values])
        changing, start = ctypes.addressof(cells.memory), ctypes.addressof(own)
        places = [changing + 8 * cell for cell in dynamic] + [start + 8 * number for number in range(len(values))]
        parameters = (ctypes.c_void_p * len(places))(*places)
        self._kept = own, parameters, cells
        self.arguments = ctypes.addressof(config), function, ctypes.addressof(parameters)


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


def _direct(compiled: Any, num: int, cells: Cells, dynamic: list[int], static: list[int]) -> Direct | None:
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
    num_dynamic = len(dynamic)
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
    return Direct(library.cuLaunchKernelEx, compiled.function, config, cells, dynamic, static + [0] * hidden)
