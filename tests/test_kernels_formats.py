from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from kernels_support import CODE_TYPES, bits, decode

from flightrec.kernels.formats import CODE_FORMATS, as_bits, copy_dtype, dtype_name
from flightrec.kernels.formats import decode as decode_codes

ALL_BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("name", sorted(CODE_TYPES))
def test_masks_agree_with_ml_dtypes_on_every_code(name):
    code_format = CODE_FORMATS[name]
    codes = ALL_BYTES[:16] if code_format.packed else ALL_BYTES
    values = codes.view(CODE_TYPES[name]).astype(np.float64) if code_format.packed else decode(codes, name)
    magnitudes = codes & code_format.magnitude_mask
    nan = np.zeros(len(codes), bool)
    if code_format.nan_first is not None:
        masked = codes & code_format.nan_mask
        nan = (masked >= code_format.nan_first) & (masked <= code_format.nan_last)
    np.testing.assert_array_equal(nan, np.isnan(values))
    infinite = magnitudes == code_format.infinity if code_format.infinity is not None else np.zeros(len(codes), bool)
    np.testing.assert_array_equal(infinite, np.isinf(values))
    zero = (codes & code_format.zero_mask) == 0 if code_format.zero_mask is not None else np.zeros(len(codes), bool)
    np.testing.assert_array_equal(zero, values == 0)
    largest = float(ml_dtypes.finfo(CODE_TYPES[name]).max)
    np.testing.assert_array_equal((magnitudes == code_format.largest) & ~nan, np.abs(values) == largest)
    assert code_format.largest_value == largest


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn"])
def test_codes_of_six_bits_in_a_byte(name):
    code_format, codes = CODE_FORMATS[name], np.arange(64, dtype=np.uint8)
    wanted = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    found = decode_codes(torch.from_numpy(codes), code_format).numpy()
    np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))
    assert code_format.largest_value == wanted.max() == wanted[code_format.largest]
    np.testing.assert_array_equal((codes & code_format.zero_mask) == 0, wanted == 0)


def test_dtype_names_are_those_of_ml_dtypes():
    assert dtype_name(torch.bfloat16) == "bfloat16"
    for name, code_format in CODE_FORMATS.items():
        assert code_format.dtype is None or dtype_name(code_format.dtype) == name


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16, torch.uint32),
    ],
)
def test_bits_keep_shape_strides_and_every_bit(dtype):
    x = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype).t()
    seen = as_bits(x)
    assert (seen.shape, seen.stride()) == (x.shape, x.stride())
    assert seen.dtype == copy_dtype(dtype)
    assert seen.dtype.itemsize == dtype.itemsize
    np.testing.assert_array_equal(bits(seen), bits(x))


def test_lazy_conjugate_is_resolved():
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    np.testing.assert_array_equal(bits(as_bits(x.conj())), bits(torch.tensor([1 - 2j, 3 + 4j], dtype=torch.complex64)))
    assert as_bits(x.conj().imag).tolist() == [-2.0, 4.0]
