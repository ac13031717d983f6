"""Transformer Engine training on a GPU: the evidence is that of the run, bit for bit, and faults are found by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import te_models
import torch
from cli_support import flightrec as command
from te_models import NUM_LAYERS, NUM_MICROBATCHES, PRODUCTS, RECIPES, Operand, Spy, product_of

import flightrec
from flightrec.config.load import packaged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
]

SIDES = {"rowwise": "", "columnwise": "columnwise_"}


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    te_models.load()


def only(directory: Path) -> flightrec.Incident:
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


def config(*triggers: dict[str, Any], tensors: Any, iterations: int = 4, **select: Any) -> dict[str, Any]:
    return {
        "budget": "none",
        "ring": {"iterations": iterations, "memory": "2 GiB"},
        "select": [{"tensors": tensors, **select}],
        "triggers": list(triggers) or [{"kind": "manual"}],
        "incident": {"after": 0},
    }


# -- what an incident holds is what the products read ------------------------------------------------------------------

LOOKED_AT = 3

DECODE = """
import sys
for name in ("torch", "transformer_engine", "transformer_engine_torch", "nvdlfw_inspect"):
    sys.modules[name] = None  # importing it fails
import numpy as np, flightrec
decoded = {}
with flightrec.open(sys.argv[1]) as incident:
    for record in incident.records():
        quantized = record.quantized
        for side, prefix in (("rowwise", ""), ("columnwise", "columnwise_")):
            if quantized is not None and prefix + "data" in quantized.components:
                decoded[f"{record.index}.{side}"] = quantized.dequantize(side=side)
np.savez(sys.argv[2], **decoded)
"""


def run_and_look(recipe: str, directory: Path) -> tuple[flightrec.Incident, Spy]:
    """Train for some iterations under the spy; the incident is of the iteration that it looked at."""
    spy = Spy()
    model = te_models.make()

    def look(iteration: int, microbatch: int) -> None:
        spy.on = iteration == LOOKED_AT

    with spy.installed(), flightrec.Recorder(config(tensors=["activation", "weight", "gradient"], iterations=1),
                                             directory=directory) as recorder:  # fmt: skip
        recorder.attach(model)
        te_models.train(
            model, te_models.recipe_of(recipe), te_models.tokens(LOOKED_AT + 2), recorder, before=look,
            end=lambda iteration: recorder.trigger("look") if iteration == LOOKED_AT else None,
        )  # fmt: skip
    return only(directory), spy


def decode_without_torch(incident: flightrec.Incident, directory: Path) -> dict[tuple[int, str], np.ndarray]:
    """(record, side) to values, made by a process that can import neither torch nor Transformer Engine."""
    target = directory / "decoded.npz"
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(incident.path), str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(target) as decoded:
        return {(int(name.split(".")[0]), name.split(".")[1]): decoded[name] for name in decoded}


def decode_by_hand(rank: Any, index: int) -> np.ndarray:
    """The row-wise values of a record in a few lines of numpy, without any code of flightrec's."""
    with h5py.File(rank.facts_path) as facts, h5py.File(rank.tensors_path) as tensors:
        names, row = facts["names"].asstr()[:], facts["records"][index]
        group = tensors[names[row["path"]]]
        assert facts["quantizers"][row["quantizer"]]["scale_direction"] == b"multiply_to_decode"
        codes, scale = group["data"][:], group["scale_inv"][()].astype("f4")
        if group["data"].attrs["format"] == "float8_e5m2":
            values = (codes.astype("u2") << 8).view("f2").astype("f4")
        else:
            c = codes.astype("i4")
            exponent, mantissa = c >> 3 & 15, c & 7
            values = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa / 512).astype("f4")
            values = np.where(c & 128, -values, values)
            values[c & 127 == 127] = np.nan
    if scale.size == 1:
        return values * scale.reshape(())
    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    scale = scale.reshape(-1, scale.shape[-1])
    full = scale.repeat(-(-rows // scale.shape[0]), axis=0)[:rows].repeat(128, axis=1)[:, :columns]
    return values * full.reshape(values.shape)


def stored_codes(record: Any, side: str) -> np.ndarray:
    """The codes in logical order."""
    codes = record.quantized.components[f"{SIDES[side]}data"]
    if side == "columnwise" and record.quantized.metadata.get("metadata", {}).get("columnwise_transposed"):
        return np.moveaxis(codes, 0, -1)
    return codes


def same_scales(stored: np.ndarray, raw: np.ndarray) -> bool:
    """Whether the stored scales are those of the run: cropped, and turned, if the run had them padded and turned."""
    if raw.size == 1:
        return stored.size == 1 and bool(stored.reshape(()) == raw.reshape(()))
    stored = stored.reshape(-1, stored.shape[-1])
    height, width = stored.shape
    return any(np.array_equal(stored, way[:height, :width]) for way in (raw, raw.T))


def is_of(record: Any, side: str, operand: Operand, decoded: np.ndarray) -> bool:
    """Whether one side of a record is this operand of the run: codes, scales and values."""
    if side not in operand.codes:
        return False
    codes, values = operand.numpy("codes", side), operand.numpy("values", side)
    scale = record.quantized.components[f"{SIDES[side]}scale_inv"]
    return (
        codes.size == decoded.size
        and np.array_equal(stored_codes(record, side).reshape(-1), codes.reshape(-1))
        and same_scales(scale, operand.numpy("scales", side))
        and np.array_equal(decoded.reshape(-1).view("u4"), values.reshape(-1).view("u4"))
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_operand_is_that_of_the_run_and_decodes_to_what_the_gpu_says(recipe: str, tmp_path: Path) -> None:
    incident, spy = run_and_look(recipe, tmp_path / "incidents")
    read = spy.by_key()
    assert len(read) == NUM_LAYERS * len(PRODUCTS) * 3 * NUM_MICROBATCHES
    decoded = decode_without_torch(incident, tmp_path)
    held: dict[tuple[int, str, str, int], set[str]] = {}
    for record in incident.records(iteration=LOOKED_AT, tensor=["activation", "weight", "gradient"]):
        at = product_of(record.key.layer)
        if at is None or record.quantized is None:
            continue
        assert record.why_absent == "", record
        key = (*at, record.key.tensor, max(record.key.microbatch, 0))
        for side in SIDES:
            if (record.index, side) not in decoded:
                continue
            values = decoded[record.index, side]
            assert any(is_of(record, side, operand, values) for operand in read[key]), (record, side)
            held.setdefault(key, set()).add(side)
            if side == "rowwise":
                by_hand = decode_by_hand(incident.ranks[0], record.index)
                assert np.array_equal(by_hand.reshape(-1), decoded[record.index, side].reshape(-1)), record
    sides = {"rowwise", "columnwise"} if recipe == "block" else {"rowwise"}
    for layer in range(NUM_LAYERS):
        for product in PRODUCTS:
            assert any((layer, product, "weight", i) in held for i in range(NUM_MICROBATCHES)), (layer, product)
            for tensor in ("activation", "gradient"):
                for microbatch in range(NUM_MICROBATCHES):
                    key = (layer, product, tensor, microbatch)
                    assert held.get(key, set()) >= sides, (key, held.get(key))


def test_an_operand_of_another_microbatch_is_told_apart(tmp_path: Path) -> None:
    """The comparison above can fail: no activation is that of another microbatch."""
    incident, spy = run_and_look("current", tmp_path)
    read = spy.by_key()
    records = incident.records(iteration=LOOKED_AT, tensor="activation", microbatch=0)
    mine = {product_of(record.key.layer): record for record in records if record.quantized is not None}
    assert len(mine) == NUM_LAYERS * len(PRODUCTS)
    for (layer, product), record in mine.items():
        values = record.quantized.dequantize()
        assert is_of(record, "rowwise", read[layer, product, "activation", 0][0], values)
        assert not is_of(record, "rowwise", read[layer, product, "activation", 1][0], values)


# -- the run is the same ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_parameters_are_bit_identical(recipe: str, checkpointing: str, tmp_path: Path, caplog: Any) -> None:
    data = te_models.tokens(20)
    options = {"checkpointing": checkpointing, "dropout": 0.1}
    plain = te_models.train(te_models.make(**options), te_models.recipe_of(recipe), data)
    again = te_models.train(te_models.make(**options), te_models.recipe_of(recipe), data)
    assert all(map(torch.equal, plain, again)), "the run without a recorder is not reproducible"
    model = te_models.make(**options)
    everything = config({"kind": "nonfinite"}, tensors="*", iterations=2, phases=["train", "recompute"])
    with flightrec.Recorder(everything, directory=tmp_path) as recorder:
        recorder.attach(model)
        recorded = te_models.train(
            model, te_models.recipe_of(recipe), data, recorder,
            end=lambda iteration: recorder.trigger("in between") if iteration == 10 else None,
        )  # fmt: skip
    assert len(plain) == 20 * NUM_MICROBATCHES + len(list(model.parameters())) == len(recorded)
    assert all(map(torch.equal, plain, recorded))
    assert "disarmed" not in caplog.text
    incident = only(tmp_path)
    assert {firing.kind for firing in incident.firings} == {"manual"}
    found = {
        (*at, record.key.tensor, record.key.phase.value)
        for record in incident.records(iteration=10)
        if (at := product_of(record.key.layer)) is not None and record.quantized is not None
    }
    phases = ["train"] if checkpointing == "none" else ["train", "recompute"]
    wanted = {
        (layer, product, tensor, phase)
        for layer in range(NUM_LAYERS)
        for product in PRODUCTS
        for tensor, phase in [("gradient", "train"), *(("activation", phase) for phase in phases)]
    }
    assert wanted <= found


# -- planted faults ---------------------------------------------------------------------------------------------------


class Now:
    """Which iteration and microbatch run: the ``before`` of a training."""

    def __init__(self) -> None:
        self.at = (-1, -1)

    def __call__(self, iteration: int, microbatch: int) -> None:
        self.at = (iteration, microbatch)


def told(incident: flightrec.Incident) -> dict[str, Any]:
    """What ``flightrec inspect`` blames first."""
    done = command("inspect", incident.path, "--json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["blame"][0]
    own = incident.blame()[0]
    assert own.key is not None
    assert (first["key"]["layer"], first["key"]["microbatch"]) == (own.key.layer, own.key.microbatch)
    return first


def fired_at(incident: flightrec.Incident, layer: int, product: str, tensor: str) -> dict[str, Any]:
    """By kind, the first firing at one product's tensor, in the order of the microbatches."""
    found: dict[str, Any] = {}
    for firing in sorted(incident.firings, key=lambda firing: firing.key.microbatch if firing.key else -1):
        if firing.key and product_of(firing.key.layer) == (layer, product) and firing.key.tensor == tensor:
            found.setdefault(firing.kind, firing)
    return found


def test_a_weight_row_that_grows_until_fc2s_input_overflows(tmp_path: Path) -> None:
    """Delayed scaling runs one update behind: each growth clips the first microbatch after it."""
    layer, start, growth = 2, 4, 16.0
    model = te_models.make()
    weight = model.layers[layer].layernorm_mlp.fc1_weight

    def grow(iteration: int) -> None:
        if iteration >= start:
            with torch.no_grad():
                weight[17].mul_(growth)

    rules = [{"kind": "nonfinite"}, {"kind": "saturation"}, {"kind": "stale_scale", "margin": 0}]
    made = config(*rules, tensors=["activation", "weight", "gradient"])
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(model)
        data = te_models.tokens(start + 6)
        te_models.train(model, te_models.recipe_of("delayed"), data, recorder, optimizer="sgd", end=grow)
    incident = only(tmp_path)
    assert start < incident.trigger.iteration <= start + 5
    hits = fired_at(incident, layer, "fc2", "activation")
    assert set(hits) & {"stale_scale", "saturation"}, [firing.message for firing in incident.firings]
    assert {hit.key.microbatch for hit in hits.values()} == {0}
    first = told(incident)
    assert (product_of(first["key"]["layer"]) or (None,))[0] == layer
    assert "mlp" in first["key"]["layer"]
    assert first["key"]["microbatch"] == 0
    clipped = {
        record.key.microbatch: record.statistics["quantized_saturated_count"]
        for record in incident.records(iteration=incident.trigger.iteration, tensor="activation")
        if product_of(record.key.layer) == (layer, "fc2")
    }
    assert clipped[0] > max(clipped[i] for i in range(1, NUM_MICROBATCHES))


def unchanged_iterations(rank: Any, layer: str, tensor: str, iteration: int) -> int:
    """For how many iterations before this one a scale has been the same word: plain h5py."""
    with h5py.File(rank.facts_path) as facts:
        names, series = facts["names"].asstr()[:], facts["series"][:]
        (column,) = np.flatnonzero((names[series["layer"]] == layer) & (names[series["tensor"]] == tensor))
        past = facts["history/scale_min/iterations"][:] <= iteration
        scale = facts["history/scale_min/values"][past, column]
    (others,) = np.nonzero(scale != scale[-1])
    return len(scale) - 1 - (others[-1] + 1 if len(others) else 0)


def test_a_scale_left_stale_by_a_skipped_update(tmp_path: Path) -> None:
    """One quantizer's scale stays where it was while its input grows by 3% an iteration."""
    layer, frozen = 1, 5
    model, now = te_models.make(), Now()
    proj = model.layers[layer].self_attention.proj
    kept: list[torch.Tensor] = []

    def skip_the_update(iteration: int, microbatch: int) -> None:
        scale = proj.fp8_meta["scaling_fwd"].scale
        if iteration >= frozen:
            kept or kept.append(scale[0].clone())
            scale[0].copy_(kept[0])

    proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.03 ** max(0, now.at[0] - frozen), *args[1:]))
    rules = [{"kind": "nonfinite"}, {"kind": "saturation"}, {"kind": "stale_scale", "margin": 0}]
    with flightrec.Recorder(config(*rules, tensors=["activation"]), directory=tmp_path) as recorder:
        recorder.attach(model)
        te_models.train(
            model, te_models.recipe_of("delayed"), te_models.tokens(frozen + 45), recorder, optimizer="sgd",
            before=now, after=skip_the_update,
        )  # fmt: skip
    incident = only(tmp_path)
    (hit,) = fired_at(incident, layer, "proj", "activation").values()
    assert hit.kind == "stale_scale"
    assert {firing.key.layer for firing in incident.firings} == {hit.key.layer}
    first = told(incident)
    assert product_of(first["key"]["layer"]) == (layer, "proj")
    assert first["key"]["microbatch"] == hit.key.microbatch
    stale = unchanged_iterations(incident.ranks[0], hit.key.layer, "activation", hit.iteration)
    # The scale may have stood still for up to 16 updates, four iterations, before: so long its history remembers.
    assert hit.iteration - frozen - 1 <= stale <= hit.iteration - frozen + 4
    assert stale >= 20
    (record,) = incident.records(
        layer=hit.key.layer, tensor="activation", iteration=hit.iteration, microbatch=hit.key.microbatch
    )
    with h5py.File(incident.ranks[0].facts_path) as facts:
        told_by_the_file = int(facts["records"]["scale_unchanged_iterations"][record.index])
    assert hit.iteration - frozen - 1 <= told_by_the_file <= hit.iteration - frozen + 4
    assert f"unchanged for {told_by_the_file} iterations" in hit.message.replace("at least ", "")
    words = {
        float(record.quantized.components["scale_inv"].reshape(()))
        for record in incident.records(layer=hit.key.layer, tensor="activation")
    }
    assert words == {np.float32(1) / np.float32(kept[0].item())}
    neighbours = [hit.key.layer.replace(f"layers.{layer}", f"layers.{i}") for i in range(NUM_LAYERS) if i != layer]
    for name in neighbours:
        assert unchanged_iterations(incident.ranks[0], name, "activation", hit.iteration) < 15


def test_a_nan_that_enters_through_one_attention_output(tmp_path: Path) -> None:
    layer, at = 1, (4, 2)
    model, now = te_models.make(), Now()

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if now.at != at:
            return None
        spot = torch.zeros(output.numel(), device=output.device, dtype=output.dtype)
        spot[123] = math.nan
        return output + spot.view(output.shape)

    model.layers[layer].self_attention.core_attention.register_forward_hook(poison)
    made = config({"kind": "nonfinite"}, tensors=["activation", "weight", "gradient", "output", "input"])
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(model)
        te_models.train(
            model, te_models.recipe_of("delayed"), te_models.tokens(7), recorder, before=now, optimizer="sgd"
        )
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", at[0])
    first = told(incident)
    assert first["key"]["layer"].startswith(f"layers.{layer}.self_attention")
    assert first["key"]["microbatch"] == at[1]
    clean = [
        record
        for record in incident.records(iteration=at[0], microbatch=range(at[1]), tensor="activation")
        if product_of(record.key.layer) is not None
    ]
    assert clean
    assert not any(record.statistics["quantized_nan_count"] for record in clean)
    operand = next(
        record
        for record in incident.records(iteration=at[0], microbatch=at[1], tensor="activation")
        if product_of(record.key.layer) == (layer, "proj") and record.quantized is not None
    )
    assert operand.statistics["quantized_nan_count"] >= 1
    assert np.isnan(operand.quantized.dequantize()).any()


def test_a_poisoned_row_in_one_microbatch_of_four(tmp_path: Path) -> None:
    at = (8, 1)
    model, now = te_models.make(stem=True), Now()

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if now.at != at:
            return None
        factor = torch.ones(output.shape[:-1], device=output.device, dtype=output.dtype)
        factor[5, 1] = 1e4
        return output * factor.unsqueeze(-1)

    model.embedding.register_forward_hook(poison)
    watched = ["input", "activation", "gradient"]
    spike = {"kind": "amax_spike", "min_samples": 4, "window": 32, "tensors": watched}
    made = config({"kind": "nonfinite"}, spike, tensors=watched, layers=["stem", "layers*"])
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(model)
        te_models.train(
            model, te_models.recipe_of("current"), te_models.tokens(11), recorder, before=now, optimizer="sgd"
        )
    incident = only(tmp_path)
    assert (incident.trigger.kind, incident.trigger.iteration) == ("amax_spike", at[0])
    assert {firing.key.microbatch for firing in incident.firings if firing.kind == "amax_spike"} == {at[1]}
    first = told(incident)
    assert (first["key"]["layer"], first["key"]["microbatch"]) == ("stem", at[1])
    amax = {
        record.key.microbatch: record.statistics["amax"]
        for record in incident.records(layer="stem", tensor=first["key"]["tensor"], iteration=at[0])
    }
    assert amax[at[1]] > 1000 * max(amax[i] for i in range(NUM_MICROBATCHES) if i != at[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_shipped_configuration_is_silent_on_a_healthy_run(recipe: str, tmp_path: Path) -> None:
    model = te_models.make()
    with flightrec.Recorder(packaged("te-fp8-pretrain"), directory=tmp_path / "out") as recorder:
        recorder.attach(model)
        te_models.train(model, te_models.recipe_of(recipe), te_models.tokens(100), recorder, lr=1e-4)
        print(recorder.summary())
    assert not (tmp_path / "out").exists(), flightrec.open(next((tmp_path / "out").iterdir())).trigger.message
