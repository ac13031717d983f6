"""Triton kernels of capture that look at a tensor beside its codes, and at its scales: see ``passes``."""

from __future__ import annotations

import triton
import triton.language as tl

from flightrec.kernels.passes import _as_float


@triton.jit
def _decode(codes, KIND: tl.constexpr):
    """FP8 codes (uint8) as float32; NaN codes of E4M3 come out finite."""
    word = codes.to(tl.int8, bitcast=True).to(tl.int16)
    if KIND == 0:
        x = ((word << 7) & -0x4001).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        x = (word << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _join_pair(under, errors, clipped, largest, zero, under_2, errors_2, clipped_2, largest_2, zero_2):
    return under + under_2, errors + errors_2, clipped + clipped_2, tl.maximum(largest, largest_2), zero + zero_2


@triton.jit(do_not_specialize=["n", "columns", "row_stride", "column_stride", "block_rows", "block_columns", "limit"])
def pair_pass(
    x_ptr, codes_ptr, n: tl.int64, factor_ptr, columns: tl.int64, row_stride: tl.int64, column_stride: tl.int64,
    block_rows: tl.int64, block_columns: tl.int64, limit_ptr, limit: tl.int64, partial_ptr,
    KIND: tl.constexpr, CODES: tl.constexpr, LARGEST: tl.constexpr, BLOCKS: tl.constexpr, MULTIPLY: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``n`` elements before and after: underflow, squared error, what lies beyond the range."""
    program = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = ROWS * 8
    row = tl.arange(0, ROWS).to(tl.int64)
    index = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    if KIND < 2:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    if limit_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(limit_ptr), 0) * limit, n)
    under = tl.zeros([ROWS], tl.int32)
    clipped = tl.zeros([ROWS], tl.int32)
    zero_scale = tl.zeros([ROWS], tl.int32)
    errors = tl.zeros([ROWS], tl.float64)
    largest = tl.zeros([ROWS], tl.float32)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if SCALED and not BLOCKS:
        factor = factor * tl.load(factor_ptr)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(program * BLOCK, n, step):
        at = start + index
        inside = at < limit
        x = _as_float(tl.load(x_ptr + at, mask=inside, other=0), KIND)
        codes = tl.load(codes_ptr + at, mask=inside, other=0)
        if BLOCKS:
            first = start + row * 8
            of_row = first // columns
            column = first - of_row * columns
            place = (of_row // block_rows) * row_stride + (column // block_columns) * column_stride
            factor = tl.load(factor_ptr + place, mask=first < n, other=1.0)
        magnitude = codes & 0x7F
        is_finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        counts = is_finite & (x != 0)
        under += tl.sum((counts & (magnitude == 0)).to(tl.int32), axis=1)
        zero_scale += tl.sum((counts & (factor == 0)[:, None]).to(tl.int32), axis=1)
        decoded = _decode(codes, CODES)
        if MULTIPLY:
            decoded = decoded * factor[:, None]
            bound = factor * LARGEST
        else:
            decoded = decoded / factor[:, None]
            bound = LARGEST / factor
        error = decoded - x
        is_number = (error.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        if CODES == 0:
            is_number = is_number & (magnitude != 0x7F)
        error = tl.where(is_number, error, 0.0).to(tl.float64)
        errors += tl.sum(error * error, axis=1)
        ratio = tl.abs(x) / bound[:, None]
        ratio = tl.where((ratio.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, ratio, 0.0)
        clipped += tl.sum((ratio > 1.00000095367431640625).to(tl.int32), axis=1)
        largest = tl.maximum(largest, tl.max(ratio, axis=1))
    under_all, errors_all, clipped_all, largest_all, zero_all = tl.reduce(
        (under, errors, clipped, largest, zero_scale), 0, _join_pair
    )
    out = partial_ptr + program * 16
    tl.store(out, under_all.to(tl.float64))
    tl.store(out + 1, errors_all)
    tl.store(out + 2, clipped_all.to(tl.float64))
    tl.store(out + 3, largest_all.to(tl.float64))
    tl.store(out + 4, zero_all.to(tl.float64))


@triton.jit
def _join_words(low, high, bad, low_2, high_2, bad_2):
    return tl.minimum(low, low_2), tl.maximum(high, high_2), bad + bad_2


@triton.jit(do_not_specialize=["rows", "columns", "row_stride", "column_stride", "slot_stride"])
def words_pass(
    words_ptr, rows: tl.int64, columns: tl.int64, row_stride: tl.int64, column_stride: tl.int64, copy_ptr, slot_ptr,
    slot_stride: tl.int64, partial_ptr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The float32 words of a scale, of any strides in two dimensions: extremes, how many are not finite; their copy."""
    program = tl.program_id(0).to(tl.int64)
    n = rows * columns
    if COPY:
        copy_ptr += tl.load(slot_ptr) * slot_stride
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(program * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < n
        row = at // columns
        word = tl.load(words_ptr + row * row_stride + (at - row * columns) * column_stride, mask=inside, other=0.0)
        if COPY:
            tl.store(copy_ptr + at, word, mask=inside)
        finite = (word.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        low = tl.where(finite & inside, tl.minimum(low, word), low)
        high = tl.where(finite & inside, tl.maximum(high, word), high)
        bad += (~finite).to(tl.int32)
    low_all, high_all, bad_all = tl.reduce((low, high, bad), 0, _join_words)
    out = partial_ptr + program * 16
    tl.store(out, low_all.to(tl.float64))
    tl.store(out + 1, high_all.to(tl.float64))
    tl.store(out + 2, bad_all.to(tl.float64))
