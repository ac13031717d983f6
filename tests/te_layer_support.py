"""What the tests of the Transformer Engine tap share, on a CPU and on a GPU: layers, and what their kernels see."""

from __future__ import annotations

from typing import Any

import torch
from sources_support import BACKWARD, FORWARD, RecordingSink, bits
from torch import nn

from flightrec.records import Phase

PHASES = (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)
RECIPES = ("none", "delayed", "current", "block")
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP checkpoint", "GroupedLinear", "ops", "ops grouped")
BF16 = torch.bfloat16
SIZES = {"cpu": (32, 48), "cuda": (512, 384)}
"""Width and rows: on a GPU whole blocks, so that scales have no padding."""


class Layer(nn.Module):
    """One layer under test below a root."""

    def __init__(self, te: Any, kind: str, **options: Any) -> None:
        super().__init__()
        width, _ = SIZES[te.device]
        shared = {"params_dtype": BF16, "device": te.device, **options}
        self.kind = kind
        if kind == "ops":
            plain = {"dtype": BF16, "device": te.device}
            self.layer = te.ops.Sequential(
                te.ops.Linear(width, 2 * width, **plain), te.ops.GELU(), te.ops.Linear(2 * width, width, **plain)
            )
        elif kind == "ops grouped":
            self.layer = te.ops.GroupedLinear(2, width, 2 * width, bias=False, dtype=BF16, device=te.device)
        elif kind == "GroupedLinear":
            self.layer = te.GroupedLinear(2, width, 2 * width, **shared)
        elif kind == "LayerNormMLP checkpoint":
            self.layer = te.LayerNormMLP(width, 2 * width, checkpoint=True, **shared)
        else:
            self.layer = getattr(te, kind)(width, 2 * width, **shared)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.kind == "GroupedLinear":
            return self.layer(x, [x.shape[0] // 3, x.shape[0] - x.shape[0] // 3], **options)
        if self.kind == "ops grouped":
            sizes = [x.shape[0] // 3, x.shape[0] - x.shape[0] // 3]
            return self.layer(x, torch.tensor(sizes, device=x.device))
        return self.layer(x, **options)


NAMES = {
    "Linear": ["layer"],
    "LayerNormLinear": ["layer"],
    "LayerNormMLP": ["layer.fc1", "layer.fc2"],
    "LayerNormMLP checkpoint": ["layer.fc1", "layer.fc2"],
    "GroupedLinear": ["layer.gemm_0", "layer.gemm_1"],
    "ops": ["layer.0", "layer.2"],
    "ops grouped": ["layer.gemm_0", "layer.gemm_1"],
}


def expected_calls(kind: str) -> list[tuple[str, str]]:
    """(layer, layout) of the products of one forward and backward, in the order of the kernel's calls."""
    names = NAMES[kind]
    if "ouped" in kind:
        return [(name, layout) for layout in ("TN", "NN", "NT") for name in names]
    calls = [(name, "TN") for name in names]
    if kind == "LayerNormMLP checkpoint":
        calls.append((names[0], "recompute"))
    return calls + [(name, layout) for name in reversed(names) for layout in ("NN", "NT")]


def recipe_of(te: Any, name: str) -> Any:
    if name == "delayed":
        return te.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max", margin=1)
    made = {"current": te.recipe.Float8CurrentScaling, "block": te.recipe.Float8BlockScaling, "none": lambda: None}
    return made[name]()


def batch(seed: int, device: str = "cpu") -> torch.Tensor:
    width, rows = SIZES[device]
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device, BF16)
    return made.requires_grad_()


def run(te: Any, model: nn.Module, x: torch.Tensor, recipe: Any, **options: Any) -> torch.Tensor:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return model(x, **options)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y.float() * torch.linspace(-1, 1, y.shape[-1], device=y.device)).square().mean()


def sink_of(**options: Any) -> RecordingSink:
    return RecordingSink(**{"phases": PHASES, **options})


def same(seen: Any, operand: Any) -> bool:
    """Whether a record holds what the kernel read: (codes, scale_inv) or a plain tensor."""
    if not isinstance(operand, tuple):
        return seen.quantized is None and torch.equal(bits(seen.tensor), bits(operand))
    parts = seen.quantized.components
    codes, scale_inv = operand[:2]
    prefix = "columnwise_" if operand[2:] == ("columnwise",) else ""
    if f"{prefix}data" not in parts:
        return False
    logical = parts[f"{prefix}data"].reshape(codes.shape)
    held = sorted(scale_inv[scale_inv > 0].tolist())  # padding is cropped, and the order may be the logical one
    return torch.equal(logical, codes) and sorted(parts[f"{prefix}scale_inv"].flatten().tolist()) == held


def check_call(sink, iteration, microbatch, name, layout, call) -> None:
    def one(tensor, stage, phase=Phase.TRAIN, part=""):
        return sink.one(name, tensor, iteration, microbatch=microbatch, stage=stage, phase=phase, part=part)

    if layout in ("TN", "recompute"):
        phase = Phase.TRAIN if layout == "TN" else Phase.RECOMPUTE
        assert same(one("activation", FORWARD, phase), call["b"])
        made = call["out"] if call["gelu_input"] is None else call["gelu_input"]
        assert same(one("output", FORWARD, phase), made)
        if microbatch == 0 and layout == "TN":
            assert same(one("weight", FORWARD), call["a"])
        assert len(sink.find(name, "weight", iteration, stage=FORWARD)) == 1
    elif layout == "NN":
        assert same(one("gradient", BACKWARD), call["b"])
        assert microbatch or any(same(seen, call["a"]) for seen in sink.find(name, "weight", iteration))
        if ("layer.fc2", "dgrad") not in sink.blinds or name != "layer.fc2":
            assert same(one("dgrad", BACKWARD), call["out"])
    else:
        assert same(one("wgrad", BACKWARD), call["out"])
        assert same(one("gradient", BACKWARD), call["b"])
        found = sink.find(name, "activation", iteration, microbatch=microbatch, phase=Phase.TRAIN)
        assert sum(same(seen, call["a"]) for seen in found) == 1
