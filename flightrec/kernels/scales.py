"""Scales: their words as numbers, spread over what they scale, and what they say by themselves.

A tensor may have two levels of scale, as NVFP4 has: one word a block, and a float32 word over all blocks or over a row.
What decodes is their product, and that is what the statistics are about. Scales of tensors with more than two
dimensions may be laid out over the flattened leading ones, the last block of a dimension need not be full, and words
may lie in the order in which tensor cores read them. Any device, on the caller's thread and current stream; nothing is
read on the host and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flightrec.kernels import pieces
from flightrec.kernels.formats import CODE_FORMATS, decode, is_nan
from flightrec.kernels.plan import CapturePlan
from flightrec.records import Statistic

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Words of a tile in the order that block-scaled products read: 32 x 16 bytes, rows 32 apart beside each other."""


def factor(plan: CapturePlan, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    """What decodes each element, in the scale's own direction: float32 that broadcasts against ``shape``.

    None without a scale, or where the shapes do not tell how it lies.
    """
    words = None if plan.scale < 0 else combined(plan, parts)
    return None if words is None else expand_scale(words, shape, plan.block_shape)


def combined(plan: CapturePlan, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The words of both scales as one, float32 in the first one's shape; None if the shapes do not tell how."""
    words = scale_values(parts[plan.scale], plan)
    if plan.tensor_scale < 0:
        return words
    second = _second(parts[plan.tensor_scale], words.shape)
    if second is None:
        return None
    return words * second if plan.multiply_to_decode else words / second


def second_factor(plan: CapturePlan, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    """The second scale alone, as ``factor``; None without one."""
    if plan.tensor_scale < 0:
        return None
    words = _words_shape(plan, parts)
    second = _second(parts[plan.tensor_scale], words)
    if second is None or second.numel() == 1:
        return None if second is None else second.reshape(())
    return expand_scale(second.expand(words), shape, plan.block_shape)


def _words_shape(plan: CapturePlan, parts: Sequence[torch.Tensor]) -> Sequence[int]:
    if not plan.scale_shape:
        return parts[plan.scale].shape
    return plan.scale_shape[::-1] if plan.scale_transposed else plan.scale_shape


def _second(scale: torch.Tensor, words: Sequence[int]) -> torch.Tensor | None:
    """The second scale in a shape that broadcasts against the first one's: one word, or one a row."""
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == len(words):
        return scale if all(have in (1, size) for have, size in zip(scale.shape, words, strict=True)) else None
    if len(words) > 1 and scale.dim() == 1 and scale.numel() == math.prod(words[:-1]):
        return scale.reshape(*words[:-1], 1)
    return None


def scale_values(scale: torch.Tensor, plan: CapturePlan) -> torch.Tensor:
    """The first scale's float32 values in logical order, decoded when they are codes themselves."""
    name = dict(plan.scales).get(plan.scale, "")
    code_format = CODE_FORMATS.get(name)
    words = scale.to(torch.float32) if code_format is None else decode(scale.view(torch.uint8), code_format)
    return in_order(words, plan)


def in_order(words: torch.Tensor, plan: CapturePlan) -> torch.Tensor:
    """Words, or codes, of the first scale in the order of what they scale."""
    if not plan.scale_shape:
        return words
    words = in_rows(words, plan.scale_shape)
    return words.t() if plan.scale_transposed else words


def in_rows(tiles: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Words of the tensor cores' order (128 x 4 tiles, padded) as rows ``[rows, columns]``; a copy."""
    rows, columns = shape
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = tiles.reshape(down, across, TILE_ROWS // 4, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns]


def tiled_numel(shape: Sequence[int]) -> int:
    """Words that ``in_rows`` reads for this shape."""
    rows, columns = shape
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def expand_scale(scale: torch.Tensor, shape: Sequence[int], block_shape: Sequence[int]) -> torch.Tensor | None:
    """``scale`` in a shape that broadcasts against ``shape``, or None when the shapes do not tell how.

    One value for all, one a row or column (size-1 dimensions), or one a block: then a block's extent is
    ``block_shape``'s, if that covers the tensor (the last block need not be full), or the ratio of the shapes. Scales
    in two dimensions for a tensor of more lie over its flattened leading dimensions.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 2 and len(shape) > 2:
        flat = (math.prod(shape[:-1]), shape[-1])
        full = expand_scale(scale, flat, block_shape[-2:])
        if full is None:
            return None
        return full.reshape(*(shape[:-1] if full.shape[0] == flat[0] else [1] * (len(shape) - 1)), full.shape[1])
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


def scale_statistics(
    plan: CapturePlan, parts: Sequence[torch.Tensor], shape: Sequence[int], valid_rows: int | torch.Tensor | None
) -> pieces.Values:
    """What the words that decode say by themselves, as 0-dimensional tensors by column.

    ``shape`` and ``valid_rows`` as in ``scale_nonfinite``.
    """
    if plan.scale < 0 or not parts[plan.scale].numel():
        return {}
    first = scale_values(parts[plan.scale], plan)
    whole = first if plan.tensor_scale < 0 else combined(plan, parts)
    if whole is None:
        return {}
    words = _valid_words(whole, shape, plan.block_shape, valid_rows)
    values: pieces.Values = {}
    if words.numel():
        finite = torch.isfinite(words)
        some = finite.any()
        low, high = torch.where(finite, words, math.inf).amin(), torch.where(finite, words, -math.inf).amax()
        values[Statistic.SCALE_MIN] = torch.where(some, low, math.nan)
        values[Statistic.SCALE_MAX] = torch.where(some, high, math.nan)
        if plan.inverse >= 0:
            own = words if whole is first else _valid_words(first, shape, plan.block_shape, valid_rows)
            inverse = _valid_words(parts[plan.inverse].to(torch.float32), shape, plan.block_shape, valid_rows)
            judged = torch.isfinite(own) & torch.isfinite(inverse) & ((own != 0) | (inverse != 0))
            values[Statistic.SCALE_INVERSE_ERROR] = torch.where(judged, (own * inverse - 1).abs(), 0).amax()
    if plan.history >= 0 and whole.numel() == 1 and plan.format in CODE_FORMATS and parts[plan.history].numel():
        past = parts[plan.history].to(torch.float32)
        past = torch.where(torch.isfinite(past), past, 0).amax()
        largest, word = CODE_FORMATS[plan.format].largest_value, whole.reshape(())
        ratio = past / (word * largest if plan.multiply_to_decode else largest / word)
        values[Statistic.HISTORY_RATIO] = torch.where(torch.isfinite(ratio), ratio, math.nan)
    return values


def amax_statistics(plan: CapturePlan, parts: Sequence[torch.Tensor]) -> pieces.Values:
    """The quantizer's own amax, and the largest of those before it; NaN where no word is finite."""
    values: pieces.Values = {}
    for statistic, at in ((Statistic.QUANTIZER_AMAX, plan.amax), (Statistic.AMAX_HISTORY_MAX, plan.history)):
        if at >= 0 and parts[at].numel():
            words = parts[at].to(torch.float32)
            largest = torch.where(torch.isfinite(words), words, -math.inf).amax()
            values[statistic] = torch.where(largest > -math.inf, largest, math.nan)
    return values


def scale_nonfinite(
    plan: CapturePlan,
    parts: Sequence[torch.Tensor],
    at: int,
    shape: Sequence[int],
    valid_rows: int | torch.Tensor | None,
) -> torch.Tensor:
    """How many words of a scale component are NaN or infinite, a 0-dimensional tensor on its device.

    Args:
        plan: what the parts mean; one of ``plan.scales`` is at ``at``.
        parts: the components.
        at: position of the scale.
        shape: of the tensor that is scaled; where the scale is laid out by rows or blocks of rows, only those that
            touch ``valid_rows`` count.
        valid_rows: rows of dimension 0 that count.
    """
    scale, code_format = parts[at], CODE_FORMATS.get(dict(plan.scales)[at])
    if code_format is None and not scale.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=scale.device)
    words = scale if code_format is None else scale.view(torch.uint8)
    if at == plan.scale:
        words = in_order(words, plan)
    if valid_rows is not None:
        rows = _row_blocks(words.shape, shape, plan.block_shape)
        if rows is not None:
            words = pieces.valid_region(words, _num_words(valid_rows, *rows))[0]
    if code_format is None:
        return (~torch.isfinite(words)).sum()
    count = torch.zeros((), dtype=torch.int64, device=scale.device)
    if code_format.nan_first is not None:
        count = count + is_nan(words, code_format).sum()
    if code_format.infinity is not None:
        count = count + ((words & code_format.magnitude_mask) == code_format.infinity).sum()
    return count


def _valid_words(
    words: torch.Tensor, shape: Sequence[int], block_shape: Sequence[int], valid_rows: int | torch.Tensor | None
) -> torch.Tensor:
    """The scale's words that touch valid rows; NaN in place of the others where their number is on the device."""
    rows = None if valid_rows is None else _row_blocks(words.shape, shape, block_shape)
    if valid_rows is None or rows is None:
        return words
    count = _num_words(valid_rows, *rows)
    if isinstance(count, int):
        return words.narrow(0, 0, min(max(count, 0), words.shape[0]))
    inside = torch.arange(words.shape[0], device=words.device) < count.reshape(())
    return torch.where(inside.reshape(-1, *([1] * (words.dim() - 1))), words, math.nan)


def _num_words(valid_rows: int | torch.Tensor, own_rows: int, block: int) -> int | torch.Tensor:
    return (valid_rows * own_rows + (block - 1)) // block


def _row_blocks(scale_shape: Sequence[int], shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows of the scale's own counting in a row of dimension 0, and how many of them share a word along dimension 0.

    None where the scale is not laid out by rows, or blocks of rows, of what it scales: then all its words count.
    """
    if not scale_shape or scale_shape[0] <= 1 or not shape:
        return None
    is_flat = len(scale_shape) == 2 and len(shape) > 2
    own_rows = math.prod(shape[1:-1]) if is_flat else 1
    total, count = shape[0] * own_rows, scale_shape[0]
    block = 0
    if is_flat and len(block_shape) > 1:
        block = block_shape[-2]
    elif not is_flat and len(block_shape) == len(shape):
        block = block_shape[0]
    if block and -(-total // block) == count:
        return own_rows, block
    return None if total % count or not total else (own_rows, total // count)
