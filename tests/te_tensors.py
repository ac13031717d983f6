"""Transformer Engine's own tensor classes, made of given buffers, on the CPU or the GPU; for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import te_cpu
import te_golden
import torch

from flightrec.codecs import quantized
from flightrec.kernels.formats import as_bits
from flightrec.ring.layout import QuantizedParts

E4M3, E5M2, FP4 = 7, 8, 10
CPU = torch.device("cpu")


def quantizer_of(words: dict[str, Any]) -> Any:
    """A quantizer with the attributes that one had on the GPU."""
    te_cpu.install()
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    sides = {"rowwise": words["rowwise_usage"], "columnwise": words["columnwise_usage"]}
    more = {name: words[name] for name in ("force_pow_2_scales", "amax_epsilon") if name in words}
    if words["class"] == "Float8Quantizer":
        return Float8Quantizer(torch.tensor(words["scale"]), torch.tensor(words["amax"]), words["dtype"], **sides)
    if words["class"] == "Float8CurrentScalingQuantizer":
        return Float8CurrentScalingQuantizer(words["dtype"], CPU, **sides, **more)
    return Float8BlockQuantizer(words["dtype"], **sides, **more, block_scaling_dim=words["block_scaling_dim"])


def golden_tensor(number: int, *, storage: bool) -> Any:
    """A recorded tensor as the very class that it was on the GPU, or as its storage class."""
    te_cpu.install()
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor, float8_tensor

    entry, arrays = te_golden.ENTRIES[number], te_golden.arrays_of(number)
    buffers = {name: torch.from_numpy(arrays[name].copy()) for name in entry["arrays"]}
    fields = {name: value for name, value in entry["fields"].items() if name != "fake_dtype"}
    made = {**buffers, **fields, "quantizer": quantizer_of(entry["quantizer"]), "fake_dtype": torch.bfloat16}
    if entry["class"] == "Float8Tensor":
        kind: Any = float8_tensor.Float8TensorStorage if storage else float8_tensor.Float8Tensor
    else:
        kind = float8_blockwise_tensor.Float8BlockwiseQTensor
        kind = float8_blockwise_tensor.Float8BlockwiseQTensorStorage if storage else kind
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        made = {**dict.fromkeys(names), **made}
    if not storage:
        made |= {"shape": torch.Size(entry["shape"]), "dtype": torch.bfloat16, "device": CPU}
    return kind(**made)


def stored(parts: QuantizedParts) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Components as they come out of a file: contiguous, in logical order, bit patterns; and their formats."""
    arrays = {}
    for name, tensor in parts.components.items():
        bits = as_bits(tensor).contiguous()
        codes = {torch.bfloat16: torch.int16, torch.int8: torch.uint8}.get(bits.dtype, bits.dtype)
        array = bits.view(codes).cpu().numpy()
        arrays[name] = array.view(np.uint16) if codes == torch.int16 else array
    return arrays, {name: parts.format(name) for name in parts.components}


def decoded(parts: QuantizedParts, side: str | None = None) -> np.ndarray:
    """Numbers of extracted parts, by way of what a file holds of them."""
    arrays, formats = stored(parts)
    return quantized.dequantize(arrays, parts.info.to_json(), formats=formats, side=side)
