"""Real faults of quantizer state, one small scenario each, with controls that must stay silent.

The numbers are those of the project's list of fault cases.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import RECORD_ALL
from torch import nn
from verdict_support import began, judged, kind_of

import flightrec
from flightrec.records import Stage

E4M3 = torch.float8_e4m3fn
QUANTIZER_RULES = [
    {"kind": "nonfinite"},
    {"kind": "underflow"},
    {"kind": "saturation"},
    {"kind": "quantization_error"},
    {"kind": "inconsistent_scale"},
    {"kind": "stale_scale", "consecutive": 1},
]
SPIKE = {"kind": "amax_spike", "min_samples": 1, "min_numel": 1, "confirm": 1}


def config(*triggers: dict[str, Any], **select: Any) -> dict[str, Any]:
    return {
        **RECORD_ALL,
        "select": [{"tensors": "*", **select}],
        "triggers": list(triggers) or QUANTIZER_RULES,
        "ring": {"iterations": 4},
        "incident": {"after": 1, "cooldown": 0},
    }


def incidents(directory: Path) -> list[flightrec.Incident]:
    folders = sorted(directory.iterdir()) if directory.exists() else []
    return [flightrec.open(folder) for folder in folders]


def only(directory: Path) -> flightrec.Incident:
    (incident,) = incidents(directory)
    return incident


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).clamp(-448, 448).to(E4M3)


def kinds(incident: flightrec.Incident) -> set[str]:
    return {firing.kind for firing in incident.firings}


# -- F01: the gradient's scale never updates --------------------------------------------------------------------------


def f01_train(directory: Path, *, frozen: bool) -> None:
    torch.manual_seed(0)
    with flightrec.Recorder(config(), directory=directory) as recorder:
        for iteration in range(6):
            gradient = torch.randn(64, 64) * 10.0 ** min(iteration, 3)
            scale = torch.tensor(1.0) if frozen else 448 / gradient.abs().amax()
            history = torch.zeros(16) if frozen else torch.full((16,), gradient.abs().amax().item())
            codes = flightrec.Quantized(quantize(gradient, scale), "float8_e4m3fn", scale=scale, amax_history=history)
            recorder.record("fc1", "gradient", high_precision=gradient, quantized=codes)
            recorder.step()


def test_f01_a_frozen_scale_saturates_and_its_evidence_is_kept(tmp_path):
    f01_train(tmp_path, frozen=True)
    incident = only(tmp_path)
    assert incident.trigger.iteration == 3
    assert kinds(incident) == {"saturation", "stale_scale", "quantization_error"}
    saturation = next(firing for firing in incident.firings if firing.kind == "saturation")
    assert 0.6 < saturation.value < 0.7
    assert {finding.key.layer for finding in incident.blame()} == {"fc1"}
    assert {finding.key.tensor for finding in incident.blame()} == {"gradient"}
    assert "nonfinite" not in {finding.kind for finding in incident.blame()}
    records = incident.records(layer="fc1", tensor="gradient")
    assert [record.iteration for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert record.quantized.components["scale"] == 1
        assert not record.quantized.components["amax_history"].any()
    verdict = judged(incident)
    assert kind_of(verdict) == ("scale", "certain")
    assert began(verdict) == ("fc1 gradient 3.0", "fc1 gradient 3.0")
    assert verdict.began.between == ("quantization of fc1 gradient",)
    assert "unchanged for at least 3 iterations, while amax went between" in verdict.evidence[1]
    assert "% of the values are clipped, the largest is 8.5" in verdict.evidence[2]
    assert "amax history holds zeros only" in verdict.evidence[3]
    told = [(change.statistic, change.iteration, change.growing_iterations) for change in verdict.precursors]
    assert told == [("amax", 0, 3), ("scale_max", 0, 0)]
    assert {c.statistic for c in verdict.changes if c.label == "origin"} >= {"clipped_share", "quantization_error"}
    assert (verdict.elements, verdict.missing) == (None, ())
    assert [round(math.log10(record.statistics["range_ratio"] * 448)) for record in records] == [1, 2, 3, 4, 4]


def test_f01_a_scale_that_follows_is_silent(tmp_path):
    f01_train(tmp_path, frozen=False)
    assert not incidents(tmp_path)


# -- F03: the scale moved on, the cached codes did not ----------------------------------------------------------------


def f03_train(directory: Path, *, stale: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 128) * 0.02
    with flightrec.Recorder(config(), directory=directory) as recorder:
        for _ in range(2):
            codes, scale = quantize(weight, torch.tensor(1.0)), torch.tensor(1.0)
            for microbatch in range(2):
                with recorder.microbatch(microbatch):
                    if microbatch == 1:
                        scale = 448 / weight.abs().amax()
                        codes = codes if stale else quantize(weight, scale)
                    quantized = flightrec.Quantized(codes, "float8_e4m3fn", scale=scale, scale_inv=1 / scale)
                    recorder.record("fc", "weight", high_precision=weight, quantized=quantized)
            recorder.step()


def test_f03_codes_of_another_scale_are_blamed_in_their_microbatch(tmp_path):
    f03_train(tmp_path, stale=True)
    incident = only(tmp_path)
    assert kinds(incident) == {"quantization_error"}  # scale and inverse scale agree with each other
    assert (incident.trigger.iteration, incident.trigger.key.layer, incident.trigger.key.microbatch) == (0, "fc", 1)
    assert incident.trigger.value == pytest.approx(0.9998, abs=2e-4)
    assert {finding.key.microbatch for finding in incident.blame()} == {1}
    first, second = incident.records(layer="fc", tensor="weight", iteration=0)
    assert first.quantized.components["data"].tolist() == second.quantized.components["data"].tolist()
    assert first.statistics["scale_max"] == 1
    assert second.statistics["scale_inverse_error"] < 1e-6
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("scale", "likely"), ("fc weight 0.1", "fc weight 0.1"))
    assert "the scale went from 1 to " in verdict.evidence[2]
    assert "since iteration 0, microbatch 0" in verdict.evidence[2]
    assert (verdict.elements, verdict.precursors, verdict.missing) == (None, (), ())


def test_f03_codes_that_were_made_again_are_silent(tmp_path):
    f03_train(tmp_path, stale=False)
    assert not incidents(tmp_path)


# -- F04: an amax of zero gives an infinite scale ---------------------------------------------------------------------


def f04_train(directory: Path, *, clamped: bool, amax: float = 0.0) -> None:
    x = torch.full((4, 8), amax)
    peak = x.abs().amax()
    scale = 448 / peak.clamp(min=1e-12) if clamped else 448 / peak
    with flightrec.Recorder(config(), directory=directory) as recorder:
        for _ in range(2):
            codes = flightrec.Quantized((x * scale).to(E4M3), "float8_e4m3fn", scale=scale)
            recorder.record("lora_B", "output", high_precision=x, quantized=codes)
            recorder.step()


def test_f04_an_infinite_scale_is_blamed_on_the_quantized_side(tmp_path):
    f04_train(tmp_path, clamped=False)
    incident = only(tmp_path)
    assert kinds(incident) == {"nonfinite", "inconsistent_scale"}
    told = next(finding for finding in incident.blame() if finding.kind == "nonfinite")
    assert (told.key.layer, told.key.tensor, told.side) == ("lora_B", "output", "quantized")
    assert told.numbers["quantized_nan_count"] == 32
    (record,) = incident.records(layer="lora_B", iteration=0)
    assert (record.statistics["nan_count"], record.statistics["amax"]) == (0, 0)
    assert np.isinf(record.quantized.components["scale"])
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("scale", "certain"), ("lora_B output 0.0", "lora_B output 0.0"))
    assert (verdict.elements.component, verdict.elements.num_faulty, verdict.precursors) == ("data", 32, ())
    assert "its amax is 0, and what is divided by that is not finite" in verdict.evidence[1]


def test_f04_a_denormal_amax_overflows_the_scale_as_well(tmp_path):
    f04_train(tmp_path, clamped=False, amax=1e-38)
    assert "inconsistent_scale" in kinds(only(tmp_path))


@pytest.mark.parametrize("amax", [0.0, 1e-5])
def test_f04_a_clamped_scale_is_silent(amax, tmp_path):
    f04_train(tmp_path, clamped=True, amax=amax)
    assert not incidents(tmp_path)


def test_f04_a_scale_of_zero_is_legal_for_zeros_only(tmp_path):
    data = torch.zeros(2, 32).to(E4M3)
    for name, high_precision in (("legal", torch.zeros(2, 32)), ("lost", torch.ones(2, 32))):
        with flightrec.Recorder(config({"kind": "inconsistent_scale"}), directory=tmp_path / name) as recorder:
            for _ in range(2):
                codes = flightrec.Quantized(data, "float8_e4m3fn", scale_inv=torch.zeros(2, 1))
                recorder.record("fc", "activation", high_precision=high_precision, quantized=codes)
                recorder.step()
    assert not incidents(tmp_path / "legal")
    assert "is 0" in only(tmp_path / "lost").trigger.message


# -- F05: the scale came back from the checkpoint, its inverse did not ------------------------------------------------


def f05_train(directory: Path, recorder: flightrec.Recorder, *, scale_inv: float, num: int = 2) -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 32) * 0.02
    scale = torch.tensor(1000.0)
    for _ in range(num):
        codes = flightrec.Quantized(
            quantize(weight, scale), "float8_e4m3fn", scale=scale, scale_inv=torch.tensor(scale_inv)
        )
        recorder.record("fc", "weight", high_precision=weight, quantized=codes)
        recorder.step()


def test_f05_a_resumed_run_tells_the_broken_pair_at_its_own_iteration(tmp_path):
    with flightrec.Recorder(config(), directory=tmp_path, run_id="run") as recorder:
        f05_train(tmp_path, recorder, scale_inv=1e-3)
        recorder.trigger("so that there is an incident of the first run")
        f05_train(tmp_path, recorder, scale_inv=1e-3)
        state = recorder.state_dict()
    (before,) = tmp_path.iterdir()
    with flightrec.Recorder(config(), directory=tmp_path, run_id="run") as recorder:
        recorder.load_state_dict(state)
        recorder.iteration = 5000
        f05_train(tmp_path, recorder, scale_inv=1.0)
    assert before.is_dir()
    (resumed,) = [incident for incident in incidents(tmp_path) if incident.path != before]
    assert {"inconsistent_scale", "quantization_error"} <= kinds(resumed)
    assert (resumed.trigger.kind, resumed.trigger.iteration) == ("inconsistent_scale", 5000)
    assert resumed.trigger.value == pytest.approx(999)
    verdict = judged(resumed)
    assert (kind_of(verdict), began(verdict)) == (("scale", "certain"), ("fc weight 5000.0", "fc weight 5000.0"))
    assert (verdict.elements, verdict.precursors) == (None, ())
    assert (resumed.blame()[0].key.layer, resumed.blame()[0].key.tensor) == ("fc", "weight")
    with flightrec.open(before) as first:
        assert kinds(first) == {"manual"}


# -- F06: gradients become zero without a word ------------------------------------------------------------------------


def f06_train(directory: Path, gradient: torch.Tensor, data: torch.Tensor) -> None:
    scale = 448 / gradient.abs().amax().clamp(min=1e-12)
    with flightrec.Recorder(config(), directory=directory) as recorder:
        for _ in range(2):
            codes = flightrec.Quantized(data, "float8_e4m3fn", scale=scale)
            recorder.record("fc2", "gradient", high_precision=gradient, quantized=codes)
            recorder.step()


def test_f06_zeros_in_place_of_gradients_are_blamed(tmp_path):
    torch.manual_seed(0)
    gradient = torch.randn(64) * 1e-3
    f06_train(tmp_path, gradient, torch.zeros(64).to(E4M3))
    incident = only(tmp_path)
    assert kinds(incident) == {"underflow", "quantization_error"}
    underflow = next(firing for firing in incident.firings if firing.kind == "underflow")
    assert (underflow.key.layer, underflow.key.tensor, underflow.value) == ("fc2", "gradient", 1.0)
    (record,) = incident.records(layer="fc2", iteration=0)
    assert 1e-3 < record.statistics["amax"] < 1e-2
    assert record.statistics["quantized_zero_count"] == 64
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("quantization", "certain"), ("fc2 gradient 0.0", "fc2 gradient 0.0"))
    assert verdict.evidence[1].startswith("64 of 64 codes are zero")
    assert "puts the largest value at 1 x the format's range" in verdict.evidence[2]
    assert (verdict.elements, verdict.precursors, verdict.missing) == (None, (), ())


def test_f06_zeros_for_zeros_and_ordinary_losses_are_silent(tmp_path):
    torch.manual_seed(0)
    f06_train(tmp_path / "zeros", torch.zeros(64), torch.zeros(64).to(E4M3))
    gradient = torch.randn(64) * 1e-3
    gradient[: 64 * 3 // 10] = 1e-9  # a third of it underflows
    f06_train(tmp_path / "third", gradient, quantize(gradient, 448 / gradient.abs().amax()))
    assert not incidents(tmp_path / "zeros")
    assert not incidents(tmp_path / "third")


# -- F08: microbatches of an iteration are counted as such ------------------------------------------------------------


def f08_train(recorder: flightrec.Recorder, *, spiked: bool, num_iterations: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    recorder.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for iteration in range(num_iterations):
        for microbatch in range(3):
            x = torch.randn(8, 8) * (1000 if spiked and (iteration, microbatch) == (1, 0) else 1)
            (model(x).mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
    return model


def test_f08_the_spiked_microbatch_is_named_and_iterations_are_steps(tmp_path):
    rule = {**SPIKE, "tensors": ["activation"]}
    with flightrec.Recorder(config(rule), directory=tmp_path) as recorder:
        f08_train(recorder, spiked=True)
        assert recorder.iteration == 2
    incident = only(tmp_path)
    key = incident.trigger.key
    assert (incident.trigger.kind, incident.trigger.iteration) == ("amax_spike", 1)
    assert (key.tensor, key.microbatch, key.stage) == ("activation", 0, Stage.FORWARD)
    assert incident.trigger.value > 2000
    verdict = judged(incident)
    assert kind_of(verdict) == ("numbers", "likely")
    assert began(verdict) == ("the model parameter (bias) 0.-1", "the model activation 1.0")
    assert (verdict.elements.shape, verdict.precursors, verdict.missing) == ((8, 8), (), ())
    last = incident.records(tensor="activation", iteration=1, microbatch=2)
    assert [record.statistics["amax"] < 5 for record in last] == [True]


def test_f08_without_the_spike_it_is_silent(tmp_path):
    with flightrec.Recorder(config(SPIKE), directory=tmp_path) as recorder:
        f08_train(recorder, spiked=False, num_iterations=6)
    assert not incidents(tmp_path)


def test_f08_every_second_iteration_has_all_of_its_microbatches_and_the_others_none(tmp_path):
    with flightrec.Recorder(config({"kind": "manual"}, every=2), directory=tmp_path) as recorder:
        f08_train(recorder, spiked=False, num_iterations=3)
        recorder.trigger("look")
        recorder.step()
    found: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for record in only(tmp_path).records(tensor="activation"):
        found[record.iteration].add(record.key.microbatch)
    assert found == {0: {0, 1, 2}, 1: set(), 2: {0, 1, 2}}


# -- a gradient that no longer comes ----------------------------------------------------------------------------------


def test_a_gradient_that_is_detached_is_missed_by_name(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rule = {"kind": "missing_record", "min_samples": 2, "consecutive": 2, "tensors": ["wgrad"]}
    with flightrec.Recorder(config(rule), directory=tmp_path) as recorder:
        recorder.attach(model)
        for iteration in range(8):
            hidden = model[0](torch.randn(4, 8))
            loss = model[1](hidden.detach() if iteration >= 3 else hidden).square().mean()
            loss.backward()
            model.zero_grad()
            recorder.step(loss=loss)
    incident = only(tmp_path)
    assert {firing.key.layer for firing in incident.firings} == {"0"}
    assert (incident.trigger.iteration, incident.trigger.record, incident.trigger.value) == (5, -1, 3)
    assert incident.blame()[0].key.layer == "0"
