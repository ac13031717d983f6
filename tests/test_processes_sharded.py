"""Sharded training in real processes: each rank records its own part, and never a collective of ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_processes import start

import flightrec

HEAD = """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
        config = {
            "budget": "none", "select": [{"tensors": "*"}],
            "ring": {"iterations": 2}, "incident": {"after": 0, "writer": "thread"},
        }
        def recorded(make, watched, spoil=None, iterations=4):
            torch.manual_seed(0)
            net, step = make()
            recorder = flightrec.Recorder(config, directory=sys.argv[1], run_id="pair") if watched else None
            if watched:
                recorder.attach(net)
            trace = []
            torch.manual_seed(1 + rank)
            for iteration in range(iterations):
                if watched and iteration == iterations - 1:
                    recorder.trigger("look")
                if watched and spoil:
                    spoil(net, iteration)
                trace += step(net)
                if watched:
                    recorder.step()
            if watched:
                recorder.close()
            return trace
        def same(left, right):
            return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))
"""


def run(tmp_path: Path, body: str) -> tuple[flightrec.Incident, dict[int, np.lib.npyio.NpzFile]]:
    """Both ranks run ``body``, which saves what it knows of itself to ``argv[3]/<rank>.npz``."""
    processes = [
        start(HEAD + body, *map(str, (tmp_path / "out", tmp_path / "store", tmp_path)), RANK=str(rank), WORLD_SIZE="2")
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all(set(out.split()) == {"same"} for out, _ in outputs), outputs
    assert not any("disarmed" in err for _, err in outputs), outputs
    return tmp_path / "out", {rank: np.load(tmp_path / f"{rank}.npz") for rank in (0, 1)}


def incidents(directory: Path) -> dict[int, flightrec.Incident]:
    found = {}
    for folder in directory.iterdir():
        incident = flightrec.open(folder)
        for rank in incident.ranks:
            found[rank.rank] = incident
    return found


@pytest.mark.dist
def test_fsdp2_parameters_and_gradients_are_held_as_local_shards(tmp_path):
    directory, known = run(
        tmp_path,
        """
        from torch.distributed.fsdp import fully_shard
        from torch import nn
        def make():
            net = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
            for layer in (net[0], net[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            def step(net):
                loss = net(torch.randn(4, 6)).square().mean()
                loss.backward()
                grads = [p.grad.to_local().clone() for p in net.parameters()]
                optimizer.step()
                optimizer.zero_grad()
                step.known = {f"grad.{n}": g.numpy() for (n, _), g in zip(net.named_parameters(), grads)}
                step.known |= {f"param.{n}": p.to_local().detach().clone().numpy() for n, p in net.named_parameters()}
                return [loss.detach(), *grads, *(p.to_local().detach().clone() for p in net.parameters())]
            make.step = step
            return net, step
        watched = recorded(make, True)
        np_known = dict(make.step.known)
        print("same" if same(watched, recorded(make, False)) else "different", flush=True)
        import numpy
        numpy.savez(f"{sys.argv[3]}/{rank}.npz", **np_known)
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    found = incidents(directory)
    assert set(found) == {0, 1}
    for rank, incident in found.items():
        assert {firing.kind for firing in incident.firings} == {"manual"}
        for layer, offset in (("0", [3, 0]), ("2", [2, 0])):
            name = f"{layer}.weight"
            (record,) = incident.records(layer=layer, tensor="parameter", iteration=3, part="weight", rank=rank)
            np.testing.assert_array_equal(record.high_precision, known[rank][f"param.{name}"])
            facts = record.metadata["metadata"]
            assert facts["placements"] == ["Shard(dim=0)"]
            assert facts["mesh_shape"] == [2]
            assert facts["mesh_coordinate"] == [rank]
            assert facts["local_offset"] == (offset if rank else [0, 0])
            gradients = incident.records(layer=layer, tensor="wgrad", iteration=3, part="", rank=rank)
            assert gradients, [entry.reason for entry in incident.blind]
            np.testing.assert_array_equal(gradients[-1].high_precision, known[rank][f"grad.{name}"])
            assert incident.records(layer=layer, tensor="activation", iteration=3, rank=rank)


@pytest.mark.dist
def test_tensor_parallel_shards_are_scanned_on_one_rank_alone_and_blamed_there(tmp_path):
    directory, known = run(
        tmp_path,
        """
        from torch.distributed.tensor import distribute_tensor, Shard, Replicate, Partial, DTensor
        from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel
        from torch import nn
        def make():
            net = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3))
            net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
            def step(net):
                torch.manual_seed(7)
                loss = net(torch.randn(4, 6)).square().mean()
                loss.backward()
                grads = [p.grad.to_local().clone() for p in net.parameters()]
                optimizer.step()
                optimizer.zero_grad()
                return [loss.detach(), *grads, *(p.to_local().detach().clone() for p in net.parameters())]
            return net, step
        print("same" if same(recorded(make, True), recorded(make, False)) else "different", flush=True)
        # One rank alone: a collective would wait for the other for ever.
        whole = torch.arange(15.0).reshape(3, 5)
        shard = distribute_tensor(whole, mesh, [Shard(0)])
        partial = DTensor.from_local(torch.full((2,), 60000.0, dtype=torch.float16), mesh, [Partial()])
        uneven = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
        if rank == 1:
            shard.to_local()[0, 3] = math.nan
            with flightrec.Recorder(config, directory=sys.argv[1] + "/alone", run_id="alone") as recorder:
                recorder.record("shard", "output", high_precision=shard)
                recorder.record("partial", "output", high_precision=partial)
                recorder.record("uneven", "output", high_precision=uneven)
                recorder.loss(shard)
                recorder.step()
        print("same", flush=True)
        import numpy
        numpy.savez(f"{sys.argv[3]}/{rank}.npz", shard=shard.to_local().numpy())
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    alone = incidents(directory / "alone")
    assert set(alone) == {1}
    incident = alone[1]
    fired = {(firing.key.layer, firing.key.tensor) for firing in incident.firings}
    assert fired == {("shard", "output"), ("", "loss")}
    (record,) = incident.records(layer="shard")
    np.testing.assert_array_equal(record.high_precision, known[1]["shard"])
    assert record.metadata["metadata"]["global_shape"] == [3, 5]
    assert record.metadata["metadata"]["local_offset"] == [2, 0]
    verdict = incident.verdict(elements=True)
    assert (verdict.kind, verdict.began.before.rank, verdict.began.before.key.layer) == ("numbers", 1, "shard")
    assert verdict.elements.indices == ((0, 3),)
    (record,) = incident.records(layer="partial")
    assert record.metadata["metadata"]["placements"] == ["Partial(sum)"]
    (record,) = incident.records(layer="uneven")
    assert record.high_precision.shape == (0, 3)
    folders = [folder for folder in directory.iterdir() if folder.name != "alone"]
    for folder in folders:
        incident = flightrec.open(folder)
        assert {firing.kind for firing in incident.firings} == {"manual"}
        (record,) = incident.records(layer="0", tensor="parameter", iteration=3, part="weight")[:1]
        assert record.metadata["metadata"]["placements"] == ["Shard(dim=0)"]
        assert record.high_precision.shape == (2, 6)
        assert incident.records(layer="0", tensor="wgrad", iteration=3, part="")


@pytest.mark.dist
def test_gradients_in_ddp_buckets_are_those_before_communication(tmp_path):
    directory, known = run(
        tmp_path,
        """
        from torch import nn
        local = {}
        def make():
            inner = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
            net = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            def step(net):
                x = torch.randn(4, 6)
                with torch.no_grad():
                    weights = [p.detach().clone() for p in inner.parameters()]
                loss = net(x).square().mean()
                loss.backward()
                grads = [p.grad.clone() for p in net.parameters()]
                again = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
                for p, w in zip(again.parameters(), weights):
                    p.data.copy_(w)
                again(x).square().mean().backward()
                local.update({n: p.grad.numpy() for n, p in again.named_parameters()})
                optimizer.step()
                optimizer.zero_grad()
                return [loss.detach(), *grads, *(p.detach().clone() for p in net.parameters())]
            return net, step
        watched = recorded(make, True)
        import numpy
        numpy.savez(f"{sys.argv[3]}/{rank}.npz", **local)
        print("same" if same(watched, recorded(make, False)) else "different", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    for rank, incident in incidents(directory).items():
        for layer in "01":
            (record,) = incident.records(layer=f"module.{layer}", tensor="wgrad", iteration=3, part="", rank=rank)
            # DDP divides by the number of ranks as it copies into the bucket, or when it reduces.
            ratio = record.high_precision / known[rank][f"{layer}.weight"]
            np.testing.assert_allclose(ratio, np.round(ratio[0, 0], 3) * np.ones_like(ratio), rtol=1e-4)
            assert round(float(ratio[0, 0]), 3) in (0.5, 1.0)
