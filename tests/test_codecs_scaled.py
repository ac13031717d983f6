from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.codecs import scaled
from flightrec.errors import FormatError

E4M3 = ml_dtypes.float8_e4m3fn


def info(direction: str, form: str = "float8_e4m3fn", **values: Any) -> dict[str, Any]:
    return {"format": form, "scale_direction": direction, "block_shape": (), "metadata": {}} | values


def encode(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (x * scale).astype(E4M3).view(np.uint8)


@given(
    rows=st.integers(1, 5), columns=st.integers(1, 5), kind=st.sampled_from(["scalar", "one", "row", "column", "rows"])
)
def test_both_directions_agree_for_powers_of_two(rows: int, columns: int, kind: str) -> None:
    shape = {"scalar": (), "one": (1, 1), "row": (rows, 1), "column": (1, columns), "rows": (rows,)}[kind]
    scale = (2.0 ** np.arange(int(np.prod(shape))).reshape(shape)).astype(np.float32)
    if kind == "rows":
        spread = scale if rows == columns else scale[:, None]
        if rows == 1:
            spread = scale.reshape(())
    else:
        spread = scale
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) % 4
    codes = encode(x, spread)
    by_scale = scaled.dequantize({"data": codes, "scale": scale}, info(scaled.ENCODE))
    by_inverse = scaled.dequantize({"data": codes, "scale_inv": 1 / scale}, info(scaled.DECODE))
    assert by_scale.dtype == np.float32
    assert by_scale.tolist() == by_inverse.tolist() == x.tolist()


@pytest.mark.parametrize("shape", [(4, 64), (3, 70), (1, 32), (130, 130)])
@pytest.mark.parametrize("block", [(1, 32), (128, 128), (2, 16)])
def test_blocks_against_a_loop(shape: tuple[int, int], block: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 0x7F, shape).astype(np.uint8)
    needed = tuple(-(-size // edge) for size, edge in zip(shape, block, strict=True))
    exponents = generator.integers(120, 134, needed).astype(np.uint8)
    expected = codes.view(E4M3).astype(np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            expected[i, j] *= 2.0 ** (int(exponents[i // block[0], j // block[1]]) - 127)
    formats = {"scale_inv": "float8_e8m0fnu"}
    meta = info(scaled.DECODE, block_shape=block)
    found = scaled.dequantize({"data": codes, "scale_inv": exponents}, meta, formats=formats)
    assert found.tolist() == expected.tolist()
    flat = scaled.dequantize({"data": codes, "scale_inv": exponents.reshape(-1)}, meta, formats=formats)
    assert flat.tolist() == expected.tolist()
    padded = np.pad(exponents, ((0, 3), (0, 1)), constant_values=255)
    if padded.size > 1:
        assert scaled.dequantize({"data": codes, "scale_inv": padded}, meta, formats=formats).tolist() == found.tolist()


def test_block_shape_is_the_ratio_of_shapes_when_it_is_not_told() -> None:
    codes = np.full((2, 6), 0x38, dtype=np.uint8)
    scale_inv = np.array([[1, 2], [3, 4]], dtype=np.float32)
    found = scaled.dequantize({"data": codes, "scale_inv": scale_inv}, info(scaled.DECODE))
    assert found.tolist() == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]


def test_packed_fp4_with_e4m3_scales_and_an_odd_last_axis() -> None:
    packed = np.array([[0x21, 0x43, 0x05]], dtype=np.uint8)  # 0.5 1 1.5 2 3
    scales = np.array([[2.0, 4.0]], dtype=np.float32).astype(E4M3).view(np.uint8)
    found = scaled.dequantize(
        {"data": packed, "scale_inv": scales, "tensor_scale_inv": np.array([0.5], dtype=np.float32)},
        info(scaled.DECODE, "float4_e2m1fn_x2", block_shape=(1, 4)),
        formats={"scale_inv": "float8_e4m3fn"},
        shape=(1, 5),
    )
    assert found.tolist() == [[0.5, 1.0, 1.5, 2.0, 6.0]]


def test_columnwise_side_may_be_transposed() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    codes = x.T.astype(E4M3).view(np.uint8)
    components = {"columnwise_data": codes, "columnwise_scale": np.array([2.0], dtype=np.float32)}
    meta = info(scaled.ENCODE, metadata={"columnwise_transposed": True}, block_shape=(1, 3))
    assert scaled.dequantize(components, meta, side="columnwise", shape=(2, 3)).tolist() == (x / 2).tolist()


def test_no_scale_zero_scale_and_infinite_scale() -> None:
    codes = np.array([0x38, 0x00], dtype=np.uint8)
    assert scaled.dequantize({"data": codes}, info(scaled.NONE)).tolist() == [1.0, 0.0]
    zero = scaled.dequantize({"data": codes, "scale": np.array(0, dtype=np.float32)}, info(scaled.ENCODE))
    assert np.isinf(zero[0])
    assert np.isnan(zero[1])
    infinite = scaled.dequantize({"data": codes, "scale": np.array(np.inf, dtype=np.float32)}, info(scaled.ENCODE))
    assert infinite.tolist() == [0.0, 0.0]


def test_empty_and_scalar_tensors() -> None:
    scale = np.array(2.0, dtype=np.float32)
    empty = scaled.dequantize({"data": np.zeros((0, 4), np.uint8), "scale": scale}, info(scaled.ENCODE))
    assert empty.shape == (0, 4)
    single = scaled.dequantize({"data": np.array(0x38, np.uint8), "scale": scale}, info(scaled.ENCODE), shape=())
    assert single.shape == ()
    assert single == 0.5


CODES = np.zeros((2, 6), dtype=np.uint8)
ONE = np.ones((), dtype=np.float32)


@pytest.mark.parametrize(
    ("components", "meta", "options", "message"),
    [
        ({"scale": ONE}, info(scaled.ENCODE), {}, "'data' is missing"),
        ({"data": CODES}, info(scaled.ENCODE), {}, "'scale' is missing among"),
        ({"data": CODES}, info("sideways"), {}, "sideways"),
        ({"data": CODES}, info(scaled.NONE, "float9"), {}, "float9"),
        ({"data": CODES}, info(scaled.NONE), {"side": "diagonal"}, "diagonal"),
        ({"data": CODES}, info(scaled.NONE), {"shape": (2, 5)}, r"\(2, 5\)"),
        ({"data": CODES, "scale": np.ones(4, "f4")}, info(scaled.ENCODE), {}, "4 scales do not divide 6"),
        ({"data": CODES, "scale": np.ones((1, 2, 6), "f4")}, info(scaled.ENCODE), {}, "more axes"),
        ({"data": CODES, "scale": np.ones((2, 1), "f4")}, info(scaled.ENCODE, block_shape=(1, 3)), {}, "need scales"),
        ({"data": CODES, "scale": np.ones(5, "f4")}, info(scaled.ENCODE, block_shape=(1, 3)), {}, "need scales"),
        ({"data": CODES, "scale": np.ones(4, "f4")}, info(scaled.ENCODE, block_shape=(0, 3)), {}, "block shape"),
        ({"data": CODES, "scale": np.ones(2, "u1")}, info(scaled.ENCODE), {}, "their format is needed"),
        ({"data": CODES, "scale": ONE}, info(scaled.ENCODE, metadata={"swizzled": True}), {}, "swizzled"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    components: dict[str, np.ndarray], meta: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        scaled.dequantize(components, meta, **options)


def test_component_names_are_those_of_the_side() -> None:
    present = ["data", "scale", "amax", "columnwise_data", "columnwise_scale"]
    assert scaled.component_names(present) == ["data", "scale"]
    assert scaled.component_names(present, "columnwise") == ["columnwise_data", "columnwise_scale"]
