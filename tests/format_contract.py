"""What the codec of every family must do, as one class of tests: subclass it and say how its tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.codecs import base, quantized
from flightrec.errors import FormatError

SIDES = ("rowwise", "columnwise")


@dataclass
class Whole:
    """A tensor as it is stored: what ``quantized.dequantize`` takes."""

    components: dict[str, np.ndarray]
    info: dict[str, Any]
    formats: dict[str, str]
    shape: tuple[int, ...]

    def decode(self, side: str, **changes: Any) -> np.ndarray:
        words = {"formats": self.formats, "shape": self.shape, "side": side} | changes
        return quantized.dequantize(self.components, words.pop("info", self.info), **words)


def join(row: Whole, column: Whole) -> Whole:
    """Both sides of one tensor, as they are recorded together."""
    own = row.info["metadata"].get("columnwise") or column.info["metadata"]["columnwise"]
    info = {**row.info, "metadata": {**row.info["metadata"], "columnwise": own}}
    return Whole(row.components | column.components, info, row.formats | column.formats, row.shape)


class FormatContract:
    """Tests of one family.

    Attributes:
        format: element format of its codes.
        needs: components, without a side's prefix, that it cannot do without.
        words: of ``info`` or of the side's metadata, likewise.
        multiple: rows and columns are multiples of it.
    """

    format: ClassVar[str] = "float8_e4m3fn"
    needs: ClassVar[tuple[str, ...]] = ("data", "scale_inv")
    words: ClassVar[tuple[str, ...]] = ()
    multiple: ClassVar[int] = 1

    def store(self, codes: np.ndarray, rng: np.random.Generator, side: str) -> tuple[Whole, np.ndarray]:
        """Codes [rows, columns] (one a byte) under random scales, and the float32 factor of each element."""
        raise NotImplementedError

    # -- how the tests use it

    def made(self, codes: np.ndarray, side: str, seed: int = 0) -> tuple[Whole, np.ndarray]:
        """What is stored, and its numbers by definition."""
        whole, factors = self.store(codes.astype(np.uint8), np.random.default_rng(seed), side)
        return whole, self.numbers(codes) * factors

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """The codes' own numbers, through ml_dtypes."""
        element = base.element_format(self.format)
        return codes.astype(np.uint8).view(element.codes).astype(np.float32)

    def num_codes(self) -> int:
        return 16 if base.element_format(self.format).elements_per_item == 2 else 256

    def random_codes(self, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.num_codes(), shape).astype(np.uint8)

    @staticmethod
    def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
        """Equal to the bit, but for the payload of NaN, which no hardware keeps."""
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        same = (found.view("u4") == expected.astype(np.float32).view("u4")) | (np.isnan(found) & np.isnan(expected))
        assert same.all()

    # -- the contract

    @pytest.mark.parametrize("side", SIDES)
    def test_every_code_is_exact(self, side: str) -> None:
        codes = np.resize(np.arange(self.num_codes()), (160, 288))
        whole, expected = self.made(codes, side)
        with np.errstate(all="ignore"):
            self.assert_same(whole.decode(side), expected)

    @pytest.mark.parametrize("side", SIDES)
    def test_odd_shapes(self, side: str) -> None:
        @given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 5))
        def check(rows: int, columns: int, seed: int) -> None:
            shape = tuple(-(-size // self.multiple) * self.multiple for size in (rows, columns))
            whole, expected = self.made(self.random_codes(shape, seed), side, seed)
            with np.errstate(all="ignore"):
                self.assert_same(whole.decode(side), expected)

        check()

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
    def test_tensors_without_elements(self, shape: tuple[int, int], side: str) -> None:
        whole, _ = self.made(np.zeros(shape, np.uint8), side)
        assert whole.decode(side).shape == shape

    @pytest.mark.parametrize("side", SIDES)
    def test_zero_codes_are_zeros_under_any_scale(self, side: str) -> None:
        whole, _ = self.made(np.zeros((32, 64), np.uint8), side)
        assert not whole.decode(side).any()

    @pytest.mark.parametrize("side", SIDES)
    def test_saturated_subnormal_and_non_finite_codes(self, side: str) -> None:
        element = base.element_format(self.format)
        numbers = np.arange(self.num_codes(), dtype=np.uint8).view(element.codes).astype(np.float32)
        finite = np.flatnonzero(np.isfinite(numbers))
        largest = finite[np.argmax(numbers[finite])]
        smallest = min((code for code in finite if numbers[code] > 0), key=lambda code: numbers[code])
        named = [largest, smallest, *np.flatnonzero(~np.isfinite(numbers))]
        codes = np.resize(np.array(named), (32, 32))
        whole, expected = self.made(codes, side)
        with np.errstate(all="ignore"):
            found = whole.decode(side)
        self.assert_same(found, expected)
        assert found[0, 0] > 0
        assert np.isfinite(found[0, :2]).all()
        assert np.isnan(found).any() == np.isnan(numbers).any()
        assert np.isinf(found).any() == np.isinf(numbers).any()

    def test_both_sides_are_decoded_by_their_own_words(self) -> None:
        row, row_expected = self.made(self.random_codes((64, 96), 1), "rowwise", 1)
        column, column_expected = self.made(self.random_codes((64, 96), 2), "columnwise", 2)
        whole = join(row, column)
        with np.errstate(all="ignore"):
            self.assert_same(whole.decode("rowwise"), row_expected)
            self.assert_same(whole.decode("columnwise"), column_expected)
            self.assert_same(quantized.dequantize(whole.components, whole.info, formats=whole.formats), row_expected)

    def test_layout_in_memory_does_not_matter(self) -> None:
        whole, expected = self.made(self.random_codes((32, 48)), "rowwise")
        whole.components = {name: np.asfortranarray(array) for name, array in whole.components.items()}
        with np.errstate(all="ignore"):
            self.assert_same(whole.decode("rowwise"), expected)

    @pytest.mark.parametrize("side", SIDES)
    def test_what_is_missing_is_named(self, side: str) -> None:
        prefix = "columnwise_" if side == "columnwise" else ""
        for name in self.needs:
            whole, _ = self.made(self.random_codes((32, 32)), side)
            del whole.components[prefix + name]
            with pytest.raises(FormatError, match=f"'{prefix}{name}'"):
                whole.decode(side)

    @pytest.mark.parametrize("side", SIDES)
    def test_words_that_are_missing_are_named(self, side: str) -> None:
        for word in self.words:
            whole, _ = self.made(self.random_codes((32, 32)), side)
            with pytest.raises(FormatError, match=word):
                whole.decode(side, info=_without(whole.info, word))

    @pytest.mark.parametrize("side", SIDES)
    def test_another_shape_and_an_unknown_format_are_refused(self, side: str) -> None:
        whole, _ = self.made(self.random_codes((32, 32)), side)
        with pytest.raises(FormatError, match=r"\(5, 7\)"):
            whole.decode(side, shape=(5, 7), info=_without(whole.info, "logical_shape"))
        prefix = "columnwise_" if side == "columnwise" else ""
        with pytest.raises(FormatError, match="float9"):
            whole.decode(side, formats={**whole.formats, f"{prefix}data": "float9"})


def _without(info: Mapping[str, Any], word: str) -> dict[str, Any]:
    """The same metadata without a word, at any depth."""
    return {
        key: _without(value, word) if isinstance(value, Mapping) else value
        for key, value in info.items()
        if key != word
    }


def described(
    scheme: str,
    element: str,
    side: str,
    *,
    block_shape: tuple[int, ...] = (),
    direction: str = "multiply_to_decode",
    **more: Any,
) -> dict[str, Any]:
    """``QuantizerInfo.to_json()`` of a tensor with one side."""
    own = {"scheme": scheme, "format": element, "scale_direction": direction, "block_shape": list(block_shape), **more}
    metadata = {"scheme": scheme, **more} if side == "rowwise" else {"scheme": scheme, "columnwise": own}
    return {"class_name": "x", "format": element, "scale_direction": direction, "block_shape": block_shape} | {
        "metadata": metadata
    }


def prefixed(arrays: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Names as they are in a file."""
    return {("columnwise_" if side == "columnwise" else "") + name: array for name, array in arrays.items()}


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scales [rows, blocks], padded to tiles, one by one where cuBLAS documents them to lie."""
    rows, columns = scales.shape
    across = columns // 4
    flat = np.empty(scales.size, scales.dtype)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    return flat
