from __future__ import annotations

import logging

import pytest
import torch
from sources_support import Net, RecordingSink, Watch, assert_same_bits, batches, square
from torch import nn

from flightrec.errors import AttachError
from flightrec.recorder import Recorder
from flightrec.records import Phase
from flightrec.sources.choose import choose_sources

CONFIG = {
    "ring": {"iterations": 2, "memory": "64 MiB"},
    "select": [
        {
            "tensors": ["input", "activation", "weight", "gradient", "output", "dgrad", "wgrad", "parameter"],
            "phases": ["train", "recompute", "eval"],
        }
    ],
    "incident": {"writer": "thread"},
}


def float8(model: nn.Module) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)
    return float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "fc" in name)


def run(directory, mode: str, kind: str, watched: bool, device: str = "cpu") -> list[torch.Tensor]:
    """Train with evaluations between; the real recorder watches or not."""
    torch.manual_seed(0)
    model = Net(mode, width=16)
    if kind == "float8":
        model = float8(model)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trace: list[torch.Tensor] = []
    recorder = Recorder(CONFIG, directory=directory) if watched else None
    if recorder is not None:
        recorder.attach(model, optimizer=optimizer)
    for x in batches(3, width=16):
        x = x.to(device)
        for chunk in x.chunk(2):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=kind == "autocast"):
                loss = square(model, chunk)
            loss.backward()
            trace.append(loss.detach().clone())
        trace += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        trace += [p.detach().clone() for p in model.parameters()]
        model.mode = "none"  # checkpointing complains where there is nothing to differentiate
        with torch.no_grad() if kind == "float8" else torch.inference_mode():  # torchao cannot do inference mode
            trace.append(model(x).clone())
        model.mode = mode
        if recorder is not None:
            recorder.step(loss=loss)
    if recorder is not None:
        recorder.close()
    return trace


@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant", "selective"])
@pytest.mark.parametrize("kind", ["fp32", "autocast", "float8"])
def test_the_real_recorder_leaves_training_bit_identical(tmp_path, caplog, mode, kind):
    plain = run(tmp_path, mode, kind, watched=False)
    with caplog.at_level(logging.INFO, logger="flightrec"):
        watched = run(tmp_path, mode, kind, watched=True)
    assert_same_bits(plain, watched)
    assert caplog.records
    assert [r.getMessage() for r in caplog.records if r.name == "flightrec" and r.levelno > logging.INFO] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant", "selective"])
@pytest.mark.parametrize("kind", ["fp32", "autocast", "float8"])
def test_the_real_recorder_leaves_training_bit_identical_on_cuda(tmp_path, caplog, mode, kind):
    plain = run(tmp_path, mode, kind, watched=False, device="cuda")
    with caplog.at_level(logging.INFO, logger="flightrec"):
        watched = run(tmp_path, mode, kind, watched=True, device="cuda")
    assert_same_bits(plain, watched)
    assert [r.getMessage() for r in caplog.records if r.name == "flightrec" and r.levelno > logging.INFO] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant"])
def test_cuda_records_the_same_keys_as_the_cpu(mode):
    def collect(device):
        torch.manual_seed(0)
        model = Net(mode, width=16).to(device)
        sink = RecordingSink(phases=(Phase.TRAIN, Phase.RECOMPUTE))
        with Watch(model, sink) as watch:
            losses = [square(model, x.to(device)) for x in batches(2, width=16)]
            for loss in losses:
                loss.backward()
            watch.step()
        return sink

    cpu, cuda = collect("cpu"), collect("cuda")
    assert not cuda.errors
    assert not cuda.blinds
    assert sorted(map(repr, cpu.recorded())) == sorted(map(repr, cuda.recorded()))


def test_sources_are_chosen_by_what_the_model_holds_and_what_is_selected():
    plain = Net(width=16)
    assert [type(s).__name__ for s in choose_sources(plain, RecordingSink())] == ["ModulesSource"]
    assert choose_sources(plain, RecordingSink(layers={"nowhere"})) == []
    quantized = float8(Net(width=16))
    sources = choose_sources(quantized, RecordingSink())
    assert [type(s).__name__ for s in sources] == ["TorchaoSource", "ModulesSource"]
    assert "4 products" in sources[0].describe()
    assert "layers" in sources[1].describe()
    only_head = choose_sources(quantized, RecordingSink(layers={"head"}))
    assert [type(s).__name__ for s in only_head] == ["ModulesSource"]


def test_each_tensor_of_a_float8_layer_comes_from_one_source():
    model = float8(Net(width=16))
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        square(model, batches(1, width=16)[0]).backward()
        watch.step()
    tensors = {(k.tensor, k.part, k.stage) for k in sink.recorded() if k.layer == "blocks.0.fc1"}
    assert len(tensors) == len([k for k in sink.recorded() if k.layer == "blocks.0.fc1"])
    assert {t for t, _, _ in tensors} == {"activation", "weight", "output", "gradient", "dgrad", "wgrad"}


def test_attach_refuses_what_is_no_module():
    with pytest.raises(AttachError, match=r"torch\.nn\.Module"):
        choose_sources(lambda x: x, RecordingSink())
