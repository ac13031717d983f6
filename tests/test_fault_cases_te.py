"""Faults of quantizer state, as reported from real runs, with Transformer Engine's own state and tensor classes.

The scenarios and numbers are those of the project's list of fault cases.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from te_delayed import HISTORY_LENGTH, Delayed
from test_fault_cases_quantizers import config, incidents, kinds, only
from verdict_support import began, judged, kind_of

import flightrec

E4M3 = torch.float8_e4m3fn


# -- F01: under checkpointing no module was the first, so that the gradient's amax never reached its scale ------------


def f01_train(directory: Path, *, frozen: bool) -> None:
    torch.manual_seed(0)
    fp8 = Delayed()
    with flightrec.Recorder(config(), directory=directory) as recorder:
        for iteration in range(6):
            gradient = torch.randn(64, 64) * 10.0 ** min(iteration, 3)
            if not frozen:
                fp8.state.scale.fill_(448 / gradient.abs().amax())
            tensor = fp8.quantize(gradient)
            if frozen:
                fp8.state.amax_history.zero_()
            recorder.record("fc1", "gradient", high_precision=gradient, quantized=fp8.parts(tensor))
            recorder.step()


def test_f01_a_scale_that_no_amax_reaches_saturates(tmp_path: Path) -> None:
    f01_train(tmp_path, frozen=True)
    incident = only(tmp_path)
    assert incident.trigger.iteration == 3
    assert {"saturation", "stale_scale"} <= kinds(incident)
    assert not {"nonfinite", "inconsistent_scale"} & kinds(incident)
    saturation = next(firing for firing in incident.firings if firing.kind == "saturation")
    assert 0.6 < saturation.value < 0.7
    assert {(finding.key.layer, finding.key.tensor) for finding in incident.blame()} == {("fc1", "gradient")}
    records = incident.records(layer="fc1", tensor="gradient")
    assert [record.iteration for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert record.quantized.components["scale"].reshape(()) == 1
        assert record.quantized.components["scale_inv"].reshape(()) == 1
        assert record.quantized.components["amax_history"].shape == (HISTORY_LENGTH,)
        assert not record.quantized.components["amax_history"].any()
        assert record.quantized.metadata["class_name"].endswith("Float8Tensor")
        assert record.quantized.metadata["metadata"]["recipe"]["margin"] == 0
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("scale", "certain"), ("fc1 gradient 3.0", "fc1 gradient 3.0"))
    assert "unchanged for at least 3 iterations, while amax went between" in verdict.evidence[1]
    assert [(change.statistic, change.iteration) for change in verdict.precursors] == [("amax", 0), ("scale_max", 0)]
    assert (verdict.elements, verdict.missing) == (None, ())
    assert [round(math.log10(record.statistics["range_ratio"] * 448)) for record in records] == [1, 2, 3, 4, 4]


def test_f01_a_scale_that_follows_is_silent(tmp_path: Path) -> None:
    f01_train(tmp_path, frozen=False)
    assert not incidents(tmp_path)


# -- F03: the scale moved on, the cached weight did not ---------------------------------------------------------------


def f03_train(directory: Path, *, stale: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 128) * 0.02
    with flightrec.Recorder(config(), directory=directory) as recorder:
        for _ in range(2):
            fp8 = Delayed()
            cached = fp8.quantize(weight)
            for microbatch in range(2):
                with recorder.microbatch(microbatch):
                    if microbatch == 1:
                        fp8.update()
                        codes = cached._data.view(E4M3)
                        cached = fp8.tensor(codes, 1 / fp8.scale) if stale else fp8.quantize(weight)
                    recorder.record("fc", "weight", high_precision=weight, quantized=cached)
            recorder.step()


def test_f03_codes_of_another_scale_are_blamed_in_their_microbatch(tmp_path: Path) -> None:
    f03_train(tmp_path, stale=True)
    incident = only(tmp_path)
    assert kinds(incident) == {"quantization_error"}  # scale and inverse scale agree with each other
    assert (incident.trigger.iteration, incident.trigger.key.layer, incident.trigger.key.microbatch) == (0, "fc", 1)
    assert incident.trigger.value == pytest.approx(0.9998, abs=2e-4)
    assert {finding.key.microbatch for finding in incident.blame()} == {1}
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("scale", "likely"), ("fc weight 0.1", "fc weight 0.1"))
    assert (verdict.elements, verdict.precursors, verdict.missing) == (None, (), ())
    first, second = incident.records(layer="fc", tensor="weight", iteration=0)
    assert np.array_equal(first.quantized.components["data"], second.quantized.components["data"])
    assert first.statistics["scale_max"] == 1
    assert second.statistics["scale_max"] == pytest.approx(1 / second.quantized.components["scale"].item())


def test_f03_codes_that_were_made_again_are_silent(tmp_path: Path) -> None:
    f03_train(tmp_path, stale=False)
    assert not incidents(tmp_path)


# -- F05: the scale came back from the checkpoint, its inverse did not ------------------------------------------------


def f05_train(recorder: flightrec.Recorder, *, scale_inv: float, num: int = 2) -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 32) * 0.02
    fp8 = Delayed()
    fp8.state.scale.fill_(1000.0)
    for _ in range(num):
        codes = (weight * fp8.scale).clamp(-448, 448).to(E4M3)
        recorder.record("fc", "weight", high_precision=weight, quantized=fp8.parts(fp8.tensor(codes, scale_inv)))
        recorder.step()


def test_f05_a_resumed_run_tells_the_broken_pair_at_its_own_iteration(tmp_path: Path) -> None:
    with flightrec.Recorder(config(), directory=tmp_path, run_id="run") as recorder:
        f05_train(recorder, scale_inv=1e-3)
        recorder.trigger("so that there is an incident of the first run")
        f05_train(recorder, scale_inv=1e-3)
        state = recorder.state_dict()
    (before,) = tmp_path.iterdir()
    with flightrec.Recorder(config(), directory=tmp_path, run_id="run") as recorder:
        recorder.load_state_dict(state)
        recorder.iteration = 5000
        f05_train(recorder, scale_inv=1.0)
    (resumed,) = [incident for incident in incidents(tmp_path) if incident.path != before]
    assert {"inconsistent_scale", "quantization_error"} <= kinds(resumed)
    assert (resumed.trigger.kind, resumed.trigger.iteration) == ("inconsistent_scale", 5000)
    assert resumed.trigger.value == pytest.approx(999)
    assert (resumed.blame()[0].key.layer, resumed.blame()[0].key.tensor) == ("fc", "weight")
    verdict = judged(resumed)
    assert (kind_of(verdict), began(verdict)) == (("scale", "certain"), ("fc weight 5000.0", "fc weight 5000.0"))
    assert (verdict.elements, verdict.precursors) == (None, ())
    with flightrec.open(before) as first:
        assert kinds(first) == {"manual"}


def test_f05_a_scale_that_moved_on_after_quantizing_is_no_broken_pair(tmp_path: Path) -> None:
    """Delayed scaling does that on purpose: handed in later, the quantizer's words are not held against the codes."""
    torch.manual_seed(0)
    fp8 = Delayed()
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        for _ in range(6):
            x = torch.randn(32, 32)
            tensor = fp8.quantize(x)
            fp8.update()
            recorder.record("fc", "activation", high_precision=x, quantized=tensor)
            recorder.step()
    assert not incidents(tmp_path)
