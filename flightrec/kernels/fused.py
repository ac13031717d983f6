"""The Triton kernel that captures a record in one launch: copies, statistics row and stamp.

``passes`` and ``pairing`` hold its loops, ``finishing`` its end. Nothing is allocated and nothing waits. No integer is
specialised, so that no value of theirs compiles a kernel anew. A slot's stride comes in units of 16 bytes: the compiler
then knows that each place is aligned, and stores whole vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flightrec.kernels import finishing, pairing, passes

_WIDE = (
    "x_stride", "codes_stride", "row_stride", "stamp_stride", "num_x", "num_codes", "numel", "code_numel", "x_row",
    "codes_row", "apart", "jump", "limit", "scale_row_stride", "scale_column_stride", "scale_stride", "more_row_stride",
    "more_column_stride", "more_stride", "columns_magic", "rows_magic", "block_magic", "history_stride", "from_0",
    "stride_0", "from_1", "stride_1", "from_2", "stride_2", "from_3", "stride_3",
)  # fmt: skip
_NARROW = (
    "present", "owned", "scale_rows", "scale_columns", "more_rows", "more_columns", "columns_shift", "rows_shift",
    "block_shift", "columns", "num_history", "num_amax", "n_0", "n_1", "n_2", "n_3",
)  # fmt: skip
_POINTERS = (
    "slot_ptr", "tick_ptr", "limit_ptr", "scale_ptr", "other_ptr", "more_ptr", "history_ptr", "amax_ptr", "part_0",
    "part_1", "part_2", "part_3", "scratch_ptr", "counters_ptr", "row_ptr", "stamp_ptr", "scale_copy_ptr",
    "more_copy_ptr", "to_0", "to_1", "to_2", "to_3",
)  # fmt: skip


@triton.jit
def put_values(
    out, x_ptr, num_words, numel, counted, nonzero, amax, total, squares, magic, shift, lanes, apart, rows_magic,
    rows_shift, jump, KIND: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the first look found, or the exact one where it takes that."""
    nan = tl.full([], 0, tl.int64)
    positive = tl.full([], 0, tl.int64)
    negative = tl.full([], 0, tl.int64)
    if passes.are_ordinary(amax, squares, KIND) == 0:
        nan, positive, negative, amax, total, squares = passes.values_exactly(
            x_ptr, num_words, counted, magic, shift, lanes, apart, rows_magic, rows_shift, jump, KIND, APART, ROWS,
            BLOCK,
        )  # fmt: skip
    finishing.put(out, 0, numel)
    finishing.put(out, 1, nan)
    finishing.put(out, 2, positive)
    finishing.put(out, 3, negative)
    finishing.put(out, 4, numel - nonzero)
    finishing.put(out, 5, amax)
    finishing.put(out, 6, total)
    finishing.put(out, 7, squares)


@triton.jit
def put_codes(out, numel, nonzero, first, second, third, RANGE: tl.constexpr):
    finishing.put(out, 8, numel)
    finishing.put(out, 9, third)
    finishing.put(out, 10, second - third)
    finishing.put(out, 11, numel - nonzero)
    finishing.put(out, 12, first - second)
    finishing.put(out, 23, tl.full([], RANGE, tl.float64))


@triton.jit
def _put_scales(
    out, slot, scale_ptr, scale_rows, scale_columns, scale_row_stride, scale_column_stride, scale_copy_ptr,
    scale_stride, more_ptr, more_rows, more_columns, more_row_stride, more_column_stride, more_copy_ptr, more_stride,
    other_ptr, past,
    HISTORY: tl.constexpr, BLOCKS: tl.constexpr, RANGE: tl.constexpr, MULTIPLY: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, mine,
):  # fmt: skip
    more_bad = tl.full([], 0, tl.int32)
    if more_ptr is not None:
        _, _, more_bad = pairing.words_pass(
            more_ptr, more_rows, more_columns, more_row_stride, more_column_stride, more_copy_ptr, slot, more_stride,
            ROWS,
        )  # fmt: skip
    if BLOCKS:
        low, high, bad = pairing.words_pass(
            scale_ptr, scale_rows, scale_columns, scale_row_stride, scale_column_stride, scale_copy_ptr, slot,
            scale_stride, ROWS,
        )  # fmt: skip
        finishing.put(out, 15, bad + more_bad)
        finishing.put(out, 19, low)
        finishing.put(out, 20, high)
    else:
        finishing.finish_scale(out, scale_ptr, other_ptr, past, more_bad, RANGE, MULTIPLY, INVERSE, HISTORY, mine)


@triton.jit
def _put_pair(
    out, x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, num_lanes, counted, scale_ptr, columns_magic, columns_shift,
    columns, rows_magic, rows_shift, block_magic, block_shift, row_stride, column_stride, KIND: tl.constexpr,
    CODES: tl.constexpr, COPY_X: tl.constexpr, COPY_CODES: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
    SCALED: tl.constexpr, MULTIPLY: tl.constexpr, ERROR: tl.constexpr, RANGE: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Look at both together, once or, where it takes that, exactly; give back what each tells by itself."""
    nonzero, amax, total, squares, code_nonzero, first, second, third, under, errors, largest = pairing.pair_pass(
        x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, num_lanes, counted // 4, scale_ptr, columns_magic, columns_shift,
        columns, rows_magic, rows_shift, block_magic, block_shift, row_stride, column_stride, KIND, CODES, COPY_X,
        COPY_CODES, MASKED, BLOCKS, SCALED, MULTIPLY, RANGE, ROWS, UNROLL,
    )  # fmt: skip
    clipped = tl.full([], 0, tl.int32)
    zero_scale = tl.full([], 0, tl.int32)
    ordinary = passes.are_ordinary(amax, squares, KIND) & (second == 0)
    if ERROR:
        ordinary = ordinary & (errors < float("inf")) & (largest <= pairing.NOT_CLIPPED)
    if ordinary == 0:
        under, errors, clipped, largest, zero_scale = pairing.pair_exactly(
            x_ptr, codes_ptr, num_lanes, counted, scale_ptr, columns_magic, columns_shift, columns, rows_magic,
            rows_shift, block_magic, block_shift, row_stride, column_stride, KIND, CODES, BLOCKS, SCALED, MULTIPLY,
            RANGE, ROWS, UNROLL * ROWS,
        )  # fmt: skip
    finishing.put(out, 13, under)
    if ERROR:
        finishing.put(out, 14, errors)
        finishing.put(out, 16, clipped)
        finishing.put(out, 17, largest)
        if SCALED:
            finishing.put(out, 18, zero_scale)
    return nonzero, amax, total, squares, code_nonzero, first, second, third


@triton.jit
def _counted(limit_ptr, limit, a_row, numel, MASKED: tl.constexpr):
    """Elements that count."""
    if MASKED:
        if limit_ptr is not None:
            limit = tl.load(limit_ptr).to(tl.int64)
        numel = tl.minimum(tl.maximum(limit, 0) * a_row, numel)
    return numel


@triton.jit
def words_of(from_ptr, to_ptr, slot, stride, COPY: tl.constexpr):
    """Both as words of four bytes, ``to_ptr`` in its slot; without a copy it is not used."""
    from_ptr = from_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if COPY:
        to_ptr = to_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * stride * 4
    else:
        to_ptr = from_ptr
    return from_ptr, to_ptr


@triton.jit(do_not_specialize=[*_WIDE, *_NARROW, *_POINTERS])
def record_pass(
    # what changes from record to record
    x_ptr, codes_ptr, scale_ptr, other_ptr, more_ptr, history_ptr, amax_ptr, part_0, part_1, part_2, part_3, slot_ptr,
    tick_ptr, limit_ptr, limit: tl.int64, scratch_ptr, counters_ptr,
    # what does not
    x_copy_ptr, x_stride: tl.int64, codes_copy_ptr, codes_stride: tl.int64, row_ptr, row_stride: tl.int64, stamp_ptr,
    stamp_stride: tl.int64, num_x: tl.int64, num_codes: tl.int64, numel: tl.int64, code_numel: tl.int64,
    x_row: tl.int64, codes_row: tl.int64, apart: tl.int64, jump: tl.int64, present: tl.int32, owned: tl.int32,
    scale_rows: tl.int32, scale_columns: tl.int32, scale_row_stride: tl.int64, scale_column_stride: tl.int64,
    scale_copy_ptr, scale_stride: tl.int64,
    more_rows: tl.int32, more_columns: tl.int32, more_row_stride: tl.int64, more_column_stride: tl.int64,
    more_copy_ptr, more_stride: tl.int64,
    columns_magic: tl.int64, columns_shift: tl.int32, columns: tl.int32, rows_magic: tl.int64, rows_shift: tl.int32,
    block_magic: tl.int64, block_shift: tl.int32, history_stride: tl.int64, num_history: tl.int32, num_amax: tl.int32,
    from_0: tl.int64, to_0, stride_0: tl.int64, n_0: tl.int32, from_1: tl.int64, to_1, stride_1: tl.int64,
    n_1: tl.int32, from_2: tl.int64, to_2, stride_2: tl.int64, n_2: tl.int32, from_3: tl.int64, to_3,
    stride_3: tl.int64, n_3: tl.int32,
    KIND: tl.constexpr, CODES: tl.constexpr, PAIR: tl.constexpr, ERROR: tl.constexpr, SCALED: tl.constexpr,
    BLOCKS: tl.constexpr, MULTIPLY: tl.constexpr, INVERSE: tl.constexpr, RANGE: tl.constexpr, COPY_X: tl.constexpr,
    COPY_CODES: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Everything of one record. KIND: 0 bfloat16, 1 float16, 2 float32, -1 none; CODES: 0 E4M3, 1 E5M2, -1 none.

    ``num_x``, ``num_codes``: words; ``x_row``, ``codes_row``: elements of a row of dimension 0; ``limit``: rows that
    count. ``columns`` and the magics: ``pairing``; APART: values alone, in rows that lie ``apart``, see ``passes``.
    ``present``: columns with a value; ``owned``: those written.
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
    past = finishing.finish_words(out, amax_ptr, num_amax, history_ptr, history_stride, num_history, mine)
    if SCALED:
        _put_scales(
            out, slot, scale_ptr, scale_rows, scale_columns, scale_row_stride, scale_column_stride, scale_copy_ptr,
            scale_stride, more_ptr, more_rows, more_columns, more_row_stride, more_column_stride, more_copy_ptr,
            more_stride, other_ptr, past, history_ptr is not None, BLOCKS, RANGE, MULTIPLY, INVERSE, ROWS, mine,
        )  # fmt: skip
    x_counted = _counted(limit_ptr, limit, x_row, numel, MASKED)
    codes_counted = _counted(limit_ptr, limit, codes_row, code_numel, MASKED)
    PER_WORD: tl.constexpr = 1 if KIND == 2 else 2
    if KIND >= 0:
        x_ptr, x_copy_ptr = words_of(x_ptr, x_copy_ptr, slot, x_stride, COPY_X)
    if CODES >= 0:
        codes_ptr, codes_copy_ptr = words_of(codes_ptr, codes_copy_ptr, slot, codes_stride, COPY_CODES)
    if PAIR:
        nonzero, amax, total, squares, code_nonzero, first, second, third = _put_pair(
            out, x_ptr, x_copy_ptr, codes_ptr, codes_copy_ptr, num_x // 4, codes_counted, scale_ptr, columns_magic,
            columns_shift, columns, rows_magic, rows_shift, block_magic, block_shift, scale_row_stride,
            scale_column_stride, KIND, CODES, COPY_X, COPY_CODES, MASKED, BLOCKS, SCALED, MULTIPLY, ERROR, RANGE, ROWS,
            UNROLL,
        )  # fmt: skip
    elif KIND >= 0:
        nonzero, amax, total, squares = passes.values_pass(
            x_ptr, x_copy_ptr, num_x, x_counted // PER_WORD, columns_magic, columns_shift, columns, apart, rows_magic,
            rows_shift, jump, KIND, COPY_X, MASKED, APART, ROWS, UNROLL,
        )  # fmt: skip
    else:
        code_nonzero, first, second, third = passes.codes_pass(
            codes_ptr, codes_copy_ptr, num_codes, codes_counted // 4, CODES, COPY_CODES, MASKED, ROWS, UNROLL
        )
    if KIND >= 0:
        put_values(
            out, x_ptr, num_x, tl.where(program == 0, x_counted, 0), x_counted // PER_WORD, nonzero, amax, total,
            squares, columns_magic, columns_shift, columns, apart, rows_magic, rows_shift, jump, KIND, APART, ROWS,
            UNROLL * ROWS * 4,
        )  # fmt: skip  # one program tells the number for all
    if CODES >= 0:
        put_codes(out, tl.where(program == 0, codes_counted, 0), code_nonzero, first, second, third, RANGE)
    finishing.join(
        scratch_ptr, counters_ptr, row_ptr + slot * row_stride, stamp_ptr + slot * stamp_stride, tick_ptr, present,
        owned, GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot_ptr", "stride", "n"])
def copy_pass(
    from_ptr, slot_ptr, to_ptr, stride: tl.int64, n: tl.int64, ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Copy ``n`` words of four bytes into a slot whose stride is ``stride`` times 16 bytes."""
    slot = tl.load(slot_ptr)
    if slot < 0:
        return
    BLOCK: tl.constexpr = UNROLL * ROWS * 4
    index = passes.lanes_of(4, ROWS, UNROLL)
    from_ptr = from_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    to_ptr = to_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * stride * 4
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        if start + BLOCK <= n:
            passes.move(from_ptr + start, to_ptr + start, index, BLOCK, True, True)
        else:
            passes.move(from_ptr + start, to_ptr + start, index, passes.left_of(n, start, BLOCK), True, False)
