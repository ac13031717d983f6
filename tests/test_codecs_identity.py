from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from format_contract import described

from flightrec.codecs import quantized
from flightrec.errors import FormatError


class TestIdentity:
    form: ClassVar[str] = "bfloat16"

    @pytest.mark.parametrize("side", ["rowwise", "columnwise"])
    def test_bfloat16_comes_as_float32(self, side: str) -> None:
        prefix = "columnwise_" if side == "columnwise" else ""
        info = described("identity", "bfloat16", side, direction="none")
        stored = np.array([[0x3F80, 0xC000, 0x7FC1]], np.uint16)
        values = quantized.dequantize({f"{prefix}data": stored}, info, formats={f"{prefix}data": "bfloat16"}, side=side)
        assert values[0, :2].tolist() == [1.0, -2.0]
        assert np.isnan(values[0, 2])


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
@pytest.mark.parametrize("form", ["float32", "float16", "float64"])
def test_native_numbers(form: str, shape: tuple[int, ...]) -> None:
    stored = np.ones(shape, form)
    values = quantized.dequantize({"data": stored}, described("identity", form, "rowwise", direction="none"))
    assert (values.dtype, values.shape) == (np.float32, shape)
    assert (values == 1).all()


def test_what_is_missing_or_no_number_is_refused() -> None:
    info = described("identity", "float32", "rowwise", direction="none")
    with pytest.raises(FormatError, match="'data' is missing"):
        quantized.dequantize({"scale_inv": np.ones(1)}, info)
    integers = described("identity", "int32", "rowwise", direction="none")
    with pytest.raises(FormatError, match="int32"):
        quantized.dequantize({"data": np.ones(1, np.int32)}, integers)
