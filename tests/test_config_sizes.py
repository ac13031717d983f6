from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.config.sizes import (
    BYTES_OF_UNIT,
    MAX_SIZE_BYTES,
    MIN_SIZE_BYTES,
    Share,
    exact_size,
    format_size,
    parse_memory,
    parse_optional_size,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("8 GiB", 8 * 2**30),
        ("8GiB", 8 * 2**30),
        ("  8  GiB ", 8 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("0.1 MiB", 104857),
        ("500 MB", 500_000_000),
        ("4096 B", 4096),
        ("4 kB", None),
        (4096, 4096),
        (2**40, 2**40),
    ],
)
def test_sizes_are_exact_and_rounded_down(written, num_bytes):
    if num_bytes is None:
        with pytest.raises(ValueError, match="from 4 KiB"):
            parse_size(written)
    else:
        assert parse_size(written) == num_bytes


@pytest.mark.parametrize("written", ["", "GiB", "8", "8 GiB 3", "-8 GiB", "1e3 GiB", ".5 GiB", 8.0, True, None, [8]])
def test_what_is_no_size_is_refused(written):
    with pytest.raises(ValueError, match=r"^expected a size such as 8 GiB, or a number of bytes$"):
        parse_size(written)


@pytest.mark.parametrize("written", ["8 G", "8 gb", "8 GIB", "8 gib", "8 Gb"])
def test_ambiguous_units_name_the_one_that_was_meant(written):
    with pytest.raises(ValueError, match="did you mean 8 GiB"):
        parse_size(written)


def test_unknown_units_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown unit 'parsec', known are B, KiB, MiB"):
        parse_size("8 parsec")


@pytest.mark.parametrize("written", [0, -1, MIN_SIZE_BYTES - 1, MAX_SIZE_BYTES + 1, "9999 PiB", "0 GiB"])
def test_sizes_out_of_range_are_refused(written):
    with pytest.raises(ValueError, match="expected a size from 4 KiB to"):
        parse_size(written)


def test_a_forgotten_unit_is_guessed():
    with pytest.raises(ValueError, match="did you mean 8 GiB"):
        parse_size(8)


@pytest.mark.parametrize(("written", "fraction"), [("5%", 0.05), ("0.5 %", 0.005), ("100%", 1.0), (" 7% ", 0.07)])
def test_shares(written, fraction):
    assert parse_share(written) == Share(fraction)


@pytest.mark.parametrize("written", ["0%", "101%", "%", "-5%", "5", 5, None, "5%%"])
def test_what_is_no_share_is_refused(written):
    with pytest.raises(ValueError, match="expected a share"):
        parse_share(written)


def test_a_share_of_a_total_is_rounded_down():
    assert Share(0.05).of(1000) == 50
    assert Share(1 / 3).of(100) == 33


@pytest.mark.parametrize(
    ("written", "value"),
    [(None, None), ("5%", Share(0.05)), (Share(0.5), Share(0.5)), ("4 KiB", 4096), (4096, 4096)],
)
def test_memory_is_a_size_a_share_or_nothing(written, value):
    assert parse_memory(written) == value


def test_memory_names_all_three_when_it_is_none_of_them():
    with pytest.raises(ValueError, match="a number of bytes, or a share such as 5%"):
        parse_memory("lots")
    assert parse_optional_size(None) is None
    with pytest.raises(ValueError, match="expected a size"):
        parse_optional_size("5%")


@given(st.integers(MIN_SIZE_BYTES, MAX_SIZE_BYTES))
def test_exact_size_reads_back_exactly(num_bytes):
    assert parse_size(exact_size(num_bytes)) == num_bytes


@given(st.integers(MIN_SIZE_BYTES, MAX_SIZE_BYTES))
def test_format_size_is_within_half_a_percent(num_bytes):
    number, unit = format_size(num_bytes).split()
    assert abs(float(number) * BYTES_OF_UNIT[unit] - num_bytes) <= 0.005 * num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (12, "12 B"), (1023, "1023 B"), (2**33, "8 GiB"), (1_530_000, "1.46 MiB"), (100 * 2**20, "100 MiB")],
)
def test_format_size(num_bytes, text):
    assert format_size(num_bytes) == text


@given(st.floats(0.0001, 1))
def test_a_written_share_reads_back(fraction):
    assert parse_share(str(Share(fraction))).fraction == pytest.approx(fraction, rel=1e-9)
