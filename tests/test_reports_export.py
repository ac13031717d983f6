"""`flightrec export`: the folder's script is run in a process of its own, without flightrec, and believed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cli_support import flightrec
from format_contract import swizzled
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.codecs import base, quantized
from flightrec.records import Key, QuantizerInfo, Stage
from flightrec.reports.export import checksum, export_path

torch = pytest.importorskip("torch")
reproduce = pytest.importorskip("flightrec.interop.reproduce")

LAYER = "blocks.0.fc1"
ACTIVATION = Key(LAYER, "activation", microbatch=0)
WEIGHT = Key(LAYER, "weight", microbatch=0)
OUTPUT = Key(LAYER, "output", microbatch=0)
GRADIENT = Key(LAYER, "gradient", microbatch=0, stage=Stage.BACKWARD)


def bfloat16(values: Any) -> np.ndarray:
    return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")


def write(folder: Path, samples: Sequence[Sample], *infos: QuantizerInfo) -> Path:
    folder.mkdir(exist_ok=True)
    return write_incident(folder, {7: samples}, [firing(ACTIVATION, 7)], quantizers=[info.to_json() for info in infos])


def plain(key: Key, values: Any) -> Sample:
    return Sample(key, {"high_precision": (bfloat16(values), "bfloat16")}, statistics())


OURS = ("flightrec", "h5py", "ml_dtypes", "safetensors")


def run(folder: Path, *arguments: str, without: Sequence[str] = OURS) -> str:
    """Run the script where flightrec, and what it needs, cannot be imported; all else is found as it is here.

    Transformer Engine may be on ``PYTHONPATH``, which an isolated interpreter does not look at.
    """
    forbid = f"""
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {tuple(without)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
sys.path[:0] = [{str(folder)!r}]
sys.path += {[place for place in sys.path if place]!r}
sys.argv = ["reproduce.py", *{list(arguments)!r}]
runpy.run_path({str(folder / "reproduce.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-I", "-c", forbid], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")  # shown where a test fails
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(scheme: str, form: str, scale: np.ndarray, scale_form: str, shape: tuple[int, ...], **more: Any) -> Sample:
    """Codes of every value in a tensor of ``shape`` with one block scale each."""
    number = -(-int(np.prod(shape)) // base.element_format(form).elements_per_item)
    codes = (np.arange(number) * 37 % (64 if "float6" in form else 256)).astype("u1").reshape(*shape[:-1], -1)
    arrays = {"data": (codes, form), "scale_inv": (scale, scale_form), **more}
    return Sample(Key(f"{scheme}.{form}", "activation", microbatch=0), arrays, statistics(), 0, shape=shape)


def formats() -> Mapping[str, tuple[Sample, QuantizerInfo]]:
    """A record of each family, with what its metadata say."""
    info = lambda scheme, form, block=(), **more: QuantizerInfo(  # noqa: E731
        f"te.{scheme}", form, "multiply_to_decode", block, {"scheme": scheme, **more} if scheme else more
    )
    e8m0 = (np.arange(64 * 2) % 9 + 120).astype("u1").reshape(64, 2)
    e4m3 = (np.arange(64 * 4) % 0x70 + 8).astype("u1").reshape(64, 4)
    amax = {"amax": (np.array([3.0], "<f4"), "float32")}
    fp8 = blocks("float8", "float8_e5m2", np.array([0.25], "<f4"), "float32", (2, 4, 32))
    block = blocks("float8_block", "float8_e4m3fn", np.array([[0.5, 3.0]], "<f4"), "float32", (16, 144))
    mx = blocks("mxfp8", "float8_e4m3fn", e8m0, "float8_e8m0fnu", (64, 64))
    nvfp4 = blocks("nvfp4", "float4_e2m1fn_x2", e4m3, "float8_e4m3fn", (64, 64), **amax)
    tiles = blocks("mxfp8", "float8_e5m2", e8m0, "float8_e8m0fnu", (64, 64))
    tiles.arrays = {
        "data": tiles.arrays["data"],
        "swizzled_scale_inv": (swizzled(np.pad(e8m0, ((0, 64), (0, 2)))), "uint8"),
    }
    column = Sample(
        Key("nvfp4.columnwise", "activation", microbatch=0),
        {
            "columnwise_data": (nvfp4.arrays["data"][0], "float4_e2m1fn_x2"),
            "columnwise_scale_inv": (e4m3, "float8_e4m3fn"),
            "columnwise_amax": amax["amax"],
        },
        statistics(), 0, shape=(64, 64),
    )  # fmt: skip
    own = {"scheme": "nvfp4", "format": "float4_e2m1fn_x2", "block_shape": [1, 16], "transposed": True}
    six = blocks("", "float6_e3m2fn", e8m0, "float8_e8m0fnu", (64, 64))
    affine = Sample(
        Key("affine", "weight", microbatch=0),
        {
            "data": (np.arange(-4, 4, dtype="i1"), "int8"),
            "scale_inv": (np.array([0.5], "<f8"), "float64"),
            "zero_point": (np.array([1], "<i8"), "int64"),
        },
        statistics(), 0,
    )  # fmt: skip
    return {
        "float8": (fp8, info("float8", "float8_e5m2")),
        "float8_block": (block, info("float8_block", "float8_e4m3fn", (128, 128))),
        "mxfp8": (mx, info("mxfp8", "float8_e4m3fn", (1, 32))),
        "tiles": (tiles, info("mxfp8", "float8_e5m2", (1, 32))),
        "nvfp4": (nvfp4, info("nvfp4", "float4_e2m1fn_x2", (1, 16))),
        "columnwise": (column, info("nvfp4", "float4_e2m1fn_x2", (1, 16), columnwise=own)),
        "six": (six, info("", "float6_e3m2fn", (1, 32))),
        "affine": (affine, info("", "int8")),
    }


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_every_format_is_decoded_by_the_rule_alone(kind: str, tmp_path: Path) -> None:
    """With the script's own functions, in this process: one of its own for each would take minutes."""
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    for name, (sample, info) in formats().items():
        path, target = write(tmp_path / name, [sample], info), tmp_path / f"{name}.repro"
        export_path(path, output=str(target), kind=kind, layer=sample.key.layer, tensor=sample.key.tensor)
        manifest = json.loads((target / "record.json").read_text())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reproduce, "FOLDER", target)
            arrays = reproduce.read_arrays(manifest)
        for component, (array, form) in sample.arrays.items():
            found = arrays[f"record.{component}"]
            assert (found.tobytes(), found.shape) == (array.tobytes(), array.shape), form
        ((side, told),) = manifest["tensors"]["record"]["sides"].items()
        stored, elements = ({k: v[i] for k, v in sample.arrays.items()} for i in (0, 1))
        expected = quantized.dequantize(stored, info.to_json(), formats=elements, shape=sample.shape, side=side)
        found = reproduce.dequantize(told, arrays)
        assert tuple(found.shape) == expected.shape
        assert checksum(found.numpy()) == checksum(expected) == reproduce.checksum(found) == told["crc32"], name
        assert ("values" in told) == (name == "affine")


def test_safetensors_itself_reads_the_dtypes(tmp_path: Path) -> None:
    safe = pytest.importorskip("safetensors.torch")
    sample = formats()["mxfp8"][0]
    sample.arrays = {**sample.arrays, "high_precision": (bfloat16(np.full((64, 64), np.nan)), "bfloat16")}
    path = write(tmp_path / "incident", [sample], formats()["mxfp8"][1])
    target = tmp_path / "repro"
    export_path(path, output=str(target), kind="safetensors", layer="mxfp8.*", tensor="activation")
    found = safe.load_file(target / "tensors.safetensors")
    assert found["record.data"].dtype == torch.float8_e4m3fn
    assert found["record.scale_inv"].dtype == torch.float8_e8m0fnu
    assert found["record.high_precision"].dtype == torch.bfloat16
    assert (
        found["record.high_precision"].view(torch.uint8).numpy().tobytes()
        == sample.arrays["high_precision"][0].tobytes()
    )


def test_a_record_is_told_by_its_script(tmp_path: Path) -> None:
    values = np.array([[1.0, np.nan, 2.0], [3.0, np.inf, 0.0]])
    info = QuantizerInfo("torchao.Float8", "float8_e4m3fn", "multiply_to_encode", (), {})
    both = {
        "high_precision": (bfloat16(values), "bfloat16"),
        "data": (np.array([[0x40, 0x7F, 0x48], [0x4C, 0x7E, 0x00]], "u1"), "float8_e4m3fn"),
        "scale": (np.array(2.0, "<f4"), "float32"),
    }
    path = write(tmp_path / "incident", [Sample(ACTIVATION, both, statistics(), 0)], info)
    target = tmp_path / "repro"
    done = flightrec("export", path, "--layer", LAYER, "--tensor", "activation", "--output", target)
    assert done.returncode == 0, done.stderr
    told = run(target)
    assert "record: blocks.0.fc1 activation, iteration 7, microbatch 0, forward" in told
    assert "high precision (bfloat16): (2, 3), amax 3, rms 1.87083, NaN 1, Inf 1, zeros 1" in told
    assert "not finite at [0, 1], [1, 1]" in told
    assert "in 2 of 2 rows and 1 of 3 columns" in told
    assert "the numbers are those that flightrec decodes: yes" in told
    assert "quantization error 0, 0 underflows" in told
    assert ("Transformer Engine cannot be used here" in told) or "Transformer Engine, " in told


def linear(spoiled: bool = False) -> tuple[list[Sample], QuantizerInfo]:
    generator = np.random.default_rng(0)
    a, w, g = (generator.integers(0x20, 0x48, shape).astype("u1") for shape in ((2, 4, 16), (8, 16), (2, 4, 8)))
    words = {"scheme": "float8"}
    info = QuantizerInfo("te.Float8Tensor", "float8_e4m3fn", "multiply_to_decode", (), words)
    scale = (np.array([0.5], "<f4"), "float32")

    def sample(key: Key, codes: np.ndarray) -> Sample:
        return Sample(key, {"data": (codes, "float8_e4m3fn"), "scale_inv": scale}, statistics(), 0)

    numbers = [base.decode(codes, "float8_e4m3fn").reshape(-1, codes.shape[-1]) / 2 for codes in (a, w, g)]
    out = (numbers[0] @ numbers[1].T).reshape(2, 4, 8)
    out[1, 2] += 1.0 if spoiled else 0.0
    results = {"wgrad": numbers[2].T @ numbers[0], "dgrad": numbers[2] @ numbers[1]}
    keys = [OUTPUT, *(Key(LAYER, name, microbatch=0, stage=Stage.BACKWARD) for name in results)]
    output, *backward = (
        Sample(key, {"high_precision": (values.astype("<f4"), "float32")}, statistics())
        for key, values in zip(keys, (out, *results.values()), strict=True)
    )
    return [sample(ACTIVATION, a), sample(WEIGHT, w), output, sample(GRADIENT, g), *backward], info


def run_here(folder: Path, *arguments: str) -> None:
    """Run the script in this process, without Transformer Engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "FOLDER", folder)
        patch.setattr(sys, "argv", ["reproduce.py", "--device", "cpu", *arguments])
        patch.setattr(reproduce, "with_transformer_engine", lambda *_: None)
        reproduce.main()


def test_a_wrong_product_is_found_by_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, info = linear(spoiled=True)
    path, target = write(tmp_path / "incident", samples, info), tmp_path / "repro"
    done = flightrec("export", path, "--layer", LAYER, "--product", "forward", "--output", target)
    assert done.returncode == 0, done.stderr
    run_here(target, "--double")
    told = capsys.readouterr().out
    assert "forward = activation @ weight.T" in told
    assert "DIFFERENT: 8 of 64 elements, at most 1 apart" in told
    assert "in 1 of 8 rows and 8 of 8 columns" in told


@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
def test_products_agree_with_what_was_recorded(which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, info = linear()
    path, target = write(tmp_path / "incident", samples, info), tmp_path / "repro"
    export_path(path, output=str(target), product=which, layer="blocks.*")
    run_here(target)
    assert "the same up to rounding" in capsys.readouterr().out


def test_a_running_sum_and_a_bias_that_was_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, info = linear()
    output, wgrad = samples[2].arrays["high_precision"][0], samples[4].arrays["high_precision"][0]
    output += np.arange(8, dtype="<f4")
    key = Key(LAYER, "gradient", microbatch=1, stage=Stage.BACKWARD)
    total = {"high_precision": (wgrad + wgrad, "float32")}
    samples += [
        Sample(replace(samples[0].key, microbatch=1), samples[0].arrays, statistics(), 0),
        Sample(key, samples[3].arrays, statistics(), 0),
        Sample(replace(samples[4].key, microbatch=1), total, statistics()),
    ]
    path = write(tmp_path / "incident", samples, info)
    export_path(path, output=str(tmp_path / "a"), product="forward", layer=LAYER, microbatch=0)
    run_here(tmp_path / "a", "--double")
    assert "a bias that was not recorded: at most" in capsys.readouterr().out
    export_path(path, output=str(tmp_path / "b"), product="wgrad", layer=LAYER, microbatch=1)
    run_here(tmp_path / "b", "--double")
    assert "added to what the microbatch before had left: at most" in capsys.readouterr().out


def test_the_operands_of_the_named_pass_and_side_are_taken(tmp_path: Path) -> None:
    samples, info = linear()
    later = Key(LAYER, "activation", microbatch=1)
    backward = Key(LAYER, "weight", microbatch=1, stage=Stage.BACKWARD)
    columns = {"columnwise_data": samples[1].arrays["data"], "columnwise_scale_inv": samples[1].arrays["scale_inv"]}
    samples += [
        Sample(later, samples[0].arrays, statistics(), 0),
        Sample(backward, columns, statistics(), 0),
        Sample(Key(LAYER, "gradient", microbatch=1, stage=Stage.BACKWARD), samples[3].arrays, statistics(), 0),
    ]
    path = write(tmp_path / "incident", samples, info)

    first = export_path(path, output=str(tmp_path / "a"), product="forward", layer=LAYER)
    assert first["num_others"] == 1
    assert {entry["key"]["microbatch"] for entry in first["tensors"].values()} == {0}
    second = export_path(path, output=str(tmp_path / "b"), product="dgrad", layer=LAYER, microbatch=1)["tensors"]
    assert (second["gradient"]["key"]["microbatch"], second["weight"]["key"]["stage"]) == (1, "backward")
    assert "output" not in second


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    bare = Sample(Key("bare", "loss"), {}, statistics(), shape=(2,), dtype="float32", reason="does not fit")
    path = write(tmp_path / "incident", [plain(ACTIVATION, np.ones((2, 2))), bare])

    def refused(*words: str) -> tuple[int, str]:
        done = flightrec("export", path, "--output", tmp_path / "repro", *words)
        assert not (tmp_path / "repro").exists()
        assert not list(tmp_path.glob(".repro*"))
        return done.returncode, done.stderr

    assert refused("--layer", LAYER)[0] == 2
    assert refused("--layer", LAYER, "--tensor", "weight", "--product", "forward")[0] == 2
    assert refused("--layer", LAYER, "--product", "sideways")[0] == 2
    assert refused("--layer", LAYER, "--tensor", "activation", "--format", "pickle")[0] == 2
    code, told = refused("--layer", "nowhere", "--tensor", "activation")
    assert code == 3 and "layers are" in told and LAYER in told
    code, told = refused("--layer", "bare", "--tensor", "loss")
    assert code == 3 and "does not fit" in told
    code, told = refused("--layer", LAYER, "--product", "forward")
    assert code == 3 and "needs its weight" in told
    with mock.patch.dict(sys.modules, {"safetensors": None, "safetensors.numpy": None}):
        code, told = refused("--layer", LAYER, "--tensor", "activation", "--format", "safetensors")
    assert code == 2 and "torch-flightrec[export]" in told
    (tmp_path / "there").mkdir()
    done = flightrec("export", path, "--layer", LAYER, "--tensor", "activation", "--output", tmp_path / "there")
    assert done.returncode == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipes", [("current", "current"), ("block1", "block2"), ("block1", "block1")], ids="-".join)
def test_transformer_engine_repeats_a_product_from_the_folder(recipes: tuple[str, str], tmp_path: Path) -> None:
    from test_interop_tensors import gpu_has_transformer_engine, recorded
    from test_sources_extract_te_gpu import quantizer_of

    if not gpu_has_transformer_engine():
        pytest.skip("needs Transformer Engine with its compiled extension")
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def quantized_by(name: str, *shape: int) -> Any:
        values = torch.randn(shape, device="cuda").to(torch.bfloat16)
        return quantizer_of(name, "kFloat8E4M3", rowwise=True, columnwise=True)(values)

    a, w = quantized_by(recipes[0], 256, 512), quantized_by(recipes[1], 384, 512)
    out = general_gemm(w, a, out_dtype=torch.bfloat16, layout="TN")[0]
    with recorded(tmp_path / "incidents", tensors={"activation": a, "weight": w, "output": out}) as incident:
        path = incident.path
    target = tmp_path / "repro"
    export_path(path, output=str(target), product="forward", layer="layer")
    told = run(target, "--device", "cuda", without=["flightrec"])
    assert "Transformer Engine, activation: " in told and "Transformer Engine, weight: " in told
    assert told.count("decodes to the same numbers") == 2, told
    assert "the same up to rounding" in told
    assert "bit for bit the recorded output" in told and "NOT bit" not in told
