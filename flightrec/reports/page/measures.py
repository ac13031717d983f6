"""The statistics that the page draws, derived from the columns of ``/records`` and of the history. Pure functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MEASURES: dict[str, str] = {
    "amax": "amax: the largest finite magnitude",
    "underflow": "Underflow: share of non-zero values that became zero",
    "saturated": "Saturation: share of codes at the format's largest value",
    "error": "Quantization error: norm(dequantized - x) / norm(x)",
    "nonfinite": "NaN and Inf: values, codes and scales",
}
"""Name to title, in the order of the page; the names are the keys of ``of_records``."""

HISTORY: dict[str, tuple[str, ...]] = {
    "amax": ("amax",),
    "underflow": ("underflow_share",),
    "saturated": ("saturated_share",),
    "error": ("quantization_error",),
    "nonfinite": ("nan_count", "inf_count", "quantized_nan_count", "quantized_inf_count", "scale_nonfinite_count"),
}
"""Names of the history's statistics that make up each, added together."""


def of_records(table: npt.NDArray[np.void]) -> dict[str, Floats]:
    """One column a measure, float64 [records], NaN where absent; also ``rms`` and ``zero``."""

    def column(name: str) -> Floats:
        there = name in (table.dtype.names or ())  # a file of an earlier minor version lacks the later ones
        return np.asarray(table[name], np.float64) if there else np.full(len(table), np.nan)

    high = np.nan_to_num(column("nan_count"))
    high = high + np.nan_to_num(column("positive_inf_count")) + np.nan_to_num(column("negative_inf_count"))
    codes = sum(
        (np.nan_to_num(column(f"{name}_count")) for name in ("quantized_nan", "quantized_inf", "scale_nonfinite")),
        np.zeros(len(table)),
    )
    known = ~(np.isnan(column("numel")) & np.isnan(column("quantized_numel")))
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = column("numel") - high
        ratios = {
            "underflow": column("underflow_count") / (finite - column("zero_count")),
            "saturated": column("quantized_saturated_count") / column("quantized_numel"),
            "error": np.sqrt(column("squared_error") / column("sum_of_squares")),
            "rms": np.sqrt(column("sum_of_squares") / finite),
            "zero": column("zero_count") / column("numel"),
        }
    return {
        "amax": column("amax"),
        "nonfinite": np.where(known, high + codes, np.nan),
        **{name: np.where(np.isfinite(values), values, np.nan) for name, values in ratios.items()},
    }


def rounded(value: Any, digits: int = 4) -> float | int | None:
    """A number in few characters; None for what is not finite."""
    value = float(value)
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def rounded_list(values: npt.NDArray[Any], digits: int = 4) -> list[float | int | None]:
    """``rounded`` of each."""
    return [rounded(value, digits) for value in values.tolist()]
