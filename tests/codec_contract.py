"""What every element format must do, as one class of tests: subclass it and name the format."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from flightrec.codecs import base
from flightrec.errors import FormatError


class CodecContract:
    """Tests of one element format whose codes are stored as integers.

    Attributes:
        format: its name.
        reference: dtype of ml_dtypes that means the same.
        named: code -> number for the edge cases that matter (NaN as None).
    """

    format: str
    reference: Any
    named: dict[int, float | None]

    def all_codes(self) -> np.ndarray:
        dtype = base.storage_dtype(self.format)
        return np.arange(1 << (8 * dtype.itemsize), dtype=np.int64).astype(dtype)

    def elements(self, codes: np.ndarray) -> np.ndarray:
        """Codes one by one, as the reference dtype reads them."""
        return codes

    def test_every_code_is_what_ml_dtypes_says(self) -> None:
        codes = self.all_codes()
        expected = self.elements(codes).view(self.reference).astype(np.float32)
        decoded = base.decode(codes, self.format)
        assert decoded.dtype == np.float32
        assert decoded.tobytes() == expected.tobytes()

    def test_named_edge_cases(self) -> None:
        for code, number in self.named.items():
            decoded = base.decode(np.array([code], dtype=base.storage_dtype(self.format)), self.format)[0]
            if number is None:
                assert np.isnan(decoded)
            else:
                assert (decoded, np.signbit(decoded)) == (number, np.signbit(number))

    def test_shapes_are_kept(self) -> None:
        factor = base.element_format(self.format).elements_per_item
        for shape in ((0,), (3, 0), (5,), (2, 3, 4)):
            codes = np.zeros(shape, dtype=base.storage_dtype(self.format))
            assert base.decode(codes, self.format).shape == (*shape[:-1], shape[-1] * factor)

    def test_another_dtype_is_refused(self) -> None:
        with pytest.raises(FormatError, match=self.format):
            base.decode(np.zeros(3, dtype=np.int32), self.format)

    def test_layout_in_memory_does_not_matter(self) -> None:
        codes = self.all_codes()[:16].reshape(4, 4)
        assert np.array_equal(
            base.decode(codes.T, self.format), base.decode(codes.T.copy(), self.format), equal_nan=True
        )

    def test_decoding_is_elementwise(self) -> None:
        dtype = base.storage_dtype(self.format)

        @given(codes=hnp.arrays(dtype, hnp.array_shapes(max_dims=3, max_side=5)))  # inside: one executor a class
        def check(codes: np.ndarray) -> None:
            whole = base.decode(codes, self.format).reshape(-1)
            single = [base.decode(codes.reshape(-1)[index : index + 1], self.format) for index in range(codes.size)]
            assert whole.tobytes() == np.concatenate(single).tobytes()

        check()


REFERENCES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "float6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "float4_e2m1fn_x2": ml_dtypes.float4_e2m1fn,
}
