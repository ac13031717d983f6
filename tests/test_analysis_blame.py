from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.analysis.blame import Finding, blame
from flightrec.records import Key, Phase, Severity, Stage
from flightrec.storage.read import open_incident

BACKWARD = Stage.BACKWARD


def seen(
    layer: str, tensor: str = "output", microbatch: int = 0, *, part: str = "", phase=Phase.TRAIN, stage=None, **counts
) -> Sample:
    default = BACKWARD if tensor in {"gradient", "dgrad", "wgrad"} else Stage.FORWARD
    key = Key(layer, tensor, part, microbatch, phase, 0, stage or default)
    return Sample(key, {}, statistics(**({"numel": 8, "nan_count": 0, "amax": 1.0} | counts)))


def found(folder: Path, samples, firings=(), **changes) -> list[Finding]:
    firings = list(firings) or [firing(None, 5, rule="manual", kind="manual")]
    folder.mkdir(exist_ok=True)
    write_incident(folder, samples, firings, index=False, **changes)
    with open_incident(folder) as incident:
        return [finding for finding in blame(incident) if finding.kind != "manual"]


def places(findings: list[Finding]) -> list[tuple[str, str, int]]:
    return [(finding.key.layer, finding.key.tensor, finding.position) for finding in findings]


def test_f10_the_first_layer_is_blamed_not_the_loss(tmp_path: Path) -> None:
    samples = [
        seen("fc", "activation", amax=40.0),
        seen("fc", "output", positive_inf_count=8, amax=float("nan")),
        seen("norm", "output", nan_count=8),
        seen("", "loss", stage=Stage.LOSS, nan_count=1),
    ]
    first, *rest = found(tmp_path, {5: samples}, [firing(samples[1].key, 5, value=8.0)])
    assert (first.key.layer, first.key.tensor, first.rule, first.side) == ("fc", "output", "nan", "high_precision")
    assert first.evidence == "fc output holds 8 +Inf of 8 values, none of them finite."
    assert places(rest) == [("norm", "output", 2), ("", "loss", 3)]
    assert first.position == 1
    assert first.tied_with == ()
    assert first.severity is Severity.FAULT


def test_f12_backward_comes_after_forward_whatever_its_order_in_the_file(tmp_path: Path) -> None:
    samples = [seen("block.1", "gradient", nan_count=1), seen("block.2", "gradient"), seen("block.3", "output")]
    samples.append(seen("late", "output", nan_count=1))
    assert places(found(tmp_path, {5: samples})) == [("late", "output", 1), ("block.1", "gradient", 2)]


def test_the_order_is_iteration_microbatch_stage_sequence(tmp_path: Path) -> None:
    samples = {
        5: [
            seen("m1", microbatch=1, nan_count=1),
            seen("end", "parameter", -1, stage=Stage.AFTER_STEP, nan_count=1),
            seen("b0", "gradient", nan_count=1),
            seen("f0", nan_count=1),
            seen("f0b", nan_count=1),
            seen("start", "parameter", -1, stage=Stage.START, nan_count=1),
        ],
        4: [seen("before", nan_count=1)],
    }
    assert [place[0] for place in places(found(tmp_path, samples))] == [
        "before",
        "start",
        "f0",
        "f0b",
        "b0",
        "m1",
        "end",
    ]


def test_f04_the_quantized_side_is_blamed_when_the_tensor_was_finite(tmp_path: Path) -> None:
    counts = {"quantized_numel": 8, "quantized_nan_count": 8, "scale_nonfinite_count": 1, "amax": 0.0}
    (finding,) = found(tmp_path, {5: [seen("lora_B", **counts)]})
    assert finding.side == "quantized"
    assert finding.evidence == (
        "the quantized lora_B output holds 8 NaN of 8 codes while the tensor before is finite (amax 0); "
        "its scales hold 1 NaN or Inf."
    )
    assert finding.numbers["scale_nonfinite_count"] == 1


def test_scales_alone(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {5: [seen("fc", scale_nonfinite_count=2, part="x")]})
    assert finding.side == "scale"
    assert finding.evidence == "fc output (x): its scales hold 2 NaN or Inf."


def test_both_sides(tmp_path: Path) -> None:
    counts = {"nan_count": 1, "negative_inf_count": 2, "quantized_numel": 8, "quantized_inf_count": 3}
    (finding,) = found(tmp_path, {5: [seen("fc", **counts)]})
    assert finding.side == "high_precision"
    assert finding.evidence == (
        "fc output holds 1 NaN and 2 -Inf of 8 values, amax 1 over the finite ones; its codes hold 3 Inf of 8."
    )


def test_f09_a_finite_precursor_that_a_rule_saw_comes_first(tmp_path: Path) -> None:
    samples = {2: [seen("lin", "activation", amax=1e10)], 3: [seen("lin", "output", nan_count=2)]}
    spike = firing(
        samples[2][0].key, 2, rule="amax", kind="amax_spike", severity=Severity.WARNING, value=1e10, threshold=4.0
    )
    first, second = found(tmp_path, samples, [firing(samples[3][0].key, 3), spike])
    assert (first.kind, first.iteration, first.evidence) == ("amax_spike", 2, "amax fired.")
    assert first.numbers == {"value": 1e10, "threshold": 4.0}
    assert (second.kind, second.iteration, second.position) == ("nonfinite", 3, 2)


def test_a_rule_and_a_record_that_are_one_finding(tmp_path: Path) -> None:
    sample = seen("fc", nan_count=1)
    firings = [firing(sample.key, 5, rule="soft", severity=Severity.WARNING), firing(sample.key, 5, rule="hard")]
    (finding,) = found(tmp_path, {5: [sample]}, firings)
    assert (finding.rule, finding.severity) == ("hard", Severity.FAULT)


def test_firings_without_a_record_or_a_key(tmp_path: Path) -> None:
    sample = seen("fc", nan_count=1)
    crash = firing(None, 5, rule="exception", kind="exception", message="")
    gone = firing(Key("gone", "output", microbatch=0), 5, rule="gone")
    findings = found(tmp_path, {5: [sample]}, [crash, gone])
    assert [finding.rule for finding in findings] == ["", "gone", "exception"]
    assert findings[-1].key is None
    assert findings[-1].evidence == "rule exception fired."


def test_microbatches_tie(tmp_path: Path) -> None:
    samples = [seen(f"fc{n}", microbatch=m, nan_count=1) for m in (0, 1) for n in (0, 1)]
    samples.append(seen("end", "parameter", -1, stage=Stage.AFTER_STEP, nan_count=1))
    findings = found(tmp_path, {5: samples})
    assert [(finding.position, finding.tied_with) for finding in findings] == [
        (1, ((0, 1),)),
        (2, ()),
        (1, ((0, 0),)),
        (4, ()),
        (5, ()),
    ]


@pytest.mark.parametrize("cause", [seen("fc", "weight", nan_count=1), seen("fc", scale_nonfinite_count=1)])
def test_a_spoiled_parameter_or_scale_explains_later_microbatches(tmp_path: Path, cause: Sample) -> None:
    findings = found(tmp_path, {5: [cause, seen("fc", "activation", 1, nan_count=1)]})
    assert [(finding.position, finding.tied_with) for finding in findings] == [(1, ()), (2, ())]


def test_a_parameter_at_the_start_explains_all_microbatches(tmp_path: Path) -> None:
    samples = [seen("gate", "parameter", -1, part="bias", stage=Stage.START, nan_count=3)]
    samples += [seen("gate", microbatch=m, nan_count=1) for m in (0, 1)]
    findings = found(tmp_path, {0: samples})
    assert places(findings) == [("gate", "parameter", 1), ("gate", "output", 2), ("gate", "output", 3)]
    assert not any(finding.tied_with for finding in findings)


def test_ranks_tie_until_gradients_are_reduced(tmp_path: Path) -> None:
    for rank, layer in enumerate(["a", "b"]):
        samples = [seen(layer, nan_count=1), seen(layer, "wgrad", -1, stage=Stage.REDUCED, nan_count=1)]
        write_incident(tmp_path, {5: samples}, [firing(samples[0].key, 5)], rank=rank, world_size=2, index=False)
    with open_incident(tmp_path) as incident:
        findings = blame(incident)
    assert [(finding.rank, finding.position, finding.tied_with) for finding in findings] == [
        (0, 1, ((1, 0),)),
        (1, 1, ((0, 0),)),
        (0, 3, ()),
        (1, 4, ()),
    ]


def test_only_training_is_judged_unless_a_rule_fired(tmp_path: Path) -> None:
    samples = [seen(phase.value, phase=phase, nan_count=1) for phase in Phase]
    fired = firing(samples[list(Phase).index(Phase.EVAL)].key, 5)
    findings = found(tmp_path, {5: samples}, [fired])
    assert [finding.key.phase for finding in findings] == [Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL]


ALLOWING = """
triggers:
  - {name: masks, kind: nonfinite, layers: "*.attn", allow: [-inf]}
  - {name: spike, kind: amax_spike}
"""


def test_infinities_that_the_configuration_allows_are_legal(tmp_path: Path) -> None:
    samples = [
        seen("0.attn", negative_inf_count=3),
        seen("0.mlp", negative_inf_count=3),
        seen("1.attn", negative_inf_count=3, nan_count=1),
        seen("2.attn", positive_inf_count=3),
        seen("3.attn", negative_inf_count=3, scale_nonfinite_count=1),
    ]
    layers = [finding.key.layer for finding in found(tmp_path, {5: samples}, config_text=ALLOWING)]
    assert layers == ["0.mlp", "1.attn", "2.attn", "3.attn"]


@pytest.mark.parametrize(
    "config_text", ["", ": :", "[1, 2]", "triggers: 3", "triggers: [{kind: nonfinite, layers: 're:('}]"]
)
def test_a_strange_configuration_allows_nothing(tmp_path: Path, config_text: str) -> None:
    assert len(found(tmp_path, {5: [seen("fc", negative_inf_count=1)]}, config_text=config_text)) == 1


def test_every_rule_must_allow_it(tmp_path: Path) -> None:
    text = "triggers: [{kind: nonfinite, allow: ['-inf', '+inf']}, {kind: nonfinite, name: strict, layers: 'a*'}]"
    samples = [seen("a", negative_inf_count=1), seen("b", negative_inf_count=1, positive_inf_count=1)]
    assert [finding.key.layer for finding in found(tmp_path, {5: samples}, config_text=text)] == ["a"]


def test_healthy_records_are_no_findings(tmp_path: Path) -> None:
    assert found(tmp_path, {5: [seen("fc"), seen("empty", numel=0, amax=np.nan)]}) == []
    assert found(tmp_path / "none", {}) == []


def test_no_payload_is_needed(tmp_path: Path) -> None:
    sample = seen("fc", nan_count=1)
    write_incident(tmp_path, {5: [sample]}, [firing(sample.key, 5)], index=False)
    (tmp_path / "rank00000.test.tensors.h5").unlink()
    with open_incident(tmp_path) as incident:
        assert len(blame(incident)) == 1
