"""Copy and statistics in host memory: the same results as ``reference`` in a few vectorised passes.

For CPU tensors only, where nothing has to be waited for: numpy looks at the tensors' own memory, block by block, so
that the later passes hit the cache. A tensor that holds a NaN or an Inf, and dtypes outside the hot path, go to
``reference``.
Runs on the caller's thread; scratch memory is one set a thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from flightrec.kernels import pieces, reference, scales
from flightrec.kernels.formats import CODE_FORMATS, CodeFormat, as_bits, decode
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.records import NUM_STATISTICS, Statistic

_Array = np.ndarray[Any, Any]

BLOCK = 65536
"""Elements a block: 256 KiB of float32, so that a block and its scratch stay in the second-level cache."""

_WIDTH = 512  # elements a dot product: few enough for float32 sums to err by less than 1e-6
_SMALL = 1024  # up to here sums in float64 cost nothing
_TINY, _HUGE = 1e-12, 1e16  # outside, squares in float32 could under- or overflow: float64 then
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ONES = np.ones((_WIDTH, 1), np.float32)
_UNITS = {"float8_e4m3fn": 256.0, "float8_e5m2": 1.0}  # what ``_Scratch.decode`` leaves out
_tables: dict[str, _Array] = {}


class _Scratch(threading.local):
    """One thread's working memory, a block long."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.floats = torch.empty(BLOCK, dtype=torch.float32)
            self.sizes = torch.empty(BLOCK, dtype=torch.float32)
            self.decoded = torch.empty(BLOCK, dtype=torch.float32)
            self.halves = torch.empty(BLOCK, dtype=torch.float16)
        self.floats_np: _Array = self.floats.numpy()
        self.sizes_np: _Array = self.sizes.numpy()
        self.decoded_np: _Array = self.decoded.numpy()
        self.halves_np: _Array = self.halves.numpy().view(np.int16)
        self.zeros = np.empty(BLOCK, np.bool_)
        self.code_zeros = np.empty(BLOCK, np.bool_)
        self.mask = np.empty(BLOCK, np.bool_)
        self.codes = np.empty(BLOCK, np.uint8)
        self.magnitudes = np.empty(BLOCK, np.uint8)

    def decode(self, codes: _Array, code_format: CodeFormat) -> _Array:
        """Codes (one a byte) as float32, without the factor ``_UNITS[format]``."""
        count = len(codes)
        halves, decoded = self.halves_np[:count], self.decoded_np[:count]
        if code_format.name == "float8_e4m3fn":  # its bits are those of a float16, 2^8 times smaller
            np.copyto(halves, codes.view(np.int8))
            np.left_shift(halves, 7, out=halves)
            np.bitwise_and(halves, -0x4001, out=halves)
        elif code_format.name == "float8_e5m2":  # the upper byte of a float16
            np.copyto(halves, codes.view(np.int8))
            np.left_shift(halves, 8, out=halves)
        else:
            return np.take(_table(code_format), codes, out=decoded, mode="clip")
        self.decoded[:count].copy_(self.halves[:count])
        return decoded


_scratch = _Scratch()


@dataclass(slots=True)
class _SlotViews:
    """One slot of a destination."""

    high_precision: torch.Tensor | None
    parts: list[torch.Tensor | None]
    row: _Array
    stamp: _Array


@dataclass(slots=True)
class _Codes:
    """Codes under way through the blocks, and their counts."""

    flat: _Array  # uint8
    code_format: CodeFormat
    numel: int
    factor: float | _Array | None = None  # decodes: one value, or one for each run of ``repeat`` codes
    repeat: int = 1
    multiply: bool = True
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    saturated: int = 0
    underflow: int = 0
    squared_error: float = 0.0
    is_unscaled: bool = False
    has_coded_scale: bool = False
    has_second_scale: bool = False  # beside a coded one
    clipped: int = 0
    range_ratio: float = 0.0
    zero_scale: int = 0


def capture(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> None:
    """As ``reference.capture``, for tensors in host memory."""
    at = int(slot.numpy()[0])
    if at < 0:  # in a captured graph, what does not have its turn
        return
    views = destination.cache.get(at)
    if views is None:
        views = destination.cache[at] = _slot_views(destination, at)
    if high_precision is not None:
        high_precision = _keep(views.high_precision, high_precision)
    parts = [_keep(view, part) for view, part in zip(views.parts, parts, strict=True)]
    views.row[:] = statistics(plan, high_precision, parts, valid_rows)
    views.stamp[...] = tick.numpy()[0]


def _slot_views(destination: Destination, at: int) -> _SlotViews:
    with torch.inference_mode(False):
        whole = destination.high_precision
        return _SlotViews(
            high_precision=None if whole is None else whole[at],
            parts=[None if part is None else part[at] for part in destination.parts],
            row=destination.statistics.numpy()[at],
            stamp=destination.stamp.numpy()[at : at + 1],
        )


def _keep(view: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
    """Copy ``source`` to its place, and give back the contiguous copy: it is what the statistics read."""
    if view is None or not source.numel():
        return source
    if view.dtype == source.dtype:
        return view.copy_(source)
    view.copy_(as_bits(source))
    return view.view(source.dtype)


def statistics(
    plan: CapturePlan,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    valid_rows: int | torch.Tensor | None = None,
) -> list[float] | _Array:
    """As ``reference.statistics``: ``C`` numbers."""
    if isinstance(valid_rows, torch.Tensor):
        valid_rows = int(valid_rows.numpy().reshape(-1)[0])
    row = [math.nan] * NUM_STATISTICS
    if _fast(row, plan, high_precision, parts, valid_rows):
        return row
    return cast("_Array", reference.statistics(plan, high_precision, parts, valid_rows).numpy())


def _fast(
    row: list[float],
    plan: CapturePlan,
    x: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    valid_rows: int | None,
) -> bool:
    """Fill ``row``; False when the reference has to."""
    if x is not None and (x.dtype not in _FLOATS or _needs_a_copy(x)):
        return False
    codes = None
    if plan.codes >= 0:
        codes = _prepare_codes(plan, x, parts, valid_rows)
        if codes is None:
            return False
    if x is not None and not _blocks(row, _flat(x, valid_rows), codes if plan.pairs else None):
        return False
    if codes is not None:
        if x is None or not plan.pairs:
            _code_blocks(codes)
        _write_codes(row, codes, pairs=plan.pairs and x is not None)
    if plan.scales:
        rows = x if x is not None else parts[max(plan.codes, 0)]
        row[Statistic.SCALE_NONFINITE_COUNT] = sum(
            _scale_nonfinite(plan, parts, at, rows.shape, valid_rows) for at, _ in plan.scales
        )
        _write_scale(row, plan, parts, rows.shape, valid_rows)
    if plan.amax >= 0 or plan.history >= 0:
        for statistic, found in scales.amax_statistics(plan, [part.detach() for part in parts]).items():
            row[statistic] = float(found.numpy())
    return True


def _flat(x: torch.Tensor, valid_rows: int | None) -> torch.Tensor:
    if valid_rows is not None and x.dim():
        x = x[: max(valid_rows, 0)]
    return x.detach().reshape(-1)


def _needs_a_copy(x: torch.Tensor) -> bool:
    """Whether to flatten it would copy more than is good: the reference takes it in pieces."""
    return not x.is_contiguous() and (x.numel() > pieces.PIECE or pieces.is_expanded(x))


def _prepare_codes(
    plan: CapturePlan, x: torch.Tensor | None, parts: Sequence[torch.Tensor], valid_rows: int | None
) -> _Codes | None:
    """The codes as flat bytes with what decodes them; None where only the reference knows how."""
    code_format = CODE_FORMATS.get(plan.format)
    codes = parts[plan.codes]
    if code_format is None or codes.dtype.itemsize != 1 or _needs_a_copy(codes):
        return None
    if valid_rows is not None and x is not None and x.dim() and codes.dim() and codes.shape[0] != x.shape[0]:
        return None
    flat = _flat(codes, valid_rows).view(torch.uint8).numpy()
    result = _Codes(flat, code_format, len(flat) * (2 if code_format.packed else 1))
    if plan.pairs and x is not None and plan.unscaled:
        result.factor, result.is_unscaled = 1.0, True
    elif plan.pairs and x is not None and plan.scale >= 0:
        result.multiply = plan.multiply_to_decode
        result.has_coded_scale = dict(plan.scales).get(plan.scale, "") in CODE_FORMATS
        return result if _prepare_factor(result, plan, [part.detach() for part in parts], valid_rows) else None
    return result


def _prepare_factor(result: _Codes, plan: CapturePlan, parts: Sequence[torch.Tensor], valid_rows: int | None) -> bool:
    """Fill in what decodes the codes; False where only the reference knows how."""
    codes = parts[plan.codes]
    values = scales.combined(plan, parts)
    result.has_second_scale = result.has_coded_scale and plan.tensor_scale >= 0
    if values is None or (result.has_second_scale and _has_zero(parts[plan.tensor_scale])):
        return False
    if values.numel() == 1:
        result.factor = float(values.numpy().reshape(-1)[0])
        return True
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if result.code_format.packed else tuple(codes.shape)
    result.repeat = _run_length(values.shape, shape, plan.block_shape)
    if result.repeat == 1:
        expanded = scales.expand_scale(values, shape, plan.block_shape)
        if expanded is None:
            return False
        values = expanded.expand(shape)
    elif valid_rows is not None and len(values.shape) != len(shape):
        values = values.reshape(*shape[:-1], -1)
    result.factor = _flat(values, valid_rows).numpy()
    return True


def _has_zero(scale: torch.Tensor) -> bool:
    return bool((scale.numpy() == 0).any())


def _run_length(scale_shape: torch.Size, shape: Sequence[int], block_shape: Sequence[int]) -> int:
    """Consecutive elements that share a scale (a row, or a block within one), 1 if blocks do not pave it so."""
    if len(scale_shape) == 2 and len(shape) > 2:  # over flattened leading dimensions
        shape, block_shape = (math.prod(shape[:-1]), shape[-1]), block_shape[-2:]
    if len(scale_shape) != len(shape) or tuple(scale_shape[:-1]) != tuple(shape[:-1]) or not scale_shape[-1]:
        return 1
    length, rest = divmod(shape[-1], scale_shape[-1])
    told = len(block_shape) != len(shape) or scale_shape[-1] == 1 or block_shape[-1] == length
    return length if told and not rest and length and BLOCK % length == 0 else 1


def _blocks(row: list[float], flat: torch.Tensor, codes: _Codes | None) -> bool:
    """Statistics of a flat high-precision tensor, and of the codes that pair with it; False on anything non-finite."""
    count, amax, zeros, total, squares = flat.numel(), 0.0, 0, 0.0, 0.0
    if codes is not None and codes.numel != count:
        return False
    direct = flat.numpy() if flat.dtype == torch.float32 else None
    scratch = _scratch
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        if direct is not None:
            block = direct[start:stop]
        else:
            scratch.floats[: stop - start].copy_(flat[start:stop])
            block = scratch.floats_np[: stop - start]
        peak = max(float(np.maximum.reduce(block)), -float(np.minimum.reduce(block)))
        if not peak < math.inf:  # a NaN compares as False
            return False
        amax = max(amax, peak)
        mask = np.equal(block, 0, out=scratch.zeros[: stop - start])
        zeros += int(np.count_nonzero(mask))
        total += _total(block, peak)
        squares += _squares(block, peak)
        if codes is not None and not _pair_block(codes, block, mask, peak, start, stop):
            return False
    row[Statistic.NUMEL] = count
    row[Statistic.NAN_COUNT] = row[Statistic.POSITIVE_INF_COUNT] = row[Statistic.NEGATIVE_INF_COUNT] = 0
    row[Statistic.ZERO_COUNT] = zeros
    row[Statistic.AMAX] = abs(amax) if count else math.nan
    row[Statistic.SUM], row[Statistic.SUM_OF_SQUARES] = total, squares
    return True


def _total(block: _Array, peak: float) -> float:
    """Sum of a finite float32 block."""
    count = len(block)
    if count <= _SMALL or peak > _HUGE:
        return float(np.add.reduce(block, dtype=np.float64))
    whole = count - count % _WIDTH
    rows = np.matmul(block[:whole].reshape(-1, 1, _WIDTH), _ONES)
    return float(np.add.reduce(rows.ravel(), dtype=np.float64)) + float(np.add.reduce(block[whole:]))


def _squares(block: _Array, peak: float) -> float:
    """Sum of squares of a float32 block whose magnitudes are about ``peak``."""
    count = len(block)
    if count <= _SMALL or not _TINY < peak < _HUGE:
        return _wide_squares(block)
    whole, rest = count - count % _WIDTH, block[count - count % _WIDTH :]
    rows = np.matmul(block[:whole].reshape(-1, 1, _WIDTH), block[:whole].reshape(-1, _WIDTH, 1))
    return float(np.add.reduce(rows.ravel(), dtype=np.float64)) + _wide_squares(rest)


def _wide_squares(block: _Array) -> float:
    wide = block.astype(np.float64)
    return float(np.add.reduce(wide * wide))


def _pair_block(codes: _Codes, block: _Array, zeros: _Array, peak: float, start: int, stop: int) -> bool:
    """One block of codes beside its high-precision block; False on anything non-finite."""
    bits = _block_codes(codes, start, stop)
    code_zeros = _count_codes(codes, bits)
    if codes.nan or codes.infinite:
        return False
    underflow = np.greater(code_zeros, zeros, out=code_zeros)
    codes.underflow += int(np.count_nonzero(underflow))
    if codes.factor is None:
        return True
    decoded = _scratch.decode(bits, codes.code_format)
    unit = _UNITS.get(codes.code_format.name, 1.0)
    target = decoded
    if isinstance(codes.factor, float):
        factor: _Array = np.array(codes.factor, np.float32)
    else:
        factor = codes.factor[start // codes.repeat : stop // codes.repeat, np.newaxis]
        target = decoded.reshape(-1, codes.repeat)
    with np.errstate(all="ignore"):
        if codes.multiply:
            np.multiply(target, factor * np.float32(unit), out=target)
        else:
            np.divide(target, factor * np.float32(1 / unit), out=target)
        np.subtract(decoded, block, out=decoded)
        squares = _squares(decoded, peak)
    codes.squared_error += squares
    _range_block(codes, block, factor, peak)
    return math.isfinite(squares)  # otherwise the reference leaves out what is not finite


def _range_block(codes: _Codes, block: _Array, factor: _Array, peak: float) -> None:
    """How far one block reaches beyond the format's range; ``factor`` as ``_pair_block`` uses it."""
    largest = np.float32(codes.code_format.largest_value)
    with np.errstate(all="ignore"):
        limit = factor * largest if codes.multiply else largest / factor
        if limit.ndim == 0:
            highest = float(np.float32(peak) / limit)
            if not math.isfinite(highest):
                highest = 0.0
            if highest > reference.CLIPPED_ABOVE:
                ratio = np.divide(np.abs(block, out=_scratch.sizes_np[: len(block)]), limit)
        else:
            sizes = np.abs(block, out=_scratch.sizes_np[: len(block)]).reshape(-1, codes.repeat)
            ratio = np.divide(sizes, limit)
            highest = float(np.maximum.reduce(ratio, axis=None))
            if not math.isfinite(highest):
                ratio[~np.isfinite(ratio)] = 0
                highest = float(np.maximum.reduce(ratio, axis=None))
        if highest > reference.CLIPPED_ABOVE:
            codes.clipped += int(np.count_nonzero(ratio > np.float32(reference.CLIPPED_ABOVE)))
    codes.range_ratio = max(codes.range_ratio, highest)
    zero = factor == 0
    if zero.any():
        wide = block if zero.ndim == 0 else block.reshape(-1, codes.repeat)
        codes.zero_scale += int(np.count_nonzero(zero & (wide != 0)))


def _code_blocks(codes: _Codes) -> None:
    for start in range(0, codes.numel, BLOCK):
        _count_codes(codes, _block_codes(codes, start, min(start + BLOCK, codes.numel)))


def _block_codes(codes: _Codes, start: int, stop: int) -> _Array:
    """Codes ``[start, stop)``, one a byte."""
    if not codes.code_format.packed:
        return codes.flat[start:stop]
    packed = codes.flat[start // 2 : stop // 2]
    bits = _scratch.codes[: stop - start]
    np.bitwise_and(packed, 0xF, out=bits[0::2])
    np.right_shift(packed, 4, out=bits[1::2])
    return bits


def _count_codes(codes: _Codes, bits: _Array) -> _Array:
    """Add a block's counts; gives back which codes are zero (scratch memory)."""
    code_format, count = codes.code_format, len(bits)
    mask = _scratch.mask[:count]
    magnitudes = np.bitwise_and(bits, code_format.magnitude_mask, out=_scratch.magnitudes[:count])
    top = int(np.maximum.reduce(magnitudes))

    def matching(values: _Array, value: int) -> int:
        return int(np.count_nonzero(np.equal(values, value, out=mask)))

    if top >= code_format.largest:
        codes.saturated += matching(magnitudes, code_format.largest)
    if code_format.infinity is not None and top >= code_format.infinity:
        codes.infinite += matching(magnitudes, code_format.infinity)
    if code_format.nan_first is not None:
        if code_format.nan_mask != code_format.magnitude_mask:
            codes.nan += matching(bits, code_format.nan_last)
        elif top >= code_format.nan_first:
            codes.nan += int(np.count_nonzero(np.greater_equal(magnitudes, code_format.nan_first, out=mask)))
    zeros = _scratch.code_zeros[:count]
    if code_format.zero_mask is None:
        zeros.fill(False)
        return zeros
    source = magnitudes if code_format.zero_mask == code_format.magnitude_mask else bits
    np.equal(source, 0, out=zeros)
    codes.zero += int(np.count_nonzero(zeros))
    return zeros


def _write_codes(row: list[float], codes: _Codes, *, pairs: bool) -> None:
    row[Statistic.QUANTIZED_NUMEL] = codes.numel
    row[Statistic.QUANTIZED_NAN_COUNT] = codes.nan
    row[Statistic.QUANTIZED_INF_COUNT] = codes.infinite
    row[Statistic.QUANTIZED_ZERO_COUNT] = codes.zero
    row[Statistic.QUANTIZED_SATURATED_COUNT] = codes.saturated
    row[Statistic.QUANTIZED_LARGEST] = codes.code_format.largest_value
    if pairs:
        row[Statistic.UNDERFLOW_COUNT] = codes.underflow
        if codes.factor is not None:
            row[Statistic.SQUARED_ERROR] = codes.squared_error
            row[Statistic.CLIPPED_COUNT] = codes.clipped
            row[Statistic.RANGE_RATIO] = codes.range_ratio
            if codes.has_second_scale:
                row[Statistic.ZERO_SCALE_COUNT] = 0  # one that is 0 went to the reference
            elif not codes.is_unscaled and not codes.has_coded_scale:
                row[Statistic.ZERO_SCALE_COUNT] = codes.zero_scale


def _write_scale(
    row: list[float],
    plan: CapturePlan,
    parts: Sequence[torch.Tensor],
    shape: torch.Size,
    valid_rows: int | None,
) -> None:
    if plan.scale < 0:
        return
    word = parts[plan.scale].detach()
    is_alone = plan.inverse < 0 and plan.history < 0 and plan.tensor_scale < 0
    if word.numel() == 1 and word.dtype == torch.float32 and is_alone:
        value = float(word.numpy().reshape(-1)[0])
        row[Statistic.SCALE_MIN] = row[Statistic.SCALE_MAX] = value if math.isfinite(value) else math.nan
        return
    detached = [part.detach() for part in parts]
    for statistic, found in scales.scale_statistics(plan, detached, shape, valid_rows).items():
        row[statistic] = float(found.numpy())


def _scale_nonfinite(
    plan: CapturePlan, parts: Sequence[torch.Tensor], at: int, shape: torch.Size, valid_rows: int | None
) -> float:
    scale = parts[at].detach()
    if scale.numel() == 1 and scale.dtype == torch.float32:
        return float(not math.isfinite(scale.numpy().reshape(-1)[0]))
    return float(scales.scale_nonfinite(plan, parts, at, shape, valid_rows).detach().numpy())


def _table(code_format: CodeFormat) -> _Array:
    """The 256 (packed: 16) values of a format."""
    table = _tables.get(code_format.name)
    if table is None:
        if code_format.packed:
            values = decode(torch.arange(16, dtype=torch.uint8), code_format)[0::2]
        else:
            values = decode(torch.arange(256, dtype=torch.uint8), code_format)
        table = _tables[code_format.name] = values.numpy().copy()
    return table
