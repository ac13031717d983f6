"""The encoders against a GPU: its values, quantized again, give its codes, and its scales where they tell them."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from te_golden import ENTRIES, FP8_FORMATS, arrays_of, name_of

from flightrec.codecs import encode, encode_scales, scale_rules, te_layout


def plans(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[encode.Plan]:
    """Each side whose values the recording has."""
    element, shape = FP8_FORMATS[entry["fields"]["fp8_dtype"]], tuple(entry["shape"])
    words = {"format": element, "scale_direction": "multiply_to_decode", "block_shape": (), "class_name": "te"}
    if entry["class"] == "Float8Tensor":
        info = {**words, "metadata": {"scheme": "float8", "quantizer": entry["quantizer"]}}
        arrays = {"data": arrays["data"], "scale_inv": arrays["fp8_scale_inv"]}
        return [encode.plan_of(arrays, info, formats={}, shape=shape, side="rowwise")]
    two_d, rows, columns = entry["fields"]["is_2D_scaled"], math.prod(shape[:-1]), shape[-1]
    found = []
    for side in ("rowwise", "columnwise"):
        if f"{side}_data" not in arrays or (found and not two_d):
            continue
        columnwise = side == "columnwise"
        scale, blocks = te_layout.logical_scale(
            "float8_block", arrays[f"{side}_scale_inv"], rows, columns, columnwise=columnwise, two_d=two_d
        )
        codes = arrays[f"{side}_data"]
        codes = codes.reshape(columns, rows).T if columnwise else codes.reshape(rows, columns)
        metadata = {"scheme": "float8_block", "quantizer": entry["quantizer"], "logical_shape": list(shape)}
        info = {**words, "block_shape": blocks, "metadata": metadata}
        found.append(encode.plan_of({"data": codes, "scale_inv": scale}, info, formats={}, shape=shape, side="rowwise"))
    return found


@pytest.mark.parametrize("number", range(len(ENTRIES)), ids=name_of)
def test_the_gpus_own_codes(number: int) -> None:
    entry, arrays = ENTRIES[number], arrays_of(number)
    for plan in plans(entry, arrays):
        values = plan.lay(arrays["float32"]).astype(np.float32)
        codes = plan.codes(0, plan.rows)
        scales = encode.candidates(plan) if plan.scales.size == 1 else [None]
        wrong = [encode.admissible(plan, values, 0, plan.rows, encode=one).differ(codes, plan.grid) for one in scales]
        assert not min(mask.sum() for mask in wrong)
        flipped = codes.copy()
        flipped[3, 5] ^= 0x10
        found = [encode.admissible(plan, values, 0, plan.rows, encode=one).differ(flipped, plan.grid) for one in scales]
        assert all(mask[3, 5] for mask in found)
        if encode_scales.is_function(plan) or entry["quantizer"].get("force_pow_2_scales") or not entry["finite"]:
            continue  # a power of two does not tell the amax, which the decoded values have lost
        rounded = values.astype(ml_dtypes.bfloat16).astype(np.float32)  # the largest of a block is exact in bfloat16
        amax, has_nan = scale_rules.amax_of(rounded, plan.block)
        computed = encode_scales.expected(plan, amax, has_nan, dtype="bfloat16", second=None, is_distributed=False)
        assert not any(mask.any() for mask in encode_scales.differ(plan, plan.scales, computed).values())
