"""Triton kernels of capture: each reads a tensor once, writes the copy, and reduces its statistics.

A persistent pass over the elements leaves one row of partial results a program; ``finishing`` joins them. Nothing is
allocated and nothing waits. Offsets are 64 bits wide and no integer is specialised, so that no value of theirs compiles
a kernel anew.

Magnitudes are compared as integers, two halves or four codes of a word at once. Sums of eight elements are made in
float32 after scaling them by a power of two (exact), so that neither overflow nor underflow can spoil them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_PARTIALS = 16
"""Columns of a program's partial results, float64; each pass has a plane of its own."""


@triton.jit
def _as_float(raw, KIND: tl.constexpr):
    if KIND == 0:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        x = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = raw.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _look_at_values(x):
    """Along axis 1 of float32 values: how many are NaN, not finite, -Inf, not zero; amax bits, sum, sum of squares."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nonfinite = magnitude >= 0x7F800000
    nan = tl.sum((magnitude > 0x7F800000).to(tl.int32), axis=1)
    nonfinite = tl.sum(is_nonfinite.to(tl.int32), axis=1)
    negative = tl.sum((bits == -8388608).to(tl.int32), axis=1)
    nonzero = tl.sum((magnitude != 0).to(tl.int32), axis=1)
    largest = tl.max(tl.where(is_nonfinite, 0, magnitude), axis=1)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(is_nonfinite, 0.0, x) * scale[:, None]
    total = tl.sum(scaled, axis=1).to(tl.float64)
    squares = tl.sum(scaled * scaled, axis=1).to(tl.float64)
    back = ((exponent + 896).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return nan, nonfinite, negative, nonzero, largest, total * back, squares * back * back


@triton.jit(do_not_specialize=["slot_stride", "n", "limit"])
def values_pass(
    x_ptr, copy_ptr, slot_ptr, slot_stride: tl.int64, n: tl.int64, limit_ptr, limit: tl.int64, partial_ptr,
    KIND: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = ROWS * 8
    index = (tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]).to(tl.int64)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if COPY:
        copy_ptr = copy_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.load(slot_ptr) * slot_stride
    if MASKED:
        if limit_ptr is not None:
            limit = tl.load(limit_ptr) * limit
        limit = tl.minimum(tl.maximum(limit, 0), n)
    nan = tl.zeros([ROWS], tl.int32)
    nonfinite = tl.zeros([ROWS], tl.int32)
    negative = tl.zeros([ROWS], tl.int32)
    nonzero = tl.zeros([ROWS], tl.int32)
    amax = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([ROWS], tl.float64)
    squares = tl.zeros([ROWS], tl.float64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(program * BLOCK, n, step):
        at = start + index
        if start + BLOCK <= n:
            raw = tl.load(x_ptr + at)
            if COPY:
                tl.store(copy_ptr + at, raw)
        else:
            raw = tl.load(x_ptr + at, mask=at < n, other=0)
            if COPY:
                tl.store(copy_ptr + at, raw, mask=at < n)
        x = _as_float(raw, KIND)
        if MASKED:
            x = tl.where(at < limit, x, 0.0)
        a, b, c, d, e, f, g = _look_at_values(x)
        nan += a
        nonfinite += b
        negative += c
        nonzero += d
        amax = tl.maximum(amax, e)
        total += f
        squares += g
    out = partial_ptr + program * 16
    all_nonzero = tl.sum(nonzero.to(tl.int64), axis=0)
    num_nan = tl.sum(nan.to(tl.int64), axis=0)
    num_negative = tl.sum(negative.to(tl.int64), axis=0)
    tl.store(out + 1, num_nan.to(tl.float64))
    tl.store(out + 2, (tl.sum(nonfinite.to(tl.int64), axis=0) - num_nan - num_negative).to(tl.float64))
    tl.store(out + 3, num_negative.to(tl.float64))
    tl.store(out + 4, -all_nonzero.to(tl.float64))
    tl.store(out + 5, tl.max(amax, axis=0).to(tl.float64))
    tl.store(out + 6, tl.sum(total, axis=0))
    tl.store(out + 7, tl.sum(squares, axis=0))


@triton.jit
def _join(nonzero, rare, amax, total, squares, nonzero_2, rare_2, amax_2, total_2, squares_2):
    return nonzero + nonzero_2, rare + rare_2, tl.maximum(amax, amax_2), total + total_2, squares + squares_2


@triton.jit(do_not_specialize=["slot_stride", "n", "limit"])
def halves_pass(
    x_ptr, copy_ptr, slot_ptr, slot_stride: tl.int64, n: tl.int64, limit_ptr, limit: tl.int64, partial_ptr,
    KIND: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``n`` words of two bfloat16 or float16 numbers; both halves of a word are compared at once."""
    INF: tl.constexpr = 0x7F80 if KIND == 0 else 0x7C00
    program = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = ROWS * 4
    index = (tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]).to(tl.int64)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if COPY:
        copy_ptr = copy_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.load(slot_ptr) * slot_stride
    if MASKED:
        if limit_ptr is not None:
            limit = tl.load(limit_ptr) * limit
        limit = tl.minimum(tl.maximum(limit, 0) // 2, n)
    nonzero = tl.zeros([ROWS], tl.int32)
    rare = tl.zeros([ROWS], tl.int64)
    amax = tl.zeros([ROWS], tl.int32)
    exponent = tl.full([ROWS], 1, tl.int32)  # sums are in units of two to this, less 127
    total = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(program * BLOCK, n, step):
        at = start + index
        if start + BLOCK <= n:
            raw = tl.load(x_ptr + at)
            if COPY:
                tl.store(copy_ptr + at, raw)
        else:
            raw = tl.load(x_ptr + at, mask=at < n, other=0)
            if COPY:
                tl.store(copy_ptr + at, raw, mask=at < n)
        if MASKED:
            raw = tl.where(at < limit, raw, 0)
        words = raw & 0x7FFF7FFF
        is_nonzero = ((words + 0x7FFF7FFF) >> 15) & 0x00010001
        is_nonfinite = ((words + (0x8000 - INF) * 0x00010001) >> 15) & 0x00010001
        is_nan = ((words + (0x7FFF - INF) * 0x00010001) >> 15) & 0x00010001
        is_negative = (is_nonfinite & ~is_nan) & (raw >> 15)
        found = tl.sum(is_nonzero + (is_nonfinite << 4) + (is_nan << 8) + (is_negative << 12), axis=1)
        found = (found & 0xFFFF) + ((found >> 16) & 0xFFFF)  # four counts of at most eight, a nibble each
        nonzero += found & 0xF
        rare += ((found >> 4) & 0xF) + ((found & 0xF00).to(tl.int64) << 12) + ((found & 0xF000).to(tl.int64) << 28)
        finite = raw & ~(is_nonfinite * 0xFFFF)
        largest = tl.max(tl.maximum(finite & 0x7FFF, (finite >> 16) & 0x7FFF), axis=1)
        amax = tl.maximum(amax, largest)
        if KIND == 0:
            one = (finite << 16).to(tl.float32, bitcast=True)
            two = (finite & -65536).to(tl.float32, bitcast=True)
            higher = tl.minimum(tl.maximum(largest >> 7, exponent), 253)
            down = (tl.maximum(127 - higher + exponent, 0) << 23).to(tl.float32, bitcast=True)
            exponent = higher
            scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            one = one * scale[:, None]
            two = two * scale[:, None]
            total = total * down + tl.sum(one + two, axis=1)
            squares = squares * down * down + tl.sum(one * one + two * two, axis=1)
        else:
            one = finite.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            two = (finite >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            total += tl.sum(one + two, axis=1)
            squares += tl.sum(one * one + two * two, axis=1)
    out = partial_ptr + program * 16
    unit = tl.full([ROWS], 1.0, tl.float64)
    if KIND == 0:
        unit = ((exponent + 896).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    nonzero, rare, amax, total, squares = tl.reduce(
        (nonzero, rare, amax, total.to(tl.float64) * unit, squares.to(tl.float64) * unit * unit), 0, _join
    )
    num_nonfinite = rare & 0xFFFFF
    num_nan = (rare >> 20) & 0xFFFFF
    num_negative = (rare >> 40) & 0xFFFFF
    tl.store(out + 1, num_nan.to(tl.float64))
    tl.store(out + 2, (num_nonfinite - num_nan - num_negative).to(tl.float64))
    tl.store(out + 3, num_negative.to(tl.float64))
    tl.store(out + 4, -nonzero.to(tl.float64))
    tl.store(out + 5, amax.to(tl.float64))
    tl.store(out + 6, total)
    tl.store(out + 7, squares)


@triton.jit
def _at_least(words, T: tl.constexpr):
    """How many of the bytes of each word (7 bits used) are at least T, summed along axis 1."""
    hits = ((words + (0x80 - T) * 0x01010101) >> 7) & 0x01010101
    return (tl.sum(hits, axis=1) * 0x01010101) >> 24


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit(do_not_specialize=["slot_stride", "n", "limit"])
def codes_pass(
    x_ptr, copy_ptr, slot_ptr, slot_stride: tl.int64, n: tl.int64, limit_ptr, limit: tl.int64, partial_ptr,
    KIND: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``n`` words of four FP8 codes."""
    program = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = ROWS * 4
    index = (tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]).to(tl.int64)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if COPY:
        copy_ptr = copy_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.load(slot_ptr) * slot_stride
    if MASKED:
        if limit_ptr is not None:
            limit = tl.load(limit_ptr) * limit
        limit = tl.minimum(tl.maximum(limit, 0) // 4, n)
    nonzero = tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32)
    second = tl.zeros([ROWS], tl.int32)
    third = tl.zeros([ROWS], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(program * BLOCK, n, step):
        at = start + index
        if start + BLOCK <= n:
            raw = tl.load(x_ptr + at)
            if COPY:
                tl.store(copy_ptr + at, raw)
        else:
            raw = tl.load(x_ptr + at, mask=at < n, other=0)
            if COPY:
                tl.store(copy_ptr + at, raw, mask=at < n)
        if MASKED:
            raw = tl.where(at < limit, raw, 0)
        words = raw & 0x7F7F7F7F
        nonzero += _at_least(words, 1)
        if KIND == 0:
            first += _at_least(words, 0x7E)
            second += _at_least(words, 0x7F)
        else:
            first += _at_least(words, 0x7B)
            second += _at_least(words, 0x7C)
            third += _at_least(words, 0x7D)
    out = partial_ptr + program * 16
    num_nonzero, num_first, num_second, num_third = tl.reduce(
        (nonzero.to(tl.int64), first.to(tl.int64), second.to(tl.int64), third.to(tl.int64)), 0, _add_four
    )
    tl.store(out + 1, (num_second if KIND == 0 else num_third).to(tl.float64))
    tl.store(out + 2, (num_second - num_third if KIND == 1 else num_third).to(tl.float64))
    tl.store(out + 3, -num_nonzero.to(tl.float64))
    tl.store(out + 4, (num_first - num_second).to(tl.float64))
