"""The arguments of ``plain.record_pass`` for values of one layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flightrec.kernels import arguments, launch, plain
from flightrec.kernels.known import Known
from flightrec.kernels.lying import NUMBERS, axes_of, elements_a_row

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUM_WARPS = 4
_ROWS = 512
_PROGRAMS_AN_SM = 8
_WIDE = 1 << 30


class PlainPart(arguments.Part):
    """One launch: a record's values, one element at a time."""

    __slots__ = ()

    def __init__(self, known: Known) -> None:
        x, destination = known.x, known.destination
        assert x is not None
        self._places = [(0, 0)]
        axes = [] if x.is_contiguous() else axes_of(x)
        (_, apart), (second, next_to), (third, near) = [(1, 0)] * (3 - len(axes)) + axes
        target = destination.high_precision if x.numel() else None
        copy, a_slot = (None, 0) if target is None else (_as_integers(target), target.stride(0))
        constants = {
            "KIND": NUMBERS[x.dtype],
            "COPY": copy is not None,
            "MASKED": known.valid_rows is not None and x.dim() > 0,
            "DIMS": len(axes),
            "WIDE": x.numel() >= _WIDE,
            "ROWS": _ROWS,
            "GROUP": launch.GROUP,
        }
        present = arguments.present_columns(known, x, None, with_codes=False, has_error=False)
        static = [
            copy, a_slot, destination.statistics, destination.statistics.stride(0), destination.stamp,
            destination.stamp.stride(0), x.numel(), elements_a_row(x), second, third, apart, next_to, near, present,
            arguments.EVERY,
        ]  # fmt: skip
        device = destination.stamp.device
        num = launch.num_programs(-(-x.numel() // _ROWS), _PROGRAMS_AN_SM, device)
        self.launch = launch.Launch(plain.record_pass, num, device, static, constants, _NUM_WARPS)

    def first(
        self,
        tensors: Sequence[torch.Tensor | None],
        slot: torch.Tensor,
        tick: torch.Tensor,
        valid_rows: int | torch.Tensor | None,
        stream: int,
        captures: bool,
    ) -> None:
        """As of any part."""
        x = tensors[0]
        assert x is not None
        rows = (valid_rows, 0) if isinstance(valid_rows, torch.Tensor) else (None, valid_rows or 0)
        self.launch.first([_as_integers(x), slot, tick, *rows], stream, captures)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])
