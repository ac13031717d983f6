"""Raw buffers of quantized tensors from a GPU, with the GPU's own numbers: see ``golden/te/record.py``. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "golden" / "te"
RECORDING = json.loads((FOLDER / "fp8.json").read_text())
ENTRIES: list[dict[str, Any]] = RECORDING["entries"]
FP8_FORMATS = {7: "float8_e4m3fn", 8: "float8_e5m2"}


def name_of(number: int) -> str:
    """What a test is called by."""
    entry = ENTRIES[number]
    sides = "".join(word[0] for word in ("rowwise", "columnwise") if entry["quantizer"][f"{word}_usage"])
    return f"{number}-{entry['recipe']}-{'x'.join(map(str, entry['shape']))}-{sides}"


def arrays_of(number: int) -> dict[str, np.ndarray]:
    """The buffers by Transformer Engine's own names, ``float32`` and, of small tensors, ``bfloat16`` (codes)."""
    with np.load(FOLDER / "fp8.npz") as file:
        prefix = f"{number}."
        return {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}


def assert_as_the_gpu(found: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    """Equal bit for bit, float32 and rounded to bfloat16; NaN is NaN, whatever its payload."""
    expected = arrays["float32"]
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view("u4")[~nan], expected.view("u4")[~nan])
    if "bfloat16" in arrays:
        bits = found.view("u4").astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even
        assert np.array_equal(rounded[~nan], arrays["bfloat16"][~nan])
