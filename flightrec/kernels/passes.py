"""Loops of the capture kernel over one tensor: each reads it once, writes the copy, and reduces its statistics.

A program takes every ``num_programs``-th block of ``UNROLL * ROWS`` lanes, a lane being 16 bytes. Blocks that are whole
are loaded and stored without masks. Bit patterns are compared as integers, several elements of a word at once; sums of
one block are made in float32, sums over blocks in float64.

Values are looked at twice at most: the first loop assumes that all are finite and of a size whose square float32 holds.
A program whose results say otherwise (no NaN or Inf escapes a sum of squares) reads its share again, exactly and
slowly. Which of the two depends on the data alone, so results are the same from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST, LARGEST = tl.constexpr(2.0**-47), tl.constexpr(2.0**50)
"""Squares of an amax between these, and all that matters beside it, neither overflow nor underflow in float32."""


@triton.jit
def as_halves(words, KIND: tl.constexpr):
    """Both halves of words (int32), float32 each."""
    if KIND == 0:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def fold(x):
    """Sum along the axes that one thread holds: ``[UNROLL, ROWS, W]`` to ``[ROWS]``."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def fold_max(x):
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def lanes_of(WIDTH: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    """Places of a block's words, int32 ``[UNROLL, ROWS, WIDTH]``."""
    block = tl.arange(0, UNROLL)[:, None, None] * (ROWS * WIDTH)
    return block + tl.arange(0, ROWS)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def left_of(end, start, BLOCK: tl.constexpr):
    """How many of a block's words lie before ``end``, int32."""
    return tl.minimum(tl.maximum(end - start, 0), BLOCK).to(tl.int32)


@triton.jit
def move(from_ptr, to_ptr, index, left, COPY: tl.constexpr, WHOLE: tl.constexpr):
    """Load a block and store it; words from ``left`` on are 0 and not stored."""
    return _moved(from_ptr + index, to_ptr, index, left, COPY, WHOLE)


@triton.jit
def _moved(from_ptrs, to_ptr, index, left, COPY: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        words = tl.load(from_ptrs)
        if COPY:
            tl.store(to_ptr + index, words)
    else:
        words = tl.load(from_ptrs, mask=index < left, other=0)
        if COPY:
            tl.store(to_ptr + index, words, mask=index < left)
    return words


@triton.jit
def _lane_of(lane, magic, shift, lanes, apart, rows_magic, rows_shift, jump):
    """Where a lane of 16 bytes lies, in lanes: in rows of ``lanes`` of them, each ``apart`` lanes from the one before.

    After so many rows there is a ``jump`` of more lanes, or fewer. The magics and shifts divide by both numbers, see
    ``arguments.magic_of``.
    """
    row = (lane * magic) >> shift
    return lane + row * (apart - lanes) + ((row * rows_magic) >> rows_shift) * jump


@triton.jit
def _move_values(
    x_ptr, copy_ptr, start, index, left, magic, shift, lanes, apart, rows_magic, rows_shift, jump, COPY: tl.constexpr,
    WHOLE: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``move`` the block from word ``start`` on, of values whose rows may lie apart."""
    if APART:
        lane = start // 4 + lanes_of(1, ROWS, UNROLL)
        lane = _lane_of(lane, magic, shift, lanes, apart, rows_magic, rows_shift, jump)
        from_ptrs = x_ptr + (lane * 4 + tl.arange(0, 4)[None, None, :])
        words = _moved(from_ptrs, copy_ptr + start, index, left, COPY, WHOLE)
    else:
        words = move(x_ptr + start, copy_ptr + start, index, left, COPY, WHOLE)
    return words


@triton.jit
def nonzero_halves(words):
    """Bits 15 and 31 of words (uint32) say which halves are not zero; other bits say nothing."""
    return (words & 0x7FFF7FFF) + 0x7FFF7FFF


@triton.jit
def _look_at_values(words, KIND: tl.constexpr):
    """Of a block, by lane: how many are not zero, amax, sum, sum of squares, if all are finite."""
    unsigned = words.to(tl.uint32, bitcast=True)
    if KIND < 2:
        low, high = as_halves(words, KIND)
        found = fold((nonzero_halves(unsigned) & 0x80008000) >> 15)
        nonzero = ((found & 0xFFFF) + (found >> 16)).to(tl.int32)
        amax = fold_max(tl.maximum(tl.abs(low), tl.abs(high)))
        total = fold(low + high)
        squares = fold(low * low + high * high)
    else:
        x = words.to(tl.float32, bitcast=True)
        nonzero = fold(((unsigned & 0x7FFFFFFF) + 0x7FFFFFFF) >> 31).to(tl.int32)
        amax, total, squares = fold_max(tl.abs(x)), fold(x), fold(x * x)
    return nonzero, amax, total.to(tl.float64), squares.to(tl.float64)


@triton.jit
def join_values(nonzero, amax, total, squares, nonzero_2, amax_2, total_2, squares_2):
    return nonzero + nonzero_2, tl.maximum(amax, amax_2), total + total_2, squares + squares_2


@triton.jit
def values_pass(
    x_ptr, copy_ptr, n, limit, magic, shift, lanes, apart, rows_magic, rows_shift, jump, KIND: tl.constexpr,
    COPY: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``n`` words of one or two values, of which ``limit`` count: four results of this program, scalars.

    APART: in rows that lie apart, see ``_lane_of``.
    """
    BLOCK: tl.constexpr = UNROLL * ROWS * 4
    index = lanes_of(4, ROWS, UNROLL)
    nonzero = tl.zeros([ROWS], tl.int32)
    amax = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float64)
    squares = tl.zeros([ROWS], tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, n - BLOCK + 1, step):
        words = _move_values(
            x_ptr, copy_ptr, start, index, BLOCK, magic, shift, lanes, apart, rows_magic, rows_shift, jump, COPY, True,
            APART, ROWS, UNROLL,
        )  # fmt: skip
        if MASKED:
            words = tl.where(index < left_of(limit, start, BLOCK), words, 0)
        a, b, c, d = _look_at_values(words, KIND)
        nonzero, amax, total, squares = join_values(nonzero, amax, total, squares, a, b, c, d)
    start = n // BLOCK * BLOCK
    if (start < n) & (start % step == first):
        left = left_of(n, start, BLOCK)
        words = _move_values(
            x_ptr, copy_ptr, start, index, left, magic, shift, lanes, apart, rows_magic, rows_shift, jump, COPY, False,
            APART, ROWS, UNROLL,
        )  # fmt: skip
        if MASKED:
            words = tl.where(index < left_of(limit, start, BLOCK), words, 0)
        a, b, c, d = _look_at_values(words, KIND)
        nonzero, amax, total, squares = join_values(nonzero, amax, total, squares, a, b, c, d)
    return tl.reduce((nonzero, amax, total, squares), 0, join_values)


@triton.jit
def are_ordinary(amax, squares, KIND: tl.constexpr):
    """Whether what the first look at values found is right."""
    ordinary = squares < float("inf")
    if KIND != 1:
        ordinary = ordinary & ((amax == 0) | ((amax > SMALLEST) & (amax < LARGEST)))
    return ordinary


@triton.jit
def _join_exact(rare, amax, total, squares, rare_2, amax_2, total_2, squares_2):
    return rare + rare_2, tl.maximum(amax, amax_2), total + total_2, squares + squares_2


@triton.jit
def _look_exactly(x):
    """Of float32 values, elementwise: NaN, Inf and -Inf counted in one word, finite magnitude, it and its square."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = (magnitude > 0x7F800000).to(tl.int64)
    is_positive = (bits == 0x7F800000).to(tl.int64)
    is_negative = (bits == -8388608).to(tl.int64)
    finite = tl.where(magnitude < 0x7F800000, x, 0.0)
    wide = finite.to(tl.float64)
    return is_nan + (is_positive << 20) + (is_negative << 40), tl.abs(finite), wide, wide * wide


@triton.jit
def values_exactly(
    x_ptr, n, limit, magic, shift, lanes, apart, rows_magic, rows_shift, jump, KIND: tl.constexpr, APART: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same share as ``values_pass`` with blocks of ``BLOCK`` words: NaN, Inf, -Inf, finite amax, sum, squares."""
    PER_WORD: tl.constexpr = 2 if KIND < 2 else 1
    limit = tl.minimum(limit, n)
    counts = tl.zeros([ROWS], tl.int64)
    amax = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float64)
    squares = tl.zeros([ROWS], tl.float64)
    nan = tl.zeros([], tl.int64)
    positive = tl.zeros([], tl.int64)
    negative = tl.zeros([], tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for block in range(first, limit, step):
        counts = tl.zeros([ROWS], tl.int64)
        for start in range(block, tl.minimum(block + BLOCK, limit), ROWS):
            at = tl.arange(0, ROWS)
            place = start + at
            if APART:
                lane = _lane_of(place // 4, magic, shift, lanes, apart, rows_magic, rows_shift, jump)
                place = lane * 4 + at % 4
            words = tl.load(x_ptr + place, mask=at < left_of(limit, start, ROWS), other=0)
            if PER_WORD == 2:
                low, high = as_halves(words, KIND)
                a, b, c, d = _look_exactly(high)
                counts, amax, total, squares = _join_exact(counts, amax, total, squares, a, b, c, d)
            else:
                low = words.to(tl.float32, bitcast=True)
            a, b, c, d = _look_exactly(low)
            counts, amax, total, squares = _join_exact(counts, amax, total, squares, a, b, c, d)
        found = tl.sum(counts, axis=0)
        nan += found & 0xFFFFF
        positive += (found >> 20) & 0xFFFFF
        negative += (found >> 40) & 0xFFFFF
    counts, amax_all, total_all, squares_all = tl.reduce((counts, amax, total, squares), 0, _join_exact)
    return nan, positive, negative, amax_all, total_all, squares_all


@triton.jit
def at_least(words, T: tl.constexpr):
    """Bytes of words (uint32, 7 bits of each byte used) that are at least ``T``, as 0 and 1."""
    return ((words + (0x80 - T) * 0x01010101) & 0x80808080) >> 7


@triton.jit
def fold_bytes(hits):
    """Sum of a block's bytes by lane, int32: 255 at most."""
    return ((fold(hits) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def look_at_codes(words, KIND: tl.constexpr):
    """Of a block of FP8 codes (uint32, signs taken off), by lane: not zero, the largest or beyond, Inf or NaN, NaN."""
    nonzero = fold_bytes(at_least(words, 1))
    if KIND == 0:
        first = fold_bytes(at_least(words, 0x7E))
        second = fold_bytes(at_least(words, 0x7F))
        third = second
    else:
        first = fold_bytes(at_least(words, 0x7B))
        second = fold_bytes(at_least(words, 0x7C))
        third = fold_bytes(at_least(words, 0x7D))
    return nonzero, first, second, third


@triton.jit
def join_codes(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def codes_pass(
    codes_ptr, copy_ptr, n, limit, KIND: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``n`` words of four FP8 codes, of which ``limit`` count: four counts of this program, int32 scalars."""
    BLOCK: tl.constexpr = UNROLL * ROWS * 4
    index = lanes_of(4, ROWS, UNROLL)
    nonzero = tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32)
    second = tl.zeros([ROWS], tl.int32)
    third = tl.zeros([ROWS], tl.int32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(begin, n - BLOCK + 1, step):
        words = move(codes_ptr + start, copy_ptr + start, index, BLOCK, COPY, True)
        if MASKED:
            words = tl.where(index < left_of(limit, start, BLOCK), words, 0)
        a, b, c, d = look_at_codes(words.to(tl.uint32, bitcast=True) & 0x7F7F7F7F, KIND)
        nonzero, first, second, third = join_codes(nonzero, first, second, third, a, b, c, d)
    start = n // BLOCK * BLOCK
    if (start < n) & (start % step == begin):
        words = move(codes_ptr + start, copy_ptr + start, index, left_of(n, start, BLOCK), COPY, False)
        if MASKED:
            words = tl.where(index < left_of(limit, start, BLOCK), words, 0)
        a, b, c, d = look_at_codes(words.to(tl.uint32, bitcast=True) & 0x7F7F7F7F, KIND)
        nonzero, first, second, third = join_codes(nonzero, first, second, third, a, b, c, d)
    return tl.reduce((nonzero, first, second, third), 0, join_codes)
