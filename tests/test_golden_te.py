"""The decoders against buffers and numbers of a GPU, without torch: the layout's views, the codecs, the values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from format_contract import described
from te_golden import ENTRIES, FP8_FORMATS, RECORDING, arrays_of, assert_as_the_gpu, name_of

from flightrec.codecs import quantized, te_layout


def per_tensor(entry: dict[str, Any], arrays: dict[str, np.ndarray], side: str) -> np.ndarray:
    element = FP8_FORMATS[entry["fields"]["fp8_dtype"]]
    data = arrays["data"] if side == "rowwise" else np.moveaxis(arrays["data_transpose"], 0, -1)
    components = {"data": data, "scale_inv": arrays["fp8_scale_inv"]}
    return quantized.dequantize(components, described("float8", element, "rowwise"))


def in_blocks(entry: dict[str, Any], arrays: dict[str, np.ndarray], side: str) -> np.ndarray:
    element = FP8_FORMATS[entry["fields"]["fp8_dtype"]]
    shape, two_d, columnwise = entry["shape"], entry["fields"]["is_2D_scaled"], side == "columnwise"
    rows, columns = math.prod(shape[:-1]), shape[-1]
    scale, data = arrays[f"{side}_scale_inv"], arrays[f"{side}_data"]
    assert scale.shape == te_layout.scale_shape("float8_block", rows, columns, columnwise=columnwise, two_d=two_d)
    view, blocks = te_layout.logical_scale("float8_block", scale, rows, columns, columnwise=columnwise, two_d=two_d)
    codes = data.reshape(columns, rows).T if columnwise else data.reshape(rows, columns)
    info = described("float8_block", element, "rowwise", block_shape=blocks, logical_shape=shape)
    return quantized.dequantize({"data": codes, "scale_inv": view}, info)


@pytest.mark.parametrize("number", range(len(ENTRIES)), ids=name_of)
def test_the_gpus_own_numbers(number: int) -> None:
    entry, arrays = ENTRIES[number], arrays_of(number)
    if entry["class"] == "Float8Tensor":
        assert_as_the_gpu(per_tensor(entry, arrays, "rowwise"), arrays)
        if "data_transpose" in arrays:
            assert_as_the_gpu(per_tensor(entry, arrays, "columnwise"), arrays)
        return
    sides = [side for side in ("rowwise", "columnwise") if f"{side}_data" in arrays]
    assert_as_the_gpu(in_blocks(entry, arrays, sides[0]), arrays)  # the side that the GPU decoded
    other = in_blocks(entry, arrays, sides[-1])
    if entry["fields"]["is_2D_scaled"]:  # square blocks: both sides are of the same codes and scales
        assert_as_the_gpu(other, arrays)
    else:
        assert np.linalg.norm(other - arrays["float32"]) < 0.15 * np.linalg.norm(arrays["float32"])


def test_what_the_recording_covers() -> None:
    assert RECORDING["transformer_engine"] == "2.20.2"
    assert RECORDING["gpu"]
    assert {entry["recipe"] for entry in ENTRIES} == {"delayed", "current", "block1d", "block2d"}
    assert {entry["fields"]["fp8_dtype"] for entry in ENTRIES} == {7, 8}
    assert {len(entry["shape"]) for entry in ENTRIES} == {2, 3}
    assert not all(entry["finite"] for entry in ENTRIES)
