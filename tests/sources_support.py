"""What the tests of the sources share: a sink that keeps everything, a small training loop, bitwise comparison."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flightrec.config.selection import DEFAULT_STAGES
from flightrec.records import NO_MICROBATCH, TENSORS, Key, Phase, Stage
from flightrec.ring.layout import QuantizedParts
from flightrec.sources import watched
from flightrec.sources.choose import choose_sources
from flightrec.sources.extract import extract
from flightrec.sources.sink import Sightings
from flightrec.sources.watched import is_watched

TRAINING = tuple(t for t in TENSORS if t not in ("loss", "metric", "parameter"))


@dataclass
class Seen:
    """One captured tensor, deeply copied."""

    iteration: int
    key: Key
    tensor: torch.Tensor | None
    quantized: QuantizedParts | None


class RecordingSink:
    """Keeps a copy of all it is given, in order; counts what it was asked."""

    def __init__(self, tensors=TRAINING, layers=None, phases=(Phase.TRAIN,), stages=DEFAULT_STAGES) -> None:
        self.stages = frozenset(stages)
        self.tensors, self.layers, self.phases = frozenset(tensors), layers, frozenset(phases)
        self.microbatch_index = NO_MICROBATCH
        self.iteration = 0
        self.seen: list[Seen] = []
        self.blinds: dict[tuple[str, str], str] = {}
        self.errors: list[Exception] = []
        self.fail_on: Callable[[Key], bool] | None = None
        self.turn: Callable[[str], bool] | None = None

    def selects(self, layer: str, tensor: str, phase: Phase, stage: Stage | None = None) -> object | None:
        wanted = tensor in self.tensors and phase in self.phases and (stage is None or stage in self.stages)
        return True if wanted and (self.layers is None or layer in self.layers) else None

    def wants(self, layer: str, tensor: str, phase: Phase, stage: Stage) -> bool:
        return self.turn is None or self.turn(layer)

    @property
    def epoch(self) -> object:
        return self.iteration

    def sleeps(self, layer: str) -> bool:
        return self.turn is not None and not self.turn(layer)

    def wants_any(self, sightings: Sightings) -> bool:
        return any(self.wants(*sighting) for sighting in sightings.of)

    def capture(
        self, layer, tensor, *, part="", microbatch, phase, call, stage, high_precision=None, quantized=None,
        columnwise=None, splits=None,
    ) -> None:  # fmt: skip
        key = Key(layer, tensor, part, microbatch, phase, call, stage)
        if self.fail_on is not None and self.fail_on(key):
            raise RuntimeError("the sink failed on purpose")
        assert self.selects(layer, tensor, phase, stage) is not None, key
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        parts = None
        if quantized is not None or columnwise is not None:
            parts, reason = extract(quantized, columnwise)
            assert parts is not None, reason
            copies = {n: c.clone(memory_format=torch.contiguous_format) for n, c in parts.components.items()}
            parts = QuantizedParts(parts.info, copies, parts.formats, parts.pair_codes)
        if high_precision is not None:
            assert type(high_precision) is torch.Tensor
            assert not high_precision.requires_grad
            high_precision = high_precision.clone(memory_format=torch.contiguous_format)
        self.seen.append(Seen(self.iteration, key, high_precision, parts))

    def blind(self, layer: str, tensor: str, reason: str) -> None:
        assert (layer, tensor) not in self.blinds, "told twice"
        self.blinds[layer, tensor] = reason

    def begin_microbatch_implicit(self) -> None:
        self.microbatch_index += 1

    @contextlib.contextmanager
    def guard(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)

    # -- for the tests

    def step(self) -> None:
        self.iteration += 1
        self.microbatch_index = NO_MICROBATCH

    def recorded(self, iteration: int | None = None) -> list[Key]:
        return [s.key for s in self.seen if iteration is None or s.iteration == iteration]

    def find(self, layer: str, tensor: str, iteration: int | None = None, **fields: Any) -> list[Seen]:
        return [
            s
            for s in self.seen
            if s.key.layer == layer
            and s.key.tensor == tensor
            and (iteration is None or s.iteration == iteration)
            and all(getattr(s.key, name) == value for name, value in fields.items())
        ]

    def one(self, layer: str, tensor: str, iteration: int | None = None, **fields: Any) -> Seen:
        found = self.find(layer, tensor, iteration, **fields)
        assert len(found) == 1, [s.key for s in found] or self.recorded()
        return found[0]

    def first_nonfinite(self) -> Seen:
        """The record that blame order puts first."""
        bad = [
            (s.iteration, *s.key.blame_order(number, 1 + max([0, *(x.key.microbatch for x in self.seen)])), number)
            for number, s in enumerate(self.seen)
            if s.tensor is not None and s.tensor.is_floating_point() and not torch.isfinite(s.tensor.float()).all()
        ]
        return self.seen[min(bad)[-1]]


def alone() -> None:
    """End what recorders still watch that earlier tests left without closing, as a crash would."""
    for held in [thing for thing in gc.get_objects() if type(thing) is watched.Watch]:
        held.end()
    assert not watched.num_watched()


class Watch:
    """All sources of a model, attached to a sink while the block lasts."""

    def __init__(self, model: torch.nn.Module, sink: RecordingSink) -> None:
        self.sink = sink
        self.sources = choose_sources(model, sink)

    def __enter__(self) -> Watch:
        for source in self.sources:
            source.attach()
        return self

    def __exit__(self, *_: object) -> None:
        for source in self.sources:
            source.detach()

    def step(self) -> None:
        for source in self.sources:
            source.after_step()
        self.sink.step()


def train(
    make: Callable[[], torch.nn.Module],
    loss_of: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
    batches: list[torch.Tensor],
    sink: RecordingSink | None = None,
    *,
    microbatches: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> list[torch.Tensor]:
    """Train from a fixed seed, watched or not; returns every loss, gradient and parameter of every iteration."""
    torch.manual_seed(0)
    model = make()
    steps = optimizer(model.parameters(), lr=0.05)
    trace: list[torch.Tensor] = []
    watch = Watch(model, sink) if sink is not None else None
    with watch or contextlib.nullcontext():
        for batch in batches:
            steps.zero_grad()
            for chunk in batch.chunk(microbatches):
                loss = loss_of(model, chunk)
                loss.backward()
                trace.append(loss.detach().clone())
            trace += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            steps.step()
            trace += [p.detach().clone() for p in model.parameters()]
            if watch is not None:
                watch.step()
    assert_untouched(model)
    return trace


def assert_same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(bits(a), bits(b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().contiguous().view(width)


def assert_untouched(model: torch.nn.Module) -> None:
    """No hook is left on a model that is no longer watched."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs
        assert not is_watched(module)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks


class Block(nn.Module):
    """Norm, two products, an in-place activation and a residual."""

    def __init__(self, width: int = 8, inplace: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.relu = nn.ReLU(inplace)
        self.fc2 = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.fc2(self.relu(self.fc1(self.norm(x).clone()))))


class Net(nn.Module):
    """Blocks, checkpointed or not, with a head."""

    def __init__(self, mode: str = "none", width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, inplace=mode != "selective") for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.mode == "none":
                x = block(x)
            elif self.mode == "selective":
                x = checkpoint(block, x, use_reentrant=False, context_fn=save_products_and_clones)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def save_products_and_clones():
    """Selective checkpointing that also caches clones, which the tests' sink makes too."""
    saved = {torch.ops.aten.addmm.default, torch.ops.aten.clone.default}

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batches(count: int = 3, rows: int = 4, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def run_once(model: nn.Module, sink: RecordingSink, loss_of, *inputs: torch.Tensor) -> Watch:
    watch = Watch(model, sink)
    with watch:
        for x in inputs:
            loss_of(model, x).backward()
        watch.step()
    return watch


FORWARD, BACKWARD = Stage.FORWARD, Stage.BACKWARD
