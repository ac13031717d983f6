"""A recorder does not change the run: not a bit, not a synchronisation, not a byte of memory, not a file."""

from __future__ import annotations

import gc
import itertools
import os

import pytest
import torch
from models import RECORD_ALL, batches, make, train
from torch.utils._python_dispatch import TorchDispatchMode

import flightrec

ALL = {**RECORD_ALL, "select": [{"tensors": "*", "phases": ["train", "recompute"]}]}


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "torchao"])
def test_losses_gradients_and_parameters_are_bit_identical(precision, checkpointing, tmp_path):
    data = batches(6, 2)
    for x in itertools.chain.from_iterable(data):
        x.requires_grad_(checkpointing == "reentrant")
    plain = train(make(precision, checkpointing=checkpointing), data, precision=precision)

    net = make(precision, checkpointing=checkpointing)
    with flightrec.Recorder(ALL, directory=tmp_path / "incidents") as recorder:
        recorder.attach(net)
        recorded = train(net, data, recorder, precision=precision)
        seen = {layout.key.tensor for layout in recorder._capture.engine.ring.layouts}
    assert seen == {"input", "activation", "weight", "output", "loss", "gradient", "dgrad", "wgrad", "parameter"}

    assert len(plain) == len(recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not list(tmp_path.iterdir())


def test_an_incident_in_between_changes_nothing_either(tmp_path):
    data = batches(8)
    plain = train(make(), data)
    net = make()
    with flightrec.Recorder(ALL, directory=tmp_path) as recorder:
        recorder.attach(net)
        recorded = train(net, data, recorder, before_step=lambda i: recorder.trigger("test") if i == 3 else None)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert len(list(tmp_path.iterdir())) == 1


class CountReads(TorchDispatchMode):
    """Counts the operations that make the host wait for device data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "masked_select", "equal"):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


def test_no_operation_reads_device_data_on_the_host(tmp_path):
    counts = []
    for with_recorder in (False, True):
        net, data = make("torchao"), batches(5, 2)
        if not with_recorder:
            with CountReads() as counter:
                train(net, data)
        else:
            with flightrec.Recorder(ALL, directory=tmp_path) as recorder:
                recorder.attach(net)
                with CountReads() as counter:
                    train(net, data, recorder)
        counts.append(counter.calls)
    assert counts[0] == counts[1]


def test_the_counter_sees_reads():
    with CountReads() as counter:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert counter.calls == ["_local_scalar_dense", "nonzero"]


def live_tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # isinstance would run strangers' __class__; fake tensors that other tests left have no memory
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_200_healthy_iterations_write_no_file_and_hold_no_more_memory(tmp_path):
    net, sizes, descriptors = make("torchao"), [], []
    data = batches(10) * 20

    def measure(iteration: int) -> None:
        if iteration in (20, 60, 100, 199):
            gc.collect()  # what earlier tests left is not the recorder's
            seen = [parameter.grad for parameter in net.parameters()]  # counted once Python has an object for it
            sizes.append(live_tensor_bytes())
            del seen
            descriptors.append(len(os.listdir("/proc/self/fd")))

    with flightrec.Recorder(directory=tmp_path / "incidents") as recorder:
        recorder.attach(net)
        train(net, data, recorder, before_step=measure, lr=1e-3, keep=False)
        assert not (tmp_path / "incidents").exists()
    assert not (tmp_path / "incidents").exists()
    assert len(set(sizes)) == 1, sizes
    assert len(set(descriptors)) == 1


def test_detaching_leaves_no_trace(tmp_path):
    import torchao.float8.float8_linear as patched

    original = patched.hp_tensor_to_float8_dynamic
    net = make("torchao")
    recorder = flightrec.Recorder(directory=tmp_path)
    recorder.attach(net)
    assert patched.hp_tensor_to_float8_dynamic is not original
    recorder.close()
    assert patched.hp_tensor_to_float8_dynamic is original
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in net.parameters())
