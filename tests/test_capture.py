"""The recorder's sink: records from what it remembers of their keys, and what is left out before it is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import batches, make, train

import flightrec
from flightrec.records import Phase, Stage
from flightrec.sources.plain import forget_plain
from flightrec.sources.sink import Sightings

EVERYTHING = {"budget": "none", "triggers": [], "ring": {"iterations": 3}}
TIGHT = {"budget": "0.001%", "ring": {"iterations": 4}}


class Forgetful(dict):
    """A cache that keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


def incident_of(folder: Path, monkeypatch: pytest.MonkeyPatch | None) -> flightrec.Incident:
    """A training's last iterations; with a monkeypatch all that is remembered of records is forgotten before each."""
    net = make()
    with flightrec.Recorder(EVERYTHING, directory=folder, run_id="same") as recorder:
        recorder.attach(net)
        if monkeypatch is not None:
            _forget_always(recorder, monkeypatch)
        train(net, batches(4, 2), recorder, before_step=lambda i: recorder.trigger("now") if i == 2 else None)
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return flightrec.open(found)


def _forget_always(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = recorder._capture
    capture._sites = Forgetful()
    original = type(capture).capture

    def forgetting(self: Any, *args: Any, **named: Any) -> None:
        forget_plain()
        ring = self.engine.ring
        ring._entries = None
        for entry in ring._registry.entries.values():
            entry.latest = None
        original(self, *args, **named)

    monkeypatch.setattr(type(capture), "capture", forgetting)


def test_an_incident_is_the_same_if_nothing_is_remembered_from_record_to_record(tmp_path):
    quick = incident_of(tmp_path / "quick", None)
    with pytest.MonkeyPatch.context() as patches:
        slow = incident_of(tmp_path / "slow", patches)
    left, right = list(quick.records()), list(slow.records())
    assert [record.key for record in left] == [record.key for record in right]
    assert len(left) > 100
    for one, two in zip(left, right, strict=True):
        assert repr(one.statistics) == repr(two.statistics)
        assert one.iteration == two.iteration
        assert (one.high_precision is None) == (two.high_precision is None)
        if one.high_precision is not None:
            assert one.high_precision.tobytes() == two.high_precision.tobytes()
            assert one.high_precision.shape == two.high_precision.shape


def test_what_is_not_in_turn_is_told_before_it_is_looked_at_and_counts_as_left_out(tmp_path):
    net, answers = make(), []
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        recorder.attach(net)
        capture = recorder._capture

        def note(iteration: int) -> None:
            ring = capture.engine.ring
            recorded = {ring.layouts[number].row for number in ring.index(iteration).layout_ids}
            left_out = capture.rotation.left_out(ring._registry.statistics.num_rows)
            for layout in ring.layouts:
                key = layout.key
                if key.tensor in ("output", "activation", "input", "gradient", "dgrad"):
                    wanted = capture.wants(key.layer, key.tensor, key.phase, key.stage)
                    answers.append((wanted, layout.row in recorded, not left_out[layout.row]))

        train(net, batches(20), recorder, before_step=note)
    assert {wanted for wanted, *_ in answers} == {True, False}
    assert all(wanted == recorded == in_turn for wanted, recorded, in_turn in answers)


def test_a_turn_that_every_puts_off_is_told_too(tmp_path):
    config = {**EVERYTHING, "select": [{"tensors": ["output"], "every": 2}]}
    net, answers = make(), []
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        recorder.attach(net)
        wants = recorder._capture.wants
        train(
            net, batches(4), recorder,
            before_step=lambda _: answers.append([wants("head", name, Phase.TRAIN, Stage.FORWARD) for name in NAMES]),
        )  # fmt: skip
    assert answers == [[True, False], [False, False]] * 2


NAMES = ("output", "activation")


def test_a_record_that_cannot_be_named_is_contained(tmp_path, caplog):
    with flightrec.Recorder(EVERYTHING, directory=tmp_path) as recorder:
        recorder.attach(make())
        recorder._capture.capture(
            ["no", "name"], "output", microbatch=0, phase=Phase.TRAIN, call=0, stage=Stage.FORWARD,
            high_precision=torch.ones(1),
        )  # fmt: skip
    assert "output of ['no', 'name'] failed and is disarmed" in caplog.text


def test_a_gradient_that_is_not_in_turn_leaves_no_hook(tmp_path):
    net = make()
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        recorder.attach(net)
        train(net, batches(6), recorder)
        x = batches(1)[0][0]
        outputs = {}
        for name in ("blocks.0.fc1", "blocks.1.fc1"):
            net.get_submodule(name).register_forward_hook(
                lambda _m, _a, output, name=name: outputs.__setitem__(name, output)
            )
        net(x)
        hooked = {
            name: any(getattr(hook, "layer", None) == name for hook in (output._backward_hooks or {}).values())
            for name, output in outputs.items()
        }
        wanted = {name: recorder._capture.wants(name, "gradient", Phase.TRAIN, Stage.BACKWARD) for name in outputs}
    assert hooked == wanted
    assert not all(hooked.values())


@pytest.mark.parametrize(("budget", "every"), [("0.001%", 1), ("0.001%", 3), ("none", 3), ("none", 1)])
def test_what_is_remembered_of_several_sightings_is_what_would_be_answered_now(tmp_path, budget, every):
    net, answers = make(), []
    select = [{"tensors": ["activation", "output", "gradient", "wgrad"], "every": every}]
    with flightrec.Recorder({"budget": budget, "select": select}, directory=tmp_path) as recorder:
        recorder.attach(net)
        capture = recorder._capture
        kept = [
            Sightings((name, tensor, Phase.TRAIN, stage) for tensor, stage in tensors)
            for name, _ in net.named_modules()
            for tensors in (
                [("activation", Stage.FORWARD), ("output", Stage.FORWARD)],
                [("gradient", Stage.BACKWARD), ("wgrad", Stage.BACKWARD)],
                [("input", Stage.FORWARD)],
            )
        ]

        def compare(iteration: int) -> None:
            for number in (iteration, iteration + 1, iteration):  # the user may say which iteration it is
                capture.iteration = number
                now = [any(capture.wants(*one) for one in sightings.of) for sightings in kept]
                assert [capture.wants_any(sightings) for sightings in kept] == now
                assert [capture.wants_any(sightings) for sightings in kept] == now
                answers.extend(now)

        train(net, batches(8), recorder, before_step=compare)
    assert len(answers) > 100
    assert True in answers
    assert False in answers or (budget, every) == ("none", 1)
