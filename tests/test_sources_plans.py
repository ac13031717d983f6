from __future__ import annotations

import torch
from sources_support import (
    Net,
    RecordingSink,
    Watch,
    assert_same_bits,
    assert_untouched,
    batches,
    square,
    train,
)
from torch import nn

from flightrec.sources.watched import is_watched


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


def test_nothing_is_hooked_that_is_not_selected():
    model = Net()
    sink = RecordingSink(layers={"head"}, tensors={"output"})
    with Watch(model, sink):
        hooked = {name for name, module in model.named_modules() if is_watched(module)}
        assert hooked == {"", "head"}
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert_untouched(model)
    assert Watch(model, RecordingSink(layers={"nowhere"})).sources == []


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


def test_spectral_norm_state_is_not_advanced_by_being_watched():
    def make():
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))

    data = batches()
    assert_same_bits(train(make, square, data), train(make, square, data, RecordingSink()))
