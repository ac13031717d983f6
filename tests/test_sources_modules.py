from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from sources_support import (
    BACKWARD,
    FORWARD,
    RecordingSink,
    Watch,
    assert_same_bits,
    batches,
    run_once,
    square,
    train,
)
from torch import nn

from flightrec.errors import AttachError
from flightrec.sources.modules import ModulesSource


def test_a_product_is_recorded_with_its_six_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    sink = RecordingSink()
    x = torch.randn(3, 4)
    inner: list[torch.Tensor] = []
    model[1].register_forward_pre_hook(lambda module, args: args[0].retain_grad() or inner.append(args[0]))
    with Watch(model, sink) as watch:
        out = model(x)
        out.retain_grad()
        out.square().sum().backward()
        watch.step()
    assert torch.equal(sink.one("0", "activation").tensor, x)
    assert torch.equal(sink.one("0", "output").tensor, inner[0])
    assert torch.equal(sink.one("1", "activation").tensor, inner[0])
    assert torch.equal(sink.one("1", "weight").tensor, model[1].weight)
    assert torch.equal(sink.one("1", "output").tensor, out)
    assert torch.equal(sink.one("1", "gradient").tensor, out.grad)
    assert torch.equal(sink.one("1", "dgrad").tensor, inner[0].grad)
    assert torch.equal(sink.one("1", "wgrad", part="").tensor, model[1].weight.grad)
    assert torch.equal(sink.one("1", "wgrad", part="bias").tensor, model[1].bias.grad)
    assert not sink.find("1", "input")
    assert torch.equal(sink.one("", "input").tensor, x)
    assert not sink.find("0", "dgrad"), "the batch needs no gradient"
    assert {s.key.stage for s in sink.seen} == {FORWARD, BACKWARD}
    assert {s.key.microbatch for s in sink.seen} == {0}
    assert not sink.errors
    assert not sink.blinds


def test_records_come_in_causal_order():
    sink = RecordingSink()
    run_once(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), sink, square, torch.randn(2, 4))
    order = [(k.layer, k.tensor) for k in sink.recorded()]
    expected = [
        ("", "input"), ("0", "activation"), ("0", "weight"), ("0", "output"), ("1", "activation"), ("1", "weight"),
        ("1", "output"), ("", "output"),
        ("", "gradient"), ("1", "gradient"), ("1", "dgrad"), ("0", "gradient"),
    ]  # fmt: skip
    assert [entry for entry in order if entry[1] != "wgrad"] == expected


def test_what_a_user_hook_put_in_is_what_the_product_read():
    model = nn.Linear(3, 3)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    sink = RecordingSink()
    run_once(model, sink, square, torch.ones(1, 3))
    assert torch.equal(sink.one("", "activation").tensor, torch.full((1, 3), 2.0))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    loss: torch.Tensor
    extra: dict


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)

    def forward(self, *, x):
        self.returned = {"y": self.fc(x), "aux": [self.fc2(x)], "n": 3, "none": None}
        return self.returned


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.d = inner

    def forward(self, x):
        return self.d(x=x * 1)


def test_f24_keyword_arguments_and_nested_outputs():
    model = Outer(D())
    sink = RecordingSink()
    x = torch.randn(2, 4, requires_grad=True)
    with Watch(model, sink) as watch:
        out = model(x)
        assert out is model.d.returned
        assert type(out) is dict
        assert out["n"] == 3
        (out["y"].sum() + out["aux"][0].sum()).backward()
        watch.step()
    assert sink.one("d", "input", part="x")
    assert sink.one("d", "output", part="y")
    assert sink.one("d", "output", part="aux.0")
    assert sink.one("d", "gradient", part="y")
    assert sink.one("d", "gradient", part="aux.0")
    assert sink.one("d", "dgrad", part="x")
    assert {k.part for k in sink.recorded() if (k.layer, k.tensor) == ("d", "output")} == {"y", "aux.0"}


def test_f24_nan_in_aux_is_blamed_by_its_path():
    inner = D()
    model = Outer(inner)
    with torch.no_grad():
        inner.fc2.bias[1] = torch.nan
    sink = RecordingSink(tensors={"input", "output", "gradient"}, layers={"", "d"})
    with Watch(model, sink) as watch:
        model(torch.randn(2, 4))["y"].sum().backward()
        watch.step()
    key = sink.first_nonfinite().key
    assert (key.layer, key.tensor, key.part) == ("d", "output", "aux.0")


@pytest.mark.parametrize("kind", [Pair, Result])
def test_f24_results_keep_their_type_and_identity(kind):
    class M(nn.Module):
        def forward(self, x, mask=None):
            y = x * 2
            self.returned = Pair(y, y + 1) if kind is Pair else Result(y, {"k": (y + 1,)})
            return self.returned

    model = M()
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        out = model(torch.ones(2, requires_grad=True), mask=torch.zeros(2, dtype=torch.bool))
        assert out is model.returned
        (out[0].sum() if kind is Pair else out.loss.sum()).backward()
        watch.step()
    parts = {k.part for k in sink.recorded() if k.tensor == "output"}
    assert parts == ({"first", "second"} if kind is Pair else {"loss", "extra.k.0"})
    assert {k.part for k in sink.recorded() if k.tensor == "input"} == {"", "mask"}


class R(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        y += x
        return torch.relu_(y)


def test_f23_in_place_module_trains_bit_identically_and_gradients_are_recorded():
    def make():
        return nn.Sequential(nn.Linear(4, 4), R(), nn.Linear(4, 4))

    sink = RecordingSink()
    data = batches(width=4)
    assert_same_bits(train(make, square, data), train(make, square, data, sink))
    assert len(sink.find("1", "gradient")) == len(data)
    assert len(sink.find("1.fc", "gradient")) == len(data)
    assert not sink.errors
    # relu's backward zeroes what relu clipped, so the product's own gradient differs from the block's
    assert not torch.equal(sink.find("1", "gradient")[0].tensor, sink.find("1.fc", "gradient")[0].tensor)
    before, after = sink.find("1.fc", "output")[0].tensor, sink.find("1", "output")[0].tensor
    assert (before < 0).any()
    assert not (after < 0).any()


def test_f23_the_inf_that_enters_an_in_place_module_is_blamed_as_its_input():
    model = nn.Sequential(nn.Hardtanh(inplace=True))
    sink = RecordingSink(layers={"0"})
    with Watch(model, sink) as watch:
        model(torch.tensor([torch.inf, 1.0]))
        watch.step()
    assert torch.equal(sink.one("0", "input").tensor, torch.tensor([torch.inf, 1.0]))
    assert torch.equal(sink.one("0", "output").tensor, torch.tensor([1.0, 1.0]))
    assert sink.first_nonfinite().key.tensor == "input"


@pytest.mark.parametrize("clamp", [False, True])
def test_f10_one_value_past_65504(clamp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 4, bias=False).half()
            nn.init.constant_(self.fc.weight, 32)
            self.norm = nn.LayerNorm(4, elementwise_affine=False)

        def forward(self, x):
            h = self.fc(x)
            if clamp:
                h = h.clamp(max=65504 - 1000)
            return self.norm(h).sum()

    sink = RecordingSink()
    run_once(M(), sink, lambda model, x: model(x), torch.full((2, 64), 40.0, dtype=torch.half))
    key = sink.first_nonfinite().key
    assert (key.layer, key.tensor) == ("fc", "output")
    assert torch.isfinite(sink.one("fc", "activation").tensor).all()
    assert bool(torch.isfinite(sink.one("", "output").tensor)) is clamp


class Where(nn.Module):
    """A block whose untaken branch has an infinite derivative at 0."""

    def __init__(self, bad: bool):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bad = bad

    def forward(self, x):
        h = self.fc(x)
        if self.bad:
            h = h * torch.tensor([0.0, 1.0, 1.0, 1.0])
            h = torch.where(h > 0, torch.sqrt(h.abs()), 0)
        return h


def test_f12_nan_only_in_backward_is_blamed_at_the_products_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(Where(False), Where(True), Where(False))
    sink = RecordingSink()
    run_once(model, sink, square, torch.randn(2, 4))
    bad = {(s.key.layer, s.key.tensor) for s in sink.seen if not torch.isfinite(s.tensor).all()}
    key = sink.first_nonfinite().key
    assert (key.layer, key.tensor, key.stage) == ("1.fc", "gradient", BACKWARD)
    assert ("1", "dgrad") in bad
    assert not any(layer.startswith("2") for layer, _ in bad)
    assert not any(tensor in ("activation", "output", "input", "weight") for _, tensor in bad)
    assert sink.one("1", "output", stage=FORWARD), "the forward of the block is there"


def test_f12_without_its_inside_the_block_is_blamed_by_the_gradient_that_leaves_it():
    torch.manual_seed(0)
    model = nn.Sequential(Where(False), Where(True), Where(False))
    sink = RecordingSink(layers={"0", "1", "2"})
    run_once(model, sink, square, torch.randn(2, 4))
    key = sink.first_nonfinite().key
    assert (key.layer, key.tensor) == ("1", "dgrad")
    assert torch.isfinite(sink.one("1", "gradient").tensor).all()


def test_f16_the_raw_loss_is_the_models_output():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.poison = False

        def forward(self, x):
            loss = (self.w * x).sum()
            return loss * torch.nan if self.poison else loss

    model, sink, logged = M(), RecordingSink(tensors={"output", "parameter"}), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sink) as watch:
        for iteration in range(4):
            model.poison = iteration == 2
            loss = model(torch.ones(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logged += loss.item() if torch.isfinite(loss) else logged / (1 + iteration)
            watch.step()
    first = sink.first_nonfinite()
    assert first.iteration == 2
    assert (first.key.tensor, first.key.stage) == ("output", FORWARD)


def test_subclasses_without_wrapping_are_recorded_as_plain():
    class Tagged(torch.Tensor):
        pass

    model = nn.Identity()
    sink = RecordingSink()
    with Watch(model, sink):
        out = model(torch.ones(2).as_subclass(Tagged))
    assert type(out) is Tagged
    assert torch.equal(sink.one("", "output").tensor, torch.ones(2))


def test_attach_refuses_what_is_no_module():
    with pytest.raises(AttachError, match=r"torch\.nn\.Module"):
        ModulesSource(lambda x: x, RecordingSink())


class HandsItsBiasOn(nn.Module):
    """Returns a parameter beside its result, for another module to add: a leaf that every microbatch reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), self.offset


class AddsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = HandsItsBiasOn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, offset = self.first(x)
        return y + offset


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_leaf_that_microbatches_share_has_each_ones_gradient_once(interleaved):
    model, sink = AddsIt(), RecordingSink()
    xs = [torch.full((2, 3), float(i + 1)) for i in range(3)]
    with Watch(model, sink) as watch:
        if interleaved:
            outputs = [model(x) for x in xs]
            for index, out in enumerate(outputs):
                (out.sum() * (index + 1)).backward()
        else:
            for index, x in enumerate(xs):
                (model(x).sum() * (index + 1)).backward()
        watch.step()
    found = [(s.key.microbatch, s.key.call, s.tensor[0].item()) for s in sink.find("first", "gradient", part="1")]
    assert found == [(0, 0, 2.0), (1, 0, 4.0), (2, 0, 6.0)]
    assert not sink.errors
