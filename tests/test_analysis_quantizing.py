from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.analysis.blame import blame
from flightrec.analysis.causes import QUANTIZER_KINDS
from flightrec.analysis.incident import open_incident
from flightrec.analysis.judge import judge
from flightrec.analysis.verdict import Verdict
from flightrec.records import Key, Severity

CLEAN = {
    "numel": 64, "nan_count": 0, "zero_count": 0, "amax": 2.0, "sum_of_squares": 64.0, "squared_error": 0.1,
    "quantized_numel": 64, "quantized_nan_count": 0, "quantized_inf_count": 0, "quantized_zero_count": 3,
    "quantized_saturated_count": 1, "clipped_count": 0, "underflow_count": 0, "range_ratio": 1.0,
    "scale_nonfinite_count": 0, "scale_min": 224.0, "scale_max": 224.0,
}  # fmt: skip


def seen(microbatch: int = 0, **counts) -> Sample:
    return Sample(Key("fc", "weight", microbatch=microbatch), {}, statistics(**(CLEAN | counts)))


def judged(folder: Path, samples, kind: str) -> Verdict:
    last = max(samples)
    fired = firing(samples[last][-1].key, last, kind=kind, rule=kind, severity=Severity.WARNING)
    write_incident(folder, samples, [fired], index=False)
    with open_incident(folder) as incident:
        return incident.verdict()


ERROR = {"squared_error": 63.0, "quantized_saturated_count": 0}


def test_codes_of_the_scale_before_are_told_from_a_quantizer_that_loses(tmp_path: Path) -> None:
    before = seen(scale_max=1.0, quantized_saturated_count=0, range_ratio=0.004)
    verdict = judged(tmp_path, {5: [before, seen(1, **ERROR)]}, "quantization_error")
    assert (verdict.kind, verdict.confidence) == ("scale", "likely")
    assert verdict.cause == "the scale moved on, the codes did not: they belong to the scale before"
    assert verdict.evidence[1:] == (
        "amax times the scale is 1 x the range, yet no code stands at its largest value.",
        "the scale went from 1 to 224 since iteration 5, microbatch 0, while as many codes are zero as there.",
    )


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"scale_max": 1.0, "quantized_saturated_count": 0}, ERROR | {"quantized_saturated_count": 1}),  # it fills
        ({"scale_max": 1.0, "quantized_saturated_count": 0, "quantized_zero_count": 4}, ERROR),  # made anew
        ({"quantized_saturated_count": 0}, ERROR),  # the scale is the same
        ({"scale_max": 1.0, "quantized_saturated_count": 0}, ERROR | {"range_ratio": 0.5}),  # need not fill it
    ],
)
def test_other_codes_of_a_large_error_are_the_quantizers(before, now, tmp_path: Path) -> None:
    verdict = judged(tmp_path, {5: [seen(**before), seen(1, **now)]}, "quantization_error")
    assert (verdict.kind, verdict.confidence) == ("quantization", "likely")


ZEROS = {"quantized_zero_count": 64, "underflow_count": 64, "quantized_saturated_count": 0}


def test_zeros_of_a_scale_that_fits_are_certainly_the_quantizers(tmp_path: Path) -> None:
    verdict = judged(tmp_path, {5: [seen(**ZEROS)]}, "underflow")
    assert (verdict.kind, verdict.confidence) == ("quantization", "certain")
    assert verdict.evidence[1:] == (
        "64 of 64 codes are zero, while the tensor before has amax 2.",
        "the scale fits: it puts the largest value at 1 x the format's range.",
    )


@pytest.mark.parametrize("changed", [{"range_ratio": 1e-6}, {"quantized_zero_count": 40}, {"range_ratio": np.nan}])
def test_zeros_of_a_scale_that_does_not_fit_or_some_zeros_are_less_sure(changed, tmp_path: Path) -> None:
    verdict = judged(tmp_path, {5: [seen(**(ZEROS | changed))]}, "underflow")
    assert (verdict.kind, verdict.confidence) == ("quantization", "likely")


@pytest.mark.parametrize(("amax", "is_told"), [(0.0, True), (1e-38, True), (1.0, False)])
def test_an_amax_without_a_lower_bound_is_told(amax: float, is_told: bool, tmp_path: Path) -> None:
    bad = seen(amax=amax, scale_nonfinite_count=1, quantized_nan_count=64)
    verdict = judged(tmp_path, {5: [bad]}, "nonfinite")
    assert (verdict.kind, verdict.confidence) == ("scale", "certain")
    assert any("no lower bound" in sentence for sentence in verdict.evidence) == is_told


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("kind", [*QUANTIZER_KINDS, "inconsistent_scale", "nonfinite"])
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_files_of_every_version_are_judged_by_what_they_hold(version: str, kind: str) -> None:
    with open_incident(GOLDEN / f"incident-{version}.index.h5") as incident:
        told = blame(incident)[0]
        for rank in incident.ranks:
            for row in range(len(rank.records)):
                key, time = rank.key(rank.records[row]), int(rank.records["iteration"][row])
                origin = replace(told, kind=kind, rank=rank.rank, key=key, iteration=time, record=row, side="quantized")
                verdict = judge(incident, elements=True, findings=[origin])
                assert verdict.kind in ("quantization", "scale", "loss", "optimizer", "numbers", "unknown")
                assert verdict.evidence[0] == told.evidence
