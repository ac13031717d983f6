"""Copy and statistics on the GPU by Triton kernels: the same results as ``reference`` in a few launches.

For dense tensors of the formats that training uses most: bfloat16, float16 and float32 values, FP8 codes with float32
scales for a tensor or for blocks. Everything else goes to ``reference``. Launches on the caller's current stream and
waits for nothing; scratch memory is one set a thread and stream, so that no two records in the making share it.

A kernel that cannot be compiled or launched (no compiler on the machine) ends the use of all of them, once and for all.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from flightrec.hosthooks import describe
from flightrec.kernels import finishing, pairing, passes, reference
from flightrec.kernels.driver import allocate
from flightrec.kernels.formats import CODE_FORMATS
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.records import NUM_STATISTICS

_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_CODES = {"float8_e4m3fn": 0, "float8_e5m2": 1}
_ROWS, _WARPS = 256, 4  # of the tensors' passes, the best of a dozen tried on an H200
_WORDS_BLOCK = 1024
_PROGRAMS_AN_SM = 8
_FEW, _MANY = 128, 2048
"""Programs a pass; one program joins their results, and few of them faster."""

_PLANES = 5  # values, codes, pairs, scales, more scales
_SMALL = 4096
"""Words of a component that one program copies on the side."""

_MAX_STREAMS = 64
_COUNTS = (torch.int32, torch.int64)

_log = logging.getLogger("flightrec")
_local = threading.local()
_num_sms: dict[torch.device, int] = {}
_gave_up = False


def capture(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> None:
    """Copy a record into its slot and write its statistics row and stamp: see ``reference.capture``."""
    if not _gave_up:
        try:
            job = _Job(plan, destination, high_precision, parts, valid_rows)
            scratch = _scratch_of(destination.stamp.device) if job.is_known() else None
            if scratch is not None:
                with _on(destination.stamp.device):
                    job.run(slot, tick, scratch)
                return
        except Exception as error:
            _give_up(error)
    reference.capture(plan, destination, high_precision, parts, slot, tick, valid_rows)


def _give_up(error: Exception) -> None:
    global _gave_up  # noqa: PLW0603  what one kernel lacks, all lack
    _gave_up = True
    why = describe(error)
    _log.warning("flightrec: Triton kernels do not work here, records will cost many times as much: %s", why)


class _Grid(NamedTuple):
    """How a scale of float32 words lies over what it scales, both in two dimensions."""

    row_stride: int
    column_stride: int
    block_rows: int
    block_columns: int


class _Job:
    """One record."""

    __slots__ = ("codes", "destination", "grid", "more", "other", "parts", "plan", "scale", "small", "valid_rows", "x")

    def __init__(
        self,
        plan: CapturePlan,
        destination: Destination,
        x: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        valid_rows: int | torch.Tensor | None,
    ) -> None:
        self.plan, self.destination, self.x, self.parts, self.valid_rows = plan, destination, x, parts, valid_rows
        self.codes = parts[plan.codes] if plan.codes >= 0 else None
        self.scale = parts[plan.scale] if plan.scale >= 0 else None
        self.other = self.more = -1  # another scale of one word, of several
        self.grid: _Grid | None = None
        self.small: list[int] = []

    # -- is it a record that the kernels know?

    def is_known(self) -> bool:
        """Whether the kernels give what the reference gives; nothing is launched here."""
        plan, x, codes = self.plan, self.x, self.codes
        if (x is None and codes is None) or plan.tensor_scale >= 0 or plan.scale_shape:
            return False
        if x is not None and not (x.dtype in _KINDS and _is_simple(x, 2)):
            return False
        if codes is not None and not (plan.format in _CODES and codes.dtype.itemsize == 1 and _is_simple(codes, 4)):
            return False
        if self.valid_rows is not None and not self._knows_rows():
            return False
        return self._knows_scales() and self._knows_words() and self._knows_pair() and self._knows_copies()

    def _knows_rows(self) -> bool:
        """Rows must end where words of the passes end, and those of values and codes must be the same."""
        if isinstance(self.valid_rows, torch.Tensor) and self.valid_rows.dtype not in _COUNTS:
            return False
        given = [tensor for tensor in (self.x, self.codes) if tensor is not None]
        if any(not tensor.dim() or _elements_a_row(tensor) % 4 for tensor in given):
            return False
        return len({tensor.shape[0] for tensor in given}) == 1

    def _knows_scales(self) -> bool:
        plan = self.plan
        if plan.scales and self.scale is None:
            return False
        for at, _ in plan.scales:
            scale = self.parts[at]
            if scale.dtype != torch.float32 or not scale.numel() or scale.is_neg():
                return False
            if scale.numel() > 1 and (self.valid_rows is not None or scale.dim() != 2):
                return False
            if at == plan.scale:
                continue
            single = scale.numel() == 1 and self.scale is not None and self.scale.numel() == 1
            if (self.other if single else self.more) >= 0:
                return False
            if single:
                self.other = at
            else:
                self.more = at
        if self.scale is None or self.scale.numel() == 1:
            return plan.inverse in (-1, self.other)
        if plan.inverse >= 0 or self.codes is None:
            return False
        self.grid = _grid(self.scale, self.codes.shape, plan.block_shape)
        return self.grid is not None

    def _knows_words(self) -> bool:
        for at in (self.plan.history, self.plan.amax):
            if at >= 0:
                words = self.parts[at]
                if words.dtype != torch.float32 or words.dim() > 1 or not words.numel():
                    return False
        return self.plan.amax < 0 or self.parts[self.plan.amax].is_contiguous()

    def _knows_pair(self) -> bool:
        if not (self.plan.pairs and self.x is not None and self.codes is not None):
            return True
        if self.x.numel() != self.codes.numel() or self.x.numel() % 8:
            return False
        if self.grid is None:
            return True
        columns, block = self.codes.shape[-1], self.grid.block_columns
        return columns % 8 == 0 and (block % 8 == 0 or block >= columns)

    def _knows_copies(self) -> bool:
        for at, target in enumerate(self.destination.parts):
            part = self.parts[at]
            if target is None or at in (self.plan.codes, self.more) or (at == self.plan.scale and self.grid):
                continue
            if part.numel() <= _SMALL and part.dtype.itemsize == 4 and (part.dim() <= 1 or part.is_contiguous()):
                self.small.append(at)
        return len(self.small) <= finishing.MAX_SMALL

    # -- launches

    def run(self, slot: torch.Tensor, tick: torch.Tensor, scratch: torch.Tensor) -> None:
        """Launch everything on the current stream."""
        values = self._values(slot, scratch[0])
        codes = self._codes(slot, scratch[1])
        pairs = self._pair(scratch[2])
        words = self._words(self.plan.scale, slot, scratch[3]) if self.grid else 1
        more = self._words(self.more, slot, scratch[4]) if self.more >= 0 else 1
        own = {self.plan.codes, self.more, *self.small, *([self.plan.scale] if self.grid else ())}
        for at, target in enumerate(self.destination.parts):
            if target is not None and at not in own:
                reference.copy_one(target, self.parts[at], slot)
        self._finish(slot, tick, scratch, (values, codes, pairs, words, more))

    def _values(self, slot: torch.Tensor, partial: torch.Tensor) -> int:
        x, target = self.x, self.destination.high_precision
        if x is None:
            return 1
        kind = _KINDS[x.dtype]
        per_word = 2 if kind < 2 else 1
        words = x.numel() // per_word
        num = _num_programs(words, 4 if kind < 2 else 8, x.device)
        kernel = passes.halves_pass if kind < 2 else passes.values_pass
        stride = 0 if target is None else target.stride(0) // per_word
        pointer, limit = self._limit(x)
        kernel[(num,)](
            x, x if target is None else target, slot, stride, words, pointer, limit, partial,
            KIND=kind, COPY=target is not None, MASKED=self.valid_rows is not None, ROWS=_ROWS, num_warps=_WARPS,
        )  # fmt: skip
        return num

    def _codes(self, slot: torch.Tensor, partial: torch.Tensor) -> int:
        codes = self.codes
        if codes is None:
            return 1
        target = self.destination.parts[self.plan.codes]
        words = codes.numel() // 4
        num = _num_programs(words, 4, codes.device)
        pointer, limit = self._limit(codes)
        passes.codes_pass[(num,)](
            codes.view(torch.uint8), codes.view(torch.uint8) if target is None else target.view(torch.uint8), slot,
            0 if target is None else target.stride(0) // 4, words, pointer, limit, partial,
            KIND=_CODES[self.plan.format], COPY=target is not None, MASKED=self.valid_rows is not None, ROWS=_ROWS,
            num_warps=_WARPS,
        )  # fmt: skip
        return num

    def _pair(self, partial: torch.Tensor) -> int:
        plan, x, codes, grid = self.plan, self.x, self.codes, self.grid
        if not plan.pairs or x is None or codes is None:
            return 1
        num = _num_programs(x.numel(), 8, x.device)
        pointer, limit = self._limit(x)
        scale = partial if self.scale is None else self.scale
        lies = (1, 1, 1, 1, 1) if grid is None else (codes.shape[-1], *grid)
        pairing.pair_pass[(num,)](
            x, codes.view(torch.uint8), x.numel(), scale, *lies, pointer, limit, partial,
            KIND=_KINDS[x.dtype], CODES=_CODES[plan.format], LARGEST=CODE_FORMATS[plan.format].largest_value,
            BLOCKS=grid is not None, MULTIPLY=plan.multiply_to_decode, SCALED=self.scale is not None, ROWS=_ROWS,
            num_warps=_WARPS,
        )  # fmt: skip
        return num

    def _words(self, at: int, slot: torch.Tensor, partial: torch.Tensor) -> int:
        words, target = self.parts[at], self.destination.parts[at]
        rows, columns = (1, 1) if words.numel() == 1 else words.shape
        row_stride, column_stride = (1, 1) if words.numel() == 1 else words.stride()
        num = max(1, min(-(-words.numel() // _WORDS_BLOCK), _FEW))
        pairing.words_pass[(num,)](
            words, rows, columns, row_stride, column_stride, words if target is None else target, slot,
            0 if target is None else target.stride(0), partial, COPY=target is not None, BLOCK=_WORDS_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
        return num

    def _finish(
        self, slot: torch.Tensor, tick: torch.Tensor, scratch: torch.Tensor, nums: tuple[int, int, int, int, int]
    ) -> None:
        plan, x, codes, destination, parts = self.plan, self.x, self.codes, self.destination, self.parts
        copies: list[Any] = []
        for at in self.small:
            part, target = parts[at], destination.parts[at]
            assert target is not None
            stride = part.stride(0) if part.dim() == 1 else 1
            copies += [part, stride, target, target.stride(0), part.numel()]
        copies += [None, 1, None, 0, 0] * (finishing.MAX_SMALL - len(self.small))
        pointer, values_limit = (None, 0) if x is None else self._limit(x)
        code_pointer, codes_limit = (pointer, 0) if codes is None else self._limit(codes)
        history = parts[plan.history] if plan.history >= 0 else None
        amax = parts[plan.amax] if plan.amax >= 0 else None
        has_pair = plan.pairs and x is not None and codes is not None
        finishing.finish[(1,)](
            scratch, scratch.stride(0), destination.statistics, destination.statistics.stride(0), destination.stamp,
            destination.stamp.stride(0), slot, tick, nums[0], 0 if x is None else x.numel(), values_limit, nums[1],
            0 if codes is None else codes.numel(), codes_limit, nums[2], nums[3], nums[4],
            pointer if pointer is not None else code_pointer,
            0.0 if codes is None else CODE_FORMATS[plan.format].largest_value, self.scale,
            parts[self.other] if self.other >= 0 else None, history,
            1 if history is None or not history.dim() else history.stride(0), 0 if history is None else history.numel(),
            amax, 0 if amax is None else amax.numel(), *copies,
            KIND=2 if x is None else _KINDS[x.dtype], HAS_VALUES=x is not None, HAS_CODES=codes is not None,
            HAS_PAIR=has_pair, HAS_ERROR=has_pair and (self.scale is not None or plan.unscaled),
            SCALED=self.scale is not None, MULTIPLY=plan.multiply_to_decode, INVERSE=plan.inverse >= 0,
            WORDS=self.grid is not None, MORE=self.more >= 0, COLUMNS=NUM_STATISTICS,
            P=_FEW if max(nums) <= _FEW else _MANY, num_warps=8,
        )  # fmt: skip

    def _limit(self, tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """Elements that count; with the number of rows on the device, where that is, and the elements of a row."""
        rows, a_row = self.valid_rows, _elements_a_row(tensor)
        if isinstance(rows, torch.Tensor):
            return rows, a_row
        return None, tensor.numel() if rows is None else min(max(rows * a_row, 0), tensor.numel())


def _grid(scale: torch.Tensor, shape: Sequence[int], block_shape: Sequence[int]) -> _Grid | None:
    """How a two-dimensional scale lies over a tensor of ``shape``, leading dimensions flattened; None if unclear."""
    if len(shape) < 2:
        return None
    sizes = (math.prod(shape[:-1]), shape[-1])
    blocks = []
    given = block_shape[-2:] if len(block_shape) > 1 else (0, 0)
    for size, count, block in zip(sizes, scale.shape, given, strict=True):
        if count == 1:
            blocks.append(size)
        elif count == size:
            blocks.append(1)
        elif block * count >= size:
            blocks.append(block)
        elif size % count == 0:
            blocks.append(size // count)
        else:
            return None
    return _Grid(*scale.stride(), *blocks)


def _elements_a_row(tensor: torch.Tensor) -> int:
    return tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1


def _is_simple(tensor: torch.Tensor, multiple: int) -> bool:
    return (
        tensor.numel() > 0
        and tensor.numel() % multiple == 0
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and not tensor.is_neg()
    )


def _num_programs(words: int, a_row: int, device: torch.device) -> int:
    if device not in _num_sms:
        has_sms = device.type == "cuda"
        _num_sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if has_sms else 1
    return max(1, min(-(-words // (_ROWS * a_row)), _PROGRAMS_AN_SM * _num_sms[device], _MANY))


def _scratch_of(device: torch.device) -> torch.Tensor | None:
    """This thread's partial results of the current stream; None for one stream too many."""
    sets: dict[tuple[torch.device, int], torch.Tensor] = vars(_local).setdefault("sets", {})
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    scratch = sets.get((device, stream))
    if scratch is None and len(sets) < _MAX_STREAMS:
        with torch.inference_mode(False):
            shape = (_PLANES, _MANY, passes.NUM_PARTIALS)
            scratch = allocate(device, lambda: torch.zeros(shape, dtype=torch.float64, device=device))
        sets[device, stream] = scratch
    return scratch


@contextmanager
def own_scratch(sets: dict[Any, Any]) -> Iterator[None]:
    """Work with the partial results in ``sets`` in here, not with this thread's."""
    outer = vars(_local).get("sets", {})
    _local.sets = sets
    try:
        yield
    finally:
        _local.sets = outer


def make_scratch(device: torch.device, sets: dict[Any, Any], stream: int) -> None:
    """Put partial results for the stream of this handle into ``sets``, initialised on the current one."""
    with own_scratch({}):
        sets[device, stream] = _scratch_of(device)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
