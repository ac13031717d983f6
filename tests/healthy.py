"""Trainings in which nothing is wrong, with every rule watching: what the rules' defaults are tuned on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import flightrec
from flightrec.config.rules import RULE_CLASSES

WIDTH, NUM_CLASSES = 32, 4

TENSORS = ["activation", "weight", "gradient", "dgrad", "wgrad", "parameter"]
"""What the rules look at; outputs and inputs would take as long again."""

SETTINGS: dict[str, dict[str, Any]] = {"metric_threshold": {"above": 1e6}}
"""The one rule that has no default: there is no limit that suits every metric."""


def every_rule() -> list[dict[str, Any]]:
    """A trigger of every kind, without parameters."""
    return [{"kind": kind, **SETTINGS.get(kind, {})} for kind in RULE_CLASSES]


class Mlp(nn.Module):
    """A classifier of noisy points."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU(),
            nn.Linear(2 * WIDTH, NUM_CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x), target)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.gelu(self.w1(x)))


class Moe(nn.Module):
    """Routed experts; one without tokens is left out, or run on an empty batch."""

    def __init__(self, num_chosen: int, *, runs_empty: bool, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        nn.init.normal_(self.router.weight, std=1.0)  # specialists from the start: some batches hold nothing for one
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.num_chosen, self.runs_empty = num_chosen, runs_empty
        self.grouped: tuple[Tensor, Tensor] | None = None
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        gates, chosen = shares.topk(self.num_chosen, dim=1)
        output = torch.zeros_like(x)
        rows, counts = [], []
        for number, expert in enumerate(self.experts):
            token, place = torch.nonzero(chosen == number, as_tuple=True)
            rows.append(x[token])
            counts.append(len(token))
            if len(token) or self.runs_empty:
                output = output.index_add(0, token, expert(x[token]) * gates[token, place, None])
        self.grouped = (torch.cat(rows).detach(), torch.tensor(counts))
        load = torch.tensor(counts) / max(sum(counts), 1)
        self.balance = len(self.experts) * (load * shares.mean(0)).sum()
        return x + output


class MoeNet(nn.Module):
    """Two routed layers, top-1 and top-2; what a batch is about decides which experts get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Moe(1, runs_empty=False, num_experts=4)
        self.second = Moe(2, runs_empty=True, num_experts=5)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(self.head(self.norm(self.second(self.first(x)))), target)
        return loss + 0.002 * (self.first.balance + self.second.balance)


def points(seed: int, rows: int, num_subjects: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of points around centres that belong to a class each, with a tenth of the labels wrong.

    Each batch has points around some of the sixteen centres only.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    centres = torch.randn(16, WIDTH, generator=generator)
    while True:
        subjects = torch.randperm(16, generator=generator)[:num_subjects]
        centre = subjects[torch.randint(num_subjects, (rows,), generator=generator)]
        x = centres[centre] + 0.7 * torch.randn(rows, WIDTH, generator=generator)
        wrong = torch.rand(rows, generator=generator) < 0.1
        noise = torch.randint(NUM_CLASSES, (rows,), generator=generator)
        yield x, torch.where(wrong, noise, centre % NUM_CLASSES)


def mlp(seed: int) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    return Mlp(), points(seed, 64)


def moe(seed: int) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    return MoeNet(), points(seed, 96, num_subjects=2)


def gpt(seed: int) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    from flightrec.demo.model import ModelSize, Text, build_model

    size = ModelSize(width=32, num_blocks=2, num_heads=2, num_sequences=8, context=32)
    text = Text()
    generator = torch.Generator().manual_seed(seed)
    batches = iter(lambda: text.batch(size, generator), None)
    return build_model(len(text.characters), size, seed=seed), batches


TRAININGS: dict[str, Callable[[int], tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]]] = {
    "mlp": mlp,
    "gpt": gpt,
    "moe": moe,
}


@dataclass
class Outcome:
    """What a training came to: incident folders, incidents by rule, all losses."""

    incidents: list[str]
    rules: Counter[str]
    losses: list[float]


def train(
    name: str,
    seed: int,
    num_iterations: int,
    directory: Path,
    *,
    triggers: list[dict[str, Any]] | None = None,
    before: Callable[[int, nn.Module], None] | None = None,
    after_backward: Callable[[int, nn.Module], None] | None = None,
    incident: dict[str, Any] | None = None,
) -> Outcome:
    """Train with a recorder.

    Args:
        name: of one of ``TRAININGS``.
        seed: of weights and data.
        num_iterations: how long.
        directory: for incidents.
        triggers: the rules; every one if None.
        before: spoils the model before an iteration.
        after_backward: spoils gradients.
        incident: settings of ``incident``.
    """
    model, batches = TRAININGS[name](seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    config = {
        "budget": "none",
        "ring": {"iterations": 2, "memory": "64 MiB"},
        "select": [{"layers": "re:(?!.*norm|.*act).*", "tensors": TENSORS, "keep": "statistics"}],
        "triggers": every_rule() if triggers is None else triggers,
        "incident": {"writer": "thread", **(incident or {})},
    }
    losses = []
    with flightrec.Recorder(config, directory=directory) as recorder:
        recorder.attach(model, optimizer=optimizer)
        for iteration in range(num_iterations):
            if before is not None:
                before(iteration, model)
            loss = model(*next(batches))
            loss.backward()
            if name == "moe":
                for layer in ("first", "second"):
                    x, splits = getattr(model, layer).grouped
                    recorder.record(f"{layer}.grouped", "activation", high_precision=x, splits=splits)
            if after_backward is not None:
                after_backward(iteration, model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            metrics = {"loss_scale": 65536.0, "learning_rate": scheduler.get_last_lr()[0]}
            recorder.step(loss=loss, metrics=metrics)
    found = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    rules: Counter[str] = Counter()
    for folder in found:
        rules.update({firing.rule for firing in flightrec.open(directory / folder).firings})
    return Outcome(found, rules, losses)
