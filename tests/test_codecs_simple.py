"""The one rule of codes and block scales gives what the codecs give, bit by bit, or says that there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flightrec.codecs import quantized, sides, simple
from flightrec.errors import FormatError


def codes(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) * 37 % 256).astype("u1").reshape(shape)


E8M0 = (np.arange(128) % 9 + 120).astype("u1")
E4M3 = (np.arange(256) % 0x70 + 8).astype("u1")
ONE = np.array([3.0], "<f4")
ROWS = np.linspace(0.5, 7, 32, dtype="<f4")

CASES: dict[str, tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any], tuple[int, ...]]] = {
    "one scale, dividing": (
        {"data": codes(2, 3, 4), "scale": ONE}, {},
        {"format": "float8_e5m2", "scale_direction": "multiply_to_encode"}, (2, 3, 4),
    ),
    "blocks, the last not full": (
        {"data": codes(5, 130), "scale_inv": np.array([[0.3, 7.0]], "<f4")}, {},
        {"format": "float8_e4m3fn", "block_shape": [128, 128], "metadata": {"scheme": "float8_block"}}, (5, 130),
    ),
    "padded scales": (
        {"data": codes(32, 64), "scale_inv": E8M0.reshape(32, 4)}, {"scale_inv": "float8_e8m0fnu"},
        {"format": "float8_e4m3fn", "block_shape": [1, 32], "metadata": {"scheme": "mxfp8"}}, (32, 64),
    ),
    "scales of an unknown ratio": (
        {"data": codes(4, 6), "scale_inv": np.arange(1, 5, dtype="<f4").reshape(4, 1)}, {},
        {"format": "float8_e4m3fn"}, (4, 6),
    ),
    "a second scale a row": (
        {"data": codes(32, 32), "scale_inv": E4M3[:128].reshape(32, 4), "amax": ROWS}, {"scale_inv": "float8_e4m3fn"},
        {"format": "float4_e2m1fn_x2", "block_shape": [1, 16], "metadata": {"scheme": "nvfp4", "e4m3_max": 256}},
        (32, 64),
    ),
    "a second scale of all": (
        {"data": codes(32, 32), "scale_inv": E4M3[:128].reshape(32, 4), "tensor_scale_inv": ONE / 7},
        {"scale_inv": "float8_e4m3fn"},
        {"format": "float4_e2m1fn_x2", "block_shape": [1, 16]}, (32, 64),
    ),
    "packed codes of an odd row": (
        {"data": codes(3, 3), "scale_inv": E8M0[:6].reshape(3, 2)}, {"scale_inv": "float8_e8m0fnu"},
        {"format": "float4_e2m1fn_x2", "block_shape": [1, 4]}, (3, 5),
    ),
    "held transposed": (
        {"columnwise_data": codes(8, 3, 2), "columnwise_scale_inv": ONE}, {},
        {"format": "float8_e4m3fn", "metadata": {"columnwise_transposed": True}}, (3, 2, 8),
    ),
    "no scale": (
        {"data": np.arange(6, dtype="<u2").reshape(2, 3)}, {"data": "bfloat16"},
        {"format": "bfloat16", "scale_direction": "none", "metadata": {"scheme": "identity"}}, (2, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_what_the_codec_does(name: str) -> None:
    components, formats, words, shape = CASES[name]
    info = {"scale_direction": "multiply_to_decode", "block_shape": [], "metadata": {}, **words}
    side = "columnwise" if "columnwise_data" in components else "rowwise"
    expected = quantized.dequantize(components, info, formats=formats, shape=shape, side=side)
    taken = sides.take(components, info, formats=formats, shape=shape, side=side)
    rule = simple.simplify(taken)
    found = simple.apply(rule, taken.codes())
    assert found.shape == expected.shape == shape
    assert np.array_equal(found, expected, equal_nan=True)
    nan = np.isnan(expected)
    assert np.array_equal(np.signbit(found)[~nan], np.signbit(expected)[~nan])
    assert rule.to_json()["shape"] == list(shape)
    if rule.scales is not None and rule.scales.size > 1:
        blocks = zip(rule.codes_shape, rule.block_shape, strict=True)
        assert rule.scales.shape == tuple(-(-size // block) for size, block in blocks), "no padding is left"


def test_what_has_no_such_rule() -> None:
    info = {"format": "int8", "scale_direction": "multiply_to_decode", "metadata": {}}
    affine = {"data": codes(4).view("i1"), "scale_inv": ONE, "zero_point": np.zeros(1, "<i8")}
    with pytest.raises(FormatError, match="zero point: no rule"):
        simple.simplify(sides.take(affine, info))
    grouped = {**info, "metadata": {"scheme": "grouped", "member": "float8"}}
    with pytest.raises(FormatError, match="grouped: no rule"):
        simple.simplify(sides.take({"data": codes(4)}, grouped))
    ragged = {**info, "format": "float8_e4m3fn"}
    with pytest.raises(FormatError, match="no rule of blocks"):
        simple.simplify(sides.take({"data": codes(4, 6), "scale_inv": np.ones(6, "<f4")}, ragged))
