"""Rows of each expert, as the kernels take them. On the caller's thread; never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flightrec.ring.layout import QuantizedParts


def splits_on(
    device: torch.device,
    splits: torch.Tensor | Sequence[int],
    high_precision: torch.Tensor | None,
    parts: QuantizedParts | None,
) -> torch.Tensor:
    """Token counts as int64 ``[E]`` on ``device``.

    Args:
        device: of the tensor that they split.
        splits: integers ``[E]``, a sequence, or a tensor on ``device`` or in host memory.
        high_precision: the tensor whose rows they count, or None.
        parts: its quantized form, or None.

    Raises:
        ValueError: they are no list of integers, lie on another device, or the tensor has no rows.
    """
    if not isinstance(splits, torch.Tensor):
        splits = torch.tensor([int(count) for count in splits], dtype=torch.int64, device="cpu")
    splits = splits.detach()
    if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool:
        raise ValueError(
            f"splits: expected integers [number of experts], got {splits.dtype} of shape {list(splits.shape)}"
        )
    tensors = [high_precision] if high_precision is not None else list(parts.components.values()) if parts else []
    if not any(tensor.dim() for tensor in tensors):
        raise ValueError("splits: expected a tensor with rows to split, got one without dimensions")
    if splits.device == device or (splits.device.type == device.type == "cpu"):
        return splits.to(torch.int64)
    if splits.device.type != "cpu":
        raise ValueError(f"splits: expected them on {device} or in host memory, got {splits.device}")
    return splits.to(torch.int64).pin_memory().to(device, non_blocking=True)
