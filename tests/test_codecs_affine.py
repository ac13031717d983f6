"""Integer codes with a zero point; equality with torch's own ``dequantize`` stands in the tests of ``extract``."""

from __future__ import annotations

import numpy as np
import pytest

from flightrec.codecs import affine, scaled
from flightrec.errors import FormatError

CHANNELS = {"metadata": {"axis": 1}}


def made(codes, scale, zero_point):
    return {"data": np.asarray(codes), "scale_inv": np.asarray(scale), "zero_point": np.asarray(zero_point)}


def test_one_scale():
    parts = made(np.array([[0, 3, 255]], np.uint8), 0.5, 3)
    for give in (affine.dequantize, scaled.dequantize):
        values = give(parts, {})
        assert values.dtype == np.float32
        assert values.tolist() == [[-1.5, 0.0, 126.0]]


def test_a_scale_for_each_channel():
    parts = made(np.array([[-128, 127], [0, 1]], np.int8), [1.0, 2.0], [0, 1])
    assert affine.dequantize(parts, CHANNELS).tolist() == [[-128.0, 252.0], [0.0, 0.0]]
    assert affine.dequantize(parts, {"metadata": {"axis": -1}}).tolist() == [[-128.0, 252.0], [0.0, 0.0]]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_shapes_without_elements_or_axes(shape):
    assert affine.dequantize(made(np.zeros(shape, np.int8), 1.0, 0), {}).shape == shape


def test_every_code_of_a_byte():
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(affine.dequantize(made(codes, 0.25, 128), {}), (np.arange(256) - 128) * np.float32(0.25))
    codes = np.arange(-128, 128).astype(np.int8)
    assert np.array_equal(affine.dequantize(made(codes, 0.25, 0), {}), np.arange(-128, 128) * np.float32(0.25))


def test_scales_that_are_not_finite_give_what_arithmetic_gives():
    assert np.isnan(affine.dequantize(made(np.array([0], np.int8), np.inf, 0), {}))[0]


@pytest.mark.parametrize(
    ("parts", "info", "why"),
    [
        ({"data": np.zeros(2, np.int8), "zero_point": np.zeros(1)}, {}, "scale_inv"),
        (made(np.zeros(2, np.float32), 1.0, 0), {}, "integers"),
        (made(np.zeros(2, np.int8), [1.0, 2.0], [0, 0]), {}, "no axis"),
        (made(np.zeros((2, 3), np.int8), [1.0, 2.0], [0, 0]), CHANNELS, "along axis 1"),
        (made(np.zeros(2, np.int8), [1.0], [0]), CHANNELS, "along axis 1"),
    ],
)
def test_what_does_not_fit_is_refused(parts, info, why):
    with pytest.raises(FormatError, match=why):
        affine.dequantize(parts, info)


def test_another_logical_shape_is_refused():
    with pytest.raises(FormatError, match="codes of shape"):
        affine.dequantize(made(np.zeros(2, np.int8), 1.0, 0), {}, shape=(3,))


def test_an_unknown_class_is_not_dequantized():
    with pytest.raises(FormatError, match="'unknown' is not understood"):
        scaled.dequantize(made_plain(), {"format": "float8_e4m3fn", "scale_direction": "unknown"})


def made_plain():
    return {"data": np.zeros(2, np.uint8)}
