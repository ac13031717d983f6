"""MXFP8: hand-made buffers against the definition, scales in rows and columns and in the tensor cores' order."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from format_contract import FormatContract, Whole, described, prefixed, swizzled

from flightrec.codecs import quantized, te_layout
from flightrec.errors import FormatError


class TestMxfp8(FormatContract):
    words: ClassVar = ("block_shape",)
    multiple: ClassVar[int] = 32
    tells_format: ClassVar[bool] = True

    def store(self, codes, rng, side):
        rows, columns = codes.shape
        columnwise = side == "columnwise"
        held = te_layout.scale_shape("mxfp8", rows, columns, columnwise=columnwise)
        raw = rng.integers(100, 150, held).astype(np.uint8)
        view, blocks = te_layout.logical_scale("mxfp8", raw, rows, columns, columnwise=columnwise)
        spread = np.repeat(raw, 32, axis=0 if columnwise else 1)[:rows, :columns]
        factors = spread.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        components = prefixed({"data": codes, **self.scales(raw, view, columnwise=columnwise)}, side)
        formats = prefixed({"data": self.format, "scale_inv": "float8_e8m0fnu"}, side) if self.tells_format else {}
        return Whole(
            components, described("mxfp8", self.format, side, block_shape=blocks), formats, codes.shape
        ), factors

    def scales(self, raw, view, *, columnwise):
        return {"scale_inv": view}


class TestPaddedScales(TestMxfp8):
    """A view without padding is no condition."""

    def scales(self, raw, view, *, columnwise):
        return {"scale_inv": raw}


class TestSwizzledScales(TestMxfp8):
    format: ClassVar[str] = "float8_e5m2"
    needs: ClassVar = ("data",)
    tells_format: ClassVar[bool] = False

    def scales(self, raw, view, *, columnwise):
        return {"swizzled_scale_inv": swizzled(raw.T if columnwise else raw)}


def test_every_scale_code() -> None:
    info = described("mxfp8", "float8_e4m3fn", "rowwise", block_shape=(1, 32))
    codes = np.full((256, 32), 0x38, np.uint8)
    values = quantized.dequantize({"data": codes, "scale_inv": np.arange(256, dtype=np.uint8)[:, None]}, info)
    assert values[0, 0] == np.float32(2.0**-127)  # subnormal, not 0
    assert values[127, 0] == 1
    assert np.isnan(values[255]).all()
    assert (values[1:254, 0] * 2 == values[2:255, 0]).all()


def test_swizzled_scales_that_are_no_whole_tiles_are_refused() -> None:
    info = described("mxfp8", "float8_e4m3fn", "rowwise", block_shape=(1, 32))
    components = {"data": np.zeros((128, 128), np.uint8), "swizzled_scale_inv": np.zeros(511, np.uint8)}
    with pytest.raises(FormatError, match="512 scales"):
        quantized.dequantize(components, info)


def test_three_axes() -> None:
    info = described("mxfp8", "float8_e4m3fn", "rowwise", block_shape=(1, 1, 32))
    codes = np.full((2, 64, 64), 0x38, np.uint8)
    scales = np.arange(120, 120 + 4).astype(np.uint8).reshape(2, 1, 2) + np.zeros((2, 64, 2), np.uint8)
    plain = quantized.dequantize({"data": codes, "scale_inv": scales}, info)
    padded = np.zeros((128, 4), np.uint8)
    padded[:, :2] = scales.reshape(128, 2)
    order = quantized.dequantize({"data": codes, "swizzled_scale_inv": swizzled(padded)}, info)
    assert plain.tolist() == order.tolist()
    assert plain[1, 5, 40] == 2.0 ** (123 - 127)
