from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from storage_samples import Sample, firing, identity, iterations, plain, statistics, write_incident

from flightrec.analysis.incident import open_incident
from flightrec.analysis.verdict import Verdict, verdict_to_json
from flightrec.config.load import load_text
from flightrec.records import Key, Severity, Stage
from flightrec.storage.facts import HistoryPiece
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS


def seen(layer: str, tensor: str = "output", stage: Stage = Stage.FORWARD, microbatch: int = 0, **counts) -> Sample:
    if stage not in (Stage.FORWARD, Stage.BACKWARD, Stage.LOSS):
        microbatch = -1
    key = Key(layer, tensor, microbatch=microbatch, stage=stage)
    return Sample(key, {}, statistics(**({"numel": 8, "nan_count": 0, "amax": 1.0} | counts)))


def judged(folder: Path, samples, firings=(), **changes) -> Verdict:
    last = max(samples)
    write_incident(
        folder, samples, list(firings) or [firing(None, last, rule="look", kind="manual")], index=False, **changes
    )
    with open_incident(folder) as incident:
        verdict = incident.verdict()
    json.dumps(verdict_to_json(verdict), allow_nan=False)
    return verdict


WGRAD = seen("fc", "wgrad", Stage.BACKWARD)
HEALTHY = {4: [seen("fc", "activation"), seen("fc"), seen("", "loss", Stage.LOSS), WGRAD]}


def after(*faulty: Sample) -> dict[int, list[Sample]]:
    return {**HEALTHY, 5: [*HEALTHY[4], *faulty]}


@pytest.mark.parametrize(
    ("stage", "tensor", "kind", "between"),
    [
        (Stage.REDUCED, "wgrad", ("communication", "likely"), "communication of the gradients"),
        (Stage.UNSCALED, "wgrad", ("optimizer", "certain"), "unscaling of the gradients"),
        (Stage.CLIPPED, "wgrad", ("optimizer", "certain"), "clipping of the gradients"),
        (Stage.AFTER_STEP, "parameter", ("optimizer", "certain"), "optimizer update"),
    ],
)
def test_what_follows_clean_gradients(stage, tensor, kind, between, tmp_path: Path) -> None:
    verdict = judged(tmp_path, after(seen("fc", tensor, stage, nan_count=3)))
    assert (verdict.kind, verdict.confidence) == kind
    assert verdict.began.between == (between,)
    assert verdict.began.after.key == WGRAD.key
    assert "was finite before it" in verdict.evidence[1] or "was finite before on this rank" in verdict.evidence[1]
    assert verdict.advice == ""


def test_an_update_without_gradients_is_less_sure(tmp_path: Path) -> None:
    samples = {5: [seen("fc"), seen("fc", "parameter", Stage.AFTER_STEP, nan_count=1)]}
    verdict = judged(tmp_path, samples)
    assert (verdict.kind, verdict.confidence) == ("optimizer", "likely")
    assert verdict.evidence[1] == "its gradient is not recorded."


def test_clean_on_every_rank_and_bad_when_reduced_is_communication(tmp_path: Path) -> None:
    for rank in range(2):
        samples = after(seen("fc", "wgrad", Stage.REDUCED, nan_count=rank))
        write_incident(tmp_path, samples, [firing(None, 5, kind="manual")], rank=rank, world_size=2, index=False)
    with open_incident(tmp_path) as incident:
        verdict = incident.verdict()
    assert (verdict.kind, verdict.confidence, verdict.began.before.rank) == ("communication", "certain", 1)
    assert "on every rank" in verdict.evidence[1]


def test_a_loss_alone_tells_logits_and_labels(tmp_path: Path) -> None:
    samples = {5: [seen("fc", amax=7.5), seen("", "loss", Stage.LOSS, nan_count=1)]}
    (entry,) = iterations(samples)
    entry.facts["data"] = {"num_valid_labels": {"0": 0.0}}
    verdict = judged(tmp_path, samples, iterations=[entry])
    assert (verdict.kind, verdict.confidence) == ("loss", "certain")
    assert verdict.evidence[1:] == (
        "the last recorded output before it, fc output, is finite (amax 7.5).",
        "of the labels is recorded: num_valid_labels: 0.",
    )


def test_a_weight_that_is_bad_in_the_oldest_iteration_is_older_than_the_ring(tmp_path: Path) -> None:
    samples = {5: [seen("fc", "weight", nan_count=1), seen("fc", nan_count=8)], 6: [seen("fc", nan_count=8)]}
    verdict = judged(tmp_path, samples, config_text="ring: {iterations: 3}\n")
    assert (verdict.kind, verdict.confidence, verdict.began.after) == ("unknown", "weak", None)
    assert "older than the ring" in verdict.missing[0]
    config = load_text(verdict.advice)
    assert config.ring.iterations == 12
    assert config.select[0].tensors and "nonfinite" in {rule.kind for rule in config.triggers}
    assert verdict.missing[0][1:] in verdict.story


def test_advice_for_what_was_not_selected_is_a_configuration(tmp_path: Path) -> None:
    verdict = judged(tmp_path, {0: [seen("", "loss", Stage.LOSS, nan_count=1)]})
    assert verdict.kind == "loss"
    assert "not selected" in verdict.missing[0]
    assert load_text(verdict.advice).select[0].layers == ("*",)


def test_nothing_recorded_at_fault_is_told(tmp_path: Path) -> None:
    gone = firing(Key("gone", "output", microbatch=0), 4)
    verdict = judged(tmp_path, HEALTHY, [gone])
    assert (verdict.kind, verdict.confidence) == ("unknown", "weak")
    assert "not among the records" in verdict.missing[0]
    assert load_text(verdict.advice)


@pytest.mark.parametrize("kind", ["exception", "manual", "hang"])
def test_the_host(kind: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, HEALTHY, [firing(None, 4, rule=kind, kind=kind, message="it stopped")])
    assert (verdict.kind, verdict.confidence, verdict.advice, verdict.missing) == ("host", "certain", "", ())
    assert verdict.story.startswith("it stopped. The cause: ")


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ("h.0.attn.qkv", "h.0.attn.proj", "softmax of the attention"),
        ("h.0.mlp.fc1", "h.0.mlp.fc2", "activation function"),
        ("h.0.proj", "h.0.norm2", "norm"),
        ("h.0.proj", "h.0.router", "router"),
        ("a", "b", "whatever is between a and b (such as an activation function, norm, softmax, router or residual"),
    ],
)
def test_what_lies_between_is_told_from_the_names(first: str, second: str, word: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, {5: [seen(first), seen(second, "activation", nan_count=1)]})
    assert verdict.began.after.key.layer == first
    assert any(entry.startswith(word) for entry in verdict.began.between)
    assert (verdict.kind, verdict.confidence) == ("numbers", "likely")


def test_the_interval_stays_in_its_microbatch(tmp_path: Path) -> None:
    samples = {5: [seen("a"), seen("a", microbatch=1), seen("b", nan_count=1), seen("b", microbatch=1)]}
    verdict = judged(tmp_path, samples)
    assert (verdict.began.after.key.layer, verdict.began.after.key.microbatch) == ("a", 0)


def test_codes_alone_are_quantization_and_codes_of_a_bad_scale_are_the_scale(tmp_path: Path) -> None:
    for number, (scales, kind) in enumerate([(0, "quantization"), (1, "scale")]):
        bad = seen("fc", quantized_numel=8, quantized_nan_count=2, scale_nonfinite_count=scales)
        folder = tmp_path / str(number)
        folder.mkdir()
        verdict = judged(folder, {5: [seen("fc", "weight"), bad]})
        assert (verdict.kind, verdict.confidence) == (kind, "certain")
        assert verdict.began.after == verdict.began.before
        assert "its high-precision side is clean" in verdict.story.lower()


def growing() -> HistoryPiece:
    """20 iterations of one tensor whose amax doubles in each of the last five."""
    values = np.full((20, len(PLAIN_STATISTICS), 1), 1.0, np.float32)
    values[:, PLAIN_STATISTICS.index("amax"), 0] = [1.0] * 15 + [2.0**n for n in range(1, 6)]
    return HistoryPiece(
        last=19,
        attempts=np.zeros(20, np.int64),
        iterations=np.arange(20),
        plain_series=[Key("fc", "activation")],
        plain=values,
        quantized_series=[],
        quantized=np.empty((20, len(HISTORY_STATISTICS), 0), np.float32),
    )


def test_growth_before_the_fault_is_a_precursor(tmp_path: Path) -> None:
    samples = {19: [seen("fc", "activation"), seen("fc", "weight"), seen("fc", nan_count=1)]}
    verdict = judged(tmp_path, samples, statistics=[growing()])
    (change,) = verdict.precursors
    assert (change.label, change.statistic, change.iteration, change.growing_iterations) == ("precursor", "amax", 14, 5)
    assert "Before it, amax of fc activation grew in each of the last 5 iterations" in verdict.story


def test_a_spike_that_a_rule_saw_is_the_origin_of_the_same_change(tmp_path: Path) -> None:
    samples = {18: [seen("fc", "activation")], 19: [seen("fc", "activation", amax=500.0)]}
    spike = firing(samples[19][0].key, 19, kind="amax_spike", severity=Severity.WARNING)
    verdict = judged(tmp_path, samples, [spike])
    assert (verdict.kind, verdict.confidence) == ("numbers", "likely")
    assert [(change.label, change.before, change.after) for change in verdict.changes] == [("origin", 1.0, 500.0)]


def test_elements_need_the_payload_and_tell_when_it_is_damaged(tmp_path: Path) -> None:
    key = Key("fc", "output", microbatch=0)
    write_incident(tmp_path, {5: [plain(key, [[1, np.nan], [2, 3]], nan_count=1)]}, [firing(key, 5)], index=False)
    with open_incident(tmp_path) as incident:
        assert incident.verdict(elements=True).elements.indices == ((0, 1),)
        assert incident.verdict().elements is None
    path = tmp_path / f"rank00000.{identity().incident_id}.tensors.h5"
    data = path.read_bytes()
    path.write_bytes(data.replace(np.array([2, 3], "<f4").tobytes(), np.array([2, 4], "<f4").tobytes()))
    with open_incident(tmp_path) as incident:
        verdict = incident.verdict(elements=True)
    assert verdict.elements is None
    assert "cannot be read" in verdict.evidence[-1]


GOOD = [seen("fc", "weight"), seen("fc"), WGRAD]


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        (GOOD, ("optimizer", "likely")),  # weight and gradient were clean: only the update lies between
        (GOOD[:2], ("numbers", "weak")),  # nobody saw the gradient
        ([*GOOD, seen("fc", "weight", Stage.AFTER_STEP)], ("numbers", "weak")),  # clean behind the update: other code
    ],
)
def test_a_weight_that_was_clean_an_iteration_before(before, kind, tmp_path: Path) -> None:
    bad = seen("fc", "weight", nan_count=1)
    verdict = judged(tmp_path, {4: before, 5: [seen("fc", "activation"), bad, seen("fc", nan_count=8)]})
    assert (verdict.kind, verdict.confidence) == kind
    assert (verdict.began.after.key.tensor, verdict.began.after.iteration) == ("weight", 4)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ([(4, slice(None)), (5, slice(None))], ("padding", "likely")),  # whole rows to the end
        ([(4, slice(0, 2)), (5, slice(3, 4))], ("padding", "weak")),  # what was in the memory is NaN here and there
        ([(5, slice(None))], ("padding", "likely")),
        ([(5, slice(0, 2))], ("numbers", "likely")),  # a part of the last row is no tail
        ([(3, slice(None)), (5, slice(None))], ("numbers", "likely")),
    ],
)
def test_a_tail_is_told_from_values_near_the_end(bad, kind, tmp_path: Path) -> None:
    values = np.ones((6, 4), np.float32)
    for row, columns in bad:
        values[row, columns] = np.nan
    key = Key("op", "output", microbatch=0)
    count = int(np.isnan(values).sum())
    samples = {5: [seen("fc"), plain(key, values.tolist(), nan_count=count)]}
    write_incident(tmp_path, samples, [firing(key, 5)], index=False)
    with open_incident(tmp_path) as incident:
        verdict = incident.verdict(elements=True)
    assert (verdict.kind, verdict.confidence, verdict.elements.num_faulty) == (*kind, count)
