"""What the kernel and ring tests share: devices, implementations, and plain numpy models of the statistics."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from flightrec.kernels import host, reference
from flightrec.kernels.formats import copy_dtype
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.records import NUM_STATISTICS, Statistic

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, GPU])
DEVICES = ["cpu", CUDA]


def fused_capture(*arguments) -> None:
    """Triton's kernels; one that fails is a failed test, not a record by the reference."""
    from flightrec.kernels import device

    assert not device._gave_up
    device.capture(*arguments)
    assert not device._gave_up


IMPLEMENTATIONS = [
    pytest.param((reference.capture, "cpu"), id="reference-cpu"),
    pytest.param((host.capture, "cpu"), id="host"),
    pytest.param((reference.capture, "cuda"), id="reference-cuda", marks=[pytest.mark.gpu, GPU]),
    pytest.param((fused_capture, "cuda"), id="triton", marks=[pytest.mark.gpu, GPU]),
]

CODE_TYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float4_e2m1fn_x2": ml_dtypes.float4_e2m1fn,
}
ROUNDED = (
    Statistic.SUM,
    Statistic.SUM_OF_SQUARES,
    Statistic.SQUARED_ERROR,
    Statistic.RANGE_RATIO,
    Statistic.SCALE_INVERSE_ERROR,
    Statistic.HISTORY_RATIO,
)
EXACT = [c for c in Statistic if c not in ROUNDED]


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes (uint8) as float64 by ml_dtypes; packed ones double the last dimension."""
    if name == "float4_e2m1fn_x2":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return codes.view(CODE_TYPES[name]).astype(np.float64)


def bits(x: torch.Tensor) -> np.ndarray:
    """A tensor's bytes in logical order."""
    x = x.detach().cpu().contiguous()
    if x.dtype.itemsize == 16:
        return torch.view_as_real(x).numpy().view(np.uint8)
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.view(narrow).numpy()


def expected_high_precision(x: np.ndarray) -> dict[int, float]:
    """Statistics of float64 values."""
    with np.errstate(all="ignore"):
        finite = x[np.isfinite(x)]
        return {
            Statistic.NUMEL: x.size,
            Statistic.NAN_COUNT: np.isnan(x).sum(),
            Statistic.POSITIVE_INF_COUNT: (x == np.inf).sum(),
            Statistic.NEGATIVE_INF_COUNT: (x == -np.inf).sum(),
            Statistic.ZERO_COUNT: (x == 0).sum(),
            Statistic.AMAX: np.abs(finite).max() if finite.size else math.nan,
            Statistic.SUM: finite.sum(),
            Statistic.SUM_OF_SQUARES: (finite**2).sum(),
        }


def expected_codes(codes: np.ndarray, name: str) -> dict[int, float]:
    """Statistics of codes, from their decoded values."""
    values = decode(codes, name)
    largest = float(ml_dtypes.finfo(CODE_TYPES[name]).max)
    return {
        Statistic.QUANTIZED_NUMEL: values.size,
        Statistic.QUANTIZED_NAN_COUNT: np.isnan(values).sum(),
        Statistic.QUANTIZED_INF_COUNT: np.isinf(values).sum(),
        Statistic.QUANTIZED_ZERO_COUNT: (values == 0).sum(),
        Statistic.QUANTIZED_SATURATED_COUNT: (np.abs(values) == largest).sum(),
        Statistic.QUANTIZED_LARGEST: largest,
    }


def expected_pair(x: np.ndarray, values: np.ndarray) -> dict[int, float]:
    """Pair statistics of float64 values and dequantized values."""
    with np.errstate(all="ignore"):
        error = (values - x)[np.isfinite(values) & np.isfinite(x)]
        return {
            Statistic.UNDERFLOW_COUNT: (np.isfinite(x) & (x != 0) & (values == 0)).sum(),
            Statistic.SQUARED_ERROR: (error**2).sum(),
        }


def expected_range(x: np.ndarray, factor: np.ndarray, name: str) -> dict[int, float]:
    """How far float64 values reach beyond a format's range; ``factor`` multiplies to decode, broadcastable."""
    largest = float(ml_dtypes.finfo(CODE_TYPES[name]).max)
    with np.errstate(all="ignore"):
        ratio = np.abs(x) / (factor * largest)
        ratio = np.where(np.isfinite(ratio), ratio, 0)
        return {
            Statistic.CLIPPED_COUNT: (ratio > 1 + 2.0**-20).sum(),
            Statistic.RANGE_RATIO: ratio.max() if x.size else 0,
        }


def expected_scale(words: np.ndarray) -> dict[int, float]:
    """Statistics of the words of a scale."""
    finite = words[np.isfinite(words)]
    extremes = (finite.min(), finite.max()) if finite.size else (math.nan, math.nan)
    return {Statistic.SCALE_MIN: extremes[0], Statistic.SCALE_MAX: extremes[1]}


def destination_for(
    high_precision: torch.Tensor | None, parts: list[torch.Tensor], device: str, num_planes: int = 4
) -> Destination:
    """Memory of its own for one record, filled with a pattern."""

    def memory(tensor: torch.Tensor) -> torch.Tensor:
        kind = copy_dtype(tensor.dtype)
        numel = -(-max(tensor.numel(), 1) // 16) * 16  # as in the ring, each place starts at a multiple of 16 bytes
        planes = torch.full((num_planes, numel), 7, dtype=kind, device=device)
        return planes[:, : tensor.numel()].view(num_planes, *tensor.shape)

    return Destination(
        high_precision=None if high_precision is None else memory(high_precision),
        parts=[memory(part) for part in parts],
        statistics=torch.full((num_planes, 3, NUM_STATISTICS), -5.0, dtype=torch.float64, device=device)[:, 1],
        stamp=torch.full((num_planes, 3), -1, dtype=torch.int64, device=device)[:, 1],
    )


def run_capture(
    implementation: tuple,
    high_precision: torch.Tensor | None,
    parts: list[torch.Tensor] | None = None,
    plan: CapturePlan | None = None,
    valid_rows: int | torch.Tensor | None = None,
    slot: int = 2,
) -> tuple[Destination, np.ndarray]:
    """Capture into plane ``slot``: the memory, and the statistics row."""
    capture, device = implementation
    high_precision = None if high_precision is None else high_precision.to(device)
    parts = [part.to(device) for part in parts or []]
    valid_rows = valid_rows.to(device) if isinstance(valid_rows, torch.Tensor) else valid_rows
    destination = destination_for(high_precision, parts, device)
    where = torch.tensor([slot], device=device)
    with torch.no_grad():
        capture(
            plan or CapturePlan(),
            destination,
            high_precision,
            parts,
            where,
            torch.tensor([9], device=device),
            valid_rows,
        )
    assert destination.stamp.cpu().tolist() == [9 if plane == slot else -1 for plane in range(4)]
    others = [plane for plane in range(4) if plane != slot]
    assert (destination.statistics.cpu()[others] == -5).all()
    return destination, destination.statistics[slot].cpu().numpy().copy()


def assert_row(row: np.ndarray, expected: dict[int, float], x: np.ndarray | None = None) -> None:
    """Counts and amax exactly, sums to 1e-6 (of the sum of magnitudes); what is not expected must be absent."""
    for column in Statistic:
        if column not in expected:
            assert math.isnan(row[column]), column.name
        elif column in EXACT:
            np.testing.assert_equal(row[column], float(expected[column]), column.name)
        else:
            scale = 0.0
            if column is Statistic.SUM and x is not None:
                scale = float(np.abs(x[np.isfinite(x)]).sum())
            np.testing.assert_allclose(row[column], expected[column], rtol=1e-6, atol=1e-6 * scale, err_msg=column.name)
