"""The feature FlightRecorder in Transformer Engine's real debug mode on a GPU, beside DumpTensors and an empty one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import te_cpu
import torch
from te_debug import ALL, debugging, only_incident, section

import flightrec
from flightrec.records import Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

RECIPES = ("none", "delayed", "current", "block")
EMPTY = """
from nvdlfw_inspect.base import BaseConfigAPIMapper
from nvdlfw_inspect.registry import Registry, api_method

@Registry.register_feature(namespace="transformer_engine")
class Nothing(BaseConfigAPIMapper):
    def parse_config_and_api(self, config, **kwargs):
        return True, {"nothing": True}

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor,
                       rowwise_quantized_tensor=None, columnwise_quantized_tensor=None, quantizer=None, tp_size=1):
        return None
"""


def recipe(name: str) -> Any:
    from transformer_engine.common import recipe as recipes

    if name == "delayed":
        return recipes.DelayedScaling(amax_history_len=8, amax_compute_algo="max")
    return {"none": None, "current": recipes.Float8CurrentScaling(), "block": recipes.Float8BlockScaling()}[name]


@contextlib.contextmanager
def debug_mode(config: dict[str, Any], log_dir: Path, *more: str) -> Iterator[Any]:
    """Debug mode for the modules made inside; other tests may have made some without it."""
    te_cpu.install()
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    TEDebugState._reset()
    with debugging(config, log_dir, *more) as api:
        yield api
    TEDebugState._reset()


def two_layers(api: Any) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layers = [te.TransformerLayer(256, 512, 4, fuse_qkv_params=True, params_dtype=torch.bfloat16) for _ in range(2)]
    net = torch.nn.Sequential(*(layer.cuda() for layer in layers))
    api.infer_and_assign_layer_names(net)
    return net


def run(api: Any, name: str, iterations: int, microbatches: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """SGD; the losses and the parameters, on the device."""
    import transformer_engine.pytorch as te

    net, scheme = two_layers(api), recipe(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(iterations):
        for _ in range(microbatches):
            x = torch.randn(128, 2, 256, device="cuda", dtype=torch.bfloat16, generator=generator)
            with te.autocast(enabled=scheme is not None, recipe=scheme):
                loss = net(x.requires_grad_()).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        api.step()
    return losses, [parameter.detach().clone() for parameter in net.parameters()]


def sanitized(layer: str, tensor: str) -> str:
    """DumpTensors' file name; here no two layers collide."""
    return f"{layer.replace('.', '_')}_{tensor}.pt"


@pytest.mark.parametrize("name", RECIPES)
def test_records_equal_the_dumps_of_the_same_steps(name: str, tmp_path: Path) -> None:
    both = {
        "DumpTensors": {"tensors": ALL, "high_precision_tensor": True, "quantized_tensor": True},
        "FlightRecorder": {"tensors": ALL, "ring": {"iterations": 2, "memory": "2 GiB"}},
    }
    with debug_mode({"both": section(**both)}, tmp_path) as api:
        run(api, name, 2)
        flightrec.inspect_recorder().trigger("compare")
        flightrec.inspect_recorder().step()
    num_quantized = 0
    with only_incident(tmp_path) as incident:
        for iteration in range(2):
            folder = tmp_path / f"tensor_dumps/rank_0/iter_{iteration:06d}"
            records = {}
            for record in incident.records(iteration=iteration):
                if not record.key.part and record.key.tensor in ALL:  # the dgrad of fc2, part fc2, was overwritten
                    records[sanitized(record.key.layer, record.key.tensor)] = record
            assert set(records) == {path.name for path in folder.iterdir()}
            for file, record in records.items():
                dump = torch.load(folder / file, weights_only=False)
                mine = torch.from_numpy(np.array(record.high_precision, np.float32))
                assert torch.equal(mine, dump["high_precision"].float().cpu()), (file, iteration)
                if "quantized" not in dump or type(dump["quantized"]) is torch.Tensor:
                    continue
                num_quantized += 1
                same_quantized(record, dump["quantized"], f"{file} in iteration {iteration}")
    assert (num_quantized > 0) == (name != "none")


def same_quantized(record: Any, dump: Any, what: str) -> None:
    """The raw codes bit for bit, and what they stand for."""
    assert record.quantized is not None, what
    codes = next(data for field in ("_data", "_rowwise_data") if (data := getattr(dump, field, None)) is not None)
    data = record.quantized.components["data"]
    assert data.tobytes() == codes.cpu().numpy().tobytes(), what
    values = np.asarray(record.quantized.dequantize(), np.float32)
    expected = dump.dequantize(dtype=torch.float32).cpu().numpy()
    assert values.tobytes() == expected.tobytes(), what


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_parameters_are_those_of_an_empty_feature(name: str, tmp_path: Path) -> None:
    features = tmp_path / "features"
    features.mkdir()
    (features / "nothing.py").write_text(EMPTY)
    results = []
    for feature, settings in (("Nothing", {}), ("FlightRecorder", {"tensors": ALL})):
        with debug_mode({"a": section(**{feature: settings})}, tmp_path / feature, str(features)) as api:
            results.append(run(api, name, 5, microbatches=2))
            if feature == "FlightRecorder":
                assert "layernorm_mlp" in flightrec.inspect_recorder().summary()
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
    assert not (tmp_path / "FlightRecorder" / "incidents").exists()  # nor did a rule fire in these healthy steps


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_microbatches_recompute_and_the_two_dgrads_of_an_mlp(name: str, tmp_path: Path) -> None:
    settings = {"tensors": ALL, "phases": ["train", "recompute", "eval"]}
    with debug_mode({"a": section(FlightRecorder=settings)}, tmp_path):
        import transformer_engine.pytorch as te

        net = te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16, name="mlp").cuda()
        scheme = recipe(name)
        for _ in range(2):
            x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(enabled=scheme is not None, recipe=scheme):
                y = te.checkpoint(net, x)
            y.float().sum().backward()
        with torch.no_grad(), te.autocast(enabled=scheme is not None, recipe=scheme):
            net(x)
        flightrec.inspect_recorder().trigger("look")
    with only_incident(tmp_path) as incident:
        found = [(r.key.phase, r.key.microbatch) for r in incident.records(layer="mlp.fc1", tensor="activation")]
        assert sorted(found) == sorted(
            [(phase, index) for phase in (Phase.TRAIN, Phase.RECOMPUTE) for index in (0, 1)] + [(Phase.EVAL, 0)]
        )
        dgrads = [(r.key.part, r.key.microbatch, r.shape[-1]) for r in incident.records(tensor="dgrad")]
        assert sorted(dgrads) == [("", 0, 256), ("", 1, 256), ("fc2", 0, 512), ("fc2", 1, 512)]
        assert {r.key.phase for r in incident.records(tensor="gradient")} == {Phase.TRAIN}


def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    with debug_mode({"a": section(FlightRecorder={"tensors": ["activation"]})}, tmp_path) as api:
        from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizer

        x = torch.randn(64, 64, device="cuda")
        for iteration in range(12):
            if iteration == 6:
                torch.cuda.set_sync_debug_mode("error")
            DebugQuantizer("l", "activation", None, None, 1).quantize(x, dtype=x.dtype)
            api.step()
        torch.cuda.set_sync_debug_mode("default")
        recorder = flightrec.inspect_recorder()
        assert recorder.iteration == 11
        recorder.trigger("look")
    with only_incident(tmp_path) as incident:
        assert incident.trigger.iteration == 11


def test_a_graph_capture_switches_the_feature_off_and_names_the_tap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with debug_mode({"a": section(FlightRecorder={"tensors": ["activation"]})}, tmp_path):
        from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizer

        x = torch.randn(64, 64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            y = x * 2
            quantizer = DebugQuantizer("l", "activation", None, None, 1)
            quantizer.quantize(y, dtype=y.dtype)
        assert not quantizer.inspect_tensor_enabled
        assert quantizer.get_next_debug_iter() is None
    assert "Recorder.attach(model)" in caplog.text
    assert not (tmp_path / "incidents").exists()
