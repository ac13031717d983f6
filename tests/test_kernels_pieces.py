"""Tensors that are large, or only look so: exact statistics without a copy of their logical size."""

from __future__ import annotations

import math
import resource

import numpy as np
import pytest
import torch
from kernels_support import DEVICES

from flightrec.kernels import pieces, reference
from flightrec.records import Statistic

HUGE = (1 << 18, 1 << 17)  # 2^35 elements


def row(x, valid_rows=None):
    return dict(zip(Statistic, reference.high_precision_statistics(x, valid_rows).tolist(), strict=True))


def peak_bytes(device):
    """The most memory that was ever in use, where the tensors are."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (torch.tensor([2.0]), (0, 0, 2.0, 2.0)),
        (torch.tensor([math.nan]), (1 << 35, 0, None, 0.0)),
        (torch.tensor([0.0]), (0, 1 << 35, 0.0, 0.0)),
    ],
    ids=["finite", "nan", "zero"],
)
def test_one_element_expanded_beyond_two_to_the_31_counts_every_element(device, base, expected):
    base = base.to(device)
    before = peak_bytes(device)
    found = row(base.expand(HUGE))
    nan, zero, amax, mean = expected
    assert found[Statistic.NUMEL] == 1 << 35
    assert (found[Statistic.NAN_COUNT], found[Statistic.ZERO_COUNT]) == (nan, zero)
    assert math.isnan(found[Statistic.AMAX]) if amax is None else found[Statistic.AMAX] == amax
    assert found[Statistic.SUM] == mean * (1 << 35)
    assert peak_bytes(device) - before < 256 << 20


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_columns_expanded(device):
    x = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).to(device)
    for expanded, copies in ((x.expand(1 << 24, 300), 1 << 24), (x.t().expand(300, 1 << 24), 1 << 24)):
        found, once = row(expanded), row(x)
        for statistic in (Statistic.NUMEL, Statistic.SUM, Statistic.SUM_OF_SQUARES):
            assert found[statistic] == once[statistic] * copies
        assert found[Statistic.AMAX] == once[Statistic.AMAX]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [0, 3, 1 << 20])
def test_valid_rows_of_an_expanded_tensor(device, num_rows):
    x = torch.tensor([[1.0, -4.0]], device=device).expand(1 << 20, 2)
    for valid_rows in (num_rows, torch.tensor(num_rows, device=device)):
        found = row(x, valid_rows)
        assert found[Statistic.NUMEL] == 2 * num_rows
        assert found[Statistic.SUM] == -3 * num_rows
        assert math.isnan(found[Statistic.AMAX]) if not num_rows else found[Statistic.AMAX] == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("valid_rows", [None, 5, 0, 100])
@pytest.mark.parametrize("on_device", [False, True])
def test_pieces_together_are_the_whole(device, valid_rows, on_device, monkeypatch):
    x = torch.randn(11, 5, 7, generator=torch.Generator().manual_seed(0))
    x[4, 2, 1], x[10, 0, 0], x[2, 2, 2] = math.nan, math.inf, 0
    x = x.to(device).transpose(1, 2)
    if on_device and valid_rows is not None:
        valid_rows = torch.tensor(valid_rows, device=device)
    whole = reference.high_precision_statistics(x, valid_rows).cpu().numpy()
    codes = x.to(torch.float8_e4m3fn)
    whole_codes = reference.quantized_statistics(codes, "float8_e4m3fn", valid_rows).cpu().numpy()
    for size in (1, 6, 40, 384):
        monkeypatch.setattr(pieces, "PIECE", size)
        assert all(piece.numel() <= size for piece, _ in pieces.pieces(x, None))
        found = reference.high_precision_statistics(x, valid_rows).cpu().numpy()
        np.testing.assert_allclose(found, whole, rtol=1e-12)
        found = reference.quantized_statistics(codes, "float8_e4m3fn", valid_rows).cpu().numpy()
        np.testing.assert_array_equal(found, whole_codes)


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_codes_count_every_code(device):
    codes = torch.full((1, 1), 0x7F, dtype=torch.uint8, device=device).expand(HUGE)
    found = dict(zip(Statistic, reference.quantized_statistics(codes, "float8_e4m3fn").tolist(), strict=True))
    assert found[Statistic.QUANTIZED_NAN_COUNT] == found[Statistic.QUANTIZED_NUMEL] == 1 << 35
