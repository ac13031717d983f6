"""Records as tensors of torch, Transformer Engine and torchao: bit by bit, and decoded to the same numbers."""

from __future__ import annotations

import importlib.util
import warnings

import numpy as np
import pytest
import te_golden
import torch
from te_tensors import golden_tensor
from test_sources_extract_te import mxfp8, nvfp4

import flightrec
from flightrec.errors import FormatError, IncidentError
from flightrec.sources.extract import extract

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to get shape of NVFP4")

CONFIG = {"budget": "none", "select": [{"tensors": "*"}], "incident": {"after": 0}}


def recorded(directory, *, tensors=None, **layers):
    """Record quantized and plain tensors, each as a layer, or under its name in one; give the open incident."""
    places = [(layer, "activation", it) for layer, it in layers.items()]
    places += [("layer", name, it) for name, it in (tensors or {}).items()]
    with flightrec.Recorder(CONFIG, directory=directory) as recorder:
        for layer, name, tensor in places:
            given = "high_precision" if type(tensor) is torch.Tensor else "quantized"
            recorder.record(layer, name, **{given: tensor})
        recorder.trigger("look")
        recorder.step()
    return flightrec.open(next(directory.iterdir()))


def only(incident, layer):
    (record,) = (record for record in incident.records() if record.key.layer == layer)
    return record


def plain_tensors():
    bits = torch.tensor([[0x7FC1, 0xFFC2, 0x0001, 0x8000]], dtype=torch.int32)
    return {
        "bfloat16": bits.to(torch.uint16).view(torch.bfloat16),
        "float16": torch.tensor([1.5, float("-inf"), -0.0], dtype=torch.float16),
        "float8": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn),
        "float64": torch.tensor([[1e300], [float("nan")]], dtype=torch.float64),
        "int64": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


def golden_tensors():
    """Buffers of a GPU in its own classes."""
    numbers = range(len(te_golden.ENTRIES))
    return {te_golden.name_of(number): golden_tensor(number, storage=bool(number % 2)) for number in numbers}


def microscaled_tensors():
    made = {}
    for shape in ((96, 160), (2, 32, 96)):
        for sides in ({}, {"rowwise": False}, {"columnwise": False}):
            for swizzled in (False, True):
                made[f"mxfp8 {shape} {sides} {swizzled}"] = mxfp8(shape, swizzled=swizzled, storage=False, **sides)
    options = [{}, {"shape": (2, 16, 64)}, {"row_scaled": True}, {"e4m3_max": 256}, {"columnwise_only": True}]
    for how in (*options, {"swizzled": True}):
        made[f"nvfp4 {how}"] = nvfp4(storage=False, **how)[0]
    return made


def torchao_tensors():
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    x = torch.linspace(-3, 5, 64 * 96).view(64, 96).to(torch.bfloat16)
    made = {"tensorwise": hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig())}
    for name, element in {"mx8": torch.float8_e5m2, "mx6": "fp6_e2m3", "mx4": torch.float4_e2m1fn_x2}.items():
        made[name] = MXTensor.to_mx(x, element, 32)
    return {**made, "transposed": made["mx4"].t()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One incident of all tensors, and the tensors: (incident, plain, golden, microscaled, torchao's)."""
    pytest.importorskip("torchao")
    other = flightrec.Quantized(torch.zeros(4, dtype=torch.float8_e4m3fn), "float8_e4m3fn", scale=torch.ones(()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to get shape of NVFP4")
        groups = [plain_tensors(), golden_tensors(), microscaled_tensors(), torchao_tensors()]
        every = {name: tensor for group in groups for name, tensor in group.items()}
        with recorded(tmp_path_factory.mktemp("interop"), other=other, **every) as incident:
            yield incident, *groups


def test_torch_tensors_are_bit_by_bit_what_was_recorded(kept) -> None:
    incident, made = kept[0], kept[1]
    for name, tensor in made.items():
        found = flightrec.to_torch(only(incident, name))
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    codes = flightrec.to_torch(only(incident, "mx8"), "data")
    assert codes.dtype == torch.float8_e5m2
    assert codes.float().equal(kept[4]["mx8"].qdata.float())
    with pytest.raises(IncidentError, match="no component 'data'"):
        flightrec.to_torch(only(incident, "bool"), "data")
    with pytest.raises(IncidentError, match="no quantized side"):
        flightrec.to_transformer_engine(only(incident, "bool"))


def test_transformer_engines_fp8_classes_decode_to_the_same_numbers(kept) -> None:
    for (name, tensor), entry in zip(kept[2].items(), te_golden.ENTRIES, strict=True):
        record = only(kept[0], name)
        made, ours = flightrec.to_transformer_engine(record), record.quantized.dequantize()
        assert type(made).__name__ == entry["class"]
        assert tuple(made.shape) == tuple(entry["shape"])
        assert made.dtype == torch.bfloat16
        found = made.dequantize(dtype=torch.float32).numpy()
        assert_same_numbers(found, ours.reshape(found.shape))
        assert type(made._quantizer).__name__ == entry["quantizer"]["class"]
        assert_held_as_before(made, tensor)


def assert_same_numbers(found: np.ndarray, expected: np.ndarray) -> None:
    """Bit by bit; NaN is NaN, whatever its sign."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view("u4")[~nan], expected.view("u4")[~nan])


def assert_held_as_before(made, tensor) -> None:
    """Every buffer has the bytes it had, the scales' padding aside."""
    for name, before in vars(tensor).items():
        after = getattr(made, name)
        if name == "_transpose" or not isinstance(before, torch.Tensor):
            continue  # per-tensor codes are recorded once
        assert after.shape == before.shape, name
    old, new = (extract(it).parts.components for it in (tensor, made))
    assert old.keys() - {"scale", "amax"} == new.keys() - {"scale", "amax"}
    for name in old:
        flat = [
            it[name].reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for it in (old, new)
        ]
        assert flat[0].equal(flat[1]), name


def test_microscaled_tensors_come_back_as_they_were_held(kept) -> None:
    for name, tensor in kept[3].items():
        made = flightrec.to_transformer_engine(only(kept[0], name))
        assert type(made) is type(tensor), name
        assert_held_as_before(made, tensor)
        assert getattr(made, "_nvfp4_e4m3_max", 448) == (256 if "256" in name else 448)


def test_another_librarys_tensor_is_refused_by_name(kept) -> None:
    record = only(kept[0], "other")
    with pytest.raises(FormatError, match=r"flightrec\.Quantized is none of Transformer Engine's"):
        flightrec.to_transformer_engine(record)
    with pytest.raises(FormatError, match="expected torchao's"):
        flightrec.to_torchao(record)


def test_torchaos_classes_decode_to_the_same_numbers(kept) -> None:
    for name, tensor in kept[4].items():
        record = only(kept[0], name)
        back = flightrec.to_torchao(record)
        assert type(back) is type(tensor), name
        numbers = back.to_original_precision() if name == "tensorwise" else back.dequantize(torch.float32)
        expected = torch.from_numpy(record.quantized.dequantize()).to(numbers.dtype)
        assert numbers.equal(expected.view(numbers.shape)), name


def gpu_has_transformer_engine() -> bool:
    """Whether the package can be used: its compiled extension is found by the package only."""
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:
        return False
    return True


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not gpu_has_transformer_engine(), reason="needs Transformer Engine with its compiled extension")
@pytest.mark.parametrize("shape", [(128, 256), (2, 64, 160)], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block1", "block2"])
def test_the_gpu_decodes_what_comes_back_to_the_same_numbers(recipe, shape, tmp_path) -> None:
    from test_sources_extract_te_gpu import quantizer_of, values_of

    sides = {"both": (True, True), "row": (True, False)}
    quantizers = {n: quantizer_of(recipe, "kFloat8E4M3", rowwise=r, columnwise=c) for n, (r, c) in sides.items()}
    kept = {name: quantizer(values_of(shape)) for name, quantizer in quantizers.items()}
    with recorded(tmp_path, **kept) as incident:
        for name, tensor in kept.items():
            record = only(incident, name)
            made = flightrec.to_transformer_engine(record, device="cuda")
            found = made.dequantize(dtype=torch.float32).cpu().numpy()
            assert type(made) is type(tensor)
            assert found.tobytes() == tensor.dequantize(dtype=torch.float32).cpu().numpy().tobytes()
            assert found.tobytes() == record.quantized.dequantize().tobytes()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not gpu_has_transformer_engine(), reason="needs Transformer Engine with its compiled extension")
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_the_gpu_decodes_microscaled_formats_to_the_same_numbers(kind, tmp_path) -> None:
    """Only the decoding kernel is asked, which exists where products of these formats do not."""
    tensor = mxfp8((128, 256), storage=False) if kind == "mxfp8" else nvfp4((128, 256), storage=False)[0]
    with recorded(tmp_path, layer=tensor) as incident:
        record = only(incident, "layer")
        made = flightrec.to_transformer_engine(record, device="cuda")
        try:
            found = made.dequantize(dtype=torch.float32).cpu().numpy()
        except RuntimeError as error:
            pytest.skip(f"this GPU cannot decode {kind}: {error}")
        assert found.tobytes() == record.quantized.dequantize(side="rowwise").tobytes()
