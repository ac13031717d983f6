"""The Triton kernel for packed FP4 codes, for scales that are codes themselves, and for two levels of scale.

MXFP8 and MXFP4 (E8M0 over 1x32 or 32x1), NVFP4 (E4M3 over 1x16 or 16x16 under a float32 word for all or one a row): all
of a record in one launch, as ``fused`` does it for what training uses most. ``packed_passes`` holds its loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flightrec.kernels import finishing, fused, packed_passes, passes

_WIDE = (
    "x_stride", "codes_stride", "row_stride", "stamp_stride", "num_x", "num_codes", "numel", "code_numel",
    "scale_row_stride", "scale_column_stride", "scale_stride", "more_row_stride", "more_column_stride", "more_stride",
    "second_stride", "lanes_magic", "rows_magic", "block_magic", "history_stride", "from_0", "stride_0", "from_1",
    "stride_1", "from_2", "stride_2", "from_3", "stride_3",
)  # fmt: skip
_NARROW = (
    "present", "owned", "scale_rows", "scale_columns", "more_rows", "more_columns", "num_second", "lanes_shift",
    "rows_shift", "block_shift", "lanes", "num_history", "num_amax", "n_0", "n_1", "n_2", "n_3",
)  # fmt: skip
_POINTERS = (
    "slot_ptr", "tick_ptr", "_limit_ptr", "_limit", "scale_ptr", "second_ptr", "more_ptr", "history_ptr", "amax_ptr",
    "part_0", "part_1", "part_2", "part_3", "scratch_ptr", "counters_ptr", "row_ptr", "stamp_ptr", "scale_copy_ptr",
    "more_copy_ptr", "to_0", "to_1", "to_2", "to_3",
)  # fmt: skip


@triton.jit
def _put_scales(
    out, slot, scale_ptr, scale_rows, scale_columns, scale_row_stride, scale_column_stride, scale_copy_ptr,
    scale_stride, more_ptr, more_rows, more_columns, more_row_stride, more_column_stride, more_copy_ptr, more_stride,
    second_ptr, num_second, second_stride, SCALE: tl.constexpr, SECOND: tl.constexpr, MORE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    low, high, bad = packed_passes.words_pass(
        scale_ptr, scale_rows, scale_columns, scale_row_stride, scale_column_stride, second_ptr, second_stride,
        scale_copy_ptr, slot, scale_stride, SCALE, SECOND, ROWS,
    )  # fmt: skip
    if SECOND > 0:
        _, _, second_bad = packed_passes.words_pass(
            second_ptr, num_second, 1, second_stride, 0, second_ptr, 0, None, slot, 0, 0, 0, ROWS
        )
        bad += second_bad
    if more_ptr is not None:
        _, _, more_bad = packed_passes.words_pass(
            more_ptr, more_rows, more_columns, more_row_stride, more_column_stride, more_ptr, 0, more_copy_ptr, slot,
            more_stride, MORE, 0, ROWS,
        )  # fmt: skip
        bad += more_bad
    finishing.put(out, 15, bad)
    finishing.put(out, 19, low)
    finishing.put(out, 20, high)


@triton.jit
def _put_pair(
    out, x_ptr, x_copy_ptr, x_stride, codes_ptr, codes_copy_ptr, codes_stride, slot, n, scale_ptr, second_ptr,
    lanes_magic, lanes_shift, lanes, rows_magic, rows_shift, block_magic, block_shift, row_stride, column_stride,
    second_stride, KIND: tl.constexpr, CODES: tl.constexpr, COPY_X: tl.constexpr, COPY_CODES: tl.constexpr,
    SCALE: tl.constexpr, SECOND: tl.constexpr, SCALED: tl.constexpr, EACH: tl.constexpr, ERROR: tl.constexpr,
    ZERO: tl.constexpr, RANGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Look at both together, once or, where it takes that, exactly; give back what each tells by itself."""
    A_LANE: tl.constexpr = 8 if KIND < 2 else 4
    W: tl.constexpr = 2 if KIND < 2 and CODES != packed_passes.FP4 else 1  # words of codes a lane
    if KIND < 2:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if COPY_X:
        x_copy_ptr = x_copy_ptr.to(x_ptr.dtype, bitcast=True) + slot * x_stride * A_LANE
    else:
        x_copy_ptr = x_ptr  # not used
    A_UNIT: tl.constexpr = 8 if KIND == 2 and CODES == packed_passes.FP4 else 4  # words of codes in 16 bytes
    if A_UNIT == 8:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if COPY_CODES:
        codes_copy_ptr = codes_copy_ptr.to(codes_ptr.dtype, bitcast=True) + slot * codes_stride * A_UNIT
    else:
        codes_copy_ptr = codes_ptr
    nonzero, amax, total, squares, code_nonzero, first, second, third, under, errors, clipped, clearly, largest = (
        packed_passes.pair_pass(
            x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, n, scale_ptr, second_ptr, lanes_magic, lanes_shift, lanes,
            rows_magic, rows_shift, block_magic, block_shift, row_stride, column_stride, second_stride, KIND, CODES,
            COPY_X, COPY_CODES, SCALE, SECOND, SCALED, EACH, RANGE, A_LANE, W, ROWS,
        )
    )  # fmt: skip
    zero_scale = tl.full([], 0, tl.int32)
    ordinary = passes.are_ordinary(amax, squares, KIND) & (second == 0)
    if ERROR:
        ordinary = ordinary & (errors < float("inf")) & (largest < float("inf")) & (clipped == clearly)
    if ordinary == 0:
        under, errors, clipped, largest, zero_scale = packed_passes.pair_exactly(
            x_ptr, codes_ptr, n, scale_ptr, second_ptr, lanes_magic, lanes_shift, lanes, rows_magic, rows_shift,
            block_magic, block_shift, row_stride, column_stride, second_stride, KIND, CODES, SCALE, SECOND, SCALED,
            EACH, RANGE, A_LANE, W, ROWS,
        )  # fmt: skip
    finishing.put(out, 13, under)
    if ERROR:
        finishing.put(out, 14, errors)
        finishing.put(out, 16, clipped)
        finishing.put(out, 17, largest)
        if ZERO:
            finishing.put(out, 18, zero_scale)
    return nonzero, amax, total, squares, code_nonzero, first, second, third


@triton.jit(do_not_specialize=[*_WIDE, *_NARROW, *_POINTERS])
def record_pass(
    # what changes from record to record
    x_ptr, codes_ptr, scale_ptr, second_ptr, more_ptr, history_ptr, amax_ptr, part_0, part_1, part_2, part_3, slot_ptr,
    tick_ptr, _limit_ptr, _limit: tl.int64, scratch_ptr, counters_ptr,
    # what does not
    x_copy_ptr, x_stride: tl.int64, codes_copy_ptr, codes_stride: tl.int64, row_ptr, row_stride: tl.int64, stamp_ptr,
    stamp_stride: tl.int64, num_x: tl.int64, num_codes: tl.int64, numel: tl.int64, code_numel: tl.int64,
    present: tl.int32, owned: tl.int32,
    scale_rows: tl.int32, scale_columns: tl.int32, scale_row_stride: tl.int64, scale_column_stride: tl.int64,
    scale_copy_ptr, scale_stride: tl.int64,
    more_rows: tl.int32, more_columns: tl.int32, more_row_stride: tl.int64, more_column_stride: tl.int64,
    more_copy_ptr, more_stride: tl.int64, num_second: tl.int32, second_stride: tl.int64,
    lanes_magic: tl.int64, lanes_shift: tl.int32, lanes: tl.int32, rows_magic: tl.int64, rows_shift: tl.int32,
    block_magic: tl.int64, block_shift: tl.int32, history_stride: tl.int64, num_history: tl.int32, num_amax: tl.int32,
    from_0: tl.int64, to_0, stride_0: tl.int64, n_0: tl.int32, from_1: tl.int64, to_1, stride_1: tl.int64,
    n_1: tl.int32, from_2: tl.int64, to_2, stride_2: tl.int64, n_2: tl.int32, from_3: tl.int64, to_3,
    stride_3: tl.int64, n_3: tl.int32,
    KIND: tl.constexpr, CODES: tl.constexpr, ERROR: tl.constexpr, SCALED: tl.constexpr, SCALE: tl.constexpr,
    SECOND: tl.constexpr, MORE: tl.constexpr, EACH: tl.constexpr, ZERO: tl.constexpr, RANGE: tl.constexpr,
    COPY_X: tl.constexpr, COPY_CODES: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Everything of one record's codes, and of its values where they belong together (KIND, otherwise -1).

    Arguments as ``fused.record_pass`` has them, in the same order where it has them; ``lanes``: of a row; CODES: 2 is
    packed FP4; SCALE, MORE: 0 float32, 1 E8M0, 2 E4M3; SECOND, EACH: ``packed_passes``; ZERO: zero scales are counted.
    """
    program = tl.program_id(0)
    mine = program == tl.num_programs(0) - 1  # of all programs the one that has the least to do
    slot = tl.load(slot_ptr)
    if slot < 0:  # in a captured graph, what does not have its turn
        return
    out = scratch_ptr + program.to(tl.int64) * finishing.WIDTH
    finishing.copy_small(
        mine, slot, part_0, from_0, to_0, stride_0, n_0, part_1, from_1, to_1, stride_1, n_1, part_2, from_2, to_2,
        stride_2, n_2, part_3, from_3, to_3, stride_3, n_3,
    )  # fmt: skip
    finishing.finish_words(out, amax_ptr, num_amax, history_ptr, history_stride, num_history, mine)
    if SCALED:
        _put_scales(
            out, slot, scale_ptr, scale_rows, scale_columns, scale_row_stride, scale_column_stride, scale_copy_ptr,
            scale_stride, more_ptr, more_rows, more_columns, more_row_stride, more_column_stride, more_copy_ptr,
            more_stride, second_ptr, num_second, second_stride, SCALE, SECOND, MORE, ROWS,
        )  # fmt: skip
    if KIND >= 0:
        nonzero, amax, total, squares, code_nonzero, first, second, third = _put_pair(
            out, x_ptr, x_copy_ptr, x_stride, codes_ptr, codes_copy_ptr, codes_stride, slot, num_x // 4, scale_ptr,
            second_ptr, lanes_magic, lanes_shift, lanes, rows_magic, rows_shift, block_magic, block_shift,
            scale_row_stride, scale_column_stride, second_stride, KIND, CODES, COPY_X, COPY_CODES, SCALE, SECOND,
            SCALED, EACH, ERROR, ZERO, RANGE, ROWS * UNROLL,
        )  # fmt: skip
        PER_WORD: tl.constexpr = 1 if KIND == 2 else 2
        words_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        fused.put_values(
            out, words_ptr, num_x, tl.where(program == 0, numel, 0), numel // PER_WORD, nonzero, amax, total, squares,
            0, 0, 0, 0, 0, 0, 0, KIND, False, ROWS, UNROLL * ROWS * 4,
        )  # fmt: skip
    else:
        codes_ptr, codes_copy_ptr = fused.words_of(codes_ptr, codes_copy_ptr, slot, codes_stride, COPY_CODES)
        if CODES == packed_passes.FP4:
            code_nonzero, first = packed_passes.nibbles_pass(
                codes_ptr, codes_copy_ptr, num_codes, COPY_CODES, ROWS, UNROLL
            )
            second = tl.full([], 0, tl.int32)
            third = second
        else:
            code_nonzero, first, second, third = passes.codes_pass(
                codes_ptr, codes_copy_ptr, num_codes, num_codes, CODES, COPY_CODES, False, ROWS, UNROLL
            )
    fused.put_codes(out, tl.where(program == 0, code_numel, 0), code_nonzero, first, second, third, RANGE)
    finishing.join(
        scratch_ptr, counters_ptr, row_ptr + slot * row_stride, stamp_ptr + slot * stamp_stride, tick_ptr, present,
        owned, GROUP,
    )  # fmt: skip
