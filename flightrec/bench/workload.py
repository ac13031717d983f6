"""What is measured: a model and one step of it, made by a user's factory or built in.

The built-in one is the demo's GPT: on a GPU in bfloat16, large enough to keep it busy; on the CPU small. Its products
run in torchao's FP8 where torchao is installed (emulated on the CPU).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flightrec.demo.model import GPT, ModelSize, Text, no_warnings_logged
from flightrec.errors import AttachError

FORM = (
    "expected (model, step), where step() runs one iteration, forward, backward and whatever else belongs to it, and "
    "returns the loss or None"
)
SEED = 0
SIZES = {
    "cpu": ModelSize(width=64, num_blocks=2, num_heads=4, num_sequences=4, context=64),
    "cuda": ModelSize(width=2048, num_blocks=8, num_heads=16, num_sequences=8, context=1024),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its step.

    Attributes:
        name: in words, for tables.
        model: whose modules are the layers.
        step: one iteration; returns the loss, a tensor on the model's device, or None.
        device: of the model.
    """

    name: str
    model: nn.Module
    step: Callable[[], object]
    device: torch.device


def build(factory: Callable[..., Any], target: str, device: str | None, num_tokens: int | None) -> Workload:
    """Call a user's factory.

    Args:
        factory: returns ``(model, step)``. If it has parameters ``device`` or ``tokens``, it is given them.
        target: how the user named it, for messages.
        device: where the model shall lie; None leaves it to the factory.
        num_tokens: of one step; None leaves it to the factory.

    Raises:
        AttachError: it raises, returns something else, or cannot be told the device or the tokens.
    """
    given: dict[str, object] = {}
    for option, value in (("device", device), ("tokens", num_tokens)):
        if value is not None and option in _parameters(factory):
            given[option] = value
        elif value is not None and option == "tokens":
            raise AttachError(
                f"--tokens {value}: {target} has no parameter `tokens`, so that it cannot be told; add one, as in "
                "def factory(tokens=4096), or leave --tokens out"
            )
    torch.manual_seed(SEED)
    try:
        made = factory(**given)
    except Exception as error:
        raise AttachError(f"--model {target}: the factory failed, {type(error).__name__}: {error}; {FORM}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise AttachError(f"--model {target}: gave {_told(made)}; {FORM}")
    model, step = made
    where = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    if where is None:
        raise AttachError(f"--model {target}: {type(model).__name__} has no parameters, so that it is on no device")
    if device is not None and where.type != torch.device(device).type:
        raise AttachError(
            f"--device {device}: the model of {target} lies on {where}; make it there, or let the factory have a "
            "parameter `device`"
        )
    size = "" if num_tokens is None else f", {num_tokens} tokens"
    return Workload(f"{type(model).__name__} of {target}{size}", model, _telling(step, target), where)


def _telling(step: Callable[[], object], target: str) -> Callable[[], object]:
    """The user's step, whose failure is told as theirs. In both arms, so that it costs the same in both."""

    def run() -> object:
        try:
            return step()
        except Exception as error:
            raise AttachError(
                f"--model {target}: step() failed, {type(error).__name__}: {error}; expected one whole iteration that "
                "can be repeated as often as is measured"
            ) from error

    return run


def _parameters(factory: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a callable without a readable signature
        return frozenset()


def _told(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a {type(made).__name__}"


def builtin(device: str, num_tokens: int | None = None) -> Workload:
    """The demo's GPT with a backward pass and an SGD step.

    Args:
        device: ``cpu`` or ``cuda``.
        num_tokens: characters of a step, whole sequences; None for what suits the device.

    Raises:
        AttachError: fewer tokens than a sequence has.
    """
    size = SIZES[device]
    num_sequences = size.num_sequences if num_tokens is None else num_tokens // size.context
    if num_sequences < 1:
        raise AttachError(f"--tokens {num_tokens}: the built-in model has sequences of {size.context}; ask for more")
    size = ModelSize(size.width, size.num_blocks, size.num_heads, num_sequences, size.context)
    text, generator = Text(), torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = GPT(len(text.characters), size).to(device=device, dtype=dtype)
    products = "FP8 products" if _use_fp8(model, device) else f"{str(dtype).removeprefix('torch.')} products"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = (codes.to(device) for codes in text.batch(size, generator))

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    name = f"built-in GPT, {size.num_blocks} blocks of width {size.width}, {products}"
    return Workload(f"{name}, {num_sequences * size.context} tokens", model, step, next(model.parameters()).device)


def _use_fp8(model: nn.Module, device: str) -> bool:
    """Turn the products inside the blocks into torchao's, where they can run."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return False
    try:
        with no_warnings_logged():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return False

    def inside_block(_: nn.Module, name: str) -> bool:
        return name.startswith("blocks.")

    config = Float8LinearConfig(emulate=device == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=inside_block)
    return True
