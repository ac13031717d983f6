"""The Triton kernel for whatever ``fused`` cannot read in vectors: any number, alignment and strides, one at a time.

Integers, truth values and float64 too, and tensors without an element. All sums are float64, as ``reference`` has them;
one look tells everything. Such tensors are small, as a rule: a mask, labels, offsets of sequences, a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flightrec.kernels import finishing

BFLOAT16, FLOAT16, FLOAT32, FLOAT64, SIGNED, UNSIGNED, TRUTH = (tl.constexpr(kind) for kind in range(7))

_WIDE = (
    "x_stride", "row_stride", "stamp_stride", "numel", "a_row", "limit", "size_1", "size_2", "stride_0", "stride_1",
    "stride_2",
)  # fmt: skip
_NARROW = ("present", "owned")
_POINTERS = (
    "x_ptr", "slot_ptr", "tick_ptr", "limit_ptr", "scratch_ptr", "counters_ptr", "x_copy_ptr", "row_ptr", "stamp_ptr",
)  # fmt: skip


@triton.jit
def _numbers(bits, KIND: tl.constexpr):
    """Bit patterns as the numbers that they stand for, float64."""
    if KIND == BFLOAT16:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FLOAT16:
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == FLOAT32:
        x = bits.to(tl.float32, bitcast=True)
    elif KIND == FLOAT64:
        x = bits.to(tl.float64, bitcast=True)
    elif KIND == SIGNED:
        x = bits
    elif KIND == UNSIGNED:
        if bits.dtype == tl.int8:
            x = bits.to(tl.uint8, bitcast=True)
        elif bits.dtype == tl.int16:
            x = bits.to(tl.uint16, bitcast=True)
        elif bits.dtype == tl.int32:
            x = bits.to(tl.uint32, bitcast=True)
        else:
            x = bits.to(tl.uint64, bitcast=True)
    else:
        x = (bits != 0).to(tl.int32)
    return x.to(tl.float64)


@triton.jit
def _place_of(at, size_1, size_2, stride_0, stride_1, stride_2, DIMS: tl.constexpr):
    """Where the elements of numbers ``at`` lie, in elements, in up to three dimensions."""
    if DIMS == 0:
        place = at.to(tl.int64)
    elif DIMS == 1:
        place = at.to(tl.int64) * stride_2
    else:
        size_2 = size_2.to(at.dtype)
        row = at // size_2
        place = (at - row * size_2).to(tl.int64) * stride_2
        if DIMS == 2:
            place += row.to(tl.int64) * stride_1
        else:
            size_1 = size_1.to(at.dtype)
            first = row // size_1
            place += (row - first * size_1).to(tl.int64) * stride_1 + first.to(tl.int64) * stride_0
    return place


@triton.jit(do_not_specialize=[*_WIDE, *_NARROW, *_POINTERS])
def record_pass(
    # what changes from record to record
    x_ptr, slot_ptr, tick_ptr, limit_ptr, limit: tl.int64, scratch_ptr, counters_ptr,
    # what does not
    x_copy_ptr, x_stride: tl.int64, row_ptr, row_stride: tl.int64, stamp_ptr, stamp_stride: tl.int64, numel: tl.int64,
    a_row: tl.int64, size_1: tl.int64, size_2: tl.int64, stride_0: tl.int64, stride_1: tl.int64, stride_2: tl.int64,
    present: tl.int32, owned: tl.int32,
    KIND: tl.constexpr, COPY: tl.constexpr, MASKED: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copy and statistics of ``numel`` elements, given as integers of their width; strides are in elements.

    KIND: one of those above. DIMS: dimensions of which one lies apart from the next, 0 for a dense tensor; sizes and
    strides of the last ones of three. ``limit`` rows of ``a_row`` elements count. WIDE: numbers of elements take 64
    bits. Otherwise as ``fused.record_pass``.
    """
    program = tl.program_id(0)
    slot = tl.load(slot_ptr)
    if slot < 0:  # in a captured graph, what does not have its turn
        return
    out = scratch_ptr + program.to(tl.int64) * finishing.WIDTH
    counted = numel
    if MASKED:
        if limit_ptr is not None:
            limit = tl.load(limit_ptr).to(tl.int64)
        counted = tl.minimum(tl.maximum(limit, 0) * a_row, numel)
    if COPY:
        x_copy_ptr += slot * x_stride
    nan = tl.zeros([ROWS], tl.int32)
    positive = tl.zeros([ROWS], tl.int32)
    negative = tl.zeros([ROWS], tl.int32)
    zero = tl.zeros([ROWS], tl.int32)
    amax = tl.zeros([ROWS], tl.float64)
    total = tl.zeros([ROWS], tl.float64)
    squares = tl.zeros([ROWS], tl.float64)
    for start in range(program.to(tl.int64) * ROWS, numel, tl.num_programs(0).to(tl.int64) * ROWS):
        at = start + tl.arange(0, ROWS)
        inside = at < numel
        counts = at < counted
        number = at if WIDE else at.to(tl.int32)
        place = _place_of(number, size_1, size_2, stride_0, stride_1, stride_2, DIMS)
        bits = tl.load(x_ptr + place, mask=inside, other=0)
        if COPY:
            tl.store(x_copy_ptr + at, bits, mask=inside)
        x = tl.where(counts, _numbers(bits, KIND), 0.0)
        magnitude = tl.abs(x)
        zero += (counts & (x == 0)).to(tl.int32)
        if KIND <= FLOAT64:
            nan += (x != x).to(tl.int32)
            positive += (x == float("inf")).to(tl.int32)
            negative += (x == float("-inf")).to(tl.int32)
            is_finite = magnitude < float("inf")
            x = tl.where(is_finite, x, 0.0)
            magnitude = tl.where(is_finite, magnitude, 0.0)
        amax = tl.maximum(amax, magnitude)
        total += x
        squares += x * x
    finishing.put(out, 0, tl.where(program == 0, counted, 0))
    finishing.put(out, 1, tl.sum(nan, axis=0))
    finishing.put(out, 2, tl.sum(positive, axis=0))
    finishing.put(out, 3, tl.sum(negative, axis=0))
    finishing.put(out, 4, tl.sum(zero, axis=0))
    finishing.put(out, 5, tl.max(amax, axis=0))
    finishing.put(out, 6, tl.sum(total, axis=0))
    finishing.put(out, 7, tl.sum(squares, axis=0))
    finishing.join(
        scratch_ptr, counters_ptr, row_ptr + slot * row_stride, stamp_ptr + slot * stamp_stride, tick_ptr, present,
        owned, GROUP,
    )  # fmt: skip
