"""Torch reference of copy and statistics: any device, on the caller's thread and current stream.

Nothing here reads device data on the host, and no operation waits for the device; temporaries are the only allocations.
Callers hold ``torch.no_grad()``. Every other implementation is tested against this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flightrec.kernels import pieces, scales
from flightrec.kernels.formats import CODE_FORMATS, CodeFormat, as_bits, decode, is_nan, is_zero, unpack
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.kernels.replays import place_of
from flightrec.records import NUM_STATISTICS, Statistic

_Values = pieces.Values

CLIPPED_ABOVE = 1 + 2.0**-20
"""A scaled element is clipped beyond this multiple of the range: a scale that fits exactly is rounded itself."""


def capture(
    plan: CapturePlan,
    destination: Destination,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    slot: torch.Tensor,
    tick: torch.Tensor,
    valid_rows: int | torch.Tensor | None = None,
) -> None:
    """Copy a record into its slot and write its statistics row and stamp.

    Args:
        plan: what the parts mean.
        destination: where; owned by the ring.
        high_precision: any shape, dtype and strides, on the ring's device; or None.
        parts: quantized components in the plan's order, likewise.
        slot: int64 ``[1]`` on the ring's device: the slot to write. ``[2]`` for what takes turns in a captured graph:
            ``replays.Groups``.
        tick: int64 ``[1]`` on the ring's device: the stamp to write.
        valid_rows: only rows ``[0, n)`` of dimension 0 count in the statistics; copies are whole.
    """
    slot = place_of(slot)
    copy_components(destination, high_precision, parts, slot)
    row = statistics(plan, high_precision, parts, valid_rows)
    destination.statistics.index_copy_(0, slot, row.unsqueeze(0))
    destination.stamp.index_copy_(0, slot, tick)


def copy_components(
    destination: Destination, high_precision: torch.Tensor | None, parts: Sequence[torch.Tensor], slot: torch.Tensor
) -> None:
    """Deep copies in logical order of everything that has a place."""
    if high_precision is not None and destination.high_precision is not None:
        copy_one(destination.high_precision, high_precision, slot)
    for target, part in zip(destination.parts, parts, strict=True):
        if target is not None:
            copy_one(target, part, slot)


def copy_one(target: torch.Tensor, source: torch.Tensor, slot: torch.Tensor) -> None:
    """Copy ``source`` (any strides) into place ``slot`` (as of ``capture``) of ``target``, bit for bit."""
    if source.numel():
        target.index_copy_(0, place_of(slot), as_bits(source).unsqueeze(0))


def statistics(
    plan: CapturePlan,
    high_precision: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
    valid_rows: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole statistics row, float64 ``[C]`` on the inputs' device; NaN where a statistic does not apply."""
    tensors = [high_precision, *parts] if high_precision is not None else list(parts)
    device = tensors[0].device if tensors else torch.device("cpu")
    values: _Values = {}
    if high_precision is not None:
        values |= _high_precision(high_precision, valid_rows)
    if plan.codes >= 0:
        values |= _quantized(parts[plan.codes], plan.format, valid_rows)
        if plan.pairs and high_precision is not None and not pieces.is_expanded(parts[plan.codes]):
            values |= _pair(plan, high_precision, parts, valid_rows)
    if plan.scales:
        shape = (high_precision if high_precision is not None else parts[max(plan.codes, 0)]).shape
        counts = [scales.scale_nonfinite(plan, parts, at, shape, valid_rows) for at, _ in plan.scales]
        values[Statistic.SCALE_NONFINITE_COUNT] = torch.stack(counts).sum()
        values |= scales.scale_statistics(plan, parts, shape, valid_rows)
    values |= scales.amax_statistics(plan, parts)
    return _row(values, device)


def high_precision_statistics(x: torch.Tensor, valid_rows: int | torch.Tensor | None = None) -> torch.Tensor:
    """Statistics of a high-precision tensor.

    Args:
        x: any shape and strides; floating point, integer or bool. A complex element counts once; its sum is that
            of real and imaginary parts.
        valid_rows: only rows ``[0, n)`` of dimension 0 count; an int, or a one-element tensor on ``x``'s device.

    Returns:
        float64 ``[C]`` on ``x``'s device.
    """
    return _row(_high_precision(x, valid_rows), x.device)


def quantized_statistics(
    codes: torch.Tensor, format_name: str, valid_rows: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Statistics of codes alone: counts of all, NaN, infinite, zero and saturated codes.

    Args:
        codes: the format's own dtype or uint8; two codes a byte for ``float4_e2m1fn_x2``.
        format_name: a name in ``formats.CODE_FORMATS``; of another format only the number of elements is told.
        valid_rows: as in ``high_precision_statistics``.

    Returns:
        float64 ``[C]`` on the codes' device.
    """
    return _row(_quantized(codes, format_name, valid_rows), codes.device)


# -- the three groups of statistics, as 0-dimensional tensors by column


def _high_precision(x: torch.Tensor, valid_rows: int | torch.Tensor | None) -> _Values:
    """All pieces together, each bounded in size: temporaries never are a large tensor's size again."""
    x, valid_rows, copies = pieces.distinct(x, valid_rows)
    values: _Values = {}
    for piece, rows in pieces.pieces(x, valid_rows):
        found = _piece_of_high_precision(piece, rows)
        values = pieces.merged(values, found) if values else found
    return values if isinstance(copies, int) and copies == 1 else pieces.repeated(values, copies)


def _piece_of_high_precision(x: torch.Tensor, valid_rows: int | torch.Tensor | None) -> _Values:
    x, skipped = pieces.valid_region(x, valid_rows)
    if x.is_complex():
        return _complex(x, skipped)
    x = _as_number(x)
    numel = x.numel()
    if not x.is_floating_point():
        x = x.to(torch.float64)
    positive, negative, nan = x == math.inf, x == -math.inf, x != x
    finite = torch.where(positive | negative | nan, 0, x)
    values: _Values = {
        Statistic.NUMEL: _constant(numel, x) - skipped,
        Statistic.NAN_COUNT: nan.sum(),
        Statistic.POSITIVE_INF_COUNT: positive.sum(),
        Statistic.NEGATIVE_INF_COUNT: negative.sum(),
        Statistic.ZERO_COUNT: (x == 0).sum() - skipped,
        Statistic.SUM: finite.sum(dtype=torch.float64),
        Statistic.SUM_OF_SQUARES: _sum_of_squares(finite),
    }
    if numel:
        low, high = torch.aminmax(finite)
        amax = torch.maximum(-low, high).abs().to(torch.float64)  # abs: the maximum of zeros may be -0.0
        values[Statistic.AMAX] = _where_finite(values, amax)
    return values


def _complex(x: torch.Tensor, skipped: torch.Tensor | int) -> _Values:
    """A complex element counts once: NaN or infinite if a part of it is, zero if both are; amax is of magnitudes."""
    words = torch.view_as_real(x.resolve_conj()).to(torch.float64)  # magnitudes of finite float32 may exceed float32
    is_nan = (words != words).any(-1)
    positive = (words == math.inf).any(-1) & ~is_nan
    negative = (words == -math.inf).any(-1) & ~is_nan & ~positive
    finite = torch.where((is_nan | positive | negative).unsqueeze(-1), 0, words)
    values: _Values = {
        Statistic.NUMEL: _constant(x.numel(), x) - skipped,
        Statistic.NAN_COUNT: is_nan.sum(),
        Statistic.POSITIVE_INF_COUNT: positive.sum(),
        Statistic.NEGATIVE_INF_COUNT: negative.sum(),
        Statistic.ZERO_COUNT: (words == 0).all(-1).sum() - skipped,
        Statistic.SUM: finite.sum(),
        Statistic.SUM_OF_SQUARES: _sum_of_squares(finite),
    }
    if x.numel():
        values[Statistic.AMAX] = _where_finite(values, torch.hypot(finite[..., 0], finite[..., 1]).amax())
    return values


def _where_finite(values: _Values, amax: torch.Tensor) -> torch.Tensor:
    nonfinite = sum(values[c] for c in (Statistic.NAN_COUNT, *_INFINITIES))
    return torch.where(values[Statistic.NUMEL] > nonfinite, amax, math.nan)


_INFINITIES = (Statistic.POSITIVE_INF_COUNT, Statistic.NEGATIVE_INF_COUNT)


def _quantized(codes: torch.Tensor, format_name: str, valid_rows: int | torch.Tensor | None) -> _Values:
    code_format = CODE_FORMATS.get(format_name)
    codes, valid_rows, copies = pieces.distinct(codes, valid_rows)
    values: _Values = {}
    for piece, rows in pieces.pieces(codes, valid_rows):
        found = _piece_of_codes(piece, code_format, rows)
        values = pieces.merged(values, found) if values else found
    return values if isinstance(copies, int) and copies == 1 else pieces.repeated(values, copies)


def _piece_of_codes(
    codes: torch.Tensor, code_format: CodeFormat | None, valid_rows: int | torch.Tensor | None
) -> _Values:
    if code_format is None:
        region, skipped = pieces.valid_region(as_bits(codes), valid_rows)
        return {Statistic.QUANTIZED_NUMEL: _constant(region.numel(), region) - skipped}
    bits, skipped = pieces.valid_region(codes.view(torch.uint8), valid_rows)
    if code_format.packed:
        bits, skipped = unpack(bits), 2 * skipped
    nothing = _constant(0, bits)
    zero = nothing if code_format.zero_mask is None else is_zero(bits, code_format).sum() - skipped
    saturated = (bits & code_format.magnitude_mask) == code_format.largest
    infinity = (bits & code_format.magnitude_mask) == code_format.infinity if code_format.infinity else None
    return {
        Statistic.QUANTIZED_NUMEL: _constant(bits.numel(), bits) - skipped,
        Statistic.QUANTIZED_NAN_COUNT: nothing if code_format.nan_first is None else is_nan(bits, code_format).sum(),
        Statistic.QUANTIZED_INF_COUNT: nothing if infinity is None else infinity.sum(),
        Statistic.QUANTIZED_ZERO_COUNT: zero,
        Statistic.QUANTIZED_SATURATED_COUNT: saturated.sum(),
        Statistic.QUANTIZED_LARGEST: torch.full((), code_format.largest_value, dtype=torch.float64, device=bits.device),
    }


def _pair(
    plan: CapturePlan,
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    valid_rows: int | torch.Tensor | None,
) -> _Values:
    code_format, codes = CODE_FORMATS[plan.format], parts[plan.codes]
    bits = codes.view(torch.uint8)
    decoded = decode(bits, code_format)
    zero = is_zero(unpack(bits) if code_format.packed else bits, code_format)
    x, decoded, zero = (pieces.valid_region(t, valid_rows, _num_rows(x))[0] for t in (x, decoded, zero))
    x = x.reshape(decoded.shape)
    values: _Values = {Statistic.UNDERFLOW_COUNT: (zero & (x != 0) & torch.isfinite(x)).sum()}
    if plan.scale < 0 and not plan.unscaled:
        return values
    factor = None
    if not plan.unscaled:
        full_shape = (codes.shape[0], *decoded.shape[1:]) if decoded.dim() else decoded.shape
        factor = _cropped(scales.factor(plan, parts, full_shape), decoded.shape)
        if factor is None:
            return values
        is_code = dict(plan.scales).get(plan.scale, "") in CODE_FORMATS
        judged = _cropped(scales.second_factor(plan, parts, full_shape), decoded.shape) if is_code else factor
        if judged is not None:
            values[Statistic.ZERO_SCALE_COUNT] = ((judged == 0) & (x != 0) & torch.isfinite(x)).sum()
        decoded = decoded * factor if plan.multiply_to_decode else decoded / factor
    error = decoded - x  # float64 when x is
    values[Statistic.SQUARED_ERROR] = _sum_of_squares(torch.where(torch.isfinite(error), error, 0))
    return values | _range(x, code_format.largest_value, factor, multiply=plan.multiply_to_decode)


def _cropped(factor: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """The factor of the valid rows only."""
    if factor is not None and shape and factor.dim() == len(shape) and factor.shape[0] > shape[0]:
        return factor.narrow(0, 0, shape[0])
    return factor


def _range(x: torch.Tensor, largest: float, factor: torch.Tensor | None, *, multiply: bool) -> _Values:
    """How far the scaled elements reach beyond the format's range."""
    if factor is None:
        factor = torch.ones((), dtype=torch.float32, device=x.device)
    limit = factor * largest if multiply else largest / factor
    ratio = (x if x.dtype == torch.float64 else x.to(torch.float32)).abs() / limit
    ratio = torch.where(torch.isfinite(ratio), ratio, 0)
    return {
        Statistic.CLIPPED_COUNT: (ratio > CLIPPED_ABOVE).sum(),
        Statistic.RANGE_RATIO: ratio.amax() if x.numel() else _constant(0, x),
    }


# -- small pieces


def _row(values: _Values, device: torch.device) -> torch.Tensor:
    absent = torch.full((), math.nan, dtype=torch.float64, device=device)
    return torch.stack([values[c].to(torch.float64) if c in values else absent for c in range(NUM_STATISTICS)])


def _constant(value: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=torch.int64, device=like.device)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)  # accumulates in float64, without a wide copy
    return norm.square()


def _as_number(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    return x.to(torch.float32) if x.dtype.itemsize == 1 and x.is_floating_point() else x


def _num_rows(x: torch.Tensor) -> int:
    return x.shape[0] if x.dim() else 1
