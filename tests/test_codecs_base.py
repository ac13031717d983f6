from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from codec_contract import REFERENCES, CodecContract

from flightrec.codecs import base
from flightrec.errors import FormatError


class TestBfloat16(CodecContract):
    format = "bfloat16"
    reference = REFERENCES["bfloat16"]
    named: ClassVar = {
        0x3F80: 1.0,
        0x8000: -0.0,
        0x0001: 2.0**-133,
        0x7F80: np.inf,
        0x7FC1: None,
        0x7F7F: 3.3895313892515355e38,
    }

    def test_nan_payloads_are_kept(self) -> None:
        codes = np.array([0x7FC1, 0xFFFF, 0x7F81], dtype="<u2")
        assert (base.decode(codes, "bfloat16").view("u4") >> 16).astype("u2").tolist() == codes.tolist()


class TestE4m3(CodecContract):
    format = "float8_e4m3fn"
    reference = REFERENCES["float8_e4m3fn"]
    named: ClassVar = {0x7E: 448.0, 0xFE: -448.0, 0x7F: None, 0xFF: None, 0x80: -0.0, 0x01: 2.0**-9, 0x78: 256.0}


class TestE5m2(CodecContract):
    format = "float8_e5m2"
    reference = REFERENCES["float8_e5m2"]
    named: ClassVar = {0x7C: np.inf, 0xFC: -np.inf, 0x7D: None, 0x7B: 57344.0, 0x80: -0.0, 0x01: 2.0**-16}


class TestE4m3fnuz(CodecContract):
    format = "float8_e4m3fnuz"
    reference = REFERENCES["float8_e4m3fnuz"]
    named: ClassVar = {0x80: None, 0x7F: 240.0, 0x00: 0.0}


class TestE5m2fnuz(CodecContract):
    format = "float8_e5m2fnuz"
    reference = REFERENCES["float8_e5m2fnuz"]
    named: ClassVar = {0x80: None, 0x7F: 57344.0, 0x00: 0.0}


class TestE8m0(CodecContract):
    format = "float8_e8m0fnu"
    reference = REFERENCES["float8_e8m0fnu"]
    named: ClassVar = {0: 2.0**-127, 127: 1.0, 128: 2.0, 254: 2.0**127, 255: None}


class TestE2m3(CodecContract):
    format = "float6_e2m3fn"
    reference = REFERENCES["float6_e2m3fn"]
    named: ClassVar = {0x1F: 7.5, 0x3F: -7.5, 0x20: -0.0, 0x01: 0.125, 0x08: 1.0}


class TestE3m2(CodecContract):
    format = "float6_e3m2fn"
    reference = REFERENCES["float6_e3m2fn"]
    named: ClassVar = {0x1F: 28.0, 0x3F: -28.0, 0x20: -0.0, 0x01: 0.0625, 0x0C: 1.0}


class TestPackedFp4(CodecContract):
    format = "float4_e2m1fn_x2"
    reference = REFERENCES["float4_e2m1fn_x2"]
    named: ClassVar = {0x17: 6.0, 0x08: -0.0, 0x0F: -6.0, 0x01: 0.5}  # the low nibble comes first

    def elements(self, codes: np.ndarray) -> np.ndarray:
        return np.array([nibble for code in codes.tolist() for nibble in (code & 15, code >> 4)], dtype=np.uint8)

    def test_odd_columns_drop_the_last_nibble(self) -> None:
        packed = np.array([[0x21, 0xF3]], dtype=np.uint8)
        assert base.decode(packed, self.format, num_columns=3).tolist() == [[0.5, 1.0, 1.5]]

    @pytest.mark.parametrize("num_columns", [2, 5, -1])
    def test_columns_that_the_bytes_cannot_hold(self, num_columns: int) -> None:
        with pytest.raises(FormatError, match="4 FP4 codes"):
            base.unpack_fp4(np.zeros((1, 2), dtype=np.uint8), num_columns)

    def test_a_scalar_has_no_axis_to_unpack(self) -> None:
        with pytest.raises(FormatError, match="one axis"):
            base.decode(np.array(3, dtype=np.uint8), self.format)


def test_contract_covers_every_format_that_is_stored_as_codes() -> None:
    assert {name for name, element in base.FORMATS.items() if not element.is_native} == REFERENCES.keys()


@pytest.mark.parametrize(
    ("form", "dtype"), [("float64", np.float64), ("float32", np.float32), ("int64", np.int64), ("complex64", "c8")]
)
def test_native_numbers_come_as_they_are(form: str, dtype: str) -> None:
    values = np.array([1, 2, 3]).astype(dtype)
    assert base.decode(values, form) is values


def test_float16_and_bool_are_converted() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert np.array_equal(base.decode(halves, "float16"), halves.astype(np.float32), equal_nan=True)
    assert base.decode(np.array([0, 1, 7], dtype=np.uint8), "bool").tolist() == [False, True, True]


def test_scalar_codes() -> None:
    decoded = base.decode(np.array(0x7E, dtype=np.uint8), "float8_e4m3fn")
    assert decoded.shape == ()
    assert decoded == 448.0


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"float9.*bfloat16"):
        base.storage_dtype("float9")


def test_half_complex_numbers_come_as_complex64():
    halves = np.array([1.5, -2.0, np.nan, np.inf], np.float16).reshape(2, 1, 2)
    decoded = base.decode(halves.view("<u4").reshape(2, 1), "complex32")
    assert decoded.dtype == np.complex64
    assert decoded.shape == (2, 1)
    assert decoded[0, 0] == 1.5 - 2j
    assert np.isnan(decoded[1, 0].real)
    assert np.isposinf(decoded[1, 0].imag)
