from __future__ import annotations

import pytest
import torch
from models import Net
from torch import nn

from flightrec.budget.blocks import find_blocks


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)


class MoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"dense": Expert(), "0": MoeBlock(), "1": MoeBlock()})


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 1)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual(), Residual())
        self.fc = nn.Linear(3, 2)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def shared() -> nn.Module:
    block = nn.Linear(2, 2)
    return nn.ModuleDict({"a": nn.ModuleList([block, nn.Linear(2, 2)]), "b": nn.Sequential(block)})


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (Gpt(), ["blocks.0", "blocks.1", "blocks.2"]),
        (
            nn.Transformer(4, 2, 2, 2, 8, batch_first=True),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
        ),
        (Moe(), ["layers.dense", "layers.0", "layers.1"]),
        (ResNet(), ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]),
        (Plain(), ["fc1", "fc2"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), ["0", "2"]),
        (nn.Sequential(nn.Embedding(4, 2), nn.Sequential(*(Plain() for _ in range(2)))), ["1.0", "1.1"]),
        (nn.ModuleList([nn.ModuleList([Plain(), Plain()])]), ["0.0", "0.1"]),
        (Wrapper(Wrapper(Plain())), ["module.module.fc1", "module.module.fc2"]),
        (Wrapper(Gpt()), ["module.blocks.0", "module.blocks.1", "module.blocks.2"]),
        (nn.Linear(2, 2), [""]),
        (nn.Identity(), [""]),
        (Net(blocks=1), ["blocks", "head"]),
        (shared(), ["a.0", "a.1"]),
    ],
)
def test_blocks_are_the_children_of_the_outermost_repeating_container(model, blocks):
    assert list(find_blocks(model)) == blocks
    names = dict(model.named_modules())
    assert all(block in names for block in blocks)


def test_nothing_of_the_model_is_run_or_changed():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    before = torch.get_rng_state()
    assert list(find_blocks(model)) == ["0", "1"]
    assert torch.equal(before, torch.get_rng_state())
