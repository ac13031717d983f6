"""The three runs of docs/post-mortem.md: small trainings, each with a fault that happens in real ones.

Needs torch; on a CPU all three take some seconds. Each writes one incident into the folder that it is given, and ends
with the iteration in which the fault is noticed, so that its history is as long on a busy machine as on an idle one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import flightrec

WIDTH = 32


class Norm(nn.Module):
    """A norm of one's own; somebody left the epsilon out."""

    def forward(self, x: Tensor) -> Tensor:
        """Mean 0 and deviation 1 along the last axis."""
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


class Block(nn.Module):
    """Two products around a GELU, beside a residual."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Input and result [batch, WIDTH]."""
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, and a head with one output."""

    def __init__(self, norm: Callable[[], nn.Module], num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, WIDTH, bias=False)
        self.blocks = nn.Sequential(*(Block(norm()) for _ in range(num_blocks)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Input [batch, 16], result [batch, 1]."""
        result: Tensor = self.head(self.blocks(self.embedding(x)))
        return result


def config(*triggers: Mapping[str, object]) -> dict[str, object]:
    """Everything is recorded, in every iteration, and the iterations of the last second are kept."""
    return {
        "budget": "none",
        "ring": {"iterations": 3},
        "select": [{"tensors": ["activation", "weight", "gradient", "output", "loss"]}],
        "triggers": list(triggers),
        "incident": {"after": 0, "cooldown": 1000},
    }


def empty_sample(directory: Path) -> None:
    """A sample without content comes, all zeros, and a norm without an epsilon divides zero by zero."""
    torch.manual_seed(0)
    net = Net(Norm)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=directory, run_id="empty-sample") as recorder:
        recorder.attach(net, optimizer=sgd)
        for iteration in range(10):
            x = torch.randn(8, 16)
            if iteration == 9:
                x[5] = 0
            train(net, sgd, recorder, x)


def frozen_scale(directory: Path) -> None:
    """The scale of a gradient in FP8 is never updated again, while the gradient grows."""
    torch.manual_seed(0)
    net = Net(lambda: nn.LayerNorm(WIDTH))
    sgd = torch.optim.SGD(net.parameters(), lr=1e-6)
    rules = ({"kind": "nonfinite"}, {"kind": "stale_scale"})
    scales: list[Tensor] = []
    history = torch.zeros(8)
    with flightrec.Recorder(config(*rules), directory=directory, run_id="frozen-scale") as recorder:

        def quantize(gradient: Tensor) -> Tensor:
            history.copy_(history.roll(1))
            history[0] = gradient.abs().amax()
            if not scales:  # the fault: an update that is left out, not the first one only
                scales.append(448 / gradient.abs().amax() / 2)
            codes = (gradient * scales[0]).clamp(-448, 448).to(torch.float8_e4m3fn)
            quantized = flightrec.Quantized(codes, "float8_e4m3fn", scale=scales[0], amax_history=history.clone())
            recorder.record("blocks.1.fc2", "gradient", part="fp8", high_precision=gradient, quantized=quantized)
            return codes.float() / scales[0]

        def forward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            output.register_hook(quantize)

        recorder.attach(net, optimizer=sgd)
        net.blocks[1].fc2.register_forward_hook(forward)
        for iteration in range(10):
            train(net, sgd, recorder, torch.randn(64, 16), weight=1.25**iteration)


def wrong_rate(directory: Path) -> None:
    """A scheduler gives one group of parameters 100 times the learning rate, and nothing becomes NaN."""
    torch.manual_seed(0)
    net = Net(lambda: nn.LayerNorm(WIDTH))
    odd = net.blocks[1].fc2
    others = [parameter for parameter in net.parameters() if parameter is not odd.weight]
    sgd = torch.optim.SGD([{"params": others}, {"params": odd.parameters()}], lr=3e-2)
    rule = {"kind": "loss_jump", "window": 48, "min_samples": 32}
    with flightrec.Recorder(config(rule), directory=directory, run_id="wrong-rate") as recorder:
        recorder.attach(net, optimizer=sgd)
        for iteration in range(96):
            if iteration == 90:
                sgd.param_groups[1]["lr"] = 3.0
            train(net, sgd, recorder, torch.randn(64, 16))


def train(net: Net, sgd: torch.optim.Optimizer, recorder: flightrec.Recorder, x: Tensor, weight: float = 1.0) -> None:
    """One iteration: the mean of the input is to be found."""
    loss = weight * (net(x) - x.mean(1, keepdim=True)).square().mean()
    recorder.loss(loss)
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    recorder.step(loss=loss)


RUNS: Mapping[str, Callable[[Path], None]] = {
    "empty-sample": empty_sample,
    "frozen-scale": frozen_scale,
    "wrong-rate": wrong_rate,
}
"""By name, which is the beginning of the incident's id."""
