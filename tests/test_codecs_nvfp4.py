"""NVFP4: hand-made buffers against the definition; the reference quantizer's stand in ``test_sources_extract_te``."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from format_contract import FormatContract, Whole, described, prefixed, swizzled

from flightrec.codecs import nvfp4, quantized, te_layout
from flightrec.errors import FormatError

E4M3 = ml_dtypes.float8_e4m3fn


def packed(codes: np.ndarray) -> np.ndarray:
    return codes[:, ::2] | codes[:, 1::2] << 4


class TestNvfp4(FormatContract):
    format: ClassVar[str] = "float4_e2m1fn_x2"
    needs: ClassVar = ("data", "scale_inv")
    words: ClassVar = ("block_shape",)
    multiple: ClassVar[int] = 16
    row_scaled: ClassVar[bool] = False
    e4m3_max: ClassVar[int] = 448

    def store(self, codes, rng, side):
        rows, columns = codes.shape
        columnwise = side == "columnwise"
        held = te_layout.scale_shape("nvfp4", rows, columns, columnwise=columnwise)
        raw = rng.integers(1, 0x7F, held).astype(np.uint8)
        view, blocks = te_layout.logical_scale("nvfp4", raw, rows, columns, columnwise=columnwise)
        lines, length = (columns, rows) if columnwise else (rows, columns)
        amax = np.exp2(rng.uniform(-3, 9, lines if self.row_scaled else 1)).astype(np.float32)
        scales = np.repeat(raw, 16, axis=1)[:lines, :length].view(E4M3).astype(np.float32)
        factors = scales * (amax[:, None] if self.row_scaled else amax[0])
        factors = factors * np.float32(1 / (6 * self.e4m3_max))
        stored = packed(codes.T if columnwise else codes)
        components = prefixed({"data": stored, "amax": amax, **self.scales(raw, view)}, side)
        formats = prefixed({"data": self.format, "scale_inv": "float8_e4m3fn", "amax": "float32"}, side)
        more = {"transposed": True} if columnwise else {}
        info = described("nvfp4", self.format, side, block_shape=blocks, e4m3_max=self.e4m3_max, **more)
        return Whole(components, info, formats, codes.shape), factors.T if columnwise else factors

    def scales(self, raw, view):
        return {"scale_inv": view}


class TestRowScaled(TestNvfp4):
    row_scaled: ClassVar[bool] = True


class TestFourOverSix(TestNvfp4):
    e4m3_max: ClassVar[int] = 256


class TestSwizzled(TestNvfp4):
    needs: ClassVar = ("data",)

    def scales(self, raw, view):
        return {"swizzled_scale_inv": swizzled(raw)}


def test_the_order_of_rounding_is_the_kernels() -> None:
    info = described("nvfp4", "float4_e2m1fn_x2", "rowwise", block_shape=(1, 16))
    codes, scale, amax = np.full((1, 8), 0x77, np.uint8), np.array([[0x35]], np.uint8), np.array([3.3], np.float32)
    values = quantized.dequantize({"data": codes, "scale_inv": scale, "amax": amax}, info)
    expected = np.float32(6) * (scale.view(E4M3).astype(np.float32)[0, 0] * amax[0] * np.float32(1 / 2688))
    assert values[0, 0] == expected


def test_a_second_scale_in_place_of_the_amax() -> None:
    info = described("nvfp4", "float4_e2m1fn_x2", "rowwise", block_shape=(1, 16))
    components = {"data": np.full((2, 8), 0x22, np.uint8), "scale_inv": np.full((2, 1), 0x38, np.uint8)}
    values = quantized.dequantize({**components, "tensor_scale_inv": np.array([0.5, 2.0], np.float32)}, info)
    assert values[:, 0].tolist() == [0.5, 2.0]
    with pytest.raises(FormatError, match="'tensor_scale_inv' is missing"):
        quantized.dequantize(components, info)
    with pytest.raises(FormatError, match="3 scales over all blocks"):
        quantized.dequantize({**components, "amax": np.ones(3, np.float32)}, info)


@pytest.mark.parametrize("mask", [0, 0b1101_0111_1110_1000, 0xFFFF])
def test_the_hadamard_transform_is_undone(mask: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 24, 5)).astype(np.float32)
    blocks = x.reshape(3, 16, 5)
    transformed = np.stack([(block.T @ nvfp4.hadamard(mask)).T for block in blocks]).reshape(x.shape)
    assert not np.allclose(transformed, x)
    assert np.allclose(nvfp4.undo_hadamard(transformed, mask), x, atol=1e-5)
    with pytest.raises(FormatError, match="16 rows"):
        nvfp4.undo_hadamard(x[:1], mask)


def test_the_hadamard_matrix_is_orthogonal_and_signed_by_rows() -> None:
    matrix = nvfp4.hadamard(0b10)
    assert np.array_equal(matrix @ matrix.T, np.eye(16, dtype=np.float32))
    assert (matrix[0] == 0.25).all()
    assert matrix[1, 0] == -0.25
