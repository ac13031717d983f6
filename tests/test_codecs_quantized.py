"""The one entry: which codec it chooses, sides, and tensors whose sides are of different families."""

from __future__ import annotations

import numpy as np
import pytest
from format_contract import described

from flightrec.codecs import quantized
from flightrec.errors import FormatError

ONE = np.ones(1, np.float32)


def test_the_first_side_that_is_there() -> None:
    info = described("float8", "float8_e4m3fn", "columnwise")
    components = {"columnwise_data": np.array([[0x38]], np.uint8), "columnwise_scale_inv": ONE}
    assert quantized.sides_of(components) == ["columnwise"]
    assert quantized.dequantize(components, info).tolist() == [[1.0]]
    with pytest.raises(FormatError, match="the rowwise side has no codes: component 'data' is missing"):
        quantized.dequantize(components, info, side="rowwise")
    with pytest.raises(FormatError, match="no codes"):
        quantized.dequantize({}, info)


def test_hybrid_sides_are_of_different_families() -> None:
    info = described("float8", "float8_e4m3fn", "rowwise")
    own = {"scheme": "identity", "format": "bfloat16", "scale_direction": "none", "block_shape": []}
    info["metadata"]["columnwise"] = own
    components = {
        "data": np.array([[0x38]], np.uint8),
        "scale_inv": ONE * 3,
        "columnwise_data": np.array([[0x3F80]], np.uint16),
    }
    formats = {"data": "float8_e4m3fn", "columnwise_data": "bfloat16"}
    assert quantized.dequantize(components, info, formats=formats).tolist() == [[3.0]]
    assert quantized.dequantize(components, info, formats=formats, side="columnwise").tolist() == [[1.0]]


def test_without_a_scheme_the_general_rule_holds() -> None:
    info = {"format": "float8_e4m3fn", "scale_direction": "multiply_to_encode", "block_shape": (), "metadata": {}}
    components = {"data": np.array([0x38], np.uint8), "scale": ONE * 4}
    assert quantized.dequantize(components, info).tolist() == [0.25]
    affine = {"data": np.array([3], np.uint8), "scale_inv": ONE, "zero_point": np.array(1)}
    assert quantized.dequantize(affine, {"metadata": {}}).tolist() == [2.0]


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"'float3'.*float8.*grouped.*nvfp4"):
        quantized.dequantize({"data": np.zeros(2, np.uint8)}, described("float3", "float8_e4m3fn", "rowwise"))


def test_component_names_are_those_that_decoding_looks_at() -> None:
    present = ["high_precision", "data", "scale_inv", "amax", "amax_history", "first_dims", "columnwise_data"]
    assert quantized.component_names(present, "rowwise") == ["data", "scale_inv", "amax", "first_dims"]
    assert quantized.component_names(present, "columnwise") == ["first_dims", "columnwise_data"]
    with pytest.raises(FormatError, match="sideways"):
        quantized.component_names(present, "sideways")
