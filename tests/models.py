"""Small real models and loops that the tests train."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32

RECORD_ALL = {"budget": "none"}
"""Part of a configuration under which everything that is selected is recorded in every iteration, without turns."""


class Block(nn.Module):
    """Norm and a two-layer MLP beside a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Net(nn.Module):
    """Blocks under an optional checkpointing mode, and a head."""

    def __init__(self, *, blocks: int = 2, width: int = WIDTH, checkpointing: str = "none") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def make(precision: str = "fp32", *, checkpointing: str = "none", blocks: int = 2, seed: int = 0) -> Net:
    """A net with reproducible weights; ``torchao`` converts its block products to emulated FP8."""
    torch.manual_seed(seed)
    net = Net(blocks=blocks, checkpointing=checkpointing)
    if precision == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            net.blocks, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, _: isinstance(m, nn.Linear)
        )
    return net


def autocast(precision: str, device: str = "cpu"):
    """The autocast context that a precision calls for."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def batches(iterations: int, microbatches: int = 1, *, seed: int = 1, rows: int = 16, device: str = "cpu"):
    """Inputs [rows, WIDTH] by iteration and microbatch."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(rows, WIDTH, generator=generator).to(device) for _ in range(microbatches)]
        for _ in range(iterations)
    ]


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Mean square of the output's distance from the input."""
    return (net(x).float() - x).square().mean()


def train(
    net,
    data,
    recorder=None,
    *,
    precision="fp32",
    lr=0.05,
    before_step=None,
    before_forward=None,
    device="cpu",
    keep=True,
):
    """Train; returns losses, gradients and parameters, as a flat list of tensors to compare bit for bit.

    Without ``keep`` nothing is kept on the way, so that memory can be measured.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    seen = []
    for iteration, microbatches in enumerate(data):
        for index, x in enumerate(microbatches):
            if before_forward is not None:
                before_forward(iteration, index, x)
            with autocast(precision, device):
                loss = loss_of(net, x) / len(microbatches)
            if recorder is not None:
                recorder.loss(loss)
            loss.backward()
            if keep:
                seen.append(loss.detach().clone())
        if before_step is not None:
            before_step(iteration)
        optimizer.step()
        if keep:
            seen += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
    return seen + [parameter.detach().clone() for parameter in net.parameters()]
