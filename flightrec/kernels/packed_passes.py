"""Loops of the kernel for packed FP4 codes, scales that are codes themselves, and two levels of scale: see ``packed``.

A tensor and its codes are read once, in lanes of 16 bytes of values. The first look assumes ordinary values, no NaN
code, and ratios to the range that are clearly clipped or clearly not; a program that finds otherwise looks at its share
again, element by element, with a division each. Clipped elements are counted at the first look already: where a power
of two is rounded down, some are clipped in every tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flightrec.kernels import pairing, passes

CLEARLY_CLIPPED = tl.constexpr(1.0 + 2.0**-19)
"""A ratio to the range from here on is clipped, whatever the rounding of its reciprocal did."""

FP4 = tl.constexpr(2)
"""``CODES`` of packed FP4; 0 and 1 as in ``fused``."""


# -- what codes and words mean


@triton.jit
def _decode(codes, CODES: tl.constexpr):
    """Codes in the low bits of int32 words as float32, exactly; NaN and Inf come out finite."""
    if CODES == FP4:
        bits = ((codes & 8) << 28) | ((codes & 7) << 22)
        x = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # two to the 126
    else:
        x = pairing.decode(codes << 24, CODES) * pairing.unit_of(CODES)
    return x


@triton.jit
def _word(raw, SCALE: tl.constexpr):
    """Words of a scale as float32, and which are not finite. SCALE: 0 float32, 1 E8M0, 2 E4M3."""
    if SCALE == 0:
        word = raw
        is_bad = (word.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    elif SCALE == 1:
        code = raw.to(tl.int32)
        is_bad = code == 0xFF
        bits = tl.where(code == 0, 0x00400000, tl.where(is_bad, 0x7FC00000, code << 23))
        word = bits.to(tl.float32, bitcast=True)
    else:
        code = raw.to(tl.int32)
        is_bad = (code & 0x7F) == 0x7F
        word = tl.where(is_bad, float("nan"), _decode(code, 0))
    return word, is_bad


@triton.jit
def words_pass(
    words_ptr, rows, columns, row_stride, column_stride, second_ptr, second_stride, copy_ptr, slot, slot_stride,
    SCALE: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As ``pairing.words_pass`` for words of any kind; extremes are of both levels' product, not finite the first's.

    SECOND: 0 none, 1 one word, 2 a word for each row of the first.
    """
    BLOCK: tl.constexpr = 8 * ROWS  # a thread's loads are in flight together
    index = tl.arange(0, 8)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    n = rows * columns
    if copy_ptr is not None:
        copy_ptr += slot * slot_stride
    low = tl.full([8, ROWS], float("-inf"), tl.float32)
    high = tl.full([8, ROWS], float("-inf"), tl.float32)
    bad = tl.zeros([8, ROWS], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + index
        inside = at < n
        row = at // columns
        place = row.to(tl.int64) * row_stride + (at - row * columns).to(tl.int64) * column_stride
        raw = tl.load(words_ptr + place, mask=inside, other=0)
        if copy_ptr is not None:
            tl.store(copy_ptr + at, raw, mask=inside)
        word, is_bad = _word(raw, SCALE)
        bad += (is_bad & inside).to(tl.int32)
        if SECOND == 1:
            word = word * tl.load(second_ptr)
        elif SECOND == 2:
            word = word * tl.load(second_ptr + row.to(tl.int64) * second_stride, mask=inside, other=0.0)
        counts = ((word.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000) & inside
        low = tl.where(counts, tl.maximum(low, -word), low)
        high = tl.where(counts, tl.maximum(high, word), high)
    by_lane = (tl.max(low, axis=0), tl.max(high, axis=0), tl.sum(bad, axis=0))
    low_all, high_all, bad_all = tl.reduce(by_lane, 0, pairing.join_words)
    return low_all, high_all, bad_all


# -- codes alone


@triton.jit
def _nibbles(words, SATURATED: tl.constexpr):
    """Of words (uint32) of FP4 codes, bit 0 of each nibble: it is not zero, or it is the largest."""
    if SATURATED:
        flags = words & (words >> 1) & (words >> 2)
    else:
        flags = words | (words >> 1) | (words >> 2)
    return flags & 0x11111111


@triton.jit
def _fold_nibbles(flags):
    """Sum of a block's nibbles by lane, int32: of 15 words at most."""
    found = passes.fold(flags)
    pairs = (found & 0x0F0F0F0F) + ((found >> 4) & 0x0F0F0F0F)
    return ((pairs * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _join_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def nibbles_pass(
    codes_ptr, copy_ptr, n, COPY: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """``n`` words of eight FP4 codes: how many are not zero, and the largest."""
    BLOCK: tl.constexpr = UNROLL * ROWS * 4
    index = passes.lanes_of(4, ROWS, UNROLL)
    nonzero = tl.zeros([ROWS], tl.int32)
    saturated = tl.zeros([ROWS], tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        if start + BLOCK <= n:
            words = passes.move(codes_ptr + start, copy_ptr + start, index, BLOCK, COPY, True)
        else:
            left = passes.left_of(n, start, BLOCK)
            words = passes.move(codes_ptr + start, copy_ptr + start, index, left, COPY, False)
        unsigned = words.to(tl.uint32, bitcast=True)
        nonzero += _fold_nibbles(_nibbles(unsigned, False))
        saturated += _fold_nibbles(_nibbles(unsigned, True))
    return tl.reduce((nonzero, saturated), 0, _join_two)


# -- values beside their codes


@triton.jit
def _lanes(
    x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, start, n, KIND: tl.constexpr, COPY_X: tl.constexpr,
    COPY_CODES: tl.constexpr, A_LANE: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Values float32 ``[ROWS, W, A_LANE // W]`` and words of codes int32 ``[ROWS, W]`` of lanes from ``start`` on.

    Behind lane ``n`` all is zero.
    """
    row = tl.arange(0, ROWS)[:, None]
    at = row * A_LANE + tl.arange(0, A_LANE)[None, :]
    at_word = row * W + tl.arange(0, W)[None, :]
    x_ptr += start * A_LANE
    x_copy_ptr += start * A_LANE
    codes_ptr += start * W
    codes_copy_ptr += start * W
    if start + ROWS <= n:
        raw = passes.move(x_ptr, x_copy_ptr, at, 0, COPY_X, True)
        words = passes.move(codes_ptr, codes_copy_ptr, at_word, 0, COPY_CODES, True)
    else:
        left = passes.left_of(n, start, ROWS)
        raw = passes.move(x_ptr, x_copy_ptr, at, left * A_LANE, COPY_X, False)
        words = passes.move(codes_ptr, codes_copy_ptr, at_word, left * W, COPY_CODES, False)
    if KIND == 0:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        x = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = raw.to(tl.float32, bitcast=True)
    if words.dtype == tl.int16:
        words = words.to(tl.uint16, bitcast=True)
    return tl.reshape(x, [ROWS, W, A_LANE // W]), words.to(tl.int32)


@triton.jit
def _codes(words, CODES: tl.constexpr, P: tl.constexpr):
    """Each word's ``P`` codes, in the low bits of int32 ``[ROWS, W, P]``; what lies above them means nothing."""
    BITS: tl.constexpr = 4 if CODES == FP4 else 8
    return words[:, :, None] >> (tl.arange(0, P) * BITS)[None, None, :]


@triton.jit
def _factor(
    scale_ptr, second_ptr, start, n, lanes_magic, lanes_shift, lanes, rows_magic, rows_shift, block_magic, block_shift,
    row_stride, column_stride, second_stride, SCALE: tl.constexpr, SECOND: tl.constexpr, SCALED: tl.constexpr,
    EACH: tl.constexpr, A_LANE: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What decodes lanes from ``start`` on, and the word whose zero is a fault; both broadcast over the lanes' values.

    ``lanes``: of a row; EACH: every column has a word of its own. Lanes behind the end have the last one's.
    """
    judged = tl.full([1, 1, 1], 1.0, tl.float32)
    factor = judged
    if SCALED:
        lane = tl.minimum(start + tl.arange(0, ROWS), n - 1)
        row = pairing.divided(lane, lanes_magic, lanes_shift)
        column = lane - row * lanes
        scale_row = pairing.divided(row, rows_magic, rows_shift)
        place = scale_row * row_stride
        if EACH:
            each = tl.arange(0, A_LANE)[None, :]
            place = place[:, None] + (column[:, None] * A_LANE + each) * column_stride
            raw = tl.load(scale_ptr + place)
            raw = tl.reshape(raw, [ROWS, W, A_LANE // W])
        else:
            place += pairing.divided(column, block_magic, block_shift) * column_stride
            raw = tl.load(scale_ptr + place)[:, None, None]
        factor, _ = _word(raw, SCALE)
        if SECOND == 1:
            judged = judged * tl.load(second_ptr)
            factor = factor * judged
        elif SECOND == 2:
            judged = tl.load(second_ptr + scale_row * second_stride)[:, None, None]
            factor = factor * judged
        if SCALE == 0:
            judged = factor
    return factor, judged


@triton.jit
def _fold(x):
    """Sum of ``[ROWS, W, P]`` by lane."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _fold_max(x):
    return tl.max(tl.max(x, axis=2), axis=1)


@triton.jit
def _by_lane(hits):
    """Sum of the bytes of ``[ROWS, W]`` by lane, int32: 255 at most."""
    return ((tl.sum(hits, axis=1) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _count_codes(words, CODES: tl.constexpr):
    """Of each lane's words, int32: not zero, the largest or beyond, Inf or NaN, NaN."""
    unsigned = words.to(tl.uint32, bitcast=True)
    if CODES == FP4:
        nonzero = tl.sum((_nibbles(unsigned, False) * 0x11111111) >> 28, axis=1).to(tl.int32)
        first = tl.sum((_nibbles(unsigned, True) * 0x11111111) >> 28, axis=1).to(tl.int32)
        second = tl.zeros(nonzero.shape, tl.int32)
        third = second
    else:
        unsigned = unsigned & 0x7F7F7F7F
        nonzero = _by_lane(passes.at_least(unsigned, 1))
        first = _by_lane(passes.at_least(unsigned, 0x7E if CODES == 0 else 0x7B))
        second = _by_lane(passes.at_least(unsigned, 0x7F if CODES == 0 else 0x7C))
        third = second if CODES == 0 else _by_lane(passes.at_least(unsigned, 0x7D))
    return nonzero, first, second, third


@triton.jit
def _join_pair(under, errors, clipped, clearly, largest, under_2, errors_2, clipped_2, clearly_2, largest_2):
    return (
        under + under_2, errors + errors_2, clipped + clipped_2, clearly + clearly_2, tl.maximum(largest, largest_2)
    )  # fmt: skip


@triton.jit
def _look(x, words, factor, CODES: tl.constexpr, RANGE: tl.constexpr, P: tl.constexpr):
    """Of lanes, if all is ordinary: underflow, errors, ratios perhaps clipped and clearly so, the largest ratio."""
    codes = _codes(words, CODES, P)
    MAGNITUDE: tl.constexpr = 7 if CODES == FP4 else 0x7F
    under = _fold((((codes & MAGNITUDE) == 0) & (x != 0)).to(tl.int32))
    error = _decode(codes, CODES) * factor - x
    ratio = tl.abs(x) * (1.0 / (factor * RANGE))
    clipped = _fold((ratio > pairing.NOT_CLIPPED).to(tl.int32))
    clearly = _fold((ratio >= CLEARLY_CLIPPED).to(tl.int32))
    return under, _fold(error * error).to(tl.float64), clipped, clearly, _fold_max(ratio)


@triton.jit
def pair_pass(
    x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, n, scale_ptr, second_ptr, lanes_magic, lanes_shift, lanes,
    rows_magic, rows_shift, block_magic, block_shift, row_stride, column_stride, second_stride,
    KIND: tl.constexpr, CODES: tl.constexpr, COPY_X: tl.constexpr, COPY_CODES: tl.constexpr, SCALE: tl.constexpr,
    SECOND: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr, RANGE: tl.constexpr, A_LANE: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``n`` lanes of 16 bytes of values and their codes: copies, statistics of both and what they tell together."""
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
    clipped = tl.zeros([ROWS], tl.int32)
    clearly = tl.zeros([ROWS], tl.int32)
    largest = tl.zeros([ROWS], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in range(tl.program_id(0).to(tl.int64) * ROWS, n, step):
        x, words = _lanes(
            x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, start, n, KIND, COPY_X, COPY_CODES, A_LANE, W, ROWS
        )
        factor, _ = _factor(
            scale_ptr, second_ptr, start, n, lanes_magic, lanes_shift, lanes, rows_magic, rows_shift, block_magic,
            block_shift, row_stride, column_stride, second_stride, SCALE, SECOND, SCALED, EACH, A_LANE, W, ROWS,
        )  # fmt: skip
        nonzero, amax, total, squares = passes.join_values(
            nonzero, amax, total, squares, _fold((x != 0).to(tl.int32)), _fold_max(tl.abs(x)),
            _fold(x).to(tl.float64), _fold(x * x).to(tl.float64),
        )  # fmt: skip
        a, b, c, d = _count_codes(words, CODES)
        code_nonzero, first, second, third = passes.join_codes(code_nonzero, first, second, third, a, b, c, d)
        a, b, c, d, e = _look(x, words, factor, CODES, RANGE, A_LANE // W)
        under, errors, clipped, clearly, largest = _join_pair(under, errors, clipped, clearly, largest, a, b, c, d, e)
    nonzero_all, amax_all, total_all, squares_all = tl.reduce((nonzero, amax, total, squares), 0, passes.join_values)
    code_all, first_all, second_all, third_all = tl.reduce((code_nonzero, first, second, third), 0, passes.join_codes)
    under_all, errors_all, clipped_all, clearly_all, largest_all = tl.reduce(
        (under, errors, clipped, clearly, largest), 0, _join_pair
    )
    return (
        nonzero_all, amax_all, total_all, squares_all, code_all, first_all, second_all, third_all, under_all,
        errors_all, clipped_all, clearly_all, largest_all,
    )  # fmt: skip


@triton.jit
def pair_exactly(
    x_ptr, codes_ptr, n, scale_ptr, second_ptr, lanes_magic, lanes_shift, lanes, rows_magic, rows_shift, block_magic,
    block_shift, row_stride, column_stride, second_stride, KIND: tl.constexpr, CODES: tl.constexpr,
    SCALE: tl.constexpr, SECOND: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr, RANGE: tl.constexpr,
    A_LANE: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same share as ``pair_pass``, whatever the numbers: underflow, errors, clipped, largest ratio, zero scales."""
    under = tl.zeros([ROWS], tl.int32)
    errors = tl.zeros([ROWS], tl.float64)
    clipped = tl.zeros([ROWS], tl.int32)
    largest = tl.zeros([ROWS], tl.float32)
    zero_scale = tl.zeros([ROWS], tl.int32)
    MAGNITUDE: tl.constexpr = 7 if CODES == FP4 else 0x7F
    NOT_A_NUMBER: tl.constexpr = 0x7F if CODES == 0 else (0x7C if CODES == 1 else 8)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in range(tl.program_id(0).to(tl.int64) * ROWS, n, step):
        x, words = _lanes(x_ptr, x_ptr, codes_ptr, codes_ptr, start, n, KIND, False, False, A_LANE, W, ROWS)
        factor, judged = _factor(
            scale_ptr, second_ptr, start, n, lanes_magic, lanes_shift, lanes, rows_magic, rows_shift, block_magic,
            block_shift, row_stride, column_stride, second_stride, SCALE, SECOND, SCALED, EACH, A_LANE, W, ROWS,
        )  # fmt: skip
        codes = _codes(words, CODES, A_LANE // W)
        magnitude = codes & MAGNITUDE
        counts = ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000) & (x != 0)
        under += _fold((counts & (magnitude == 0)).to(tl.int32))
        zero_scale += _fold((counts & (judged == 0)).to(tl.int32))
        error = _decode(codes, CODES) * factor - x
        is_number = ((error.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000) & (magnitude < NOT_A_NUMBER)
        error = tl.where(is_number, error, 0.0).to(tl.float64)
        errors += _fold(error * error)
        ratio = tl.div_rn(tl.abs(x), factor * RANGE + tl.zeros(x.shape, tl.float32))
        ratio = tl.where((ratio.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, ratio, 0.0)
        clipped += _fold((ratio > 1.00000095367431640625).to(tl.int32))
        largest = tl.maximum(largest, _fold_max(ratio))
    return tl.reduce((under, errors, clipped, largest, zero_scale), 0, pairing.join_exact)
