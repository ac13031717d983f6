"""The Triton kernel that ends a capture: one program joins partial results into the statistics row and stamps it."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SMALL = 4
"""Small components that the kernel copies on the side."""


@triton.jit
def _column(plane_ptr, lanes, num_programs, COLUMN: tl.constexpr, OTHER: tl.constexpr):
    return tl.load(plane_ptr + lanes * 16 + COLUMN, mask=lanes < num_programs, other=OTHER)


@triton.jit
def _sum(plane_ptr, lanes, num_programs, COLUMN: tl.constexpr):
    return tl.sum(_column(plane_ptr, lanes, num_programs, COLUMN, 0.0), axis=0)


@triton.jit
def _largest(plane_ptr, lanes, num_programs, COLUMN: tl.constexpr):
    return tl.max(_column(plane_ptr, lanes, num_programs, COLUMN, 0.0), axis=0)


@triton.jit
def _copy_words(from_ptr, from_stride, to_ptr, slot, slot_stride, n):
    """Copy ``n`` words of four bytes."""
    if from_ptr is not None:
        from_ptr = from_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        to_ptr = to_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * slot_stride
        for start in range(0, n, 256):
            at = start + tl.arange(0, 256)
            tl.store(to_ptr + at, tl.load(from_ptr + at * from_stride, mask=at < n), mask=at < n)


@triton.jit
def _largest_word(ptr, stride, n):
    """Largest finite of ``n`` float32 words; minus infinity without one."""
    found = float("-inf")
    for start in range(0, n, 256):
        at = start + tl.arange(0, 256)
        words = tl.load(ptr + at * stride, mask=at < n, other=float("-inf"))
        found = tl.maximum(found, tl.max(tl.where(tl.abs(words) < float("inf"), words, float("-inf")), axis=0))
    return found


@triton.jit
def _or_absent(value):
    """A float32 value as float64, NaN for an infinite one."""
    return tl.where(tl.abs(value) < float("inf"), value.to(tl.float64), float("nan"))


@triton.jit
def _values(row, plane, lanes, num_programs, count, KIND: tl.constexpr):
    nan = _sum(plane, lanes, num_programs, 1)
    positive = _sum(plane, lanes, num_programs, 2)
    negative = _sum(plane, lanes, num_programs, 3)
    amax = _largest(plane, lanes, num_programs, 5)
    if KIND == 0:
        amax = (amax.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(tl.float64)
    elif KIND == 1:
        amax = amax.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
    else:
        amax = amax.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(row, count)
    tl.store(row + 1, nan)
    tl.store(row + 2, positive)
    tl.store(row + 3, negative)
    tl.store(row + 4, count + _sum(plane, lanes, num_programs, 4))
    tl.store(row + 5, tl.where(count > nan + positive + negative, amax, float("nan")))
    tl.store(row + 6, _sum(plane, lanes, num_programs, 6))
    tl.store(row + 7, _sum(plane, lanes, num_programs, 7))


@triton.jit
def _codes(row, plane, lanes, num_programs, count, largest):
    tl.store(row + 8, count)
    tl.store(row + 9, _sum(plane, lanes, num_programs, 1))
    tl.store(row + 10, _sum(plane, lanes, num_programs, 2))
    tl.store(row + 11, count + _sum(plane, lanes, num_programs, 3))
    tl.store(row + 12, _sum(plane, lanes, num_programs, 4))
    tl.store(row + 23, largest)


@triton.jit
def _pair(row, plane, lanes, num_programs, HAS_ERROR: tl.constexpr, SCALED: tl.constexpr):
    tl.store(row + 13, _sum(plane, lanes, num_programs, 0))
    if HAS_ERROR:
        tl.store(row + 14, _sum(plane, lanes, num_programs, 1))
        tl.store(row + 16, _sum(plane, lanes, num_programs, 2))
        tl.store(row + 17, _largest(plane, lanes, num_programs, 3))
        if SCALED:
            tl.store(row + 18, _sum(plane, lanes, num_programs, 4))


@triton.jit(do_not_specialize=[
    "plane_size", "row_stride", "stamp_stride", "num_values_programs", "numel", "values_limit", "num_codes_programs",
    "code_numel", "codes_limit", "num_pair_programs", "num_words_programs", "num_more_programs", "history_stride",
    "num_history", "num_amax", "from_0", "stride_0", "n_0", "from_1", "stride_1", "n_1", "from_2", "stride_2", "n_2",
    "from_3", "stride_3", "n_3", "largest_code",
])  # fmt: skip
def finish(
    partial_ptr, plane_size: tl.int64, row_ptr, row_stride: tl.int64, stamp_ptr, stamp_stride: tl.int64, slot_ptr,
    tick_ptr, num_values_programs: tl.int64, numel: tl.int64, values_limit: tl.int64, num_codes_programs: tl.int64,
    code_numel: tl.int64, codes_limit: tl.int64, num_pair_programs: tl.int64, num_words_programs: tl.int64,
    num_more_programs: tl.int64, limit_ptr, largest_code: tl.float32, scale_ptr, other_ptr, history_ptr,
    history_stride: tl.int64, num_history: tl.int64, amax_ptr, num_amax: tl.int64,
    part_0, from_0: tl.int64, to_0, stride_0: tl.int64, n_0: tl.int64,
    part_1, from_1: tl.int64, to_1, stride_1: tl.int64, n_1: tl.int64,
    part_2, from_2: tl.int64, to_2, stride_2: tl.int64, n_2: tl.int64,
    part_3, from_3: tl.int64, to_3, stride_3: tl.int64, n_3: tl.int64,
    KIND: tl.constexpr, HAS_VALUES: tl.constexpr, HAS_CODES: tl.constexpr, HAS_PAIR: tl.constexpr,
    HAS_ERROR: tl.constexpr, SCALED: tl.constexpr, MULTIPLY: tl.constexpr, INVERSE: tl.constexpr, WORDS: tl.constexpr,
    MORE: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Join the programs' partial results into one statistics row, stamp it, and copy the small components."""
    slot = tl.load(slot_ptr)
    row = row_ptr + slot * row_stride
    lanes = tl.arange(0, P)
    every = tl.arange(0, 32)
    tl.store(row + every, tl.full([32], float("nan"), tl.float64), mask=every < COLUMNS)
    tl.debug_barrier()  # what follows overwrites some of it
    if limit_ptr is not None:
        rows_seen = tl.maximum(tl.load(limit_ptr), 0)
        values_limit = tl.minimum(rows_seen * values_limit, numel)
        codes_limit = tl.minimum(rows_seen * codes_limit, code_numel)
    if HAS_VALUES:
        _values(row, partial_ptr, lanes, num_values_programs, values_limit.to(tl.float64), KIND)
    if HAS_CODES:
        largest = tl.full([], largest_code, tl.float64)
        _codes(row, partial_ptr + plane_size, lanes, num_codes_programs, codes_limit.to(tl.float64), largest)
    if HAS_PAIR:
        _pair(row, partial_ptr + 2 * plane_size, lanes, num_pair_programs, HAS_ERROR, SCALED)
    if SCALED:
        if WORDS:
            plane = partial_ptr + 3 * plane_size
            low = tl.min(_column(plane, lanes, num_words_programs, 0, float("inf")), axis=0)
            high = tl.max(_column(plane, lanes, num_words_programs, 1, float("-inf")), axis=0)
            bad = _sum(plane, lanes, num_words_programs, 2)
            tl.store(row + 19, _or_absent(low))
            tl.store(row + 20, _or_absent(high))
        else:
            word = tl.load(scale_ptr)
            finite = tl.abs(word) < float("inf")
            bad = 1.0 - finite.to(tl.float64)
            tl.store(row + 19, _or_absent(word))
            tl.store(row + 20, _or_absent(word))
            if other_ptr is not None:
                other = tl.load(other_ptr)
                other_finite = tl.abs(other) < float("inf")
                bad += 1.0 - other_finite.to(tl.float64)
                if INVERSE:
                    judged = finite & other_finite & ((word != 0) | (other != 0))
                    tl.store(row + 21, tl.where(judged, tl.abs(word * other - 1.0), 0.0).to(tl.float64))
            if history_ptr is not None:
                past = tl.maximum(_largest_word(history_ptr, history_stride, num_history), 0.0)
                if MULTIPLY:
                    bound = word * largest_code
                else:
                    bound = largest_code / word
                tl.store(row + 22, _or_absent(past / bound))
        if MORE:
            bad += _sum(partial_ptr + 4 * plane_size, lanes, num_more_programs, 2)
        tl.store(row + 15, bad)
    if amax_ptr is not None:
        tl.store(row + 24, _or_absent(_largest_word(amax_ptr, 1, num_amax)))
    if history_ptr is not None:
        tl.store(row + 25, _or_absent(_largest_word(history_ptr, history_stride, num_history)))
    _copy_words(part_0, from_0, to_0, slot, stride_0, n_0)
    _copy_words(part_1, from_1, to_1, slot, stride_1, n_1)
    _copy_words(part_2, from_2, to_2, slot, stride_2, n_2)
    _copy_words(part_3, from_3, to_3, slot, stride_3, n_3)
    tl.store(stamp_ptr + slot * stamp_stride, tl.load(tick_ptr))
