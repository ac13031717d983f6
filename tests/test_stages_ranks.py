"""Stages of gradients in real runs of two ranks: before and after the reduction, with and without accumulation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_processes import start

import flightrec
from flightrec.records import NO_MICROBATCH, Stage

pytest.importorskip("torch.distributed")

BODY = """
    import contextlib, json
    import torch.distributed as dist
    options = json.loads(sys.argv[3])
    rank = int(os.environ["RANK"])
    device = options.pop("device")
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if "cuda" in device else "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2
    )
    fault, count, scaled = options.pop("fault"), options.pop("microbatches"), options.pop("scaled")
    net = make(blocks=1).to(device)
    at = {"now": (-1, -1)}
    if rank == 1:
        net.blocks[0].fc1.weight.register_hook(
            lambda g: g.index_fill(0, torch.tensor(2, device=g.device), math.nan)
            if at["now"] == (fault, count - 1) else None
        )
    ddp = torch.nn.parallel.DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=scaled, init_scale=64.0)
    config = {
        "budget": "none",
        "select": [{"tensors": ["wgrad"], "stages": ["backward", "reduced", "unscaled", "clipped"]}],
        "triggers": [{"kind": "nonfinite"}, {"kind": "loss_scale_collapse"}],
        "ring": {"iterations": 2},
    }
    trace = []
    recorder = None
    if sys.argv[1]:
        recorder = flightrec.Recorder(config, directory=sys.argv[1], run_id=f"rank{rank}")
        recorder.attach(net, optimizer=optimizer, scaler=scaler)
    for iteration, microbatches in enumerate(batches(6, count, seed=rank, device=device)):
        for index, x in enumerate(microbatches):
            at["now"] = (iteration, index)
            last = index == count - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                scaler.scale(ddp(x).square().mean() / count).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        trace.append(sum(p.grad.double().nan_to_num(0).abs().sum().item() for p in ddp.parameters()))
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
    trace.append(sum(p.detach().double().nan_to_num(0).abs().sum().item() for p in ddp.parameters()))
    if recorder is not None:
        recorder.close()
    print(json.dumps(trace), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(folder: Path, record: bool, **options) -> list[str]:
    """Start both ranks; what they printed: sums of gradients and parameters, to the bit."""
    import torch

    if options["device"] == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    out = str(folder / "out") if record else ""
    store = str(folder / f"store{int(record)}")
    processes: list[subprocess.Popen] = [
        start(BODY, out, store, json.dumps(options), RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [out.strip().splitlines()[-1] for out, _ in outputs]


def by_rank(folder: Path) -> dict[int, flightrec.Incident]:
    found = [flightrec.open(path) for path in (folder / "out").iterdir()]
    return {incident.ranks[0].rank: incident for incident in found}


@pytest.mark.dist
@pytest.mark.parametrize("view, microbatches", [(False, 1), (True, 3)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_of_one_ranks_backward_is_on_both_only_once_reduced(device, view, microbatches, tmp_path):
    options = {"device": device, "gradient_as_bucket_view": view, "microbatches": microbatches, "fault": 3}
    recorded = run(tmp_path, True, scaled=False, **options)
    if view:
        assert recorded == run(tmp_path, False, scaled=False, **options)

    incidents = by_rank(tmp_path)
    assert set(incidents) == {0, 1}
    for rank, incident in incidents.items():
        assert incident.trigger.iteration == 3
        where = {"layer": "blocks.0.fc1", "tensor": "wgrad", "part": "", "iteration": 3}
        backward = incident.records(stage="backward", **where)
        assert [record.key.microbatch for record in backward] == list(range(microbatches))
        spoilt = [bool(np.isnan(record.high_precision).any()) for record in backward]
        assert spoilt == [False] * (microbatches - 1) + [rank == 1]
        (reduced,) = incident.records(stage="reduced", **where)
        assert np.isnan(reduced.high_precision[2]).all()
        assert not np.isnan(reduced.high_precision[:2]).any()
        first = incident.blame()[0]
        assert (first.key.layer, first.key.stage) == (
            "blocks.0.fc1",
            Stage.BACKWARD if rank == 1 else Stage.REDUCED,
        )
        assert first.key.microbatch == (microbatches - 1 if rank == 1 else NO_MICROBATCH)
        verdict = incident.verdict(elements=True)  # each rank wrote its own, and knows of no other
        assert (verdict.kind, verdict.confidence) == (("numbers" if rank else "communication"), "likely")
        assert verdict.began.between == (
            "backward of the operation of blocks.0.fc1" if rank else "communication of the gradients",
        )
        assert verdict.elements.rows == (2,)

    # In a healthy iteration what was reduced is the mean of both ranks' sums, the same on both.
    healthy = {"layer": "head", "tensor": "wgrad", "part": "", "iteration": 2}
    reduced = [incidents[rank].records(stage="reduced", **healthy)[0].high_precision for rank in (0, 1)]
    local = [incidents[rank].records(stage="backward", **healthy)[-1].high_precision for rank in (0, 1)]
    assert np.array_equal(*reduced)
    assert not np.array_equal(*local)
    np.testing.assert_allclose(reduced[0], (local[0] + local[1]) / 2, rtol=1e-5, atol=1e-8)


@pytest.mark.dist
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_all_ranks_skip_is_silent_on_all(device, tmp_path):
    options = {"device": device, "gradient_as_bucket_view": True, "microbatches": 2, "fault": 3, "scaled": True}
    run(tmp_path, True, **options)
    assert not (tmp_path / "out").exists()
