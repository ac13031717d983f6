"""The arguments of ``packed.record_pass`` for records of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flightrec.kernels import arguments, launch, packed
from flightrec.kernels.formats import CODE_FORMATS
from flightrec.kernels.known import CODES, SCALES, Known, in_two
from flightrec.kernels.lying import KINDS


class PackedPart(arguments.Part):
    """One launch: a record's codes and all that belongs to them, with its values if they are theirs."""

    __slots__ = ()

    def __init__(self, known: Known, *, with_values: bool) -> None:
        plan, codes = known.plan, known.codes
        assert codes is not None
        x = known.x if with_values else None
        read = [plan.codes, plan.scale, known.other, known.more, plan.history, plan.amax, *known.small]
        self._places = [] if x is None else [(0, 0)]
        self._places += [(place, at + 1) for place, at in enumerate(read, start=1) if at >= 0]
        kind = "codes" if x is None else "pair_in_blocks"
        num_warps, unroll, programs_an_sm = arguments.SIZES[kind]
        rows = 32 * num_warps
        lanes = -(-arguments.bytes_of(codes if x is None else x) // 16)
        device = known.destination.stamp.device
        num = launch.num_programs(-(-lanes // (rows * unroll)), programs_an_sm, device)
        has_error = x is not None and (plan.scale >= 0 or plan.unscaled)
        formats = dict(plan.scales)
        constants = {
            "KIND": -1 if x is None else KINDS[x.dtype],
            "CODES": CODES[plan.format],
            "ERROR": has_error,
            "SCALED": plan.scale >= 0,
            "SCALE": SCALES.get(known.scale_format, 0),
            "SECOND": 0 if known.other < 0 else 1 if known.parts[known.other].numel() == 1 else 2,
            "MORE": SCALES.get(formats.get(known.more, ""), 0),
            "EACH": known.grid is not None and known.grid.block_columns == 1 and known.decoded_shape[-1] > 1,
            "ZERO": has_error and plan.scale >= 0 and known.counts_zero_scales,
            "RANGE": CODE_FORMATS[plan.format].largest_value,
            "COPY_X": x is not None and known.destination.high_precision is not None,
            "COPY_CODES": known.destination.parts[plan.codes] is not None,
            "ROWS": rows,
            "UNROLL": unroll,
            "GROUP": launch.GROUP,
        }
        present = arguments.present_columns(known, x, codes, with_codes=True, has_error=has_error)
        owned = present if x is None and known.x is not None else arguments.EVERY
        num_x, num_codes, numel, _, _, _ = arguments.sizes_of(x, codes)
        code_numel = codes.numel() * (2 if CODE_FORMATS[plan.format].packed else 1)
        static = [*arguments.places_of(known, x, codes), num_x, num_codes, numel, code_numel, present, owned]
        static += [*_words(known, plan.scale), *_words(known, known.more), *_second(known), *_lying(known, x)]
        static += [*arguments.histories_of(known), *arguments.small_parts(known, with_codes=True)]
        self.launch = launch.Launch(packed.record_pass, num, device, static, constants, num_warps)

    def first(self, tensors: Sequence[torch.Tensor | None], *rest: Any) -> None:
        """As of any part. Codes as bytes: Triton does not know all of their types."""
        as_bytes = [t.view(torch.uint8) if t is not None and t.dtype.itemsize == 1 else t for t in tensors]
        super().first(as_bytes, *rest)


def _words(known: Known, at: int) -> list[Any]:
    """How the words of a scale lie, and where their copy goes."""
    words = in_two(known.parts[at]) if at >= 0 else None
    if words is None:
        return [1, 1, 1, 1, None, 0]
    target = known.destination.parts[at]
    return [*words.shape, *words.stride(), target, 0 if target is None else target.stride(0)]


def _second(known: Known) -> list[int]:
    """Words of the second level and their stride."""
    if known.other < 0:
        return [0, 0]
    second = known.parts[known.other]
    return [second.numel(), second.stride(0) if second.dim() == 1 else 1]


def _lying(known: Known, x: torch.Tensor | None) -> list[int]:
    """Which word of the scale a lane of 16 bytes of ``x`` has."""
    if known.grid is None or x is None:
        return [0] * 7
    a_lane = 16 // x.dtype.itemsize
    lanes = known.decoded_shape[-1] // a_lane
    block = -(-known.grid.block_columns // a_lane)
    return [
        *arguments.magic_of(lanes), lanes, *arguments.magic_of(known.grid.block_rows), *arguments.magic_of(block)
    ]  # fmt: skip
