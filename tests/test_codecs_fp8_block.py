"""FP8 in blocks; equality with the GPU's own values stands in ``test_golden_te``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from format_contract import FormatContract, Whole, described, prefixed

from flightrec.codecs import quantized, te_layout
from flightrec.errors import FormatError


class TestOneByBlock(FormatContract):
    """1 x 128, held as Transformer Engine holds it and brought to logical order by its layout's views."""

    words: ClassVar = ("block_shape",)
    two_d: ClassVar[bool] = False

    def store(self, codes, rng, side):
        rows, columns = codes.shape
        columnwise = side == "columnwise"
        held = te_layout.scale_shape("float8_block", rows, columns, columnwise=columnwise, two_d=self.two_d)
        raw = np.exp2(rng.uniform(-8, 8, held)).astype(np.float32)
        view, blocks = te_layout.logical_scale(
            "float8_block", raw, rows, columns, columnwise=columnwise, two_d=self.two_d
        )
        factors = self.raw_scale(raw, np.arange(rows)[:, None], np.arange(columns), columnwise=columnwise)
        components = prefixed({"data": codes, "scale_inv": view}, side)
        formats = prefixed({"data": self.format, "scale_inv": "float32"}, side)
        return Whole(
            components, described("float8_block", self.format, side, block_shape=blocks), formats, codes.shape
        ), factors

    def raw_scale(self, raw, i, j, *, columnwise):
        """Where Transformer Engine keeps the scales of elements."""
        return raw[i // 128, j] if columnwise else raw[j // 128, i]


class TestSquareBlocks(TestOneByBlock):
    two_d: ClassVar[bool] = True
    format: ClassVar[str] = "float8_e5m2"

    def raw_scale(self, raw, i, j, *, columnwise):
        return raw[j // 128, i // 128] if columnwise else raw[i // 128, j // 128]


def test_flattened_codes_come_in_the_tensors_shape() -> None:
    info = described("float8_block", "float8_e4m3fn", "rowwise", block_shape=(128, 128), logical_shape=[2, 3, 4])
    components = {"data": np.full((6, 4), 0x38, np.uint8), "scale_inv": np.array([[3.0]], np.float32)}
    assert quantized.dequantize(components, info, shape=(6, 4)).shape == (2, 3, 4)


def test_too_few_scales_and_codes_for_scales_are_refused() -> None:
    info = described("float8_block", "float8_e4m3fn", "rowwise", block_shape=(1, 128))
    codes = np.zeros((4, 256), np.uint8)
    with pytest.raises(FormatError, match=r"need scales of shape \(4, 2\)"):
        quantized.dequantize({"data": codes, "scale_inv": np.ones((3, 2), np.float32)}, info)
    with pytest.raises(FormatError, match="expected float32"):
        quantized.dequantize({"data": codes, "scale_inv": np.ones((4, 2), np.uint8)}, info)
