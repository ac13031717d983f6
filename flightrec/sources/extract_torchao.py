"""Takes torchao's quantized tensors apart; knows their private fields.

Imports no torchao: a tensor of it can only exist if it is loaded already. Owns a cache of metadata. Launches nothing,
never synchronises.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from flightrec.records import QuantizerInfo
from flightrec.ring.layout import QuantizedParts
from flightrec.sources.extract_base import blocks_of, dtype_name

_TORCHAO_FLOAT8 = "torchao.float8.float8_training_tensor"


def is_torchao_float8(value: object) -> bool:
    """Say whether a tensor is torchao's Float8 training tensor."""
    module = sys.modules.get(_TORCHAO_FLOAT8)
    return module is not None and isinstance(value, module.Float8TrainingTensor)


def torchao_role(value: Any) -> str:
    """Which operand a Float8 training tensor is: ``input``, ``weight`` or ``grad_output``."""
    return str(value._gemm_input_role.value)


def is_torchao_axiswise(value: Any) -> bool:
    """Say whether a Float8 training tensor has a scale for each row or column, so that its direction matters."""
    return value._axiswise_dim is not None


def from_torchao_float8(value: Any) -> QuantizedParts:
    """Take a Float8 training tensor: ``_data`` = ``x * _scale``, so the scale multiplies to encode."""
    data, scale = value._data.detach(), value._scale.detach()
    block_shape = blocks_of(tuple(data.shape), scale)
    info = _torchao_float8_info(data.dtype, value._orig_dtype, value._axiswise_dim, torchao_role(value), block_shape)
    return QuantizedParts(info, {"data": data, "scale": scale}, pair_codes="data")


@functools.lru_cache(maxsize=1024)
def _torchao_float8_info(
    dtype: torch.dtype, original: torch.dtype, axiswise_dim: int | None, role: str, block_shape: tuple[int, ...]
) -> QuantizerInfo:
    metadata = {
        "original_dtype": dtype_name(original),
        "granularity": "tensorwise" if axiswise_dim is None else "axiswise",
        "axiswise_dim": axiswise_dim,
        "gemm_input_role": role,
    }
    name = f"{_TORCHAO_FLOAT8}.Float8TrainingTensor"
    return QuantizerInfo(name, dtype_name(dtype), "multiply_to_encode", block_shape, metadata)
