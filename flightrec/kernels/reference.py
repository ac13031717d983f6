"""Torch reference of copy and statistics: any device, on the caller's thread and current stream.

Nothing here reads device data on the host, and no operation waits for the device; temporaries are the only allocations.
Callers hold ``torch.no_grad()``. Every other implementation is tested against this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flightrec.kernels import pieces
from flightrec.kernels.formats import CODE_FORMATS, CodeFormat, as_bits
from flightrec.kernels.plan import CapturePlan, Destination
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
        slot: int64 ``[1]`` on the ring's device: the slot to write.
        tick: int64 ``[1]`` on the ring's device: the stamp to write.
        valid_rows: only rows ``[0, n)`` of dimension 0 count in the statistics; copies are whole.
    """
    copy_components(destination, high_precision, parts, slot)
    row = statistics(plan, high_precision, parts, valid_rows)
    destination.statistics.index_copy_(0, slot, row.unsqueeze(0))
    destination.stamp.index_copy_(0, slot, tick)


def copy_components(
    destination: Destination, high_precision: torch.Tensor | None, parts: Sequence[torch.Tensor], slot: torch.Tensor
) -> None:
    """Deep copies in logical order of everything that has a place."""
    if high_precision is not None and destination.high_precision is not None:
        _copy(destination.high_precision, high_precision, slot)
    for target, part in zip(destination.parts, parts, strict=True):
        if target is not None:
            _copy(target, part, slot)


def _copy(target: torch.Tensor, source: torch.Tensor, slot: torch.Tensor) -> None:
    if source.numel():
        target.index_copy_(0, slot, as_bits(source).unsqueeze(0))


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
            scale = parts[plan.scale] if plan.scale >= 0 else None
            values |= _pair(plan, high_precision, parts[plan.codes], scale, valid_rows)
    if plan.scales:
        rows = _num_rows(high_precision if high_precision is not None else parts[max(plan.codes, 0)])
        counts = [scale_nonfinite(parts[at], name, rows, valid_rows) for at, name in plan.scales]
        values[Statistic.SCALE_NONFINITE_COUNT] = torch.stack(counts).sum()
        values |= scale_statistics(plan, parts, rows, valid_rows)
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


def decode(codes: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    """Codes as float32, exactly, without their scale; packed codes double the last dimension."""
    if not code_format.packed:
        assert code_format.dtype is not None
        return codes.view(code_format.dtype).to(torch.float32)
    nibbles = _unpack(codes).to(torch.int16)
    bits = ((nibbles & 0x8) << 12) | ((nibbles & 0x7) << 9)  # the same value as float16, times 2^-14
    return bits.view(torch.float16).to(torch.float32) * 16384.0


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
    x, skipped = _valid_region(x, valid_rows)
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
        region, skipped = _valid_region(as_bits(codes), valid_rows)
        return {Statistic.QUANTIZED_NUMEL: _constant(region.numel(), region) - skipped}
    bits, skipped = _valid_region(codes.view(torch.uint8), valid_rows)
    if code_format.packed:
        bits, skipped = _unpack(bits), 2 * skipped
    nothing = _constant(0, bits)
    zero = nothing if code_format.zero_mask is None else _is_zero(bits, code_format).sum() - skipped
    saturated = (bits & code_format.magnitude_mask) == code_format.largest
    infinity = (bits & code_format.magnitude_mask) == code_format.infinity if code_format.infinity else None
    return {
        Statistic.QUANTIZED_NUMEL: _constant(bits.numel(), bits) - skipped,
        Statistic.QUANTIZED_NAN_COUNT: nothing if code_format.nan_first is None else _is_nan(bits, code_format).sum(),
        Statistic.QUANTIZED_INF_COUNT: nothing if infinity is None else infinity.sum(),
        Statistic.QUANTIZED_ZERO_COUNT: zero,
        Statistic.QUANTIZED_SATURATED_COUNT: saturated.sum(),
        Statistic.QUANTIZED_LARGEST: torch.full((), code_format.largest_value, dtype=torch.float64, device=bits.device),
    }


def _pair(
    plan: CapturePlan,
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    valid_rows: int | torch.Tensor | None,
) -> _Values:
    code_format = CODE_FORMATS[plan.format]
    bits = codes.view(torch.uint8)
    decoded = decode(bits, code_format)
    zero = _is_zero(_unpack(bits) if code_format.packed else bits, code_format)
    x, decoded, zero = (_valid_region(t, valid_rows, _num_rows(x))[0] for t in (x, decoded, zero))
    x = x.reshape(decoded.shape)
    values: _Values = {Statistic.UNDERFLOW_COUNT: (zero & (x != 0) & torch.isfinite(x)).sum()}
    if scale is None and not plan.unscaled:
        return values
    factor = None
    if scale is not None:
        full_shape = (codes.shape[0], *decoded.shape[1:]) if decoded.dim() else decoded.shape
        factor = expand_scale(scale_values(scale, plan), full_shape, plan.block_shape)
        if factor is None:
            return values
        if factor.dim() == decoded.dim() and decoded.dim() and factor.shape[0] > decoded.shape[0]:
            factor = factor.narrow(0, 0, decoded.shape[0])
        is_code = dict(plan.scales).get(plan.scale, "") in CODE_FORMATS
        if not is_code:
            values[Statistic.ZERO_SCALE_COUNT] = ((factor == 0) & (x != 0) & torch.isfinite(x)).sum()
        decoded = decoded * factor if plan.multiply_to_decode else decoded / factor
    error = decoded - x  # float64 when x is
    values[Statistic.SQUARED_ERROR] = _sum_of_squares(torch.where(torch.isfinite(error), error, 0))
    return values | _range(x, code_format.largest_value, factor, multiply=plan.multiply_to_decode)


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


def scale_statistics(
    plan: CapturePlan, parts: Sequence[torch.Tensor], rows: int, valid_rows: int | torch.Tensor | None
) -> _Values:
    """What the words of the scale that decodes say by themselves, as 0-dimensional tensors by column.

    ``rows`` and ``valid_rows`` as in ``scale_nonfinite``.
    """
    if plan.scale < 0 or not parts[plan.scale].numel():
        return {}
    whole = scale_values(parts[plan.scale], plan)
    words = _valid_words(whole, rows, valid_rows)
    finite = torch.isfinite(words)
    some = finite.any()
    values: _Values = {}
    if words.numel():
        low, high = torch.where(finite, words, math.inf).amin(), torch.where(finite, words, -math.inf).amax()
        values[Statistic.SCALE_MIN] = torch.where(some, low, math.nan)
        values[Statistic.SCALE_MAX] = torch.where(some, high, math.nan)
        if plan.inverse >= 0:
            inverse = _valid_words(parts[plan.inverse].to(torch.float32), rows, valid_rows)
            judged = finite & torch.isfinite(inverse) & ((words != 0) | (inverse != 0))
            error = (words * inverse - 1).abs()
            values[Statistic.SCALE_INVERSE_ERROR] = torch.where(judged, error, 0).amax()
    if plan.history >= 0 and whole.numel() == 1 and plan.format in CODE_FORMATS and parts[plan.history].numel():
        past = parts[plan.history].to(torch.float32)
        past = torch.where(torch.isfinite(past), past, 0).amax()
        largest, factor = CODE_FORMATS[plan.format].largest_value, whole.reshape(())
        ratio = past / (factor * largest if plan.multiply_to_decode else largest / factor)
        values[Statistic.HISTORY_RATIO] = torch.where(torch.isfinite(ratio), ratio, math.nan)
    return values


def _valid_words(words: torch.Tensor, rows: int, valid_rows: int | torch.Tensor | None) -> torch.Tensor:
    """The scale's words that touch valid rows; NaN in place of the others where their number is on the device."""
    if valid_rows is None or not _by_rows(words, rows):
        return words
    block = rows // words.shape[0]
    count = (valid_rows + (block - 1)) // block
    if isinstance(count, int):
        return words.narrow(0, 0, min(max(count, 0), words.shape[0]))
    inside = torch.arange(words.shape[0], device=words.device) < count.reshape(())
    return torch.where(inside.reshape(-1, *([1] * (words.dim() - 1))), words, math.nan)


def _by_rows(scale: torch.Tensor, rows: int) -> bool:
    """Whether a scale is laid out by rows, or blocks of rows, of what it scales."""
    return scale.dim() > 0 and scale.shape[0] > 1 and not rows % scale.shape[0]


def scale_values(scale: torch.Tensor, plan: CapturePlan) -> torch.Tensor:
    """The scale's float32 values, decoded when they are codes themselves."""
    name = dict(plan.scales).get(plan.scale, "")
    code_format = CODE_FORMATS.get(name)
    return scale.to(torch.float32) if code_format is None else decode(scale.view(torch.uint8), code_format)


def expand_scale(scale: torch.Tensor, shape: Sequence[int], block_shape: Sequence[int]) -> torch.Tensor | None:
    """``scale`` in a shape that broadcasts against ``shape``, or None when the shapes do not tell how.

    One value for all, one a row or column (size-1 dimensions), or one a block: then a block's extent is
    ``block_shape``'s, if that covers the tensor (the last block need not be full), or the ratio of the shapes.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() != len(shape):
        return None
    blocks = []
    for at, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
        if count in (1, size):
            blocks.append(1)
        elif at < len(block_shape) and block_shape[at] * count >= size:
            blocks.append(block_shape[at])
        elif count and size % count == 0:
            blocks.append(size // count)
        else:
            return None
    if all(block == 1 for block in blocks):
        return scale
    spread = scale.reshape([extent for count in scale.shape for extent in (count, 1)])
    spread = spread.expand([extent for pair in zip(scale.shape, blocks, strict=True) for extent in pair])
    full = spread.reshape([count * block for count, block in zip(scale.shape, blocks, strict=True)])
    for at, size in enumerate(shape):
        if full.shape[at] > size:
            full = full.narrow(at, 0, size)
    return full


def scale_nonfinite(scale: torch.Tensor, name: str, rows: int, valid_rows: int | torch.Tensor | None) -> torch.Tensor:
    """How many words of a scale component are NaN or infinite, a 0-dimensional tensor on its device.

    ``rows`` is the first dimension of the tensor that is scaled; where the scale is laid out by rows or blocks of rows,
    only those that touch ``valid_rows`` count.
    """
    if not _by_rows(scale, rows):
        valid_rows = None  # not laid out by rows: all of it counts
    code_format = CODE_FORMATS.get(name)
    if code_format is None:
        if not scale.is_floating_point():
            return _constant(0, scale)
        return (~torch.isfinite(_scale_region(scale, rows, valid_rows))).sum()
    bits = _scale_region(scale.view(torch.uint8), rows, valid_rows)
    count = _constant(0, bits)
    if code_format.nan_first is not None:
        count = count + _is_nan(bits, code_format).sum()
    if code_format.infinity is not None:
        count = count + ((bits & code_format.magnitude_mask) == code_format.infinity).sum()
    return count


def _scale_region(scale: torch.Tensor, rows: int, valid_rows: int | torch.Tensor | None) -> torch.Tensor:
    if valid_rows is None:
        return scale
    block = rows // scale.shape[0]
    return _valid_region(scale, (valid_rows + (block - 1)) // block)[0]


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


def _valid_region(
    x: torch.Tensor, valid_rows: int | torch.Tensor | None, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Rows ``[0, n)`` of ``x``, and how many elements were zeroed instead of cut off (a device-side ``n``).

    ``rows`` is the number of rows that ``n`` counts, where ``x`` spreads each over several rows of its own.
    """
    if valid_rows is None or x.dim() == 0:
        return x, 0
    own = x.shape[0]
    ratio = own // rows if rows else 1
    if isinstance(valid_rows, int):
        return x.narrow(0, 0, min(max(valid_rows * ratio, 0), own)), 0
    count = (valid_rows.reshape(()) * ratio).clamp(0, own)
    inside = torch.arange(own, device=x.device) < count
    region = torch.where(inside.reshape(-1, *([1] * (x.dim() - 1))), x, 0)
    return region, (own - count) * (x.numel() // own if own else 0)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2) if packed.dim() else packed & 0xF


def _is_nan(bits: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    assert code_format.nan_first is not None
    masked = bits & code_format.nan_mask
    if code_format.nan_first == code_format.nan_last:
        return masked.eq(code_format.nan_last)
    return masked.ge(code_format.nan_first)  # a range ends at the largest masked code


def _is_zero(bits: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    if code_format.zero_mask is None:
        return torch.zeros_like(bits, dtype=torch.bool)
    return (bits & code_format.zero_mask).eq(0)
