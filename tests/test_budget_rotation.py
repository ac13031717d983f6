"""Rotation in real trainings: the run unchanged, each layer in its turn, full coverage after a precursor."""

from __future__ import annotations

import itertools
import logging
import time

import pytest
import torch
from models import WIDTH, Block, batches, loss_of, make, train
from torch import nn

import flightrec
from flightrec.records import NO_MICROBATCH, Stage

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
BOUNDARIES = {(f"blocks.{n}", tensor) for n in (0, 1) for tensor in ("output", "gradient")}
TIGHT = {"budget": "0.001%", "ring": {"iterations": 4}, "incident": {"after": 2}}
"""Always spent: one layer an iteration."""


class Watched:
    """Notes which (layer, tensor) each tick recorded."""

    def __init__(self, recorder: flightrec.Recorder) -> None:
        self.recorder = recorder
        self.ticks: list[set[tuple[str, str]]] = []

    def __call__(self, iteration: int) -> None:
        ring = self.recorder._capture.engine.ring
        keys = [ring.layouts[number].key for number in ring.index(iteration).layout_ids]
        self.ticks.append({(key.layer, key.tensor) for key in keys})

    @property
    def rotating(self) -> list[set[str]]:
        """Layers beside the boundaries and the loss, by tick."""
        always = {*BOUNDARIES, ("", "loss"), ("", "metric")}
        return [{layer for layer, _ in tick - always} for tick in self.ticks]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_gradients_and_parameters_are_bit_identical(precision, device, tmp_path):
    data = batches(30, 2, device=device)
    plain = train(make(precision).to(device), data, precision=precision, device=device)
    net = make(precision).to(device)
    generators = torch.get_rng_state()
    with flightrec.Recorder(TIGHT, directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        assert torch.equal(torch.get_rng_state(), generators)
        recorded = train(net, data, recorder, precision=precision, device=device)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", DEVICES)
def test_each_layer_is_recorded_in_its_turn_and_the_boundaries_always(device, tmp_path):
    net = make().to(device)
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        train(net, batches(60, device=device), recorder, before_step=seen, device=device, keep=False)
    first, *others = seen.ticks
    layers = seen.rotating[0]
    assert {"", "blocks.0", "blocks.0.norm", "blocks.0.fc1", "blocks.0.act", "blocks.0.fc2", "head"} < layers
    assert all(tick >= BOUNDARIES for tick in seen.ticks)
    for tick, recorded in zip(others, seen.rotating[1:], strict=True):
        assert len(recorded) == 1
        (layer,) = recorded
        expected = {name for name in first if name[0] == layer and name not in BOUNDARIES}
        assert {name for name in tick if name[0] == layer and name not in BOUNDARIES} == expected, "pairs stay together"
    for start in range(1, 60 - len(layers)):
        assert set.union(*seen.rotating[start : start + len(layers)]) == layers, "every layer within a round"


def test_the_order_is_the_models_and_the_same_in_every_run(tmp_path):
    rounds = []
    for run in range(2):
        net = make()
        with flightrec.Recorder(TIGHT, directory=tmp_path / str(run)) as recorder:
            recorder.attach(net)
            seen = Watched(recorder)
            train(net, batches(30), recorder, before_step=seen, keep=False)
        rounds.append([*itertools.chain.from_iterable(seen.rotating[1:])])
    assert rounds[0] == rounds[1]
    names = [name for name, _ in make().named_modules() if name in rounds[0]]
    start = rounds[0].index("")
    assert rounds[0][start : start + len(names)] == names


def test_an_ample_budget_records_everything(tmp_path):
    net = make()
    with flightrec.Recorder({"budget": "100%"}, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        train(net, batches(12), recorder, before_step=lambda i: (seen(i), time.sleep(0.1)), keep=False)
        assert "enough for everything" in recorder.summary()
    assert len({frozenset(tick) for tick in seen.ticks[6:]}) == 1
    assert seen.ticks[-1] >= seen.ticks[0]


def test_none_records_everything_and_measures_it(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flightrec")
    net = make()
    with flightrec.Recorder({"budget": "none"}, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        train(net, batches(10), recorder, before_step=seen, keep=False)
        assert "budget none: everything that is selected in every iteration" in recorder.summary()
        assert "% of the observed step" in recorder.summary()
    assert len({frozenset(tick) for tick in seen.ticks[1:]}) == 1
    assert sum("budget none" in record.message and "predicted" in record.message for record in caplog.records) == 1


def test_the_start_says_what_rotates_and_when_the_budget_does_not_hold(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flightrec")
    net = make()
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        assert recorder.summary() == ""
        recorder.attach(net)
        data = batches(20)
        train(net, data[:1], recorder, keep=False)
        assert "how many shows when a step's time is known" in recorder.summary()
        train(net, data[1:], recorder, keep=False)
        summary = recorder.summary()
    for words in ("budget 0.001% of a step", "2 blocks (blocks.0, blocks.1)", "a round takes", "predicted"):
        assert words in summary
    (line,) = [record.message for record in caplog.records if "in turns" in record.message]
    assert "N = 4 iterations" in line
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "more than the budget of 0.001%" in warning.message


def test_what_is_recorded_by_hand_takes_no_turns(tmp_path):
    net = make()
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        for number, (x,) in enumerate(batches(20)):
            loss = loss_of(net, x)
            loss.backward()
            recorder.record("mine", "activation", high_precision=x)
            recorder.record("blocks.0.fc1", "input", high_precision=x)
            recorder._capture.keep_scalar("loss", "", loss, NO_MICROBATCH, Stage.LOSS)
            seen(number)
            recorder.step(metrics={"norm": 1.0})
    assert all({("mine", "activation"), ("blocks.0.fc1", "input"), ("", "loss")} <= tick for tick in seen.ticks)


def test_every_is_kept_within_turns(tmp_path):
    select = [{"layers": "*.fc1", "tensors": "weight", "every": 30}, {"tensors": ["activation", "output", "gradient"]}]
    net = make()
    with flightrec.Recorder({**TIGHT, "select": select}, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        train(net, batches(100), recorder, before_step=seen, keep=False)
    weights = [n for n, tick in enumerate(seen.ticks) if ("blocks.0.fc1", "weight") in tick]
    activations = [n for n, tick in enumerate(seen.ticks) if ("blocks.0.fc1", "activation") in tick]
    assert weights[0] == 0 and len(weights) >= 3
    assert all(30 <= later - earlier < 30 + 12 for earlier, later in itertools.pairwise(weights))
    assert set(weights) < set(activations)


def watch_rule(**more):
    return {"name": "sign", "kind": "metric_threshold", "above": 1.0, "severity": "watch", **more}


def test_a_watch_raises_coverage_to_everything_for_k_iterations(tmp_path):
    net = make()
    config = {**TIGHT, "triggers": [watch_rule()], "watch_iterations": 5}
    with flightrec.Recorder(config, directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for number, (x,) in enumerate(batches(40)):
            loss_of(net, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen(number)
            recorder.step(metrics={"sign": 2.0 if number == 20 else 0.5})
    whole = [number for number, layers in enumerate(seen.rotating) if layers == seen.rotating[0]]
    assert whole == [0, 21, 22, 23, 24, 25]
    assert not (tmp_path / "out").exists()


def test_a_rule_that_watches_all_the_time_does_not_pin_the_coverage(tmp_path, caplog):
    net = make()
    config = {**TIGHT, "triggers": [watch_rule(rearm=1)]}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        recorder.attach(net)
        seen = Watched(recorder)
        for number in range(240):
            loss_of(net, torch.ones(4, WIDTH)).backward()
            seen(number)
            recorder.step(metrics={"sign": 2.0 * (number % 2)})
    assert sum(layers == seen.rotating[0] for layers in seen.rotating[120:]) <= 20
    assert sum("no longer raise the coverage" in record.message for record in caplog.records) == 1


def test_an_incident_has_the_boundaries_always_and_says_what_was_not_in_turn(tmp_path):
    net = make()
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        recorder.attach(net)
        train(
            net, batches(34), recorder, before_step=lambda i: recorder.trigger("now") if i == 20 else None, keep=False
        )  # fmt: skip
    (folder,) = tmp_path.iterdir()
    incident = flightrec.open(folder)
    assert [entry.iteration for entry in incident.iterations] == [17, 18, 19, 20, 21, 22]
    layers = {}
    for entry in incident.iterations:
        records = incident.records(iteration=entry.iteration)
        names = {(record.key.layer, record.key.tensor) for record in records}
        assert names >= {*BOUNDARIES, ("", "loss")}
        assert all(record.high_precision is not None for record in records)
        layers[entry.iteration] = {layer for layer, _ in names - BOUNDARIES - {("", "loss")}}
    assert [len(layers[iteration]) for iteration in (17, 18, 19, 20)] == [1] * 4
    assert len(layers[21]) == len(layers[22]) > 10, "an incident sees its iterations after the fault whole"
    told = {row.iteration: row.reason for row in incident.blind}
    assert set(told) == {17, 18, 19, 20}
    assert all((row.layer, row.tensor) == ("*", "") for row in incident.blind)
    for iteration, reason in told.items():
        assert reason.endswith(f"recorded: {min(layers[iteration]) or 'the model'}")
        assert "budget of 0.001%" in reason


MISSING = {"kind": "missing_record", "min_samples": 2, "consecutive": 2, "factor": 1, "tensors": ["gradient", "wgrad"]}


class Sided(nn.Module):
    """A block with a branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.side = nn.Linear(WIDTH, WIDTH)
        self.takes_side = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.side(x) if self.takes_side else x


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_that_vanished_is_missed_when_its_turns_came(device, tmp_path):
    net = Sided().to(device)
    with flightrec.Recorder({**TIGHT, "triggers": [MISSING]}, directory=tmp_path) as recorder:
        recorder.attach(net)
        for number, (x,) in enumerate(batches(120, device=device)):
            net.takes_side = number < 60
            loss_of(net, x).backward()
            net.zero_grad()
            recorder.step()
    (folder,) = tmp_path.iterdir()
    incident = flightrec.open(folder)
    assert (incident.trigger.kind, incident.trigger.key.layer) == ("missing_record", "side")
    assert 60 + 2 * 10 < incident.trigger.iteration < 60 + 4 * 14


@pytest.mark.slow
def test_rotation_alone_is_never_a_missing_record(tmp_path):
    """500 iterations in which turns lengthen and shorten because the budget and coverage do."""
    net = make()
    rules = [MISSING, watch_rule()]
    config = {"budget": "30%", "triggers": rules, "watch_iterations": 3}
    lengths = set()
    with flightrec.Recorder(config, directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        data = batches(10)
        for number in range(500):
            loss_of(net, data[number % 10][0]).backward()
            net.zero_grad()
            recorder._capture.rotation.share = 100.0 if number // 60 % 2 else 1e-6  # not left to a machine's speed
            recorder.step(metrics={"sign": 2.0 if number % 50 == 49 else 0.5})
            plan = recorder._capture.rotation._plan
            lengths.add(plan.num_turns)
    assert len(lengths) > 1
    assert not (tmp_path / "out").exists()


def test_the_products_of_one_module_take_its_turns(tmp_path):
    """Transformer Engine's modules have products such as ``mlp.fc1`` that are no modules themselves."""
    skipped: list[tuple[bool, ...]] = []
    net = make("fp32")
    with flightrec.Recorder(TIGHT, directory=tmp_path) as recorder:
        recorder.attach(net)
        rotation = recorder._capture.rotation

        def look(iteration: int) -> None:
            names = ("blocks.1.fc2", "blocks.1.fc2.gemm_0", "blocks.1.fc2.own.deep", "elsewhere.fc2")
            skipped.append(tuple(rotation.skips(name, "activation", 1, iteration, rotates=True) for name in names))
            assert [rotation.sleeps(name) for name in names] == list(skipped[-1])

        train(net, batches(30, 1), recorder, before_step=look)
    module = [skips[0] for skips in skipped]
    assert True in module
    assert False in module
    assert [skips[1] for skips in skipped] == [skips[2] for skips in skipped] == module
    assert not any(skips[3] for skips in skipped)
