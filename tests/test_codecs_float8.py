"""FP8 with one scale a tensor; equality with the GPU's own values stands in ``test_golden_te``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from format_contract import FormatContract, Whole, described, prefixed

from flightrec.codecs import float8, quantized
from flightrec.errors import FormatError


class TestFloat8E4m3(FormatContract):
    format: ClassVar[str] = "float8_e4m3fn"

    def store(self, codes, rng, side):
        scale = np.exp2(rng.uniform(-8, 8, 1)).astype(np.float32)
        components = prefixed({"data": codes, "scale_inv": scale}, side)
        info = described("float8", self.format, side)
        formats = prefixed({"data": self.format, "scale_inv": "float32"}, side)
        return Whole(components, info, formats, codes.shape), np.full(codes.shape, scale[0])


class TestFloat8E5m2(TestFloat8E4m3):
    format: ClassVar[str] = "float8_e5m2"


def test_a_scale_that_encodes_divides() -> None:
    info = described("float8", "float8_e4m3fn", "rowwise", direction="multiply_to_encode")
    components = {"data": np.array([[0x38, 0x40]], np.uint8), "scale": np.array([4.0], np.float32)}
    assert quantized.dequantize(components, info).tolist() == [[0.25, 0.5]]


def test_several_scales_are_refused() -> None:
    info = described("float8", "float8_e4m3fn", "rowwise")
    components = {"data": np.zeros((2, 2), np.uint8), "scale_inv": np.ones(2, np.float32)}
    with pytest.raises(FormatError, match="'scale_inv' holds 2 scales"):
        quantized.dequantize(components, info)


def test_other_codes_are_refused() -> None:
    info = described(float8.SCHEME, "int8", "rowwise")
    with pytest.raises(FormatError, match="'int8', expected FP8"):
        quantized.dequantize({"data": np.zeros(2, np.int8), "scale_inv": np.ones(1, np.float32)}, info)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5)])
def test_any_number_of_axes(shape) -> None:
    codes = np.full(shape, 0x38, np.uint8)
    values = quantized.dequantize(
        {"data": codes, "scale_inv": np.array([2.0], np.float32)}, described("float8", "float8_e4m3fn", "rowwise")
    )
    assert values.shape == shape
    assert (values == 2).all()
