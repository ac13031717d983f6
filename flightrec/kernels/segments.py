"""Statistics of each expert's rows of a grouped product, in one pass over the tensor.

Twice, as everything here: ``reference`` reduces every row, then the rows of each segment, with what the device alone
knows; ``host`` cuts the tensor, since in host memory the counts can be read. Runs on the caller's thread and stream;
callers hold ``torch.no_grad()``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flightrec.kernels import host as host_kernels
from flightrec.kernels import reference as torch_kernels
from flightrec.kernels import scales
from flightrec.kernels.formats import CODE_FORMATS, CodeFormat, decode, is_nan, is_zero, unpack
from flightrec.kernels.plan import CapturePlan
from flightrec.records import NUM_STATISTICS, Statistic

_Array = np.ndarray[Any, Any]
_Rows = dict[Statistic, torch.Tensor]

_OF_THE_WHOLE = (
    Statistic.SCALE_NONFINITE_COUNT,
    Statistic.SCALE_MIN,
    Statistic.SCALE_MAX,
    Statistic.SCALE_INVERSE_ERROR,
    Statistic.HISTORY_RATIO,
    Statistic.QUANTIZER_AMAX,
    Statistic.AMAX_HISTORY_MAX,
)
"""Statistics that a segment has none of: its scale's words stand in the row of the whole tensor."""

SegmentStatistics = Callable[
    [CapturePlan, "torch.Tensor | None", Sequence[torch.Tensor], torch.Tensor],
    torch.Tensor,
]


def choose(device: torch.device) -> SegmentStatistics:
    """The implementation for tensors on ``device``."""
    return host if device.type == "cpu" else reference


def reference(
    plan: CapturePlan, high_precision: torch.Tensor | None, parts: Sequence[torch.Tensor], splits: torch.Tensor
) -> torch.Tensor:
    """Statistics of each segment. Does not synchronise.

    Args:
        plan: what the parts mean.
        high_precision: ``[rows, ...]``, any dtype and strides, or None.
        parts: quantized components in the plan's order.
        splits: integers ``[E]`` on the tensors' device: rows of each segment, one after the other from row 0; rows
            beyond their sum belong to none. Negative ones count as 0.

    Returns:
        float64 ``[E, C]`` on the tensors' device, as ``reference.statistics`` would give for each segment alone, but
        without what is told of the whole scale. Works on E x rows elements beside those of the tensor.
    """
    codes = parts[plan.codes] if plan.codes >= 0 else None
    sums: _Rows = {}
    peaks: _Rows = {}
    device = splits.device
    num_rows = _num_rows(high_precision, codes)
    if high_precision is not None:
        _high_precision_rows(high_precision, sums, peaks)
    code_format = CODE_FORMATS.get(plan.format)
    if codes is not None and code_format is not None and _has_rows(codes, code_format, num_rows):
        _code_rows(codes, code_format, sums)
        if plan.pairs and high_precision is not None:
            _pair_rows(plan, high_precision, parts, sums, peaks)
    inside = _members(splits, num_rows)
    values = {statistic: torch.where(inside, rows, 0.0).sum(1) for statistic, rows in sums.items()}
    values |= (
        {statistic: torch.where(inside, rows, 0.0).amax(1) for statistic, rows in peaks.items()} if num_rows else {}
    )
    if Statistic.AMAX in values:
        nonfinite = values[Statistic.NAN_COUNT] + values[Statistic.POSITIVE_INF_COUNT]
        some = values[Statistic.NUMEL] > nonfinite + values[Statistic.NEGATIVE_INF_COUNT]
        values[Statistic.AMAX] = torch.where(some, values[Statistic.AMAX], math.nan)
    if Statistic.QUANTIZED_NUMEL in values and code_format is not None:
        values[Statistic.QUANTIZED_LARGEST] = torch.full_like(
            values[Statistic.QUANTIZED_NUMEL], code_format.largest_value
        )
    absent = torch.full(splits.shape, math.nan, dtype=torch.float64, device=device)
    return torch.stack([values.get(statistic, absent) for statistic in Statistic], dim=1)


def host(
    plan: CapturePlan, high_precision: torch.Tensor | None, parts: Sequence[torch.Tensor], splits: torch.Tensor
) -> torch.Tensor:
    """As ``reference``, for tensors in host memory: each segment's rows are cut out and read once."""
    codes = parts[plan.codes] if plan.codes >= 0 else None
    num_rows = _num_rows(high_precision, codes)
    code_format = CODE_FORMATS.get(plan.format)
    is_coded = dict(plan.scales).get(plan.scale, "") in CODE_FORMATS
    cuts_scale = False
    if codes is None or code_format is None or not _has_rows(codes, code_format, num_rows):
        plan, parts = CapturePlan(), ()
    else:
        plan, parts, cuts_scale = _by_rows(plan, parts, codes, code_format)
    result: _Array = np.full((len(splits), NUM_STATISTICS), math.nan)
    start = 0
    for number, count in enumerate(splits.numpy().tolist()):
        stop = min(start + max(count, 0), num_rows)
        rows = None if high_precision is None else high_precision.narrow(0, start, stop - start)
        cut = [part.narrow(0, start, stop - start) if at == 0 or cuts_scale else part for at, part in enumerate(parts)]
        if rows is not None or cut:
            result[number] = host_kernels.statistics(plan, rows, cut)
        start = stop
    result[:, _OF_THE_WHOLE] = math.nan
    if is_coded:
        result[:, Statistic.ZERO_SCALE_COUNT] = math.nan
    return torch.from_numpy(result)


# -- where the rows are


def _num_rows(high_precision: torch.Tensor | None, codes: torch.Tensor | None) -> int:
    tensor = high_precision if high_precision is not None else codes
    return tensor.shape[0] if tensor is not None and tensor.dim() else 0


def _has_rows(codes: torch.Tensor, code_format: CodeFormat, num_rows: int) -> bool:
    """Whether the codes lie row by row as the tensor does."""
    return codes.dim() > (1 if code_format.packed else 0) and codes.shape[0] == num_rows and codes.dtype.itemsize == 1


def _members(splits: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Bool ``[E, rows]``: which rows are whose."""
    counts = splits.to(torch.int64).clamp(min=0)
    number = torch.arange(len(splits), device=splits.device)
    ends = torch.where(number[:, None] >= number[None, :], counts[None, :], 0).sum(1)  # deterministic, unlike cumsum
    row = torch.arange(num_rows, device=splits.device)
    return (row >= (ends - counts)[:, None]) & (row < ends[:, None])


# -- rows, float64 [rows] each


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)


def _sum(values: torch.Tensor) -> torch.Tensor:
    return _wide(values).sum(1, dtype=torch.float64)


def _peak(values: torch.Tensor) -> torch.Tensor:
    return _wide(values).amax(1).to(torch.float64)


def _high_precision_rows(x: torch.Tensor, sums: _Rows, peaks: _Rows) -> None:
    x = torch_kernels._as_number(x)
    if not x.is_floating_point():
        x = x.to(torch.float64)
    positive, negative, nan = x == math.inf, x == -math.inf, x != x
    finite = torch.where(positive | negative | nan, 0, x)
    width = x.numel() // x.shape[0] if x.shape[0] else 0
    sums |= {
        Statistic.NUMEL: torch.full((x.shape[0],), width, dtype=torch.float64, device=x.device),
        Statistic.NAN_COUNT: _sum(nan),
        Statistic.POSITIVE_INF_COUNT: _sum(positive),
        Statistic.NEGATIVE_INF_COUNT: _sum(negative),
        Statistic.ZERO_COUNT: _sum(x == 0),
        Statistic.SUM: _sum(finite),
        Statistic.SUM_OF_SQUARES: _sum(finite.to(torch.float64).square()),
    }
    if width:
        peaks[Statistic.AMAX] = _peak(finite.abs())


def _code_rows(codes: torch.Tensor, code_format: CodeFormat, sums: _Rows) -> None:
    bits = codes.view(torch.uint8)
    if code_format.packed:
        bits = unpack(bits)
    magnitude = bits & code_format.magnitude_mask
    nothing = torch.zeros_like(bits, dtype=torch.bool)
    nan = nothing if code_format.nan_first is None else is_nan(bits, code_format)
    is_infinite = nothing if code_format.infinity is None else magnitude == code_format.infinity
    sums |= {
        Statistic.QUANTIZED_NUMEL: _sum(torch.ones_like(bits)),
        Statistic.QUANTIZED_NAN_COUNT: _sum(nan),
        Statistic.QUANTIZED_INF_COUNT: _sum(is_infinite),
        Statistic.QUANTIZED_ZERO_COUNT: _sum(is_zero(bits, code_format)),
        Statistic.QUANTIZED_SATURATED_COUNT: _sum(magnitude == code_format.largest),
    }


def _pair_rows(plan: CapturePlan, x: torch.Tensor, parts: Sequence[torch.Tensor], sums: _Rows, peaks: _Rows) -> None:
    code_format = CODE_FORMATS[plan.format]
    bits = parts[plan.codes].view(torch.uint8)
    decoded = decode(bits, code_format)
    zero = is_zero(unpack(bits) if code_format.packed else bits, code_format)
    x = x.reshape(decoded.shape)
    lost = (x != 0) & torch.isfinite(x)
    sums[Statistic.UNDERFLOW_COUNT] = _sum(zero & lost)
    factor = None
    if not plan.unscaled:
        factor = scales.factor(plan, parts, decoded.shape)
        if factor is None:
            return
        if dict(plan.scales).get(plan.scale, "") not in CODE_FORMATS:
            sums[Statistic.ZERO_SCALE_COUNT] = _sum((factor == 0) & lost)
        decoded = decoded * factor if plan.multiply_to_decode else decoded / factor
    error = decoded - x
    sums[Statistic.SQUARED_ERROR] = _sum(torch.where(torch.isfinite(error), error, 0).to(torch.float64).square())
    if x.numel():
        largest = code_format.largest_value
        limit = torch.full((), largest, device=x.device) if factor is None else factor * largest
        if factor is not None and not plan.multiply_to_decode:
            limit = largest / factor
        ratio = (x if x.dtype == torch.float64 else x.to(torch.float32)).abs() / limit
        ratio = torch.where(torch.isfinite(ratio), ratio, 0)
        sums[Statistic.CLIPPED_COUNT] = _sum(ratio > torch_kernels.CLIPPED_ABOVE)
        peaks[Statistic.RANGE_RATIO] = _peak(ratio)


# -- cutting, in host memory


def _by_rows(
    plan: CapturePlan, parts: Sequence[torch.Tensor], codes: torch.Tensor, code_format: CodeFormat
) -> tuple[CapturePlan, Sequence[torch.Tensor], bool]:
    """Codes alone, or with their scale; and whether the scale is to be cut too: then it can be between any two rows."""
    plain = CapturePlan(codes=0, format=plan.format, pairs=plan.pairs, unscaled=plan.unscaled)
    if not plan.pairs or plan.unscaled or plan.scale < 0:
        return plain, (codes,), False
    scale, name, blocks = parts[plan.scale], dict(plan.scales).get(plan.scale, ""), plan.block_shape
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if code_format.packed else tuple(codes.shape)
    factor = scales.factor(plan, parts, shape)
    if factor is None:
        return plain, (codes,), False
    is_cut = factor.dim() > 0 and factor.shape[0] == shape[0] > 1
    is_plain = plan.tensor_scale < 0 and not plan.scale_shape and scale.dim() in (0, len(shape))
    if not is_plain or (is_cut and scale.shape[0] != shape[0]):  # two scales, or blocks of several rows
        scale, name, blocks = factor, "float32", ()
    scaled = dataclasses.replace(
        plain, scale=1, multiply_to_decode=plan.multiply_to_decode, block_shape=blocks, scales=((1, name),)
    )
    return scaled, (codes, scale), is_cut
