from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from storage_samples import Sample, firing, iterations, statistics, write_incident

from flightrec.analysis.incident import open_incident
from flightrec.analysis.speed import find_speeds
from flightrec.analysis.verdict import Verdict, verdict_to_json
from flightrec.config.load import load_text
from flightrec.records import Key, Severity, Stage
from flightrec.storage.facts import HistoryPiece
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS

NUM = 100
LOSS = Key("", "loss", microbatch=0, stage=Stage.LOSS)


def write(folder: Path, tensor: str, steps: dict[int, float], *, rates: list[list[float]]) -> None:
    """A loss jumps in the last iteration; amax of ``fc`` moves by 1% an iteration, and by ``steps`` in some."""
    moved = np.full(NUM, 1.01)
    moved[1::2] = 1 / 1.01
    for iteration, factor in steps.items():
        moved[iteration] = factor
    values = np.full((NUM, len(PLAIN_STATISTICS), 2), 1.0, np.float32)
    values[:, PLAIN_STATISTICS.index("amax"), 0] = np.cumprod(moved)
    values[:, PLAIN_STATISTICS.index("amax"), 1] = np.where(np.arange(NUM) % 2, 1.0, 1.01)
    history = HistoryPiece(
        last=NUM - 1, attempts=np.zeros(NUM, np.int64), iterations=np.arange(NUM),
        plain_series=[Key("fc", tensor), Key("calm", "weight")], plain=values,
        quantized_series=[], quantized=np.empty((NUM, len(HISTORY_STATISTICS), 0), np.float32),
    )  # fmt: skip
    one = Sample(Key("fc", "output", microbatch=0), {}, statistics(numel=8, nan_count=0, amax=1.0))
    loss = Sample(LOSS, {}, statistics(numel=1, nan_count=0, amax=9.0))
    mean = Sample(Key("", "loss", "mean", 0, stage=Stage.LOSS), {}, statistics(numel=1, nan_count=0, amax=9.0))
    samples = {NUM - 2: [one, mean, loss], NUM - 1: [one, mean, loss]}
    entries = iterations(samples)
    for entry, values_of in zip(entries, rates, strict=True):
        entry.facts["optimizer"] = {"groups": [{"lr": rate} for rate in values_of]}
    jump = firing(LOSS, NUM - 1, kind="loss_jump", severity=Severity.WARNING)
    write_incident(folder, samples, [jump], index=False, statistics=[history], iterations=entries)


def judged(folder: Path, tensor: str = "weight", steps=None, *, rates=((0.1, 0.1), (0.1, 0.1))) -> Verdict:
    write(folder, tensor, {90: 1.2} if steps is None else steps, rates=[list(rate) for rate in rates])
    with open_incident(folder) as incident:
        verdict = incident.verdict(elements=True)
    assert verdict_to_json(verdict)["elements"] is None
    return verdict


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        (((0.1, 10.0), (0.1, 10.0)), "the groups of parameters have learning rates 0.1, 10."),
        (((0.1, 0.1), (0.1, 3.0)), "the learning rate of group 1 went from 0.1 to 3 in iteration 99."),
        (((0.1, 0.2), (0.1, 0.2)), None),
        (((0.0, 0.0), (0.0, 0.0)), None),
        (((), ()), None),
    ],
)
def test_a_weight_that_moved_before_the_loss_is_the_optimizers(rates, told, tmp_path: Path) -> None:
    verdict = judged(tmp_path, rates=rates)
    assert (verdict.kind, verdict.confidence) == ("optimizer", "likely" if told else "weak")
    assert verdict.cause == "the optimizer moved fc weight before the loss told"
    assert verdict.evidence[1].startswith("fc weight moved 18.3 times as fast as ever before, from iteration 90 on")
    assert verdict.evidence[2:] == ((told,) if told else ())
    assert [(change.key.layer, change.iteration) for change in verdict.precursors] == [("fc", 90)]
    assert verdict.began.after.key.layer == "fc"  # not the loss of another name
    assert verdict.missing == ("it began in iteration 90, before the oldest recorded one (98).",)
    assert load_text(verdict.advice).ring.iterations >= NUM - 90


def test_an_activation_that_moved_is_the_numbers(tmp_path: Path) -> None:
    assert judged(tmp_path, "activation").kind == "numbers"


@pytest.mark.parametrize("steps", [{}, {90: 1.02}, {3: 1.5}, {50: 1.2, 90: 1.2}])
def test_what_moves_as_ever_or_settles_is_no_cause(steps, tmp_path: Path) -> None:
    verdict = judged(tmp_path, steps=steps)
    assert (verdict.kind, verdict.confidence, verdict.precursors) == ("loss", "weak", ())
    assert (verdict.missing, verdict.advice) == ((), "")


def test_a_short_history_tells_nothing(tmp_path: Path) -> None:
    write(tmp_path, "weight", {20: 1.2}, rates=[[], []])
    with open_incident(tmp_path) as incident:
        assert find_speeds(incident.ranks[0], until=(0, 30)) == []
        assert len(find_speeds(incident.ranks[0], until=(0, NUM))) == 0
