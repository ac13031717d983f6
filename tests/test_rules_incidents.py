"""From rules to incidents: what one incident holds, what fires once, what is kept for a fault; and experts in a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flightrec
from flightrec.records import Severity

USUAL = [{"kind": kind} for kind in ("nonfinite", "loss_jump", "amax_spike", "underflow", "exception")]


def incidents(directory):
    folders = sorted(directory.iterdir()) if directory.exists() else []
    return sorted((flightrec.open(folder) for folder in folders), key=lambda incident: incident.trigger.iteration)


def recorder_for(tmp_path, triggers, **incident):
    return flightrec.Recorder(
        {
            "ring": {"iterations": 1},
            "select": [{"tensors": "*"}],
            "triggers": triggers,
            "incident": {"after": 0, "writer": "thread", **incident},
        },
        directory=tmp_path,
    )


def test_forty_benign_spikes_of_an_experts_wgrad_do_not_use_up_what_a_nan_needs(tmp_path):
    spikes = {
        "name": "wgrad_spike", "kind": "amax_spike", "tensors": "wgrad", "layers": "experts.*", "confirm": 1,
        "window": 8, "min_samples": 8, "cooldown": 0,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    num_spikes = 0
    with recorder_for(tmp_path, [*USUAL, spikes], limit=20) as recorder:
        for iteration in range(20 + 40 * 12 + 1):
            for expert in range(2):
                wgrad = torch.randn(32, 32, generator=generator)
                if expert == 0 and iteration >= 20 and iteration % 12 == 9:
                    wgrad *= 9
                    num_spikes += 1
                recorder.record(f"experts.{expert}.w1", "wgrad", high_precision=wgrad)
            activation = torch.randn(32, 32, generator=generator)
            if iteration == 20 + 40 * 12:
                activation[3, 4] = math.nan
            recorder.record("experts.0.w1", "activation", high_precision=activation)
            recorder.step(loss=2.5)
    found = incidents(tmp_path)
    assert num_spikes == 40
    assert [incident.trigger.rule for incident in found] == ["wgrad_spike"] * 15 + ["nonfinite"]
    assert math.isnan(found[-1].records(tensor="activation", iteration=500)[0].high_precision[3, 4])


def test_all_firings_of_an_iteration_are_one_incident_and_the_gravest_is_its_trigger(tmp_path):
    rules = [
        {"kind": "metric_threshold", "name": "quiet", "above": 1, "severity": "watch"},
        {"kind": "metric_threshold", "above": 1},
        {"kind": "nonfinite"},
    ]
    with recorder_for(tmp_path, rules, cooldown=0) as recorder:
        for iteration in range(6):
            value = math.nan if iteration == 3 else 1.0
            for layer in ("a", "b"):
                recorder.record(layer, "output", high_precision=torch.tensor([1.0, value]))
            recorder.step(metrics={"norm": 5.0 if iteration == 3 else 0.5})
    (incident,) = incidents(tmp_path)
    assert (incident.trigger.rule, incident.trigger.severity) == ("nonfinite", Severity.FAULT)
    told = [(firing.rule, firing.severity.value, firing.iteration) for firing in incident.firings]
    assert told == [
        ("nonfinite", "fault", 3),
        ("nonfinite", "fault", 3),
        ("metric_threshold", "warning", 3),
        ("quiet", "watch", 3),
    ]


def test_what_stays_faulty_fires_once_and_again_only_after_rearm_clean_iterations(tmp_path):
    bad = {
        *range(5, 25),
        *range(28, 30),
        *range(40, 42),
    }  # three clean ones between the first two, ten before the third
    with recorder_for(tmp_path, [{"kind": "nonfinite", "rearm": 4}], cooldown=0) as recorder:
        for iteration in range(50):
            value = math.nan if iteration in bad else 1.0
            recorder.record("x", "output", high_precision=torch.tensor([value]))
            recorder.step()
    assert [incident.trigger.iteration for incident in incidents(tmp_path)] == [5, 40]


def test_a_rule_that_only_watches_writes_nothing_and_holds_nothing(tmp_path):
    with recorder_for(tmp_path, [{"kind": "nonfinite", "severity": "watch"}]) as recorder:
        for _ in range(8):
            recorder.record("x", "output", high_precision=torch.tensor([math.nan]))
            recorder.step()
    assert incidents(tmp_path) == []


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [True, False])
def test_a_grouped_tensor_is_written_once_with_its_splits_and_each_expert_has_statistics(as_list, tmp_path):
    splits = [5, 0, 9, 2]
    x = torch.randn(20, 16)  # four rows are padding ...
    x[18] = math.nan  # ... which may hold anything
    codes = (x * 4).nan_to_num(0).to(torch.float8_e4m3fn)
    quantized = flightrec.Quantized(data=codes, format="float8_e4m3fn", scale=torch.tensor(4.0))
    with recorder_for(tmp_path, [{"kind": "nonfinite"}, {"kind": "expert"}]) as recorder:
        for iteration in range(4):
            if iteration == 3:
                recorder.trigger("now")
            counts = splits if as_list else torch.tensor(splits)
            recorder.record("moe", "activation", part="x", high_precision=x, quantized=quantized, splits=counts)
            recorder.step()
    (incident,) = incidents(tmp_path)
    assert incident.trigger.kind == "manual"
    records = {record.key.part: record for record in incident.records(layer="moe", iteration=3)}
    assert set(records) == {"x", "activation.x.splits", *(f"x.expert.{number}" for number in range(4))}
    np.testing.assert_array_equal(records["x"].high_precision, x.numpy())
    assert records["x"].statistics["numel"] == 16 * 16
    assert records["activation.x.splits"].high_precision.tolist() == splits
    start = 0
    for number, count in enumerate(splits):
        expert, rows = records[f"x.expert.{number}"], x[start : start + count]
        assert expert.high_precision is None
        assert expert.statistics["numel"] == expert.statistics["quantized_numel"] == rows.numel()
        assert expert.statistics["amax"] == (rows.abs().max().item() if count else None)
        assert expert.statistics["squared_error"] == pytest.approx(
            (codes[start : start + count].float() / 4 - rows).square().sum().item(), rel=1e-5
        )
        start += count


def test_one_expert_among_many_is_named_and_the_whole_looks_as_ever(tmp_path):
    """The largest expert is forty times the others; one of those grows ten times, and the whole's amax stays."""
    generator = torch.Generator().manual_seed(0)
    rules = [{"kind": "amax_spike"}, {"kind": "expert"}]
    with recorder_for(tmp_path, rules) as recorder:
        for iteration in range(80):
            x = torch.randn(4 * 32, 64, generator=generator)
            x[:32] *= 40
            if iteration >= 75:
                x[64:96] *= 10
            recorder.record("moe", "activation", high_precision=x, splits=[32, 32, 32, 32])
            recorder.step()
    (incident,) = incidents(tmp_path)
    loud = [firing for firing in incident.firings if firing.severity is not Severity.WATCH]
    assert {(firing.rule, firing.key.part) for firing in loud} == {
        ("amax_spike", "expert.2"),
        ("expert", "expert.2"),
    } or {(firing.rule, firing.key.part) for firing in loud} == {("expert", "expert.2")}
    assert incident.trigger.iteration == 76


def test_a_number_of_experts_that_changes_is_told_and_the_tensor_is_still_recorded(tmp_path, caplog):
    with recorder_for(tmp_path, [{"kind": "nonfinite"}]) as recorder:
        for splits in ([2, 2], [1, 1, 2], [1, 1, 2], [4, 0]):
            recorder.record("moe", "output", high_precision=torch.ones(4, 2), splits=splits)
            recorder.step()
        recorder.trigger("now")
        recorder.record("moe", "output", high_precision=torch.ones(4, 2), splits=[1, 1, 2])
        recorder.step()
    assert caplog.text.count("another than before") == 1
    (incident,) = incidents(tmp_path)
    assert {record.key.part for record in incident.records(iteration=4)} == {"", "output.splits"}
    assert any("another than before" in blind.reason for blind in incident.blind)


@pytest.mark.parametrize("splits", ["abc", [[1], [2]], torch.tensor([0.5]), object(), {1: 2}])
def test_bad_splits_never_raise(splits, tmp_path, caplog):
    with recorder_for(tmp_path, [{"kind": "nonfinite"}]) as recorder:
        for _ in range(3):
            recorder.record("moe", "output", high_precision=torch.ones(4, 2), splits=splits)
            recorder.record("fc", "output", high_precision=torch.ones(4, 2))
            recorder.step()
    assert incidents(tmp_path) == []
