"""Every kind of tensor through every entry point, with every rule on: held right or named as blind, and no harm."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from models import RECORD_ALL
from sources_support import assert_same_bits
from tensor_kinds import KINDS
from torch import nn

import flightrec
from flightrec.config.load import load
from flightrec.rules.kinds import DEVICE_RULES

pytestmark = pytest.mark.filterwarnings("ignore")

ITERATIONS = 4
SPOILED = 2

PLACES = {
    ("odd", "input", "extra"),
    ("odd", "output", "1"),
    ("holder", "weight", ""),
    ("holder", "parameter", "weight"),
    ("shadow", "wgrad", "main_grad"),
    ("own", "activation", ""),
    ("own", "gradient", "codes"),
    ("", "loss", ""),
    ("", "metric", "m"),
    ("", "metric", "data.d"),
}
"""(layer, tensor, part) under which the kind must be found, or (layer, tensor) named as blind."""


class Odd(nn.Module):
    """Takes a tensor of any kind and hands it back beside its result."""

    def forward(self, x, extra):
        return x * 2, extra


class Holder(nn.Module):
    """Holds a weight of any kind beside the product that is really computed."""

    def __init__(self, weight):
        super().__init__()
        can_be = not isinstance(weight, nn.parameter.UninitializedTensorMixin)
        self.weight = nn.Parameter(weight, requires_grad=False) if can_be else weight

    def forward(self, x):
        return x + 1


class Net(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.first, self.odd, self.shadow = nn.Linear(6, 6), Odd(), nn.Linear(6, 6, bias=False)
        self.holder = Holder(weight)
        self.extra = None

    def forward(self, x):
        x, _ = self.odd(self.first(x), extra=self.extra)
        return self.holder(self.shadow(x))


def config():
    kinds = [*DEVICE_RULES, "exception", "manual"]
    return {
        **RECORD_ALL,
        "select": [{"tensors": "*"}],
        "ring": {"iterations": ITERATIONS},
        "incident": {"after": 0, "writer": "thread"},
        "triggers": [rule(kind) for kind in kinds],
    }


def rule(kind):
    return {"kind": kind, "above": 1e30} if kind == "metric_threshold" else {"kind": kind}


def run(kind, directory=None, spoil=False):
    """Train, with the kind everywhere if a recorder is asked for; gives losses, gradients and parameters."""
    torch.manual_seed(0)
    data = [torch.randn(3, 6) for _ in range(ITERATIONS)]
    net = Net(kind.make(False))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    recorder = None
    if directory is not None:
        recorder = flightrec.Recorder(config(), directory=directory)
        recorder.attach(net)
    trace = []
    for iteration, x in enumerate(data):
        odd = kind.make(spoil and iteration == SPOILED)
        net.extra = odd
        if spoil and iteration == SPOILED:
            net.holder.weight = nn.Parameter(kind.make(True), requires_grad=False)
        if recorder is not None:
            net.shadow.weight.main_grad, net.shadow.weight.grad_added_to_main_grad = odd, True
            with recorder.microbatch(0, data={"d": odd}):
                pass
            recorder.record("own", "activation", high_precision=odd)
            recorder.record("own", "gradient", part="codes", quantized=odd)
            recorder.loss(odd)
        loss = net(x).square().mean()
        loss.backward()
        trace += [loss.detach().clone(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
        trace += [p.detach().clone() for p in trained]
        if recorder is not None:
            if not spoil and iteration == ITERATIONS - 1:
                recorder.trigger("look")
            recorder.step(metrics={"m": odd})
    if recorder is not None:
        recorder.close()
    return trace


def only(directory):
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


def places(kind):
    """All, but that a weight of less than two dimensions is no operand of a product."""
    odd = kind.make(False)
    is_product = not isinstance(odd, nn.parameter.UninitializedTensorMixin) and odd.dim() >= 2
    return PLACES if is_product else PLACES - {("holder", "weight", "")}


def found(incident, place, iteration):
    layer, tensor, part = place
    return [r for r in incident.records(layer=layer, tensor=tensor, iteration=iteration) if r.key.part == part]


@pytest.mark.parametrize("name", KINDS)
def test_it_is_held_right_or_named_as_blind_and_nothing_else_fires(name, tmp_path, caplog):
    kind = KINDS[name]
    with caplog.at_level(logging.WARNING):
        watched = run(kind, tmp_path)
    assert_same_bits(watched, run(kind))
    assert "disarmed" not in caplog.text
    assert "failed" not in caplog.text
    incident = only(tmp_path)
    assert {firing.kind for firing in incident.firings} == {"manual"}
    blind = {(entry.layer, entry.tensor): entry.reason for entry in incident.blind}
    odd = kind.make(False)
    for place in places(kind):
        records = found(incident, place, ITERATIONS - 1)
        if kind.blind or (place[2] == "codes" and kind.dequantized is None and not records):
            assert not records, place
            reason = blind[place[:2]]
            assert kind.blind in reason or place[2] == "codes", (place, reason)
            continue
        assert records, (place, blind)
        assert not any(reason for at, reason in blind.items() if at == place[:2] and place[2] != "codes"), place
        check(kind, odd, records[-1])


def check(kind, odd, record):
    assert record.why_absent == ""
    if kind.high_precision is not None and record.high_precision is not None:
        expected = kind.high_precision(odd)
        assert record.high_precision.shape == expected.shape
        np.testing.assert_array_equal(record.high_precision, expected)
        assert record.statistics["numel"] == expected.size
        if expected.size:
            assert record.statistics["amax"] == pytest.approx(np.abs(expected.astype("c16")).max(), rel=1e-6)
    else:
        assert record.quantized is not None
    if kind.dequantized is not None:
        assert record.quantized.dequantize().tobytes() == kind.dequantized(odd).tobytes()
    for name, array in (kind.components(odd) if kind.components else {}).items():
        np.testing.assert_array_equal(record.quantized.components[name], array)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.can_hold_nan])
def test_a_nan_inside_fires_nonfinite_naming_the_tensor(name, tmp_path):
    kind = KINDS[name]
    run(kind, tmp_path, spoil=True)
    incident = only(tmp_path)
    named = {
        (f.key.layer, f.key.tensor, f.key.part)
        for f in incident.firings
        if f.kind == "nonfinite" and f.iteration == SPOILED
    }
    expected = {place for place in places(kind) if place[2] != "codes"}
    assert named >= expected, expected - named
    assert incident.trigger.kind == "nonfinite"


def test_every_rule_is_on():
    assert {rule.kind for rule in load(config()).triggers} >= set(DEVICE_RULES)
