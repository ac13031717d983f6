"""The history of statistics, worked out from the records of every iteration by plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from flightrec.records import NO_MICROBATCH, Key

Samples = dict[tuple[Key, tuple[int, int]], dict[str, float]]
"""(series, (attempt, iteration)) -> statistic -> value."""


def one_record(found: Mapping[str, float]) -> dict[str, float]:
    """Statistics of one record; ``found`` has the columns of ``/records``, NaN where absent."""

    def share(part: float, whole: float) -> float:
        if whole:
            return part / whole
        return math.nan if math.isnan(part) or not part else math.copysign(math.inf, part)

    s = {name: float(value) for name, value in found.items()}
    infinite = s["positive_inf_count"] + s["negative_inf_count"]
    finite = s["numel"] - s["nan_count"] - infinite
    return {
        "numel": s["quantized_numel"] if math.isnan(s["numel"]) else s["numel"],
        "nan_count": s["nan_count"],
        "inf_count": infinite,
        "zero_share": share(s["zero_count"], s["numel"]),
        "amax": s["amax"],
        "rms": math.sqrt(share(s["sum_of_squares"], finite)),
        "mean": share(s["sum"], finite),
        "quantized_nan_count": s["quantized_nan_count"],
        "quantized_inf_count": s["quantized_inf_count"],
        "quantized_zero_share": share(s["quantized_zero_count"], s["quantized_numel"]),
        "saturated_share": share(s["quantized_saturated_count"], s["quantized_numel"]),
        "clipped_share": share(s["clipped_count"], finite),
        "underflow_share": share(s["underflow_count"], finite - s["zero_count"]),
        "quantization_error": math.sqrt(share(s["squared_error"], s["sum_of_squares"])),
        "range_ratio": s["range_ratio"],
        "history_ratio": s["history_ratio"],
        "scale_min": s["scale_min"],
        "scale_max": s["scale_max"],
        "scale_inverse_error": s["scale_inverse_error"],
        "scale_nonfinite_count": s["scale_nonfinite_count"],
        "zero_scale_count": s["zero_scale_count"],
        "quantizer_amax": s["quantizer_amax"],
    }


def over_microbatches(records: list[dict[str, float]]) -> dict[str, float]:
    """The worst of several records of a series in one iteration."""
    sample = {}
    for name in records[0]:
        values = [record[name] for record in records if not math.isnan(record[name])]
        if not values:
            sample[name] = math.nan
        elif name == "numel":
            sample[name] = sum(values)
        elif name == "scale_min":
            sample[name] = min(values)
        elif name == "mean":
            sample[name] = max(values, key=abs)
        else:
            sample[name] = max(values)
    return sample


def samples_of(records: Iterable[tuple[Key, tuple[int, int], Mapping[str, float]]]) -> Samples:
    """Samples of all series from (key, (attempt, iteration), statistics) of every record."""
    found: dict[tuple[Key, tuple[int, int]], list[dict[str, float]]] = {}
    for key, time, statistics in records:
        found.setdefault((replace(key, microbatch=NO_MICROBATCH), time), []).append(one_record(statistics))
    return {place: over_microbatches(several) for place, several in found.items()}


def assert_equal(history, expected: Samples, times: list[tuple[int, int]]) -> None:
    """The history holds exactly these samples, at these times, for all series that are expected."""
    got_times = list(zip(history.attempts.tolist(), history.iterations.tolist(), strict=True))
    assert got_times == times
    keys = {key for key, time in expected if time in set(times)}
    assert {series.key for series in history.all_series} == keys
    for series in history.all_series:
        for statistic in next(iter(expected.values())):
            wanted = [expected.get((series.key, time), {}).get(statistic, math.nan) for time in times]
            np.testing.assert_allclose(
                series[statistic], np.array(wanted, np.float32), rtol=1e-6, err_msg=f"{series}: {statistic}"
            )
