"""What a feature is shown, sorted into what a recorder keeps: the tensor, its quantizations, and what replaced them.

Pure functions, called inside ``quiet`` on the training thread and on autograd's threads. Nothing is copied here, and
nothing outlives the call. Never synchronises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flightrec.sources.extract import is_quantized
from flightrec.sources.extract_te import identity_data
from flightrec.sources.observe import observe


class Shown(NamedTuple):
    """One record to be: at least one of the three is there.

    Attributes:
        part: empty for the tensor and its quantizations; ``rowwise`` or ``columnwise`` for what a product read instead.
        high_precision: plain tensor of any strides.
        quantized: row-wise, or both directions in one object.
        columnwise: another object for the other direction.
    """

    part: str
    high_precision: torch.Tensor | None = None
    quantized: object | None = None
    columnwise: object | None = None


class Operands(NamedTuple):
    """All records of one call.

    Attributes:
        records: of the call.
        device: they are on.
        reason: why there are none.
        at_quantizing: the call is that which quantized, since it shows what was quantized.
    """

    records: list[Shown]
    device: torch.device | None
    reason: str = ""
    at_quantizing: bool = False


def sort_operands(tensor: object, rowwise: object, columnwise: object) -> Operands:
    """Sort what ``inspect_tensor`` was given.

    Args:
        tensor: in high precision; None for FP8 parameters.
        rowwise: what the product reads along rows: a quantized tensor, a plain one (no autocast, a product in high
            precision, a modified tensor), or None.
        columnwise: the same for the other product; often the same object.
    """
    high_precision, own, reason = _observe(tensor)
    row_plain, row_quantized, row_reason = _observe(rowwise)
    column_plain, column_quantized, column_reason = (None, None, "") if columnwise is rowwise else _observe(columnwise)
    if row_quantized is None:
        row_quantized = own
    records = []
    if high_precision is not None or row_quantized is not None or column_quantized is not None:
        records.append(Shown("", high_precision, row_quantized, column_quantized))
    seen = [] if high_precision is None else [high_precision]
    for part, plain in (("rowwise", row_plain), ("columnwise", column_plain)):
        if plain is not None and not any(_is_same(plain, other) for other in seen):
            seen.append(plain)
            records.append(Shown(part, plain))
    if records and records[0].part and len(records) == 1:
        records[0] = records[0]._replace(part="")  # there is nothing that it stands instead of
    devices = (device_of(value) for value in (tensor, rowwise, columnwise))
    why = reason or row_reason or column_reason
    return Operands(records, next(filter(None, devices), None), why, at_quantizing=tensor is not None)


def _observe(value: object) -> tuple[torch.Tensor | None, object | None, str]:
    """What is plain in a value, what is quantized, and why neither."""
    if value is None:
        return None, None, ""
    if (held := identity_data(value)) is not None:
        return held, None, ""
    if is_quantized(value):  # storage objects are no torch tensors
        return None, value, ""
    if not isinstance(value, torch.Tensor):
        return None, value, ""  # whoever takes it apart says that it does not know the class
    observed = observe(value)
    return observed.plain, observed.quantized, observed.reason


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same memory read in the same way."""
    return (
        one.dtype == other.dtype
        and one.data_ptr() == other.data_ptr()
        and one.numel() == other.numel()
        and one.is_contiguous() == other.is_contiguous()
    )


def device_of(value: object) -> torch.device | None:
    """Where a tensor or a quantized object lies; None if it does not say."""
    device = getattr(value, "device", None)
    if isinstance(device, torch.device):
        return None if device.type == "meta" else device
    slots = getattr(value, "__dict__", {})
    return next((item.device for item in slots.values() if isinstance(item, torch.Tensor)), None)
