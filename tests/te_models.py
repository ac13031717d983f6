"""A small GPT of Transformer Engine's own layers, its recipes, its training loop, and a spy below any tap.

Transformer Engine is imported where it is used: ``load()`` skips the test where its modules cannot run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

HIDDEN, FFN, HEADS, VOCABULARY = 256, 512, 4, 128
SEQUENCE, BATCH = 64, 2  # 128 tokens: whole blocks for block scaling
NUM_LAYERS, NUM_MICROBATCHES = 4, 4

RECIPES = ("delayed", "current", "block")
PRODUCTS = ("qkv", "proj", "fc1", "fc2")
"""Words in the layer names of the four products of a ``TransformerLayer``, in the order of its forward."""


def load() -> Any:
    """``transformer_engine.pytorch`` with its compiled extension; skips the test where that is not installed."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # so that two runs can be compared at all
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
    if not hasattr(te, "TransformerLayer"):
        pytest.skip("Transformer Engine is here without its compiled extension")
    return te


def recipe_of(name: str | None) -> Any:
    """A new recipe; None for bf16 without FP8."""
    if name is None:
        return None
    load()
    recipe = importlib.import_module("transformer_engine.common.recipe")
    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max")
    return {"current": recipe.Float8CurrentScaling, "block": recipe.Float8BlockScaling}[name]()


def reset_fp8() -> None:
    """Forget the amax buffers of models that are gone: Transformer Engine keeps them for the whole process."""
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    quantization.FP8GlobalStateManager.reset()


class Gpt(nn.Module):
    """Embedding, transformer layers, and logits by the embedding's own weight.

    Args:
        num_layers: how many.
        checkpointing: ``none``, ``reentrant`` or ``non_reentrant``: each layer under ``te.checkpoint``.
        dropout: of the hidden states; draws from the device's generator.
        stem: a ``te.Linear`` before the first layer, the only product without a norm in front of it.
        names: give the modules names for nvdlfw_inspect, those that they have in the model.
    """

    def __init__(
        self,
        *,
        num_layers: int = NUM_LAYERS,
        checkpointing: str = "none",
        dropout: float = 0.0,
        stem: bool = False,
        names: bool = False,
    ) -> None:
        super().__init__()
        te = load()
        common = {"params_dtype": torch.bfloat16, "device": "cuda"}
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.stem = te.Linear(HIDDEN, HIDDEN, **common, **({"name": "stem"} if names else {})) if stem else None
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN, FFN, HEADS, layer_number=i + 1, hidden_dropout=dropout, attention_dropout=0.0,
                fuse_qkv_params=True, **common, **({"name": f"layers.{i}"} if names else {}),
            )
            for i in range(num_layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Mean cross entropy of the next token; tokens int64 [sequence + 1, batch]."""
        te = load()
        x = self.embedding(tokens[:-1])
        if self.stem is not None:
            x = self.stem(x, is_first_microbatch=is_first_microbatch)
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x, is_first_microbatch=is_first_microbatch)
            else:
                reentrant = self.checkpointing == "reentrant"
                x = te.checkpoint(layer, x, is_first_microbatch=is_first_microbatch, use_reentrant=reentrant)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight).float()
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), tokens[1:].reshape(-1))


def make(*, seed: int = 0, **options: Any) -> Gpt:
    """A model with reproducible weights, and Transformer Engine's global state as in a new process."""
    load()
    reset_fp8()
    torch.manual_seed(seed)
    return Gpt(**options)


def tokens(num_iterations: int, num_microbatches: int = NUM_MICROBATCHES, *, seed: int = 1) -> torch.Tensor:
    """Int64 [iterations, microbatches, sequence + 1, batch], on the device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_iterations, num_microbatches, SEQUENCE + 1, BATCH)
    return torch.randint(0, VOCABULARY, shape, generator=generator).cuda()


Call = Callable[[int, int], None]


def train(
    model: Gpt,
    recipe: Any,
    data: torch.Tensor,
    recorder: Any = None,
    *,
    optimizer: str = "adam",
    lr: float = 1e-3,
    before: Call | None = None,
    after: Call | None = None,
    end: Callable[[int], None] | None = None,
) -> list[torch.Tensor]:
    """Train with gradient accumulation; returns all losses and then all parameters, to be compared bit for bit.

    Args:
        model: what to train.
        recipe: of the FP8 products; None for none.
        data: what ``tokens`` gave.
        recorder: told of microbatches, losses and steps, if given.
        optimizer: ``adam`` or ``sgd``.
        lr: its learning rate.
        before: called with (iteration, microbatch) before each forward.
        after: the same, after each backward.
        end: called with the iteration before ``recorder.step()``, after the optimizer's step.
    """
    te = load()
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    stepper = kind(model.parameters(), lr=lr)
    torch.manual_seed(7)  # dropout
    losses = []
    for iteration, microbatches in enumerate(data):
        for index, sample in enumerate(microbatches):
            if before is not None:
                before(iteration, index)
            with recorder.microbatch(index) if recorder is not None else contextlib.nullcontext():
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    loss = model(sample, is_first_microbatch=index == 0)
                if recorder is not None:
                    recorder.loss(loss)
                (loss / len(microbatches)).backward()
            losses.append(loss.detach().clone())
            if after is not None:
                after(iteration, index)
        stepper.step()
        stepper.zero_grad()
        if end is not None:
            end(iteration)
        if recorder is not None:
            recorder.step()
    return losses + [parameter.detach().clone() for parameter in model.parameters()]


# -- what the products read, seen below any tap


def product_of(layer: str) -> tuple[int, str] | None:
    """(index of the transformer layer, one of ``PRODUCTS``) of a layer's name; None if it is no product of them."""
    found = re.search(r"layers\.(\d+)\..*?(qkv|proj|fc1|fc2)", layer)
    return (int(found[1]), found[2]) if found else None


@dataclass(frozen=True)
class Operand:
    """A quantized operand as a product read it: logical codes, scales, and what Transformer Engine decodes it to.

    Row-wise and column-wise apart; the values are the GPU's own ``dequantize(dtype=float32)``.
    """

    class_name: str
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def numpy(self, what: str, side: str) -> np.ndarray:
        """One array on the host."""
        return getattr(self, what)[side].cpu().numpy()


def _snapshot(operand: Any) -> Operand:
    seen = Operand(type(operand).__name__)
    if hasattr(operand, "_rowwise_data"):
        for side in ("rowwise", "columnwise"):
            data, scale = getattr(operand, f"_{side}_data"), getattr(operand, f"_{side}_scale_inv")
            if data is not None:
                seen.codes[side] = (data if side == "rowwise" else data.movedim(0, -1)).clone(
                    memory_format=torch.contiguous_format
                )
                seen.scales[side] = scale.clone()
                seen.values[side] = _one_side(operand, side).dequantize(dtype=torch.float32).clone()
        return seen
    data, transpose = operand._data, operand._transpose
    if data is None:
        data = transpose.movedim(0, -1)
    seen.codes["rowwise"] = data.clone(memory_format=torch.contiguous_format)
    seen.scales["rowwise"] = operand._scale_inv.clone()
    seen.values["rowwise"] = operand.dequantize(dtype=torch.float32).clone()
    return seen


def _one_side(operand: Any, side: str) -> Any:
    """The same block-scaled data with one direction only, so that ``dequantize`` reads that one."""
    storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage")
    sides = {
        f"{name}_{what}": getattr(operand, f"_{name}_{what}") if name == side else None
        for name in ("rowwise", "columnwise")
        for what in ("data", "scale_inv")
    }
    return storage.Float8BlockwiseQTensorStorage(
        **sides,
        fp8_dtype=operand._fp8_dtype,
        quantizer=operand._quantizer,
        is_2D_scaled=operand._is_2D_scaled,
        fake_dtype=operand._dtype,
    )


@dataclass(frozen=True)
class Product:
    """One product: its layout (``TN`` forward, ``NN`` dgrad, ``NT`` wgrad), and its operands by tensor name."""

    layout: str
    operands: dict[str, Operand]


OPERANDS = {"TN": ("weight", "activation"), "NN": ("weight", "gradient"), "NT": ("activation", "gradient")}
"""By layout, what a product's two operands are."""


class Spy:
    """Wraps the compiled extension's own ``generic_gemm``, below whatever taps the callers; keeps what it reads."""

    def __init__(self) -> None:
        self.on = False
        self.products: list[Product] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[Spy]:
        """In place while the context lasts; enter it before a recorder is made."""
        load()
        extension = sys.modules["transformer_engine_torch"]
        original = extension.generic_gemm

        @functools.wraps(original)
        def generic_gemm(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self._see(*args[:4])
            return original(*args, **kwargs)

        extension.generic_gemm = generic_gemm
        try:
            yield self
        finally:
            extension.generic_gemm = original

    def _see(self, a: Any, transa: bool, b: Any, transb: bool) -> None:
        layout = ("T" if transa else "N") + ("T" if transb else "N")
        with torch.no_grad():
            operands = {name: _snapshot(x) for name, x in zip(OPERANDS[layout], (a, b), strict=True)}
        self.products.append(Product(layout, operands))

    def by_key(self, num_layers: int = NUM_LAYERS) -> dict[tuple[int, str, str, int], list[Operand]]:
        """(layer, product, tensor, microbatch) to what was read of it, in order.

        Names come from the order alone: a microbatch's forward runs through the layers and their products, its
        backward through all of them in reverse, dgrad before wgrad.
        """
        forward = [(layer, product) for layer in range(num_layers) for product in PRODUCTS]
        order = [(*at, "TN") for at in forward]
        order += [(*at, layout) for at in reversed(forward) for layout in ("NN", "NT")]
        assert len(self.products) % len(order) == 0, (len(self.products), len(order))
        found: dict[tuple[int, str, str, int], list[Operand]] = {}
        for number, seen in enumerate(self.products):
            microbatch, place = divmod(number, len(order))
            layer, product, layout = order[place]
            assert seen.layout == layout, (number, seen.layout, order[place])
            for tensor, operand in seen.operands.items():
                found.setdefault((layer, product, tensor, microbatch), []).append(operand)
        return found
