"""Stages, gradient scalers and gradient accumulation through the whole recorder."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from models import RECORD_ALL, batches, make
from rules_support import DEVICES
from test_unchanged import CountReads
from torch import nn

import flightrec
from flightrec.records import NO_MICROBATCH, Stage
from flightrec.sources.watched import is_watched

GRADIENTS = {"tensors": ["wgrad"], "stages": ["backward", "reduced", "unscaled", "clipped"]}
ALL_RULES = [
    {"kind": "nonfinite"},
    {"kind": "loss_jump"},
    {"kind": "amax_spike"},
    {"kind": "underflow"},
    {"kind": "quantization_error"},
    {"kind": "saturation"},
    {"kind": "inconsistent_scale"},
    {"kind": "stale_scale"},
    {"kind": "loss_drift"},
    {"kind": "metric_jump"},
    {"kind": "metric_threshold", "above": 1e30},
    {"kind": "zero_gradient", "min_samples": 2, "consecutive": 2},
    {"kind": "missing_record", "min_samples": 1, "consecutive": 2},
    {"kind": "unchanged_parameters", "min_samples": 1, "consecutive": 2},
    {"kind": "loss_scale_collapse"},
    {"kind": "exception"},
]


def config(*triggers, select=(GRADIENTS, {"tensors": "*"})):
    return {
        **RECORD_ALL,
        "select": list(select),
        "triggers": list(triggers) or ALL_RULES,
        "ring": {"iterations": 3},
        "incident": {"cooldown": 0},
    }


def only(directory: Path) -> flightrec.Incident:
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


def fp16(net, x, device):
    with torch.autocast(device, dtype=torch.float16):
        return (net(x).float() - x).square().mean()


def train_scaled(
    recorder, net, optimizers, scaler, iterations, *, device="cpu", clip=0.5, late_update=False, spoil=None, seen=None
):
    """Mixed precision as torch's documentation writes it."""
    for iteration, (x,) in enumerate(batches(iterations, device=device)):
        loss = fp16(net, x, device)
        scaler.scale(loss).backward()
        if spoil is not None:
            spoil(iteration)
        norm = None
        for optimizer in optimizers:
            if clip is not None:
                scaler.unscale_(optimizer)
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                norm = nn.utils.clip_grad_norm_(parameters, clip)
            scaler.step(optimizer)
        if seen is not None:
            seen += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]
        if not late_update:
            scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if recorder is not None:
            recorder.step(loss=loss, metrics={} if norm is None else {"grad_norm": norm})
        if late_update:
            scaler.update()
    if seen is not None:
        seen += [p.detach().clone() for p in net.parameters()]


# -- a gradient scaler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_update", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_healthy_start_from_a_scale_of_2_to_the_40_is_silent(device, late_update, tmp_path):
    net = make(blocks=1).to(device)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler(device, init_scale=2.0**40)
    with flightrec.Recorder(config(), directory=tmp_path / "out") as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        train_scaled(recorder, net, [optimizer], scaler, 50, device=device, late_update=late_update)
        recorder.state_dict()  # waits, so that the last verdicts are there
        keys = {layout.key for layout in recorder._capture.engine.ring.layouts}
        history = {n: [v for _, v, _ in s] for n, s in recorder._capture.engine.history.state_dict().items()}
    assert not (tmp_path / "out").exists()
    skipped = history["metric.skipped_step"]
    assert set(skipped) == {0, 1}
    assert sum(skipped) >= 16
    scales = history["metric.loss_scale"]
    assert [scale / later for scale, later in itertools.pairwise(scales)] == [2.0**skip for skip in skipped[:-1]]
    assert {k.stage for k in keys if k.tensor == "wgrad"} == {
        Stage.BACKWARD,
        Stage.REDUCED,
        Stage.UNSCALED,
        Stage.CLIPPED,
    }
    assert {"unscale_", "step", "update"}.isdisjoint(vars(scaler))


def test_the_same_start_without_the_scaler_attached_fires(tmp_path):
    net = make(blocks=1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        train_scaled(recorder, net, [optimizer], scaler, 3)
    assert only(tmp_path).trigger.key.stage is Stage.BACKWARD


def test_a_run_that_tells_its_own_skipped_steps_is_silent_too(tmp_path):
    net = make(blocks=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path / "out") as recorder:
        recorder.attach(net)
        for iteration, (x,) in enumerate(batches(6)):
            loss = fp16(net, x, "cpu")
            (loss * (2.0**60 if iteration < 3 else 1.0)).backward()
            skipped = not all(torch.isfinite(p.grad).all() for p in net.parameters())
            assert skipped is (iteration < 3)
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, metrics={"skipped_step": float(skipped)})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_that_collapses_fires(device, tmp_path):
    net = make(blocks=1).to(device)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler(device, init_scale=4.0)

    def spoil(iteration):
        if iteration >= 5:  # only the backward pass is wrong
            net.head.weight.grad[0, 0] = math.nan

    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        train_scaled(recorder, net, [optimizer], scaler, 14, device=device, spoil=spoil)
    incident = only(tmp_path)
    assert {firing.kind for firing in incident.firings} == {"loss_scale_collapse"}
    assert incident.trigger.key.part == "loss_scale"
    assert incident.trigger.iteration == 9  # 4 skips in a row from 5 on: the scale is lower from 6 on, 0.25 in 9
    assert incident.trigger.value == 0.25
    spoilt = incident.records(layer="head", tensor="wgrad", part="", iteration=9, stage="unscaled")
    assert np.isnan(spoilt[0].high_precision[0, 0])


def test_a_gradient_that_is_not_finite_in_a_step_that_was_taken_fires(tmp_path):
    net = make(blocks=1)
    taken = [p for name, p in net.named_parameters() if not name.startswith("head")]
    optimizer, scaler = torch.optim.SGD(taken, lr=1e-2), torch.amp.GradScaler("cpu", init_scale=16.0)

    def backward_hook(gradient):
        return torch.full_like(gradient, math.nan) if len(seen) == 3 else gradient

    seen: list[int] = []
    net.head.weight.register_hook(backward_hook)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        train_scaled(recorder, net, [optimizer], scaler, 6, spoil=seen.append)
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 3)
    assert (incident.trigger.key.layer, incident.trigger.key.tensor) == ("head", "wgrad")


def test_a_disabled_scaler_excuses_nothing(tmp_path):
    net = make(blocks=1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", enabled=False)

    def spoil(iteration):
        if iteration == 3:
            net.head.weight.grad[0, 0] = math.nan

    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        train_scaled(recorder, net, [optimizer], scaler, 5, clip=None, spoil=spoil)
        metrics = [k for k in recorder._capture.engine.ring.layouts if k.key.tensor == "metric"]
    incident = only(tmp_path)
    assert not metrics
    assert (incident.trigger.iteration, incident.trigger.key.stage) == (3, Stage.REDUCED)
    assert [entry.tensor for entry in incident.blind if entry.tensor.startswith("wgrad")] == ["wgrad at unscaled"]


@pytest.mark.parametrize("stage, where", [(Stage.FORWARD, "activation"), (Stage.LOSS, "loss")])
def test_forward_and_loss_are_judged_in_a_skipped_step_too(stage, where, tmp_path):
    net = make(blocks=1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=4.0)

    def poison(module, args):
        return (torch.full_like(args[0], math.nan),) if len(seen) == 4 else None

    seen: list[int] = []
    net.head.register_forward_pre_hook(poison)
    rule = {"kind": "nonfinite", "tensors": [where]}
    with flightrec.Recorder(config(rule), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        train_scaled(recorder, net, [optimizer], scaler, 6, spoil=seen.append)
    incident = only(tmp_path)
    assert (incident.trigger.iteration, incident.trigger.key.stage) == (4, stage)
    skipped = {entry.iteration: entry.metrics["skipped_step"] for entry in incident.iterations}
    assert (skipped[3], skipped[4]) == (0, 1)


def test_one_of_two_optimizers_skips(tmp_path):
    net = make(blocks=1)
    rest = [p for name, p in net.named_parameters() if not name.startswith("head")]
    optimizers = [torch.optim.SGD(rest, lr=1e-2), torch.optim.Adam(net.head.parameters(), lr=1e-3)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def spoil(iteration):
        if iteration == 3:
            net.head.weight.grad[0, 0] = math.inf

    with flightrec.Recorder(config(), directory=tmp_path / "out") as recorder:
        recorder.attach(net, optimizer=optimizers, scaler=scaler)
        train_scaled(recorder, net, optimizers, scaler, 8, spoil=spoil)
        recorder.state_dict()
        history = recorder._capture.engine.history.state_dict()
    assert not (tmp_path / "out").exists()
    assert [value for _, value, _ in history["metric.skipped_step"]][:7] == [0, 0, 0, 1, 0, 0, 0]


def test_parameters_that_stand_still_without_a_skip_fire(tmp_path):
    net = make(blocks=1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=4.0)

    def spoil(iteration):
        optimizer.param_groups[0]["lr"] = 1e-2 if iteration < 5 else 0.0

    rule = {"kind": "unchanged_parameters", "min_samples": 2, "consecutive": 3}
    with flightrec.Recorder(config(rule), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        train_scaled(recorder, net, [optimizer], scaler, 12, spoil=spoil)
    assert only(tmp_path).trigger.iteration == 7


def test_what_the_user_gives_under_the_same_name_counts(tmp_path):
    net = make(blocks=1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=4.0)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        for (x,) in batches(2):
            scaler.scale(fp16(net, x, "cpu")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step(metrics={"loss_scale": 7.0})
        recorder.state_dict()
        history = recorder._capture.engine.history.state_dict()
    assert history["metric.loss_scale"][0] == (0, 7.0, 0)
    assert history["metric.skipped_step"][0] == (0, 0.0, 0)


def test_an_exception_after_a_skip_tells_of_nothing_else(tmp_path):
    net = make(blocks=1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**60)

    def run(recorder):
        train_scaled(recorder, net, [optimizer], scaler, 2)
        scaler.scale(fp16(net, batches(1)[0][0], "cpu")).backward()
        scaler.step(optimizer)
        scaler.update()
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"), flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        run(recorder)
    incident = only(tmp_path)
    assert {firing.kind for firing in incident.firings} == {"exception"}


def test_a_scaler_without_the_rule_for_its_collapse_is_told(tmp_path, caplog):
    for triggers, told in (([{"kind": "nonfinite"}], 1), (ALL_RULES, 0)):
        caplog.clear()
        with flightrec.Recorder(config(*triggers), directory=tmp_path) as recorder:
            recorder.attach(make(blocks=1), scaler=torch.amp.GradScaler("cpu"))
        assert sum("loss_scale_collapse" in record.message for record in caplog.records) == told


# -- where a fault between backward and optimizer began ---------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_by_a_norm_that_is_no_number_is_blamed_on_the_clipping(device, tmp_path):
    net = make(blocks=1).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        for iteration, (x,) in enumerate(batches(5, device=device)):
            net(x).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), math.nan if iteration == 3 else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    incident = only(tmp_path)
    first = incident.blame()[0]
    assert (first.iteration, first.key.tensor, first.key.stage) == (3, "wgrad", Stage.CLIPPED)
    verdict = incident.verdict(elements=True)
    assert (verdict.kind, verdict.confidence, verdict.precursors) == ("optimizer", "certain", ())
    assert verdict.began.between == ("clipping of the gradients",)
    assert (verdict.began.after.key.stage, verdict.began.after.iteration) == (Stage.REDUCED, 3)
    assert verdict.elements.num_faulty == verdict.elements.numel
    (reduced,) = incident.records(layer="head", tensor="wgrad", part="", iteration=3, stage="reduced")
    (backward,) = incident.records(layer="head", tensor="wgrad", part="", iteration=3, stage="backward")
    assert np.array_equal(reduced.high_precision, backward.high_precision)
    assert reduced.key.microbatch == NO_MICROBATCH


@pytest.mark.parametrize("device", DEVICES)
def test_the_run_is_bit_identical_and_nothing_is_read_back(device, tmp_path):
    traces, reads = [], []
    for with_recorder in (False, True):
        net = make(blocks=1).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=3)
        seen: list[torch.Tensor] = []
        if with_recorder:
            with flightrec.Recorder(config(), directory=tmp_path / "out") as recorder:
                recorder.attach(net, optimizer=optimizer, scaler=scaler)
                with CountReads() as counter:
                    train_scaled(recorder, net, [optimizer], scaler, 15, device=device, seen=seen)
        else:
            with CountReads() as counter:
                train_scaled(None, net, [optimizer], scaler, 15, device=device, seen=seen)
        traces.append([*seen, scaler._scale.clone()])
        reads.append(counter.calls)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*traces, strict=True))
    assert reads[0] == reads[1]
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_stage_waits_for_the_device(tmp_path):
    net = make(blocks=1).cuda()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=4.0)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
        for iteration, (x,) in enumerate(batches(12, device="cuda")):
            torch.cuda.set_sync_debug_mode("error" if iteration >= 4 else "default")
            try:
                scaler.scale(fp16(net, x, "cuda")).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                torch.cuda.set_sync_debug_mode("default")
                scaler.step(optimizer)  # torch looks here whether to skip
                torch.cuda.set_sync_debug_mode("error" if iteration >= 4 else "default")
                scaler.update()
                optimizer.zero_grad()
                recorder.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert not list(tmp_path.iterdir())


# -- gradient accumulation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_wgrad_is_the_running_sum_and_the_loss_the_mean_over_microbatches(device, named, tmp_path):
    net, count = make(blocks=1).to(device), 3
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    sums, losses = [], []
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        for microbatches in batches(2, count, device=device):
            sums, losses = [], []
            for index, x in enumerate(microbatches):
                if named:
                    with recorder.microbatch(index):
                        loss = net(x).square().mean() / count
                        recorder.loss(loss)
                        loss.backward()
                else:
                    loss = net(x).square().mean() / count
                    recorder.loss(loss)
                    loss.backward()
                sums.append(net.head.weight.grad.cpu().clone())
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            recorder.trigger("look")
            recorder.step()
    incident = flightrec.open(min(tmp_path.iterdir()))
    found = incident.records(layer="head", tensor="wgrad", part="", iteration=1, stage="backward")
    assert [record.key.microbatch for record in found] == [0, 1, 2]
    assert all(np.array_equal(r.high_precision, s.numpy()) for r, s in zip(found, sums, strict=True))
    for stage in ("reduced", "clipped"):
        (record,) = incident.records(layer="head", tensor="wgrad", part="", iteration=1, stage=stage)
        assert np.array_equal(record.high_precision, sums[-1].numpy())
    entry = {e.iteration: e for e in incident.iterations}[1]
    assert entry.loss == pytest.approx(sum(losses) / count)
    parts = incident.records(tensor="loss", iteration=1)
    assert [(r.key.microbatch, float(r.high_precision)) for r in parts] == list(enumerate(np.float32(losses)))


@pytest.mark.parametrize("named", [True, False])
def test_a_loss_given_once_or_to_step_is_that_of_the_iteration(named, tmp_path):
    net = make(blocks=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net)
        for iteration, microbatches in enumerate(batches(4, 2)):
            for index, x in enumerate(microbatches):
                if named:
                    with recorder.microbatch(index):
                        net(x).square().mean().backward()
                else:
                    net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if iteration % 2 == 0:
                recorder.loss(torch.tensor(10.0 + iteration))  # once, after the last microbatch
            if iteration == 1:
                recorder.step(loss=20.0)
            elif iteration == 2:
                recorder.step(loss=30.0)  # both: what step is given counts
            else:
                recorder.step()
        recorder.state_dict()
        history = recorder._capture.engine.history.state_dict()
    assert history["loss"][:3] == [(0, 10.0, 0), (1, 20.0, 0), (2, 30.0, 0)]  # iteration, value, attempt
    assert len(history["loss"]) == 3


def test_a_nan_of_one_microbatch_is_blamed_on_it(tmp_path):
    net, count = make(blocks=1), 3
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    state = {"at": (-1, -1)}
    net.blocks[0].fc2.weight.register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor(0), math.nan) if state["at"] == (2, 1) else None
    )
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        for iteration, microbatches in enumerate(batches(4, count)):
            for index, x in enumerate(microbatches):
                state["at"] = (iteration, index)
                (net(x).square().mean() / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    first = only(tmp_path).blame()[0]
    assert (first.iteration, first.key.microbatch, first.key.layer) == (2, 1, "blocks.0.fc2")
    assert (first.key.tensor, first.key.stage) == ("wgrad", Stage.BACKWARD)


def test_only_the_stages_that_are_selected_are_recorded(tmp_path):
    net = make(blocks=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    select = [{"tensors": ["parameter", "wgrad"], "stages": ["after_step", "clipped"]}]
    with flightrec.Recorder(config({"kind": "nonfinite"}, select=select), directory=tmp_path) as recorder:
        recorder.attach(net, optimizer=optimizer)
        assert not any(is_watched(m) for name, m in net.named_modules() if name)
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
        for (x,) in batches(2):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
        keys = {(layout.key.tensor, layout.key.stage) for layout in recorder._capture.engine.ring.layouts}
    assert keys == {("parameter", Stage.AFTER_STEP), ("wgrad", Stage.CLIPPED)}
    assert not optimizer._optimizer_step_pre_hooks
