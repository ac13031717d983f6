"""Real faults of low-precision training, one small scenario each, with controls that must stay silent.

The numbers are those of the project's list of fault cases.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from models import RECORD_ALL
from torch import nn
from verdict_support import began, judged, kind_of

import flightrec
from flightrec.records import Phase, Stage

EVERYTHING = {"tensors": "*", "phases": ["train", "recompute", "eval"]}
SPIKE = {"kind": "amax_spike", "min_samples": 1, "min_numel": 1, "confirm": 1}
JUMP = {"kind": "loss_jump", "min_samples": 2, "window": 8}


def config(*triggers: dict[str, Any], iterations: int = 4, after: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = {
        **RECORD_ALL,
        "select": [EVERYTHING],
        "ring": {"iterations": iterations},
        "incident": {"after": after, "cooldown": 0},
    }
    if triggers:
        made["triggers"] = list(triggers)
    return made


def incidents(directory: Path) -> list[flightrec.Incident]:
    folders = sorted(directory.iterdir()) if directory.exists() else []
    return [flightrec.open(folder) for folder in folders]


def only(directory: Path) -> flightrec.Incident:
    (incident,) = incidents(directory)
    return incident


# -- F09: the interesting step is the one before the NaN; an isolated spike of the gradient is no fault ---------------


def f09_train(directory: Path, *triggers: dict[str, Any]) -> None:
    torch.manual_seed(0)
    lin = nn.Linear(16, 16)
    sgd = torch.optim.SGD(lin.parameters(), lr=0.1)
    with flightrec.Recorder(config(*triggers), directory=directory) as recorder:
        recorder.attach(lin)
        for iteration in range(6):
            x = torch.randn(4, 16) * (1e10 if iteration == 2 else 1)
            loss = lin(x).square().mean()
            recorder.loss(loss)
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            recorder.step()


def test_f09_the_spike_is_blamed_before_the_nan(tmp_path):
    f09_train(tmp_path, SPIKE, {"kind": "nonfinite"})
    incident = only(tmp_path)  # what follows within `after` joins; the gravest firing is the trigger
    assert next((f.kind, f.iteration) for f in incident.firings) == ("amax_spike", 2)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 3)
    finding = incident.blame()[0]
    assert (finding.kind, finding.iteration, finding.key.tensor) == ("amax_spike", 2, "activation")
    verdict = judged(incident)
    assert kind_of(verdict) == ("numbers", "likely")
    assert began(verdict) == ("the model parameter (bias) 1.-1", "the model activation 2.0")
    assert verdict.began.between == ("the data, or what comes before the first recorded layer",)
    assert {change.label for change in verdict.changes if change.key == finding.key.series} == {"origin"}
    assert (verdict.precursors, verdict.missing, verdict.advice) == ((), (), "")
    assert verdict.elements.indices[0] == (0, 3) and abs(verdict.elements.values[0]) > 1e10


def test_f09_with_nonfinite_alone_the_iterations_before_are_kept(tmp_path):
    f09_train(tmp_path, {"kind": "nonfinite"})
    incident = only(tmp_path)
    assert incident.trigger.iteration == 3
    assert {1, 2, 3} <= {entry.iteration for entry in incident.iterations}
    # The rule names only what is non-finite; the finite precursor of iteration 2 stands in the statistics.
    amax = {r.iteration: r.statistics["amax"] for r in incident.records(tensor="activation")}
    assert amax[2] > 1e9 > 10 > amax[1]
    verdict = judged(incident)
    assert kind_of(verdict) == ("numbers", "likely")
    assert began(verdict) == ("the model output 3.0", "the loss 3.0")
    first = verdict.precursors[0]
    assert (first.statistic, first.key.tensor, first.iteration, first.before, first.after) == (
        "amax",
        "activation",
        2,
        pytest.approx(amax[1]),
        pytest.approx(amax[2]),
    )
    assert "Before it, amax of the model activation went from" in verdict.story


def test_f09_a_gradient_spike_with_a_flat_loss_is_silent(tmp_path):
    torch.manual_seed(0)
    lin = nn.Linear(16, 16)
    sgd = torch.optim.SGD(lin.parameters(), lr=1e-9)
    with flightrec.Recorder(config(JUMP, {"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(lin)
        x = torch.randn(4, 16)
        for iteration in range(12):
            loss = lin(x).square().mean() * (1 + 0.2 * math.sin(iteration))
            recorder.loss(loss)
            loss.backward()
            if iteration == 8:
                lin.weight.grad.mul_(1500)
            sgd.step()
            sgd.zero_grad()
            recorder.step()
    assert not incidents(tmp_path)


def test_f09_the_first_steps_are_silent(tmp_path):
    torch.manual_seed(0)
    lin = nn.Linear(64, 64)
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(lin)
        for iteration in range(5):
            loss = lin(torch.randn(32, 64) * 100.0**iteration).square().mean()
            recorder.loss(loss)
            loss.backward()
            recorder.step()
    assert not incidents(tmp_path)


# -- F10: one value past 65504 ----------------------------------------------------------------------------------------


class HalfOverflow(nn.Module):
    def __init__(self, *, clamp: bool, factor: float = 40) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 4, bias=False).half()
        nn.init.constant_(self.fc.weight, 32)
        self.norm = nn.LayerNorm(4).half()
        self.clamp, self.factor = clamp, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x * self.factor)
        if self.clamp:
            h = h.clamp(max=65504 - 1000)
        return self.norm(h)


def f10_run(directory: Path, *, clamp: bool, factor: float = 40, tensors: Any = None) -> None:
    rule: dict[str, Any] = {"kind": "nonfinite"}
    if tensors:
        rule["tensors"] = tensors
    with flightrec.Recorder(config(rule), directory=directory) as recorder:
        model = HalfOverflow(clamp=clamp, factor=factor)
        recorder.attach(model)
        for _ in range(2):
            loss = model(torch.ones(2, 64, dtype=torch.half)).float().sum()
            recorder.loss(loss)
            recorder.step()


def test_f10_the_overflowing_product_is_blamed(tmp_path):
    f10_run(tmp_path, clamp=False)
    finding = only(tmp_path).blame()[0]
    assert (finding.key.layer, finding.key.tensor, finding.key.stage) == ("fc", "output", Stage.FORWARD)
    assert finding.numbers["positive_inf_count"] == 8
    records = {(r.key.layer, r.key.tensor): r for r in only(tmp_path).records(iteration=0)}
    assert records["fc", "activation"].statistics["amax"] == 40
    assert np.isinf(records["fc", "output"].high_precision).all()
    assert np.isnan(records["", "loss"].high_precision)
    verdict = judged(only(tmp_path))
    assert kind_of(verdict) == ("numbers", "certain")
    assert began(verdict) == ("fc weight 0.0", "fc output 0.0")
    assert verdict.began.between == ("the operation of fc",)
    assert verdict.evidence[1] == "activation and weight of fc are finite."
    assert verdict.evidence[2] == "it is float16, which ends at 65504: what is beyond is Inf."
    assert (verdict.elements.num_faulty, verdict.elements.rows, verdict.elements.columns) == (8, (0, 1), (0, 1, 2, 3))
    assert verdict.precursors == ()
    assert verdict.story == (
        "In iteration 0, microbatch 0, fc output holds 8 +Inf of 8 values, none of them finite. The last clean record "
        "before it is fc weight (forward); between them, not recorded: the operation of fc. The cause: fc output came "
        "out bad of operands that are clean. At fault: all 8 elements. It was noticed in iteration 0 by the rule "
        "nonfinite at fc output."
    )


def test_f10_a_clamp_behind_the_product_still_shows_the_inf_in_its_output(tmp_path):
    f10_run(tmp_path, clamp=True)
    assert only(tmp_path).blame()[0].key.layer == "fc"


def test_f10_controls_are_silent(tmp_path):
    f10_run(tmp_path / "clamped", clamp=True, tensors=["loss"])
    f10_run(tmp_path / "small", clamp=False, factor=1)
    assert not incidents(tmp_path / "clamped")
    assert not incidents(tmp_path / "small")


# -- F12: NaN only in backward ----------------------------------------------------------------------------------------


class WhereBlock(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.faulty:
            return x * 1.5
        return torch.where(x > 0, torch.sqrt(x), 0)


@pytest.mark.parametrize("faulty", [True, False])
def test_f12_the_gradient_that_leaves_block_2_is_blamed(faulty, tmp_path):
    model = nn.Sequential(WhereBlock(faulty=False), WhereBlock(faulty=faulty), WhereBlock(faulty=False))
    # attach needs a parameter to know the device
    model.register_buffer("unused", torch.zeros(1))
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(model)
        for _ in range(2):
            x = torch.tensor([0.0, 4.0], requires_grad=True)
            loss = model(x).sum()
            recorder.loss(loss)
            loss.backward()
            recorder.step()
    if not faulty:
        assert not incidents(tmp_path)
        return
    assert torch.isnan(x.grad).any()
    incident = only(tmp_path)
    findings = incident.blame()
    first = findings[0]
    assert (first.key.layer, first.key.tensor, first.key.stage) == ("1", "dgrad", Stage.BACKWARD)
    assert all(finding.key.stage is Stage.BACKWARD and finding.key.layer != "2" for finding in findings if finding.key)
    assert incident.records(layer="1", tensor="input") and incident.records(layer="1", tensor="output")
    verdict = judged(incident)
    assert kind_of(verdict) == ("numbers", "certain")
    assert began(verdict) == ("1 gradient 0.0", "1 dgrad 0.0")
    assert verdict.began.between == ("backward of the operation of 1",)
    assert (verdict.elements.indices, verdict.precursors) == (((0,),), ())


# -- F16: the framework hides the NaN loss ----------------------------------------------------------------------------


def test_f16_the_raw_loss_is_blamed_before_the_weights_become_nan(tmp_path):
    weight = nn.Parameter(torch.ones(4))
    holder = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    logged, seen = 0.0, []
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(holder)
        for iteration in range(4):
            loss = (weight * (float("nan") if iteration == 2 else 0.25)).sum()
            recorder.loss(loss)  # the raw value
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            raw = loss.item()
            logged += raw if math.isfinite(raw) else logged / (1 + iteration)  # what the logger shows
            seen.append(logged / (iteration + 1))
            recorder.step()
    assert all(map(math.isfinite, seen))
    incident = only(tmp_path)
    assert incident.trigger.iteration == 2
    first = incident.blame()[0]
    assert (first.iteration, first.key.tensor, first.key.stage) == (2, "loss", Stage.LOSS)
    assert {finding.key.tensor for finding in incident.blame()[1:] if finding.key} >= {"wgrad", "parameter"}
    verdict = judged(incident)
    assert kind_of(verdict) == ("loss", "likely")
    assert began(verdict) == ("the model parameter (0) 1.-1", "the loss 2.0")
    assert verdict.began.between == ("softmax of the logits", "loss")
    assert verdict.evidence[1:] == ("the logits are not recorded.", "the labels are not recorded.")
    assert "not selected" in verdict.missing[0] and verdict.advice.startswith("budget: none")
    assert (verdict.elements.num_faulty, verdict.precursors) == (1, ())


# -- F17: a kernel leaves the rows of the tail unwritten --------------------------------------------------------------


class Unwritten(torch.autograd.Function):
    """Writes the first four rows only; what stands in the memory of the others shows."""

    @staticmethod
    def forward(ctx, x, dirt, gradient_dirt):
        ctx.dirt = gradient_dirt
        out = torch.full_like(x, dirt)
        out[:4] = 2 * x[:4]
        return out

    @staticmethod
    def backward(ctx, gradient):
        out = torch.full_like(gradient, ctx.dirt)
        out[:4] = 2 * gradient[:4]
        return out, None, None


class Grouped(nn.Module):
    def forward(self, x: torch.Tensor, dirt: float, gradient_dirt: float) -> torch.Tensor:
        return Unwritten.apply(x, dirt, gradient_dirt)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.op = nn.Linear(8, 8), Grouped()

    def forward(self, x: torch.Tensor, dirt: float, gradient_dirt: float) -> torch.Tensor:
        return self.op(self.fc(x), dirt, gradient_dirt)[:4].square().sum()


def f17_train(directory: Path, *, dirt: float) -> flightrec.Incident:
    torch.manual_seed(0)
    model = Padded()
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=directory) as recorder:
        recorder.attach(model)
        for iteration in range(3):  # fresh memory is zero
            model(torch.randn(6, 8), dirt if iteration else 0.0, math.nan if iteration else 0.0).backward()
            recorder.step()
    return only(directory)


def test_f17_rows_that_no_kernel_wrote_are_named_as_a_tail(tmp_path):
    incident = f17_train(tmp_path, dirt=math.nan)
    assert incident.trigger.iteration == 1
    verdict = judged(incident)
    assert kind_of(verdict) == ("padding", "likely")
    assert began(verdict) == ("op input 1.0", "op output 1.0")
    assert verdict.began.between == ("the operation of op",)
    assert (verdict.elements.valid_rows, verdict.elements.rows, verdict.elements.num_faulty) == (4, (4, 5), 16)
    assert "At fault: rows 4 to 5 of 6, none before." in verdict.story
    assert verdict.precursors == ()
    first = incident.blame(elements=True)[0]
    assert (repr(first.elements), incident.blame()[0].elements) == (repr(verdict.elements), None)  # NaN among them
    assert incident.verdict().kind == "numbers"  # the tables do not tell which rows


def test_f17_in_backward_alone_it_is_a_tail_of_the_gradient(tmp_path):
    verdict = judged(f17_train(tmp_path, dirt=0.0))
    assert kind_of(verdict) == ("padding", "likely")
    assert began(verdict) == ("op gradient 1.0", "op dgrad 1.0")
    assert verdict.began.between == ("backward of the operation of op",)
    assert (verdict.elements.valid_rows, verdict.elements.rows) == (4, (4, 5))


# -- F23: in-place operations -----------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y += x
        return self.relu(y)


def f23_train(recorder: flightrec.Recorder | None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(InPlace(), InPlace())
    if recorder:
        recorder.attach(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        if recorder:
            recorder.step(loss=loss)
    return [p.detach().clone() for p in model.parameters()]


def test_f23_in_place_modules_train_the_same_and_their_gradients_are_recorded(tmp_path):
    plain = f23_train(None)
    with flightrec.Recorder(config({"kind": "manual"}), directory=tmp_path) as recorder:
        recorder.trigger("look")
        recorded = f23_train(recorder)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    layers = {record.key.layer for record in only(tmp_path).records(tensor="gradient", iteration=0)}
    assert {"0", "1", "0.fc", "1.fc", "0.relu", "1.relu"} <= layers


def test_f23_what_enters_an_in_place_module_is_kept_as_it_was(tmp_path):
    model = nn.Sequential(nn.Hardtanh(inplace=True))
    model.register_buffer("unused", torch.zeros(1))
    with flightrec.Recorder(config(), directory=tmp_path) as recorder:
        recorder.attach(model)
        model(torch.tensor([math.inf, 1.0]))
        recorder.step()
    incident = only(tmp_path)
    # The outer module is entered first, with the same tensor.
    assert {(f.key.layer, f.key.tensor) for f in incident.blame()} == {("", "input"), ("0", "input")}
    (entered,) = incident.records(layer="0", tensor="input", iteration=0)
    (left,) = incident.records(layer="0", tensor="output", iteration=0)
    assert entered.high_precision.tolist() == [math.inf, 1.0]
    assert left.high_precision.tolist() == [1.0, 1.0]
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("numbers", "weak"), ("none", "the model input 0.0"))
    assert (verdict.elements.indices, verdict.elements.values) == (((0,),), (math.inf,))
    assert "not selected" in verdict.missing[0]


# -- F24: keyword-only inputs, dict and list outputs ------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    aux: list[torch.Tensor]
    n: int = 3
    none: None = None


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.fc2, self.kind, self.made = nn.Linear(4, 4), nn.Linear(4, 4), kind, None

    def forward(self, *, x: torch.Tensor) -> Any:
        y, aux = self.fc(x), [self.fc2(x)]
        self.made = Output(y, aux) if self.kind == "dataclass" else {"y": y, "aux": aux, "n": 3, "none": None}
        return self.made


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_f24_structured_inputs_and_outputs_are_recorded_by_path(kind, tmp_path):
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d = Structured(kind)

        def forward(self, x: torch.Tensor) -> Any:
            return self.d(x=x)

    root = Root()
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(root)
        for iteration in range(2):
            if iteration == 1:
                with torch.no_grad():
                    root.d.fc2.bias[0] = math.nan
            out = root(torch.randn(2, 4, requires_grad=True))
            assert out is root.d.made
            y, aux = (out.y, out.aux[0]) if kind == "dataclass" else (out["y"], out["aux"][0])
            (y.sum() + aux.sum()).backward()
            recorder.step()
    incident = only(tmp_path)
    parts = {(r.key.tensor, r.key.part) for r in incident.records(layer="d", iteration=0)}
    assert parts == {
        ("input", "x"), ("output", "y"), ("output", "aux.0"),
        ("gradient", "y"), ("gradient", "aux.0"), ("dgrad", "x"),
    }  # fmt: skip
    named = [(f.key.layer, f.key.tensor, f.key.part) for f in incident.blame() if f.key]
    assert ("d", "output", "aux.0") in named
    assert ("d", "output", "y") not in named
    verdict = judged(incident)
    assert (kind_of(verdict), began(verdict)) == (("numbers", "certain"), ("d.fc2 weight 1.0", "d.fc2 output 1.0"))
    assert (verdict.elements.columns, verdict.elements.indices) == ((0,), ((0, 0), (1, 0)))


# -- F34: names -------------------------------------------------------------------------------------------------------


def test_f34_every_name_comes_back_and_nothing_is_overwritten(tmp_path):
    names = ["layers.0.fc1", "layers.0.fc1", "a", "a/b", "a_b", "a b", "a.b", ".", "..", "x//y", "tr/", "n\0m", "n", ""]
    names += ["ünïcode", "z" * 3000, "z" * 2999 + "y", "%2F", "a%2Fb", "\ud800"]
    with flightrec.Recorder(config({"kind": "manual"}, after=0), directory=tmp_path) as recorder:
        value = 0
        expected: dict[tuple[str, int], list[int]] = {}
        for microbatch in range(2):
            with recorder.microbatch(microbatch):
                for _call in range(2):
                    for name in names:
                        value += 1
                        expected.setdefault((name, microbatch), []).append(value)
                        recorder.record(name, "output", high_precision=torch.tensor([float(value)]))
        recorder.trigger("names")
        recorder.step()
    incident = only(tmp_path)
    found: dict[tuple[str, int], list[int]] = {}
    for record in incident.records(tensor="output"):
        assert record.key.phase is Phase.TRAIN
        found.setdefault((record.key.layer, record.key.microbatch), []).append(int(record.high_precision[0]))
    assert found == expected


# -- F39: types that HDF5 does not know -------------------------------------------------------------------------------

CODES = {
    "float8_e4m3fn": (torch.float8_e4m3fn, [0x7F, 0xFF, 0x80, 0x00, 0x7E, 0x01]),
    "float8_e5m2": (torch.float8_e5m2, [0x7C, 0x7D, 0x80, 0xFF, 0x7B, 0x01]),
    "float8_e8m0fnu": (torch.float8_e8m0fnu, [0xFF, 0x00, 0x7F, 0xFE]),
}


def test_f39_bits_survive_and_plain_h5py_reads_them(tmp_path):
    bf16 = torch.tensor([0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80], dtype=torch.uint16)
    packed = torch.tensor([[0x1F, 0x80, 0x07]], dtype=torch.uint8)  # an odd number of bytes in the last dimension
    with flightrec.Recorder(config({"kind": "manual"}, after=0), directory=tmp_path) as recorder:
        recorder.record("bf16", "output", high_precision=bf16.view(torch.bfloat16))
        for name, (dtype, codes) in CODES.items():
            data = torch.tensor(codes, dtype=torch.uint8).view(dtype)
            recorder.record(name, "output", quantized=flightrec.Quantized(data, name))
        recorder.record("fp4", "output", quantized=flightrec.Quantized(packed, "float4_e2m1fn_x2"))
        recorder.trigger("types")
        recorder.step()
    incident = only(tmp_path)
    (tensors,) = incident.path.glob("*.tensors.h5")
    with h5py.File(tensors, "r") as file:
        for record in incident.records(tensor="output"):
            group = file[record.path]
            if record.key.layer == "bf16":
                data = group["high_precision"]
                assert data.attrs["format"] == "bfloat16"
                assert data[()].tolist() == bf16.tolist()
                decoded = (data[()].astype("u4") << 16).view("f4")
                assert np.isnan(decoded[:2]).all() and math.copysign(1, decoded[2]) == -1 and np.isinf(decoded[4])
            elif record.key.layer == "fp4":
                assert group["data"].attrs["format"] == "float4_e2m1fn_x2"
                assert group["data"][()].tolist() == packed.tolist()
                assert record.shape == (1, 6)
                assert record.quantized.dequantize().tolist() == [[-6.0, 0.5, 0.0, -0.0, 6.0, 0.0]]
            else:
                assert group["data"].attrs["format"] == record.key.layer
                assert group["data"].dtype == np.uint8
                assert group["data"][()].tolist() == CODES[record.key.layer][1]


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 2)

    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(torch.where(x > 0, x, 0 * x / x))


@pytest.mark.parametrize("compiled_first", [False, True], ids=["attach first", "compiled and run before attach"])
def test_f26_a_fault_inside_a_compiled_region_is_blamed_where_it_arose(compiled_first, tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Compiled()
    call = torch.compile(net, backend="eager", fullgraph=True)
    healthy = torch.randn(3, 4)
    if compiled_first:
        call(healthy).sum().backward()
    with flightrec.Recorder(config({"kind": "nonfinite"}), directory=tmp_path) as recorder:
        recorder.attach(net)
        for x in (healthy, healthy, torch.zeros(3, 4)):
            with torch.no_grad():
                net.fc1.bias.mul_(float(x.any()))  # in the last one 0 / 0 arises between the two layers
            call(x).sum().backward()
            recorder.step(loss=torch.zeros(()))
    (incident,) = incidents(tmp_path)
    assert incident.trigger.iteration == 2
    keys = [record.key for record in incident.records(layer="fc*") if record.iteration == 2]
    assert {("fc1", "output"), ("fc2", "activation"), ("fc2", "gradient")} <= {(k.layer, k.tensor) for k in keys}
    first = incident.blame()[0]
    assert (first.key.layer, first.key.tensor) == ("fc2", "activation")
    verdict = judged(incident)
    assert kind_of(verdict) == ("numbers", "likely")
    assert began(verdict) == ("fc1 output 2.0", "fc2 activation 2.0")
    assert verdict.began.between == ("activation function",)
    torch._dynamo.reset()
