"""Takes Transformer Engine's tensors in blocks apart: FP8 blocks, MXFP8, NVFP4; knows their private fields.

Both sides come as views in logical order, without padding. Only column-wise NVFP4, whose codes are packed along the
rows, and scales in the tensor cores' order stay as they are. Launches one multiplication for NVFP4's second scale and
nothing else, never synchronises.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flightrec.codecs import te_layout
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import dtype_name
from flightrec.sources.extract_te_info import QuantizerState, Words, format_name, info_of

# The signs of Transformer Engine's random Hadamard transform, which its reference quantizers hold as a flag only.
_RHT_SIGN_MASK = 0b1101_0111_1110_1000


def block_parts(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    """``Float8BlockwiseQTensor``: blocks of 1 x 128 or 128 x 128 with float32 scales."""
    two_d = bool(tensor._is_2D_scaled)
    taken = Blocks("float8_block", format_name(tensor._fp8_dtype), "", two_d=two_d)
    column = tensor._columnwise_data
    if column is not None:  # held transposed
        column = column.t() if column.dim() <= 2 else column.reshape(column.shape[0], -1).t()
        shape = (*tensor._columnwise_data.shape[1:], tensor._columnwise_data.shape[0])
        taken.add_columnwise(column, tensor._columnwise_scale_inv, shape)
    if tensor._rowwise_data is not None:
        taken.add_rowwise(tensor._rowwise_data, tensor._rowwise_scale_inv, tuple(tensor._rowwise_data.shape))
    return taken.parts(tensor, quantizer, state, tensor._dtype)


def mxfp8_parts(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    """``MXFP8Tensor``: blocks of 1 x 32 with powers of two."""
    swizzled = bool(tensor._with_gemm_swizzled_scales)
    taken = Blocks("mxfp8", format_name(tensor._fp8_dtype), "float8_e8m0fnu", swizzled=swizzled)
    column = tensor._columnwise_data
    if column is not None:
        flat = column if column.dim() <= 2 else column.reshape(-1, column.shape[-1])
        taken.add_columnwise(flat, tensor._columnwise_scale_inv, tuple(column.shape))
    if tensor._rowwise_data is not None:
        taken.add_rowwise(tensor._rowwise_data, tensor._rowwise_scale_inv, tuple(tensor._rowwise_data.shape))
    return taken.parts(tensor, quantizer, state, tensor._dtype)


def nvfp4_parts(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    """``NVFP4Tensor``: blocks of 1 x 16 with E4M3 scales under a second scale."""
    taken = Blocks(
        "nvfp4",
        format_name(tensor._fp4_dtype),
        "float8_e4m3fn",
        swizzled=bool(tensor._with_gemm_swizzled_scales),
        e4m3_max=int(getattr(tensor, "_nvfp4_e4m3_max", 448)),
        more=(
            ("row_scaled", bool(getattr(tensor, "_row_scaled_nvfp4", False))),
            ("four_over_six", bool(getattr(tensor, "_nvfp4_use_4over6", False))),
        ),
    )
    taken.columnwise_more = rht_words(quantizer)
    _add_fp4(taken, tensor._rowwise_data, tensor._rowwise_scale_inv, tensor._amax_rowwise, columnwise=False)
    _add_fp4(taken, tensor._columnwise_data, tensor._columnwise_scale_inv, tensor._amax_columnwise, columnwise=True)
    return taken.parts(tensor, quantizer, state, tensor._dtype)


def nvfp4_ref_parts(tensor: Any, quantizer: Any, state: QuantizerState | None) -> QuantizedParts | None:
    """``NVFP4TensorRef``, of the reference recipe: scales without padding, some words in its quantizer only."""
    taken = Blocks(
        "nvfp4",
        "float4_e2m1fn_x2",
        "float8_e4m3fn",
        e4m3_max=int(tensor.nvfp4_e4m3_max),
        more=(
            ("row_scaled", bool(getattr(quantizer, "row_scaled_nvfp4", False))),
            ("four_over_six", bool(tensor.nvfp4_use_4over6)),
        ),
    )
    taken.columnwise_more = rht_words(quantizer)
    _add_fp4(taken, tensor.data, tensor.scale, tensor.global_amax_row, columnwise=False)
    _add_fp4(taken, tensor.data_t, tensor.scale_t, tensor.global_amax_col, columnwise=True)
    if tensor.original_shape is not None and len(tensor.original_shape) != 2:
        taken.row_shape = taken.column_shape = tuple(tensor.original_shape)
    return taken.parts(tensor, quantizer, state, tensor.dtype)


def rht_words(quantizer: Any) -> tuple[tuple[str, Any], ...]:
    """What metadata of the column-wise side say of a random Hadamard transform, if the quantizer applies one."""
    if not getattr(quantizer, "with_rht", False):
        return ()
    mask = getattr(quantizer, "rht_matrix_random_sign_mask_t", None)
    if not isinstance(mask, int):
        mask = _RHT_SIGN_MASK if getattr(quantizer, "with_random_sign_mask", True) else 0
    return (("rht", True), ("rht_sign_mask", mask))


def _add_fp4(taken: Blocks, data: Any, scale: Any, amax: Any, *, columnwise: bool) -> None:
    if data is None:
        return
    if not columnwise:
        taken.add_rowwise(data, scale, (*data.shape[:-1], data.shape[-1] * 2))
    else:  # held transposed and packed along the rows: no view brings it back
        held = (*data.shape[:-1], data.shape[-1] * 2)
        taken.add_columnwise(data if data.dim() <= 2 else data.reshape(data.shape[0], -1), scale, (*held[1:], held[0]))
    if amax is not None:
        taken.add_amax(amax, columnwise=columnwise)


class Blocks:
    """Gathers the two sides of a tensor in blocks."""

    def __init__(
        self,
        scheme: str,
        codes: str,
        scales: str,
        *,
        two_d: bool = False,
        swizzled: bool = False,
        e4m3_max: int = 448,
        more: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        self.components: dict[str, torch.Tensor] = {}
        self.formats: dict[str, str] = {}
        self.row_shape: tuple[int, ...] | None = None
        self.column_shape: tuple[int, ...] | None = None
        self.columnwise_more: tuple[tuple[str, Any], ...] = ()
        self._row: Words | None = None
        self._column: Words | None = None
        self._scheme, self._codes, self._scales, self._two_d, self._swizzled = scheme, codes, scales, two_d, swizzled
        self._more, self._e4m3_max = more, e4m3_max
        if scheme == "nvfp4":
            self._more = (("e4m3_max", e4m3_max), *more)

    def add_rowwise(self, data: torch.Tensor, scale: torch.Tensor | None, shape: tuple[int, ...]) -> None:
        """Codes [..., K] (packed for FP4) of a tensor of ``shape``, the scales as Transformer Engine holds them."""
        if self._two_d and len(shape) > 2:  # blocks reach over the leading dimensions
            data, self.row_shape = data.reshape(-1, data.shape[-1]), shape
        blocks = self._add("", data, scale, shape, lead=shape[:-1] if data.dim() == len(shape) else None)
        self._row = Words(self._scheme, self._codes, (*(1,) * (data.dim() - 2), *blocks), self._more)

    def add_columnwise(self, data: torch.Tensor, scale: torch.Tensor | None, shape: tuple[int, ...]) -> None:
        """Codes of a tensor of ``shape``, leading dimensions flattened; [K, M / 2] for FP4, else [M, K]."""
        blocks = self._add("columnwise_", data, scale, shape, lead=None)
        more = (*self._more, *self.columnwise_more)
        if self._scheme == "nvfp4":
            more = (("transposed", True), *more)
        if self._scheme == "nvfp4" or len(shape) > 2:
            self.column_shape = shape
        self._column = Words(self._scheme, self._codes, blocks, more)

    def add_amax(self, amax: torch.Tensor, *, columnwise: bool) -> None:
        """The amax that NVFP4's second scale comes from: one, or one a row."""
        self.components["columnwise_amax" if columnwise else "amax"] = amax
        if not columnwise:  # statistics multiply by it; decoding goes from the amax, as the kernels round
            self.components["tensor_scale_inv"] = amax * (1.0 / (6.0 * self._e4m3_max))

    def _add(
        self, prefix: str, data: torch.Tensor, scale: Any, shape: tuple[int, ...], lead: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        self.components[f"{prefix}data"] = data
        self.formats[f"{prefix}data"] = self._codes
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        columnwise = bool(prefix)
        raw = scale if isinstance(scale, torch.Tensor) and scale.dim() == 2 else data.new_empty(0, 0)
        view, blocks = te_layout.logical_scale(
            self._scheme, raw, rows, columns, columnwise=columnwise, two_d=self._two_d
        )
        if not isinstance(scale, torch.Tensor):
            return blocks
        if self._swizzled or scale.dim() != 2:
            self.components[f"{prefix}swizzled_scale_inv"] = scale
            self.formats[f"{prefix}swizzled_scale_inv"] = "uint8"
            return blocks
        if lead is not None and len(lead) > 1 and view.shape[0] == rows:
            view = view.reshape(*lead, view.shape[1])
        self.components[f"{prefix}scale_inv"] = view
        self.formats[f"{prefix}scale_inv"] = self._scales or dtype_name(view.dtype)
        return blocks

    def parts(
        self, tensor: Any, quantizer: Any, state: QuantizerState | None, dtype: torch.dtype | None
    ) -> QuantizedParts | None:
        """What was gathered, or None if that is nothing."""
        if not self.components:
            return None
        logical = self.column_shape if self._row is None else self.row_shape
        if state is not None and state.amax_history is not None:
            self.components["amax_history"] = state.amax_history.detach()
        info = info_of(tensor, quantizer, state, self._row, self._column, logical_shape=logical, dtype=dtype)
        pair = "data" if self._row is not None else None
        if self._row is None and self._scheme != "nvfp4":
            pair = "columnwise_data"
        return QuantizedParts(info, self.components, self.formats, pair_codes=pair)
