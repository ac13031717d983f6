from __future__ import annotations

import copy
import gc
import pickle
import weakref
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
    assert_untouched,
    bits,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flightrec.errors import AttachError
from flightrec.records import NO_MICROBATCH, Phase, Stage
from flightrec.sources.modules import ModulesSource


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
        return x + self.drop(self.fc2(self.relu(self.fc1(self.norm(x)))))


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
                x = checkpoint(block, x, use_reentrant=False, context_fn=save_everything)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def save_everything():
    """Selective checkpointing whose cache takes whatever operation it sees."""

    def policy(ctx, op, *args, **kwargs):
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

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


# -- what is recorded


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


def test_embeddings_have_no_activation_and_norms_no_weight_operand():
    model = nn.ModuleDict({"emb": nn.Embedding(10, 4), "norm": nn.LayerNorm(4)})
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        model["norm"](model["emb"](torch.tensor([[1, 2]]))).sum().backward()
        watch.step()
    assert {k.tensor for k in sink.recorded() if k.layer == "emb"} == {"weight", "output", "gradient", "wgrad"}
    assert {k.tensor for k in sink.recorded() if k.layer == "norm"} == {"input", "output", "gradient", "dgrad", "wgrad"}
    assert {k.part for k in sink.recorded() if k.layer == "norm" and k.tensor == "wgrad"} == {"", "bias"}
    assert {k.microbatch for k in sink.recorded()} == {0}, "children called by themselves make a microbatch too"


def test_wgrad_is_cumulative_over_microbatches_and_weight_comes_once():
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    sink = RecordingSink()
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    run_once(model, sink, square, first, second)
    each = [torch.autograd.grad(square(model, x), model.weight)[0] for x in (first, second)]
    assert torch.equal(sink.one("", "wgrad", microbatch=0).tensor, each[0])
    assert torch.allclose(sink.one("", "wgrad", microbatch=1).tensor, each[0] + each[1])
    assert sink.one("", "weight").key.microbatch == 0
    assert [s.key.call for s in sink.find("", "activation")] == [0, 0]


def test_parameters_come_at_the_start_and_after_each_step():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    sink = RecordingSink(tensors={"parameter"})
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sink) as watch:
        for _ in range(2):
            square(model, torch.ones(1, 3)).backward()
            optimizer.step()
            watch.step()
    start = sink.one("", "parameter", 0, stage=Stage.START, part="weight")
    assert torch.equal(start.tensor, before)
    assert start.key.microbatch == NO_MICROBATCH
    assert not sink.find("", "parameter", 1, stage=Stage.START)
    assert torch.equal(sink.one("", "parameter", 1, stage=Stage.AFTER_STEP, part="weight").tensor, model.weight)
    assert torch.equal(sink.one("", "parameter", 1, stage=Stage.AFTER_STEP, part="bias").tensor, model.bias)


def test_shared_modules_and_tied_parameters_go_by_their_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.same = self.a
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.same(self.a(x)))

    sink = RecordingSink(tensors={"activation", "weight", "wgrad", "parameter"})
    run_once(Tied(), sink, square, torch.randn(2, 4))
    assert [s.key.call for s in sink.find("a", "activation")] == [0, 1]
    assert not sink.find("same", "activation")
    assert sink.one("a", "weight")
    assert not sink.find("b", "weight")
    assert "a.weight" in sink.blinds["b", "weight"]
    assert [(k.layer, k.tensor) for k in sink.recorded() if k.tensor == "wgrad"] == [("a", "wgrad")]
    assert {k.layer for k in sink.recorded() if k.tensor == "parameter"} == {"a"}


def test_what_a_user_hook_put_in_is_what_the_product_read():
    model = nn.Linear(3, 3)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    sink = RecordingSink()
    run_once(model, sink, square, torch.ones(1, 3))
    assert torch.equal(sink.one("", "activation").tensor, torch.full((1, 3), 2.0))


def test_nothing_is_hooked_that_is_not_selected():
    model = Net()
    sink = RecordingSink(layers={"head"}, tensors={"output"})
    with Watch(model, sink):
        hooked = {name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks}
        assert hooked == {"", "head"}
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert_untouched(model)
    assert Watch(model, RecordingSink(layers={"nowhere"})).sources == []


# -- containers (F24)


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


# -- in place (F23)


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
        return nn.Sequential(nn.Linear(4, 4), R(), nn.ReLU(inplace=True), nn.Linear(4, 4))

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


def test_the_outer_of_two_modules_that_return_one_tensor_sees_its_gradient_first():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    sink = RecordingSink(tensors={"gradient"})
    user: list[str] = []
    model[0][0].register_forward_hook(lambda m, a, o: o.register_hook(lambda g: user.append("user")) and None)
    run_once(model, sink, square, torch.randn(1, 4))
    assert [k.layer for k in sink.recorded()] == ["", "0", "0.0"]
    assert user == ["user"]


# -- other fault cases


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


def test_f21_evaluation_leaves_no_trace_and_gradients_of_eval_mode_modules_are_training():
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).eval().requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, 8), frozen, nn.Linear(8, 8))
    model[1].training = False
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        for iteration in range(6):
            square(model, torch.randn(2, 8)).backward()
            if iteration % 2:
                with torch.no_grad():
                    for _ in range(10):
                        model(10 * torch.randn(2, 8))
                model.eval()
                model(torch.randn(2, 8))
                model.train()
                model[1].eval()
            watch.step()
    per_iteration = [len(sink.recorded(i)) for i in range(6)]
    assert per_iteration == [per_iteration[0]] * 6
    assert {k.phase for k in sink.recorded()} == {Phase.TRAIN}
    assert len(sink.find("1", "gradient", phase=Phase.TRAIN)) == 6
    assert max(s.tensor.abs().max() for s in sink.find("", "input")) < 10
    assert all(s.key.microbatch == 0 for s in sink.seen)


def test_f21_evaluation_is_recorded_under_its_own_phase_when_selected():
    model = nn.Linear(4, 4)
    sink = RecordingSink(phases=(Phase.TRAIN, Phase.EVAL))
    with Watch(model, sink) as watch:
        with torch.inference_mode():
            model(torch.full((1, 4), torch.nan))
        model.eval()
        model(torch.ones(1, 4))
        watch.step()
    assert {k.phase for k in sink.recorded()} == {Phase.EVAL}
    assert {k.tensor for k in sink.recorded()} == {"activation", "output"}
    assert [k.call for k in sink.recorded() if k.tensor == "activation"] == [0, 1]
    assert sink.first_nonfinite().key.tensor == "activation"


# -- the run is not changed


@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant", "selective"])
@pytest.mark.parametrize("phases", [(Phase.TRAIN,), (Phase.TRAIN, Phase.RECOMPUTE, Phase.EVAL)])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_bit_identical(mode, phases, autocast):
    def loss_of(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return square(model, x)

    sink = RecordingSink(phases=phases, tensors=(*RecordingSink().tensors, "parameter"))
    data = batches()
    plain = train(lambda: Net(mode), loss_of, data, microbatches=2, optimizer=torch.optim.Adam)
    watched = train(lambda: Net(mode), loss_of, data, sink, microbatches=2, optimizer=torch.optim.Adam)
    assert_same_bits(plain, watched)
    assert sink.seen
    assert not sink.errors
    assert len({(s.iteration, s.key) for s in sink.seen}) == len(sink.seen), "no key twice in an iteration"


@pytest.mark.parametrize("mode", ["none", "reentrant", "nonreentrant", "selective"])
def test_checkpointing_records_the_same_training_tensors(mode):
    def collect(mode):
        sink = RecordingSink()
        train(lambda: Net(mode), square, batches(), sink, microbatches=2)
        return {(s.iteration, s.key): s.tensor for s in sink.seen}

    expected, found = collect("none"), collect(mode)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(bits(tensor), bits(found[key])), key


@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_recompute_is_a_phase_with_the_microbatch_of_its_backward(mode):
    torch.manual_seed(0)
    model = Net(mode)
    sink = RecordingSink(phases=(Phase.TRAIN, Phase.RECOMPUTE))
    with Watch(model, sink) as watch:
        losses = [square(model, x) for x in batches(2)]
        for loss in losses:  # both forwards first, as a pipeline does
            loss.backward()
        watch.step()
    for microbatch in (0, 1):
        first = sink.one("blocks.0.fc1", "activation", microbatch=microbatch, phase=Phase.TRAIN)
        again = sink.one("blocks.0.fc1", "activation", microbatch=microbatch, phase=Phase.RECOMPUTE)
        assert torch.equal(first.tensor, again.tensor)
        assert sink.one("blocks.0.fc1", "gradient", microbatch=microbatch)
        assert sink.one("blocks.0.fc1", "wgrad", microbatch=microbatch, part="")
    assert {k.phase for k in sink.recorded() if k.stage is BACKWARD} == {Phase.TRAIN}


def test_transformer_encoder_evaluates_by_its_fused_path_as_before():
    def evaluate(watched):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.Sequential(nn.Linear(8, 8), layer)
        sink = RecordingSink()
        outs = []
        calls = []
        layer.self_attn.register_forward_hook  # noqa: B018  (a hook of our own would switch the fused path off)
        original = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, **k: calls.append(1) or original(*a, **k)
        watch = Watch(model, sink)
        if watched:
            watch.__enter__()
        for x in batches(2):
            model.train()
            square(model, x[None]).backward()
            model.eval()
            with torch.no_grad():
                outs.append(model(x[None]))
            if watched:
                watch.step()
        if watched:
            watch.__exit__()
        return outs, calls, sink

    plain, plain_calls, _ = evaluate(False)
    watched, calls, sink = evaluate(True)
    assert_same_bits(plain, watched)
    assert len(calls) == len(plain_calls) == 2, "attention runs unfused in training only"
    assert len(sink.find("1.linear1", "activation")) == 2


def test_attention_shared_input_and_leaf_inputs_do_not_gather_hooks():
    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, 2, 8))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(self.query, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model = Query()
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        for _ in range(5):
            square(model, torch.randn(1, 3, 8)).backward()
            assert len(model.query._backward_hooks) == 1
            watch.step()
            assert not model.query._backward_hooks
    assert torch.equal(
        sink.one("attention", "dgrad", 0, part="0").tensor, sink.one("", "wgrad", 0, part="query").tensor
    )


def test_no_tensor_outlives_the_iteration_and_nothing_grows():
    torch.manual_seed(0)
    model = Net("nonreentrant")
    sink = RecordingSink(tensors={"output", "gradient", "dgrad", "activation", "wgrad"})
    sink.capture = lambda *a, **k: None
    alive: list[weakref.ref] = []
    counts = []
    with Watch(model, sink) as watch:
        gc.collect()
        gc.disable()
        try:
            for iteration in range(50):
                out = model(torch.randn(4, 8))
                loss = out.square().mean()
                loss.backward()
                model.zero_grad()
                alive += [weakref.ref(out), weakref.ref(loss)]
                del out, loss
                with torch.no_grad():
                    model(torch.randn(4, 8))
                watch.step()
                if iteration in (10, 49):
                    gc.collect()
                    counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            assert not any(reference() is not None for reference in alive)
        finally:
            gc.enable()
    assert counts[0] == counts[1]


def test_a_forgotten_output_is_freed_without_the_garbage_collector():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sink = RecordingSink()
    sink.capture = lambda *a, **k: None
    with Watch(model, sink):
        gc.collect()
        gc.disable()
        try:
            out = model(torch.randn(2, 4, requires_grad=True))
            reference = weakref.ref(out)
            del out
            assert reference() is None
        finally:
            gc.enable()


# -- robustness


def test_a_failing_sink_never_reaches_the_run():
    sink = RecordingSink()
    sink.fail_on = lambda key: key.layer == "blocks.0.fc1"
    data = batches()
    assert_same_bits(train(Net, square, data), train(Net, square, data, sink))
    assert len(sink.errors) == 1
    assert "failed on purpose" in sink.blinds["blocks.0.fc1", ""]
    assert sink.find("blocks.0.fc2", "gradient")
    assert not sink.find("blocks.0.fc1", "output")


def test_a_sink_that_fails_everywhere_switches_the_source_off():
    sink = RecordingSink()
    sink.fail_on = lambda key: True
    data = batches()
    assert_same_bits(train(Net, square, data), train(Net, square, data, sink))
    assert not sink.seen
    assert 0 < len(sink.errors) <= 10


def test_a_failure_in_a_backward_hook_does_not_stop_backward():
    sink = RecordingSink()
    sink.fail_on = lambda key: key.stage is BACKWARD
    data = batches(2)
    assert_same_bits(train(Net, square, data), train(Net, square, data, sink))
    assert sink.errors


def test_an_exception_in_the_model_is_raised_unchanged_and_the_next_forward_counts_right():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.error = None

        def forward(self, x):
            y = self.fc(x)
            if self.error is not None:
                raise self.error
            return y

    model = nn.Sequential(Bad(), nn.Linear(2, 2))
    sink = RecordingSink()
    with Watch(model, sink) as watch:
        for error in (ValueError("the model's own"), KeyboardInterrupt()):
            model[0].error = error
            with pytest.raises(type(error)) as caught:
                model(torch.ones(1, 2))
            assert caught.value is error
            model[0].error = None
            sink.step()
        square(model, torch.ones(1, 2)).backward()
        watch.step()
    last = sink.recorded(2)
    assert {k.microbatch for k in last} == {0}
    assert {k.phase for k in last} == {Phase.TRAIN}
    assert not sink.find("0", "output", 0)


def test_copies_and_pickles_of_a_watched_model_are_not_watched():
    model = nn.Sequential(nn.Linear(2, 2))
    sink = RecordingSink()
    with Watch(model, sink):
        averaged = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        square(averaged, torch.ones(1, 2)).backward()
        square(loaded, torch.ones(1, 2)).backward()
        assert not sink.seen
        square(model, torch.ones(1, 2)).backward()
        assert sink.seen


def test_a_second_attach_starts_clean_and_detach_is_final():
    model = nn.Linear(2, 2)
    first, second = RecordingSink(), RecordingSink()
    watch = Watch(model, first)
    with watch:
        loss = square(model, torch.ones(1, 2))
    seen = len(first.seen)
    loss.backward()
    assert len(first.seen) == seen, "hooks on a graph that is still alive do nothing"
    for source in watch.sources:
        source.detach()
    assert_untouched(model)
    run_once(model, second, square, torch.ones(1, 2))
    assert second.one("", "gradient")
    assert len(first.seen) == seen


def test_what_cannot_be_recorded_is_told_once_with_its_reason():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(4, 2, sparse=True)
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
            self.seen = nn.Identity()

        def forward(self, index):
            x = self.spectral(self.emb(index))
            self.seen(torch.complex(x, x))
            self.seen(x.to_sparse())
            return x

    data = [torch.tensor([1, 2])] * 2
    sink = RecordingSink()
    torch.manual_seed(0)
    assert_same_bits(train(Odd, square, data, optimizer=torch.optim.SGD)[:1], train(Odd, square, data, sink)[:1])
    assert "sparse" in sink.blinds["emb", "wgrad"]
    assert "parametrized" in sink.blinds["spectral", "weight"]
    assert "complex" in sink.blinds["seen", "input"]
    assert not sink.errors


def test_spectral_norm_state_is_not_advanced_by_being_watched():
    def make():
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))

    data = batches()
    assert_same_bits(train(make, square, data), train(make, square, data, RecordingSink()))


def test_lazy_and_later_unfrozen_parameters_are_hooked_when_they_can_be():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4).requires_grad_(False))
    sink = RecordingSink(tensors={"wgrad", "activation", "parameter"})
    with Watch(model, sink) as watch:
        square(model, torch.ones(1, 3)).backward()
        watch.step()
        model[1].requires_grad_(True)
        watch.step()
        square(model, torch.ones(1, 3)).backward()
        watch.step()
    assert sink.find("0", "wgrad", 2)
    assert sink.find("1", "wgrad", 2)
    assert sink.find("0", "parameter", 0, stage=Stage.AFTER_STEP)
    assert not sink.errors
    assert "lazy" in sink.blinds["0", "parameter"]


def test_a_replaced_parameter_is_followed():
    model = nn.Linear(2, 2)
    sink = RecordingSink(tensors={"wgrad"})
    with Watch(model, sink) as watch:
        watch.step()
        old = model.weight
        model.weight = nn.Parameter(torch.ones(2, 2))
        watch.step()
        square(model, torch.ones(1, 2)).backward()
        watch.step()
        assert not old._post_accumulate_grad_hooks
    assert sink.one("", "wgrad", part="")


def test_compiled_models_run_as_one_graph_and_are_told_as_blind():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    expected = square(model, x)
    sink = RecordingSink(layers={"0", "1", "2"})
    with Watch(model, sink) as watch:
        model.compile(backend="aot_eager", fullgraph=True)
        loss = square(model, x)
        loss.backward()
        watch.step()
    assert torch.equal(loss, expected)
    assert {k.tensor for k in sink.recorded()} <= {"wgrad"}
    sink = RecordingSink()
    with Watch(model, sink):
        assert "torch.compile" in sink.blinds["", ""]
    torch._dynamo.reset()


def test_transforms_and_fake_tensors_are_not_recorded():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(3, 3)
    sink = RecordingSink()
    with Watch(model, sink):
        torch.func.vmap(model)(torch.ones(2, 3))
        parameters = dict(model.named_parameters())
        torch.func.grad(lambda p: torch.func.functional_call(model, p, torch.ones(2, 3)).sum())(parameters)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(2, 3))
    assert not sink.seen
    assert not sink.errors


def test_double_backward_and_retained_graphs_work():
    def loss_of(model, x):
        x = x.clone().requires_grad_(True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()

    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    sink = RecordingSink()
    assert_same_bits(train(make, loss_of, batches()), train(make, loss_of, batches(), sink))
    assert not sink.errors


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
