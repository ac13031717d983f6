"""The end of the capture kernel: programs' partial results become one statistics row, by whichever program comes last.

A partial row has a statistics row's columns, of which most are sums and some are maxima; in ``SCALE_MIN`` stands the
negated minimum, and minus infinity is what is absent. With many programs the last of each group joins its group, the
last of all joins the groups: which program that is changes nothing in the results. The counters are zero again at the
end, so that the next launch on the stream needs nothing prepared.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SMALL = 4
"""Small components that the kernel copies on the side."""

WIDTH = tl.constexpr(32)
"""Columns of a partial row, float64."""

_MAXIMA = tl.constexpr(sum(1 << column for column in (5, 17, 19, 20, 21, 22, 23, 24, 25)))


@triton.jit
def copy_words(from_ptr, from_stride, to_ptr, slot, slot_stride, n):
    """Copy ``n`` words of four bytes."""
    if from_ptr is not None:
        from_ptr = from_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        to_ptr = to_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * slot_stride
        for start in range(0, n, 1024):
            at = start + tl.arange(0, 1024)
            tl.store(to_ptr + at, tl.load(from_ptr + at * from_stride, mask=at < n), mask=at < n)


@triton.jit
def copy_small(
    mine, slot, part_0, from_0, to_0, stride_0, n_0, part_1, from_1, to_1, stride_1, n_1, part_2, from_2, to_2,
    stride_2, n_2, part_3, from_3, to_3, stride_3, n_3,
):  # fmt: skip
    """Copy the small components, for one program to do."""
    if mine:
        copy_words(part_0, from_0, to_0, slot, stride_0, n_0)
        copy_words(part_1, from_1, to_1, slot, stride_1, n_1)
        copy_words(part_2, from_2, to_2, slot, stride_2, n_2)
        copy_words(part_3, from_3, to_3, slot, stride_3, n_3)


@triton.jit
def _largest_word(ptr, stride, n):
    """Largest finite of ``n`` float32 words; minus infinity without one."""
    found = tl.full([1024], float("-inf"), tl.float32)
    for start in range(0, n, 1024):
        at = start + tl.arange(0, 1024)
        words = tl.load(ptr + at * stride, mask=at < n, other=float("-inf"))
        found = tl.maximum(found, tl.where(tl.abs(words) < float("inf"), words, float("-inf")))
    return tl.max(found, axis=0)


@triton.jit
def _or_absent(value):
    """A float32 value as float64, minus infinity for one that is not finite."""
    return tl.where(tl.abs(value) < float("inf"), value.to(tl.float64), float("-inf"))


@triton.jit
def put(row_ptr, column: tl.constexpr, value):
    """Store one number of a partial row."""
    tl.store(row_ptr + column, value.to(tl.float64))


@triton.jit
def finish_scale(
    row_ptr, scale_ptr, other_ptr, past, more_bad, RANGE: tl.constexpr, MULTIPLY: tl.constexpr,
    INVERSE: tl.constexpr, HISTORY: tl.constexpr, mine,
):  # fmt: skip
    """What a scale of one word tells, for one program to say; the others say nothing."""
    bad = more_bad.to(tl.float64)
    low = tl.full([], float("-inf"), tl.float64)
    high = low
    inverse = low
    ratio = low
    if mine:
        word = tl.load(scale_ptr)
        finite = tl.abs(word) < float("inf")
        bad += 1.0 - finite.to(tl.float64)
        low = _or_absent(-word)
        high = _or_absent(word)
        if other_ptr is not None:
            other = tl.load(other_ptr)
            other_finite = tl.abs(other) < float("inf")
            bad += 1.0 - other_finite.to(tl.float64)
            if INVERSE:
                judged = finite & other_finite & ((word != 0) | (other != 0))
                inverse = tl.where(judged, tl.abs(word * other - 1.0), 0.0).to(tl.float64)
        if HISTORY:
            if MULTIPLY:
                bound = word * RANGE
            else:
                bound = RANGE / word
            ratio = _or_absent(tl.maximum(past, 0.0) / bound)
    put(row_ptr, 15, bad)
    put(row_ptr, 19, low)
    put(row_ptr, 20, high)
    put(row_ptr, 21, inverse)
    put(row_ptr, 22, ratio)


@triton.jit
def finish_words(row_ptr, amax_ptr, num_amax, history_ptr, history_stride, num_history, mine):
    """The quantizer's amax and the largest of past ones, for one program to say; gives back the latter."""
    amax = tl.full([], float("-inf"), tl.float32)
    past = amax
    if amax_ptr is not None or history_ptr is not None:
        if mine:
            if amax_ptr is not None:
                amax = _largest_word(amax_ptr, 1, num_amax)
            if history_ptr is not None:
                past = _largest_word(history_ptr, history_stride, num_history)
        put(row_ptr, 24, amax)
        put(row_ptr, 25, past)
    return past


@triton.jit
def _has_bit(bits, columns):
    return ((bits >> columns) & 1) != 0


@triton.jit
def _are_maxima(columns):
    return _has_bit(tl.zeros([WIDTH], tl.int32) + _MAXIMA, columns)


@triton.jit
def _joined(rows_ptr, num_rows, columns, wanted, GROUP: tl.constexpr):
    """``num_rows`` partial rows, ``GROUP`` at most, as one; others wrote them, so not from this core's cache."""
    row = tl.arange(0, GROUP)[:, None]
    given = (row < num_rows) & wanted[None, :]
    place = rows_ptr + row * WIDTH + columns[None, :]
    sums = tl.sum(tl.load(place, mask=given, other=0.0, cache_modifier=".cg"), axis=0)
    maxima = tl.max(tl.load(place, mask=given, other=float("-inf"), cache_modifier=".cg"), axis=0)
    return tl.where(_are_maxima(columns), maxima, sums)


@triton.jit
def join(
    scratch_ptr, counters_ptr, row_ptr, stamp_ptr, tick_ptr, present, owned, GROUP: tl.constexpr
):  # fmt: skip
    """Count this program in; the last writes the stamp and the columns ``owned`` of the row, NaN if not ``present``.

    ``scratch_ptr``: a partial row for each program, then one for each group.
    """
    program = tl.program_id(0)
    num = tl.num_programs(0)
    columns = tl.arange(0, WIDTH)
    wanted = _has_bit(present, columns)
    rows_ptr = scratch_ptr
    num_rows = num
    tl.debug_barrier()  # the whole program's stores come before the counting
    last = num > 0
    if num > GROUP:
        num_rows = tl.cdiv(num, GROUP)
        group = program // GROUP
        size = tl.minimum(num - group * GROUP, GROUP)
        rows_ptr = scratch_ptr + num * WIDTH
        last = tl.atomic_add(counters_ptr + 1 + group, 1, sem="acq_rel") == size - 1
        if last:
            tl.store(counters_ptr + 1 + group, 0)
            of_group = _joined(scratch_ptr + group * (GROUP * WIDTH), size, columns, wanted, GROUP)
            tl.store(rows_ptr + group * WIDTH + columns, of_group)
            tl.debug_barrier()
    if last & (num_rows > 1):
        last = tl.atomic_add(counters_ptr, 1, sem="acq_rel") == num_rows - 1
    if last:
        tl.store(counters_ptr, 0)
        row = _joined(rows_ptr, num_rows, columns, wanted, GROUP)
        count = tl.sum(tl.where(columns == 0, row, 0.0), axis=0)
        nonfinite = tl.sum(tl.where((columns >= 1) & (columns <= 3), row, 0.0), axis=0)
        is_absent = _are_maxima(columns) & (row == float("-inf"))
        is_absent = is_absent | (columns == tl.where(count > nonfinite, -1, 5)) | ~wanted
        row = tl.where(is_absent, float("nan"), tl.where(columns == 19, -row, row))
        tl.store(row_ptr + columns, row, mask=_has_bit(owned, columns))
        tl.store(stamp_ptr, tl.load(tick_ptr))
