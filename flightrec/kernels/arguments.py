"""The arguments of ``fused.record_pass`` for records of one layout: what is worked out once, and what each fills in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flightrec.kernels import finishing, fused
from flightrec.kernels.formats import CODE_FORMATS
from flightrec.kernels.known import CODES, Known
from flightrec.kernels.launch import GROUP, Cells, Launch, num_programs
from flightrec.kernels.lying import KINDS, Way, elements_a_row, is_aligned, is_simple, rows_of
from flightrec.records import NUM_STATISTICS, Statistic

SIZES = {"values": (8, 2, 4), "codes": (8, 2, 4), "pair": (4, 2, 5), "pair_in_blocks": (4, 1, 8)}
"""(warps, lanes of 16 bytes a thread holds at once, programs an SM), by what a launch looks at: the best of those tried
on an H200."""

EVERY = (1 << NUM_STATISTICS) - 1
_VALUES = (1 << Statistic.QUANTIZED_NUMEL) - 1
_CODES = sum(1 << column for column in (8, 9, 10, 11, 12, Statistic.QUANTIZED_LARGEST))


class Part:
    """One launch of the kernel: a record's values, codes or both. With the codes goes all that belongs to them.

    Attributes:
        launch: with all arguments that stay.
    """

    __slots__ = ("_places", "launch")

    def __init__(self, known: Known, *, with_values: bool, with_codes: bool) -> None:
        plan = known.plan
        x = known.x if with_values else None
        codes = known.codes if with_codes else None
        self._places: list[tuple[int, int]] = [] if x is None else [(0, 0)]
        """(argument, tensor) of each tensor that the kernel reads: the values are 0, parts count from 1."""
        if with_codes:
            read = [plan.codes, plan.scale, known.other, known.more, plan.history, plan.amax, *known.small]
            self._places += [(place, at + 1) for place, at in enumerate(read, start=1) if at >= 0]
        kind = "values" if codes is None else "codes" if x is None else "pair_in_blocks" if known.grid else "pair"
        num_warps, unroll, programs_an_sm = SIZES[kind]
        rows = 32 * num_warps
        lanes = -(-bytes_of(codes if x is None else x) // 16)
        device = known.destination.stamp.device
        num = num_programs(-(-lanes // (rows * unroll)), programs_an_sm, device)
        has_error = x is not None and codes is not None and (plan.scale >= 0 or plan.unscaled)
        constants = {
            "KIND": -1 if x is None else KINDS[x.dtype],
            "CODES": -1 if codes is None else CODES[plan.format],
            "PAIR": x is not None and codes is not None,
            "ERROR": has_error,
            "SCALED": with_codes and plan.scale >= 0,
            "BLOCKS": with_codes and known.grid is not None,
            "MULTIPLY": plan.multiply_to_decode,
            "INVERSE": with_codes and plan.inverse >= 0,
            "RANGE": 1.0 if codes is None else CODE_FORMATS[plan.format].largest_value,
            "COPY_X": x is not None and known.destination.high_precision is not None,
            "COPY_CODES": codes is not None and known.destination.parts[plan.codes] is not None,
            "MASKED": known.valid_rows is not None,
            "APART": x is not None and known.way is Way.ROWS,
            "ROWS": rows,
            "UNROLL": unroll,
            "GROUP": GROUP,
        }
        present = present_columns(known, x, codes, with_codes=with_codes, has_error=has_error)
        owned = present if with_codes and not with_values and known.x is not None else EVERY
        static = [*places_of(known, x, codes), *sizes_of(x, codes), *_apart(known, x), present, owned]
        static += _words(known, plan.scale if constants["BLOCKS"] else -1)
        static += _words(known, known.more if with_codes else -1)
        static += [*_lying(known, x), *histories_of(known), *small_parts(known, with_codes=with_codes)]
        self.launch = Launch(fused.record_pass, num, device, static, constants, num_warps)

    def cells(self, cells: Cells, valid_rows: object) -> list[int]:
        """The cell of each argument that changes, without those that are absent; ``valid_rows`` as in a record."""
        rows = [cells.rows, cells.nothing] if isinstance(valid_rows, torch.Tensor) else [cells.rows]
        return [*(at for _, at in self._places), cells.slot, cells.tick, *rows]

    def first(
        self,
        tensors: Sequence[torch.Tensor | None],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None,
        stream: int,
        captures: bool,
    ) -> None:
        """As ``Launch.first``; ``tensors`` are the values, or None, and the parts."""
        dynamic: list[torch.Tensor | int | None] = [*_NO_TENSORS, slot, tick, None, 0]
        for place, at in self._places:
            dynamic[place] = tensors[at]
        if isinstance(valid_rows, torch.Tensor):
            dynamic[-2] = valid_rows
        elif valid_rows is not None:
            dynamic[-1] = valid_rows
        self.launch.first(dynamic, stream, captures)


_NO_TENSORS = [None] * (7 + finishing.MAX_SMALL)


class CopyPart(Part):
    """The launch that copies a dense part, number ``at``, and does no more."""

    __slots__ = ()

    def __init__(self, target: torch.Tensor, part: torch.Tensor, at: int) -> None:
        num_bytes = bytes_of(part)
        self._places = [(0, at + 1)]
        num_warps, unroll, programs_an_sm = SIZES["values"]
        rows = 32 * num_warps
        num = num_programs(-(-num_bytes // (16 * rows * unroll)), programs_an_sm, target.device)
        static = [target, target.stride(0) * target.dtype.itemsize // 16, num_bytes // 4]
        constants = {"ROWS": rows, "UNROLL": unroll}
        self.launch = Launch(fused.copy_pass, num, target.device, static, constants, num_warps, has_scratch=False)

    @staticmethod
    def can_copy(target: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether the part is dense and of whole words."""
        return is_simple(part, 1) and bytes_of(part) % 4 == 0 and is_aligned(target)

    def cells(self, cells: Cells, valid_rows: object) -> list[int]:  # noqa: ARG002  it has no rows
        """As of any part."""
        return [self._places[0][1], cells.slot]

    def first(
        self,
        tensors: Sequence[torch.Tensor | None],
        slot: torch.Tensor,
        tick: torch.Tensor,  # noqa: ARG002
        valid_rows: int | torch.Tensor | None,  # noqa: ARG002
        stream: int,
        captures: bool,
    ) -> None:
        """As of any part."""
        self.launch.first([tensors[self._places[0][1]], slot], stream, captures)


def present_columns(
    known: Known, x: torch.Tensor | None, codes: torch.Tensor | None, *, with_codes: bool, has_error: bool
) -> int:
    """Bits of the statistics that this launch tells."""
    plan, found = known.plan, 0
    if x is not None:
        found |= _VALUES
    if codes is not None:
        found |= _CODES
    columns: list[Statistic] = []
    if x is not None and codes is not None:
        columns.append(Statistic.UNDERFLOW_COUNT)
    if has_error:
        columns += [Statistic.SQUARED_ERROR, Statistic.CLIPPED_COUNT, Statistic.RANGE_RATIO]
    if with_codes and plan.scale >= 0:
        columns += [Statistic.SCALE_NONFINITE_COUNT, Statistic.SCALE_MIN, Statistic.SCALE_MAX]
        columns += [Statistic.ZERO_SCALE_COUNT] * (has_error and known.counts_zero_scales)
        if known.grid is None:
            columns += [Statistic.SCALE_INVERSE_ERROR] * (plan.inverse >= 0)
            columns += [Statistic.HISTORY_RATIO] * (plan.history >= 0)
    if with_codes:
        columns += [Statistic.QUANTIZER_AMAX] * (plan.amax >= 0) + [Statistic.AMAX_HISTORY_MAX] * (plan.history >= 0)
    for column in columns:
        found |= 1 << column
    return found


def places_of(known: Known, x: torch.Tensor | None, codes: torch.Tensor | None) -> list[Any]:
    """Where copies, row and stamp go, each with the slot's stride; that of copies in units of 16 bytes."""
    destination = known.destination
    places: list[Any] = []
    for target in (
        destination.high_precision if x is not None else None,
        destination.parts[known.plan.codes] if codes is not None else None,
    ):
        places += [None, 0] if target is None else [target, target.stride(0) * target.dtype.itemsize // 16]
    for target in (destination.statistics, destination.stamp):
        places += [target, target.stride(0)]
    return places


def sizes_of(x: torch.Tensor | None, codes: torch.Tensor | None) -> list[int]:
    """Words of both, elements of both, elements of a row of both."""
    given = (x, codes)
    return [
        *(bytes_of(tensor) // 4 for tensor in given),
        *(0 if tensor is None else tensor.numel() for tensor in given),
        *(0 if tensor is None else elements_a_row(tensor) for tensor in given),
    ]


def _apart(known: Known, x: torch.Tensor | None) -> tuple[int, int]:
    """Lanes of 16 bytes from one row of values to the next, and of a jump, where these are read by rows."""
    rows = rows_of(x) if x is not None and known.way is Way.ROWS else None
    return (0, 0) if rows is None else (rows.apart, rows.jump)


def _words(known: Known, at: int) -> list[Any]:
    """How the words of a scale lie, and where their copy goes."""
    if at < 0:
        return [1, 1, 1, 1, None, 0]
    words, target = known.parts[at], known.destination.parts[at]
    lie = [1, 1, 1, 1] if words.numel() == 1 else [*words.shape, *words.stride()]
    return [*lie, target, 0 if target is None else target.stride(0)]


def _lying(known: Known, x: torch.Tensor | None) -> list[int]:
    """Which scale a lane of 16 bytes of ``x`` has; or the row that it is in, of those that lie apart."""
    rows = rows_of(x) if x is not None and known.way is Way.ROWS else None
    if rows is not None:
        return [*magic_of(rows.length), rows.length, *magic_of(rows.num), 0, 0]
    if known.grid is None or x is None:
        return [0] * 7
    a_lane = 16 // x.dtype.itemsize
    columns = x.shape[-1] if known.codes is None else known.codes.shape[-1]
    block = -(-known.grid.block_columns // a_lane)
    return [*magic_of(columns // a_lane), columns // a_lane, *magic_of(known.grid.block_rows), *magic_of(block)]


def magic_of(divisor: int) -> tuple[int, int]:
    """(factor, shift) that divide any integer below 2^31 by ``divisor``: ``(n * factor) >> shift``, in 63 bits."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


def histories_of(known: Known) -> list[int]:
    """Stride and words of the past amaxes, words of the quantizer's own."""
    plan, parts = known.plan, known.parts
    history = parts[plan.history] if plan.history >= 0 else None
    stride = 1 if history is None or not history.dim() else history.stride(0)
    return [stride, 0 if history is None else history.numel(), parts[plan.amax].numel() if plan.amax >= 0 else 0]


def small_parts(known: Known, *, with_codes: bool) -> list[Any]:
    """Of each small component: stride, target, the slot's stride, words."""
    found: list[Any] = []
    small = known.small if with_codes else []
    for at in small:
        part, target = known.parts[at], known.destination.parts[at]
        assert target is not None
        found += [part.stride(0) if part.dim() == 1 else 1, target, target.stride(0), part.numel()]
    return found + [1, None, 0, 0] * (finishing.MAX_SMALL - len(small))


def bytes_of(tensor: torch.Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.numel() * tensor.dtype.itemsize
