"""Made ``fp8.npz`` and ``fp8.json``: raw buffers of quantized tensors with the GPU's own values of them.

Needs a GPU with FP8 and Transformer Engine; run as ``python record.py FOLDER``. The tests hold the decoders against the
files, so a new recording must come from another machine or version, not replace these.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformer_engine
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

LARGE = 8000
"""Elements of a tensor beyond which its bfloat16 values are left out: they are those of float32, rounded."""

SIDES = ((True, True), (True, False), (False, True))
DTYPES = (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
Case = tuple[str, Any, torch.Tensor, bool]


def values(rows: int, columns: int) -> torch.Tensor:
    """Random values over nine orders of magnitude, with zeros, a row of zeros, tiny ones and some that saturate."""
    x = torch.randn(rows, columns, device="cuda") * torch.logspace(-6, 3, columns, device="cuda")
    x[0, 0] = 0
    x[1] = 0
    x[2, :4] = torch.tensor([1e-30, -1e-20, 6e4, -6e4], device="cuda")
    return x.to(torch.bfloat16)


def delayed(dtype: Any, scale: float, *, rowwise: bool = True, columnwise: bool = True) -> Float8Quantizer:
    """A quantizer that was given its scale beforehand."""
    word, amax = torch.tensor([scale], device="cuda"), torch.zeros(1, device="cuda")
    return Float8Quantizer(word, amax, dtype, rowwise=rowwise, columnwise=columnwise)


def current(dtype: Any, **words: Any) -> Float8CurrentScalingQuantizer:
    """A quantizer that measures its scale."""
    return Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **words)


def per_tensor() -> Iterator[Case]:
    """One scale a tensor; a tensor without row-wise data cannot be quantized on this chip."""
    for dtype in DTYPES:
        yield "current", current(dtype), values(32, 48), True
        for rowwise, columnwise in SIDES[:2]:
            sides = {"rowwise": rowwise, "columnwise": columnwise}
            yield "delayed", delayed(dtype, 3.5, **sides), values(16, 16), True
            for power_of_two, epsilon in ((False, 0.0), (True, 0.0), (False, 1e6)):
                words = {"force_pow_2_scales": power_of_two, "amax_epsilon": epsilon}
                yield "current", current(dtype, **sides, **words), values(16, 16), True
        x = values(32, 48)
        x[5, 5], x[6, 6], x[7, 7] = float("nan"), float("inf"), -float("inf")
        yield "delayed", delayed(dtype, 2.0), x, False
        yield "current", current(dtype), x, False


def blocks() -> Iterator[Case]:
    """Scales by block: every combination for a small tensor, some for larger ones of odd shapes."""
    for dtype, dim, (rowwise, columnwise), power_of_two in itertools.product(DTYPES, (1, 2), SIDES, (True, False)):
        yield f"block{dim}d", block(dtype, dim, rowwise, columnwise, power_of_two), values(16, 48), True
    e4m3 = DTYPES[0]
    yield "block2d", block(e4m3, 2, False, True, True), values(144, 176), True
    yield "block1d", block(e4m3, 1, True, True, True), values(48, 272).reshape(3, 16, 272), True
    yield "block2d", block(e4m3, 2, False, True, True), values(48, 272).reshape(3, 16, 272), True


def block(dtype: Any, dim: int, rowwise: bool, columnwise: bool, power_of_two: bool) -> Float8BlockQuantizer:
    """A quantizer in blocks of 1 x 128 or 128 x 128."""
    return Float8BlockQuantizer(
        dtype, rowwise=rowwise, columnwise=columnwise, block_scaling_dim=dim, force_pow_2_scales=power_of_two
    )


def stored(tensor: torch.Tensor) -> np.ndarray:
    """As it is in the file: bit patterns where numpy has no such type."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    return (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).cpu().numpy()


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of a tensor's or quantizer's fields; scales as lists."""
    kept = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
    kept = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in kept.items()}
    numbers = {name: int(value) for name, value in kept.items() if name in ("dtype", "fp8_dtype")}
    return {name: value for name, value in {**kept, **numbers}.items() if isinstance(value, (int, float, str, list))}


def main(folder: Path) -> None:
    """Quantize every case and write both files."""
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    entries = []
    for number, (recipe, quantizer, x, finite) in enumerate(itertools.chain(per_tensor(), blocks())):
        tensor = quantizer(x)
        fields = tensor.get_metadata()
        buffers = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        arrays.update((f"{number}.{name}", stored(value)) for name, value in buffers.items())
        arrays[f"{number}.float32"] = stored(tensor.dequantize(dtype=torch.float32))
        if x.numel() <= LARGE:
            arrays[f"{number}.bfloat16"] = stored(tensor.dequantize(dtype=torch.bfloat16))
        entries.append(
            {
                "class": type(tensor).__name__,
                "recipe": recipe,
                "shape": list(x.shape),
                "finite": finite,
                "fields": plain({name: value for name, value in fields.items() if name not in buffers}),
                "quantizer": {**plain(vars(quantizer)), "class": type(quantizer).__name__},
                "arrays": {name: str(value.dtype).removeprefix("torch.") for name, value in buffers.items()},
            }
        )
    np.savez_compressed(folder / "fp8.npz", **arrays)
    head = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": transformer_engine.__version__,
        "cuda": torch.version.cuda,
    }
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (folder / "fp8.json").write_text(f'{json.dumps(head)[:-1]}, "entries": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
