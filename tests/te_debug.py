"""Transformer Engine's debug mode on a CPU: its real routing and quantizers around products written in torch.

``DebugLinear`` goes the way of ``te.Linear``: quantizers made in each forward, layers that leave debug mode, operands
quantized inside an autograd function.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import te_cpu
import torch
from torch import nn

import flightrec

ALL = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
MANUAL = [{"kind": "manual"}, {"kind": "nonfinite"}]


def te_features() -> str:
    """Transformer Engine's own feature directory."""
    import transformer_engine

    return os.path.join(transformer_engine.__path__[0], "debug", "features")


def section(layers: str = ".*", enabled: bool = True, **features: Mapping[str, Any]) -> dict[str, Any]:
    """A section of an nvdlfw_inspect configuration."""
    named = {name: {"enabled": True, **settings} for name, settings in features.items()}
    return {
        "enabled": enabled,
        "layers": {"layer_name_regex_pattern": layers},
        "transformer_engine": named,
    }


@contextlib.contextmanager
def debugging(config: object, log_dir: Path, *more_features: str, first: int = 0) -> Iterator[Any]:
    """nvdlfw_inspect with this configuration, its own and our features; ended at the end."""
    te_cpu.install()
    import nvdlfw_inspect.api as api

    log_dir.mkdir(parents=True, exist_ok=True)
    directories = [te_features(), flightrec.feature_directory(), *more_features]
    api.initialize(config, feature_dirs=directories, log_dir=str(log_dir), init_training_step=first)
    try:
        yield api
    finally:
        api.end_debug()


def quantizer(kind: str | None) -> Any:
    """A parent quantizer: None, ``identity``, or ``fp8`` (per-tensor current scaling, computed in torch)."""
    te_cpu.install()
    if kind is None:
        return None
    if kind == "identity":
        from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

        return IdentityQuantizer()
    return _fp8_class()(_fp8_dtype(), torch.device("cpu"))


def _fp8_dtype() -> Any:
    from transformer_engine.pytorch.constants import DType

    return DType.kFloat8E4M3


def _fp8_class() -> type:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor

    class TorchQuantizer(Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            scale = 448.0 / tensor.abs().amax().float().nan_to_num(1.0).clamp(min=1e-12)
            codes = (tensor.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return Float8Tensor(
                tuple(tensor.shape),
                tensor.dtype,
                data=codes.view(torch.uint8),
                fp8_scale_inv=scale.reciprocal().reshape(1),
                fp8_dtype=self.dtype,
                quantizer=self,
                device=tensor.device,
            )

    return TorchQuantizer


def plain(operand: Any) -> torch.Tensor:
    """The values of what a product reads."""
    if isinstance(operand, torch.Tensor) and type(operand) in (torch.Tensor, nn.Parameter):
        return operand
    if type(operand).__name__ == "IdentityTensor":
        return operand._hp_data
    codes = operand._data.view(torch.float8_e4m3fn).float()
    return (codes * operand._scale_inv).to(operand.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, quantizers: dict[str, Any]) -> torch.Tensor:
        ctx.quantizers = quantizers
        if not quantizers:
            ctx.save_for_backward(x, weight)
            return x @ weight.T
        left = quantizers["activation"].quantize(x, dtype=x.dtype)
        right = quantizers["weight"].quantize(weight, dtype=x.dtype)
        read = [plain(left.get_tensor(False)), plain(right.get_tensor(False))]
        ctx.save_for_backward(*read)
        return quantizers["output"].process_gemm_output(read[0] @ read[1].T)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        if not ctx.quantizers:
            return gradient @ weight, gradient.T @ x, None
        quantized = ctx.quantizers["gradient"].quantize(gradient, dtype=gradient.dtype)
        read = plain(quantized.get_tensor(False))
        dgrad = ctx.quantizers["dgrad"].process_gemm_output(read @ weight)
        return dgrad, ctx.quantizers["wgrad"].process_gemm_output(read.T @ x), None


class DebugLinear(nn.Module):
    """``te.Linear`` in debug mode, as far as a feature can see it.

    Attributes:
        debugged: whether each forward so far was in debug mode.
    """

    def __init__(self, name: str, size: int = 8, kind: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.linspace(-1, 1, size * size).reshape(size, size))
        self.kind = kind
        self.next_iteration: int | None = 0
        self.last: tuple[int, bool] | None = None
        self.debugged: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantizers = self._quantizers() if self._is_debug_iteration() else {}
        self.debugged.append(bool(quantizers))
        if torch.is_grad_enabled():
            return _Product.apply(x, self.weight, quantizers)
        return _Product.forward(_NoContext(), x, self.weight, quantizers)

    def _is_debug_iteration(self) -> bool:
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        now = TEDebugState.get_iteration()
        if self.last is None or self.last[0] != now:
            self.last = (now, self.next_iteration is not None and now >= self.next_iteration)
        return self.last[1]

    def _quantizers(self) -> dict[str, Any]:
        from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizer
        from transformer_engine.debug.pytorch.utils import any_feature_enabled, next_iter_when_debug_should_be_run

        made = {}
        for tensor in ALL:
            parent = quantizer(self.kind) if tensor in ("activation", "weight", "gradient") else None
            made[tensor] = DebugQuantizer(self.name, tensor, parent, None, 1)
        self.next_iteration = next_iter_when_debug_should_be_run(made.values())
        return made if any_feature_enabled(made.values()) else {}


class _NoContext:
    quantizers: dict[str, Any]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        pass


def batch(iteration: int, size: int = 8, rows: int = 4) -> torch.Tensor:
    """Input of an iteration, the same in every process."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(rows, size, generator=generator)


def train(net: nn.Module, api: Any, iterations: range, *, microbatches: int = 1) -> list[float]:
    """SGD over ``iterations``; the losses."""
    losses = []
    for iteration in iterations:
        total = 0.0
        for microbatch in range(microbatches):
            loss = net(batch(iteration * 100 + microbatch)).square().mean()
            loss.backward()
            total += float(loss.detach())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        losses.append(total)
        api.step()
    return losses


def only_incident(log_dir: Path, directory: str = "incidents") -> flightrec.Incident:
    """The one incident that was written."""
    (folder,) = (log_dir / directory).iterdir()
    return flightrec.open(folder)
