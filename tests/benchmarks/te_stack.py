"""What the benchmarks of Transformer Engine share: the model, debug mode for a while, a feature that does nothing.

TransformerLayers of hidden size 4096, forward and backward. Needs a GPU and Transformer Engine; debug mode also
nvdlfw_inspect. ``flightrec bench --model te_stack:factory``, run in this folder, measures this model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import te_models
import torch
from torch import nn

import flightrec

HIDDEN, FFN, HEADS, TOKENS = 4096, 16384, 32, 4096

NOTHING = '''
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

@Registry.register_feature(namespace="transformer_engine")
class DoesNothing(TEConfigAPIMapper):
    """Is asked for every tensor and does nothing with it."""

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor):
        pass
'''
DO_NOTHING = "DoesNothing: {enabled: True, tensors: [activation, gradient]}"


class Stack(nn.Module):
    """Transformer layers without embedding or head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        te = te_models.load()
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN, FFN, HEADS, layer_number=i + 1, hidden_dropout=0.0, attention_dropout=0.0,
                fuse_qkv_params=True, params_dtype=torch.bfloat16, device="cuda", name=f"layers.{i}",
            )
            for i in range(num_layers)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, is_first_microbatch=True)
        return x


class TeRun:
    """A model of its own and its step; what ``flightrec.bench`` calls a workload.

    Args:
        recipe: one of ``te_models.RECIPES``.
        num_layers: how many.
        num_tokens: of a step.
    """

    def __init__(self, recipe: str = "delayed", num_layers: int = 4, num_tokens: int = TOKENS) -> None:
        self.name = (
            f"{num_layers} TransformerLayers, hidden {HIDDEN}, FFN {FFN}, {HEADS} heads, {num_tokens} tokens, {recipe} "
            "scaling, forward and backward"
        )
        self.device = torch.device("cuda")
        self.after_backward: Callable[[torch.Tensor], object] | None = None
        self._made = (recipe, num_layers, num_tokens)
        self.renew()

    def renew(self) -> None:
        """Make the model anew, and Transformer Engine's global state as in a new process."""
        recipe, num_layers, num_tokens = self._made
        te_models.reset_fp8()
        torch.manual_seed(0)
        self.model = Stack(num_layers)
        self.recipe = te_models.recipe_of(recipe)
        self.x = torch.randn(num_tokens, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step(self) -> torch.Tensor:
        """Forward and backward; gradients are dropped, not applied."""
        with te_models.load().autocast(enabled=True, recipe=self.recipe):
            y = self.model(self.x)
        loss = y.float().mean()
        loss.backward()
        if self.after_backward is not None:
            self.after_backward(loss)
        self.model.zero_grad()
        return loss.detach()


@contextlib.contextmanager
def debug_mode(folder: Path, layers: str, line: str) -> Iterator[Any]:
    """Transformer Engine's debug mode with one feature, for the models that are made inside."""
    import nvdlfw_inspect.api as debug_api
    import transformer_engine
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    own = folder / "features"
    own.mkdir(exist_ok=True)
    (own / "does_nothing.py").write_text(NOTHING)
    config = folder / "inspect.yaml"
    head = f'look:\n  enabled: True\n  layers: {{layer_name_regex_pattern: "{layers}"}}\n'
    config.write_text(f"{head}  transformer_engine:\n    {line}\n")
    shipped = Path(transformer_engine.__file__).parent / "debug" / "features"
    TEDebugState._reset()
    debug_api.initialize(
        config_file=str(config),
        feature_dirs=[str(shipped), str(own), flightrec.feature_directory()],
        log_dir=str(folder),
    )
    try:
        yield debug_api
    finally:
        debug_api.end_debug()
        TEDebugState._reset()


def factory(tokens: int = TOKENS) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """For ``flightrec bench --model te_stack:factory``, run in this folder."""
    run = TeRun(num_tokens=tokens)
    return run.model, run.step
