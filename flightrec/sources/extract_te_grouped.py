"""Takes Transformer Engine's grouped tensors apart: many members in one buffer, split on the device.

The buffers are kept as they are, with the splits beside them; ``codecs.grouped`` cuts them. Launches nothing, never
synchronises: how many rows a member has may be known to the device only.
"""

from __future__ import annotations

from typing import Any

import torch

from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import dtype_name
from flightrec.sources.extract_te_blocks import rht_words
from flightrec.sources.extract_te_info import QuantizerState, Words, format_name, info_of

_SCHEMES = (
    ("Float8Block", "float8_block"),
    ("MXFP8", "mxfp8"),
    ("NVFP4", "nvfp4"),
    ("Float8", "float8"),
)
"""Beginning of a quantizer's class name, and what its tensors are."""

_SCALE_FORMATS = {"mxfp8": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}


def grouped_parts(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    """The buffers of a ``GroupedTensor`` or its storage, one-dimensional, and how they are split.

    Returns:
        The parts, or None if there are no buffers. Statistics see only groups without padding: where members differ a
        buffer may end in memory that no member owns, and scales in blocks have padding between the members.
    """
    scheme = _scheme_of(quantizer)
    data = tensor.rowwise_data if tensor.rowwise_data is not None else tensor.columnwise_data
    if data is None:
        return None
    codes = dtype_name(data.dtype) if scheme == "identity" else format_name(getattr(quantizer, "dtype", None))
    swizzled = bool(getattr(tensor, "_with_gemm_swizzled_scales", False))
    components: dict[str, torch.Tensor] = {}
    formats: dict[str, str] = {}
    for prefix, name in (("", "rowwise_data"), ("columnwise_", "columnwise_data")):
        if getattr(tensor, name) is None:
            continue
        components[f"{prefix}data"] = getattr(tensor, name).detach()
        formats[f"{prefix}data"] = codes
        scale, amax = getattr(tensor, f"{prefix}scale_inv"), getattr(tensor, f"{prefix}amax")
        if scale is None and scheme == "float8":  # one for both directions
            scale = tensor.scale_inv if tensor.scale_inv is not None else tensor.columnwise_scale_inv
        if scale is not None:
            word = f"{prefix}swizzled_scale_inv" if swizzled else f"{prefix}scale_inv"
            components[word] = scale
            formats[word] = "uint8" if swizzled else _SCALE_FORMATS.get(scheme, dtype_name(scale.dtype))
        if amax is not None:
            components[f"{prefix}amax"] = amax
    splits = {name: getattr(tensor, name, None) for name in ("first_dims", "last_dims", "tensor_offsets")}
    components |= {n: s for n, s in splits.items() if isinstance(s, torch.Tensor) and s.device == data.device}
    more = _words(tensor, quantizer, scheme, splits)
    row = Words("grouped", codes, (), more) if tensor.rowwise_data is not None else None
    column = Words("grouped", codes, (), (*more, *rht_words(quantizer))) if tensor.columnwise_data is not None else None
    info = info_of(tensor, quantizer, state, row, column, dtype=tensor.fake_dtype)
    is_full = splits["first_dims"] is None and splits["last_dims"] is None and scheme in ("identity", "float8")
    return QuantizedParts(info, components, formats, is_understood=is_full)


def _scheme_of(quantizer: Any) -> str:
    name = type(quantizer).__name__
    if quantizer is None or name.startswith("Identity"):
        return "identity"
    return next((scheme for start, scheme in _SCHEMES if name.startswith(start)), name)


def _words(tensor: Any, quantizer: Any, scheme: str, splits: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What is constant: a number of rows that changes from iteration to iteration is left to the splits."""
    rows, columns = (int(size) for size in tensor.logical_shape)
    group = (-1 if splits["last_dims"] is None else rows, columns if splits["last_dims"] is None else -1)
    words: list[tuple[str, Any]] = [
        ("member", scheme),
        ("num_tensors", int(tensor.num_tensors)),
        ("group_shape", group),
    ]
    if scheme == "float8_block":
        words.append(("two_d", getattr(quantizer, "block_scaling_dim", 1) == 2))
    if scheme == "nvfp4":
        words.append(("e4m3_max", int(getattr(tensor, "nvfp4_e4m3_max", 448))))
        words.append(("row_scaled", bool(getattr(tensor, "row_scaled_nvfp4", False))))
    return tuple(words)
