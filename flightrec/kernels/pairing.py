"""Loops of the capture kernel over a tensor beside its codes, and over the words of a scale: see ``passes``.

A tensor and its codes are read once, together: copies and statistics of both, and what only both can tell. The first
look assumes ordinary values, no NaN or Inf code, nothing clipped; a program that finds otherwise looks again, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flightrec.kernels.passes import (
    as_halves,
    join_codes,
    join_values,
    lanes_of,
    left_of,
    look_at_codes,
    move,
    nonzero_halves,
)

NOT_CLIPPED = tl.constexpr(1.0 + 2.0**-21)
"""A ratio to the range up to here is not clipped, whatever the rounding of its reciprocal did."""


@triton.jit
def divided(of, magic, shift):
    """``of // d`` for int64 below 2^31, by multiplication: ``device.magic_of(d)`` gives the numbers."""
    return (of * magic) >> shift


@triton.jit
def _place_of(
    lane, columns_magic, columns_shift, columns, rows_magic, rows_shift, block_magic, block_shift, row_stride,
    column_stride,
):  # fmt: skip
    """Where the scale of a lane lies; ``columns`` and blocks' columns in lanes."""
    row = divided(lane, columns_magic, columns_shift)
    column = lane - row * columns
    return divided(row, rows_magic, rows_shift) * row_stride + divided(column, block_magic, block_shift) * column_stride


@triton.jit
def decode(code, KIND: tl.constexpr):
    """The last byte of words (int32) as an FP8 code, float32, in units of ``unit_of``; NaN and Inf come out finite."""
    if KIND == 0:
        x = ((code >> 4) & -0x78100000).to(tl.float32, bitcast=True)
    else:
        x = ((code >> 3) & -0x70200000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def unit_of(KIND: tl.constexpr):
    unit: tl.constexpr = 1.329227995784916e36 if KIND == 0 else 5.192296858534828e33  # two to the 120, to the 112
    return unit


@triton.jit
def _four(words, KIND: tl.constexpr):
    """Four values for each word of codes, float32, and in a word (uint32) the sign bits of its non-zero bytes."""
    if KIND < 2:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
        x_0, x_1 = as_halves(even, KIND)
        x_2, x_3 = as_halves(odd, KIND)
        low = nonzero_halves(even.to(tl.uint32, bitcast=True))
        high = nonzero_halves(odd.to(tl.uint32, bitcast=True))
        flags = ((low >> 8) & 0x80) | ((low >> 16) & 0x8000) | ((high & 0x8000) << 8) | (high & 0x80000000)
    else:
        even, odd = tl.split(tl.reshape(words.to(tl.float32, bitcast=True), [words.shape[0], words.shape[1], 2, 2]))
        even = tl.reshape(even, [words.shape[0], words.shape[1], 1, 2])
        odd = tl.reshape(odd, [words.shape[0], words.shape[1], 1, 2])
        x_0, x_2 = tl.split(even)
        x_1, x_3 = tl.split(odd)
        flags = (
            ((x_0 != 0).to(tl.uint32) << 7) | ((x_1 != 0).to(tl.uint32) << 15)
            | ((x_2 != 0).to(tl.uint32) << 23) | ((x_3 != 0).to(tl.uint32) << 31)
        )  # fmt: skip
    return x_0, x_1, x_2, x_3, flags


@triton.jit
def _by_lane(x):
    """Sum of ``[UNROLL, ROWS, W]`` along the last axis alone."""
    return tl.sum(x, axis=2)


@triton.jit
def _all_of(x):
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def _bytes_of(hits):
    return ((_all_of(hits) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _square_of_error(x, code, factor, CODES: tl.constexpr):
    error = decode(code, CODES) * factor - x
    return error * error


@triton.jit
def _join_pair(under, errors, largest, under_2, errors_2, largest_2):
    return under + under_2, errors + errors_2, tl.maximum(largest, largest_2)


@triton.jit
def _look_at_pair(words, codes, factor, inverse, KIND: tl.constexpr, CODES: tl.constexpr):
    """Of a block and its codes, by lane: the statistics of both and what they tell together.

    ``factor`` decodes, ``inverse`` is one over the largest value that it can; both broadcast over ``codes``.
    """
    x_0, x_1, x_2, x_3, flags = _four(words, KIND)
    unsigned = codes.to(tl.uint32, bitcast=True) & 0x7F7F7F7F
    nonzero = _bytes_of(flags >> 7)
    under = _bytes_of((flags & ~(unsigned + 0x7F7F7F7F)) >> 7)
    total = _all_of((x_0 + x_1) + (x_2 + x_3))
    squares = _all_of((x_0 * x_0 + x_1 * x_1) + (x_2 * x_2 + x_3 * x_3))
    of_lane = tl.max(
        tl.maximum(tl.maximum(tl.abs(x_0), tl.abs(x_1)), tl.maximum(tl.abs(x_2), tl.abs(x_3))), axis=2, keep_dims=True
    )
    errors = _square_of_error(x_0, codes << 24, factor, CODES) + _square_of_error(x_1, codes << 16, factor, CODES)
    errors += _square_of_error(x_2, codes << 8, factor, CODES) + _square_of_error(x_3, codes, factor, CODES)
    ratio = tl.max(tl.max(of_lane * inverse, axis=2), axis=0)
    amax = tl.max(tl.max(of_lane, axis=2), axis=0)
    all_errors = _all_of(errors).to(tl.float64)
    return nonzero, amax, total.to(tl.float64), squares.to(tl.float64), under, all_errors, ratio, unsigned


@triton.jit
def _decoding(scale, CODES: tl.constexpr, MULTIPLY: tl.constexpr, RANGE: tl.constexpr):
    """What to multiply codes with, and one over the largest value that codes can mean: one division a scale.

    A scale so large that the first overflows makes the errors infinite, and so the program look again.
    """
    if MULTIPLY:
        times = scale * unit_of(CODES)
        over = 1.0 / (scale * RANGE)
    else:
        times = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale) * unit_of(CODES)
        over = scale * (1.0 / RANGE)
    return times, over


@triton.jit
def pair_pass(
    x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, n, limit, factor_ptr, columns_magic, columns_shift, columns,
    rows_magic, rows_shift, block_magic, block_shift, row_stride, column_stride,
    KIND: tl.constexpr, CODES: tl.constexpr, COPY_X: tl.constexpr, COPY_CODES: tl.constexpr, MASKED: tl.constexpr,
    BLOCKS: tl.constexpr, SCALED: tl.constexpr, MULTIPLY: tl.constexpr, RANGE: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``n`` lanes of 16 bytes of values and their codes, of which the first ``limit`` code words count."""
    WIDTH: tl.constexpr = 2 if KIND < 2 else 1  # words of codes a lane
    LANES: tl.constexpr = UNROLL * ROWS
    index_x = lanes_of(4, ROWS, UNROLL)
    index_codes = lanes_of(WIDTH, ROWS, UNROLL)
    index_lanes = lanes_of(1, ROWS, UNROLL)
    nonzero = tl.zeros([ROWS], tl.int32)
    amax = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float64)
    squares = tl.zeros([ROWS], tl.float64)
    code_nonzero = tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32)
    second = tl.zeros([ROWS], tl.int32)
    third = tl.zeros([ROWS], tl.int32)
    under = tl.zeros([ROWS], tl.int32)
    errors = tl.zeros([ROWS], tl.float64)
    largest = tl.zeros([ROWS], tl.float32)
    factor = tl.full([1, 1, 1], 1.0, tl.float32)
    if SCALED and not BLOCKS:
        factor = factor * tl.load(factor_ptr)
    factor, inverse = _decoding(factor, CODES, MULTIPLY, RANGE)
    step = tl.num_programs(0).to(tl.int64) * LANES
    for start in range(tl.program_id(0).to(tl.int64) * LANES, n, step):
        if start + LANES <= n:
            words = move(x_ptr + start * 4, x_copy_ptr + start * 4, index_x, 0, COPY_X, True)
            codes = move(codes_ptr + start * WIDTH, codes_copy_ptr + start * WIDTH, index_codes, 0, COPY_CODES, True)
        else:
            left = left_of(n, start, LANES)
            words = move(x_ptr + start * 4, x_copy_ptr + start * 4, index_x, left * 4, COPY_X, False)
            codes = move(
                codes_ptr + start * WIDTH, codes_copy_ptr + start * WIDTH, index_codes, left * WIDTH, COPY_CODES, False
            )
        if MASKED:
            counts = left_of(limit, start * WIDTH, LANES * WIDTH)
            words = tl.where(index_x * WIDTH < counts * 4, words, 0)
            codes = tl.where(index_codes < counts, codes, 0)
        if BLOCKS:
            lane = start + index_lanes
            place = _place_of(
                lane, columns_magic, columns_shift, columns, rows_magic, rows_shift, block_magic, block_shift,
                row_stride, column_stride,
            )  # fmt: skip
            of_block = tl.load(factor_ptr + place, mask=lane < n, other=1.0)
            times, over = _decoding(of_block, CODES, MULTIPLY, RANGE)
        else:
            times, over = factor, inverse
        a, b, c, d, e, f, g, unsigned = _look_at_pair(words, codes, times, over, KIND, CODES)
        nonzero, amax, total, squares = join_values(nonzero, amax, total, squares, a, b, c, d)
        under, errors, largest = _join_pair(under, errors, largest, e, f, g)
        a, b, c, d = look_at_codes(unsigned, CODES)
        code_nonzero, first, second, third = join_codes(code_nonzero, first, second, third, a, b, c, d)
    nonzero_all, amax_all, total_all, squares_all = tl.reduce((nonzero, amax, total, squares), 0, join_values)
    code_nonzero_all, first_all, second_all, third_all = tl.reduce((code_nonzero, first, second, third), 0, join_codes)
    under_all, errors_all, largest_all = tl.reduce((under, errors, largest), 0, _join_pair)
    return (
        nonzero_all, amax_all, total_all, squares_all, code_nonzero_all, first_all, second_all, third_all, under_all,
        errors_all, largest_all,
    )  # fmt: skip


@triton.jit
def join_exact(under, errors, clipped, largest, zero, under_2, errors_2, clipped_2, largest_2, zero_2):
    return under + under_2, errors + errors_2, clipped + clipped_2, tl.maximum(largest, largest_2), zero + zero_2


@triton.jit
def pair_exactly(
    x_ptr, codes_ptr, n, limit, factor_ptr, columns_magic, columns_shift, columns, rows_magic, rows_shift, block_magic,
    block_shift, row_stride, column_stride, KIND: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr,
    SCALED: tl.constexpr, MULTIPLY: tl.constexpr, RANGE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The same share as ``pair_pass`` with blocks of ``LANES``: underflow, errors, clipped, largest ratio, zero scales.

    Element by element, ``limit`` of them; a division each.
    """
    A_LANE: tl.constexpr = 8 if KIND < 2 else 4
    if KIND < 2:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    under = tl.zeros([ROWS], tl.int32)
    clipped = tl.zeros([ROWS], tl.int32)
    zero_scale = tl.zeros([ROWS], tl.int32)
    errors = tl.zeros([ROWS], tl.float64)
    largest = tl.zeros([ROWS], tl.float32)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if SCALED and not BLOCKS:
        factor = factor * tl.load(factor_ptr)
    BLOCK: tl.constexpr = LANES * A_LANE
    limit = tl.minimum(limit, n * A_LANE)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, limit, step):
        for start in range(block, tl.minimum(block + BLOCK, limit), ROWS):
            at = start + tl.arange(0, ROWS)
            inside = at < limit
            raw = tl.load(x_ptr + at, mask=inside, other=0)
            if KIND == 0:
                x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            elif KIND == 1:
                x = raw.to(tl.float16, bitcast=True).to(tl.float32)
            else:
                x = raw.to(tl.float32, bitcast=True)
            code = tl.load(codes_ptr + at, mask=inside, other=0)
            if BLOCKS:
                place = _place_of(
                    at // A_LANE, columns_magic, columns_shift, columns, rows_magic, rows_shift, block_magic,
                    block_shift, row_stride, column_stride,
                )  # fmt: skip
                factor = tl.load(factor_ptr + place, mask=inside, other=1.0)
            magnitude = code & 0x7F
            counts = ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000) & (x != 0)
            under += (counts & (magnitude == 0)).to(tl.int32)
            zero_scale += (counts & (factor == 0)).to(tl.int32)
            decoded = decode(code.to(tl.int32) << 24, CODES) * unit_of(CODES)
            if MULTIPLY:
                decoded = decoded * factor
                bound = factor * RANGE
            else:
                decoded = tl.div_rn(decoded, factor)
                bound = tl.div_rn(tl.full([ROWS], RANGE, tl.float32), factor)
            error = decoded - x
            is_number = (error.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
            is_number = is_number & (magnitude < (0x7F if CODES == 0 else 0x7C))
            error = tl.where(is_number, error, 0.0).to(tl.float64)
            errors += error * error
            ratio = tl.div_rn(tl.abs(x), bound)
            ratio = tl.where((ratio.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, ratio, 0.0)
            clipped += (ratio > 1.00000095367431640625).to(tl.int32)
            largest = tl.maximum(largest, ratio)
    return tl.reduce((under, errors, clipped, largest, zero_scale), 0, join_exact)


@triton.jit
def join_words(low, high, bad, low_2, high_2, bad_2):
    return tl.maximum(low, low_2), tl.maximum(high, high_2), bad + bad_2


@triton.jit
def words_pass(
    words_ptr, rows, columns, row_stride, column_stride, copy_ptr, slot, slot_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """A scale's float32 words, of any strides in two dimensions: less the smallest, the largest, how many not finite.

    And their copy.
    """
    n = rows * columns
    if copy_ptr is not None:
        copy_ptr += slot * slot_stride
    low = tl.full([BLOCK], float("-inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        row = at // columns
        place = row.to(tl.int64) * row_stride + (at - row * columns).to(tl.int64) * column_stride
        word = tl.load(words_ptr + place, mask=inside, other=0.0)
        if copy_ptr is not None:
            tl.store(copy_ptr + at, word, mask=inside)
        finite = (word.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        low = tl.where(finite & inside, tl.maximum(low, -word), low)
        high = tl.where(finite & inside, tl.maximum(high, word), high)
        bad += (~finite).to(tl.int32)
    low_all, high_all, bad_all = tl.reduce((low, high, bad), 0, join_words)
    return low_all, high_all, bad_all
