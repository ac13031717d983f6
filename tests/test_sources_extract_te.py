"""Transformer Engine's real classes on a CPU: taken apart, stored as numpy, decoded, equal to what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import te_cpu
import te_golden
import torch
from te_tensors import CPU, E4M3, E5M2, FP4, decoded, golden_tensor, stored

import flightrec
from flightrec.codecs import quantized
from flightrec.kernels import reference
from flightrec.records import Statistic
from flightrec.ring.layout import build_plan
from flightrec.sources.extract import device_of, extract, is_quantized
from flightrec.sources.extract_te import QuantizerState, extract_te, identity_data, is_te
from flightrec.sources.observe import observe

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to get shape of NVFP4")


def parts_of(tensor, columnwise=None):
    parts, reason = extract(tensor, columnwise)
    assert parts is not None, reason
    return parts


def float8(shape=(64, 48), *, data=True, transpose=False, **more):
    te_cpu.install()
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    codes = (torch.arange(torch.Size(shape).numel()) % 120).to(torch.uint8).view(shape)
    return Float8TensorStorage(
        data=codes if data else None,
        data_transpose=codes.movedim(-1, 0).contiguous() if transpose else None,
        fp8_scale_inv=torch.tensor([0.25]),
        fp8_dtype=E4M3,
        fake_dtype=torch.bfloat16,
        **more,
    )


def delayed_quantizer(scale=4.0, amax=7.0):
    te_cpu.install()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    return Float8Quantizer(torch.tensor([scale]), torch.tensor([amax]), E4M3)


# -- what a GPU recorded


@pytest.mark.parametrize("storage", [True, False], ids=["storage", "tensor"])
@pytest.mark.parametrize("number", range(len(te_golden.ENTRIES)), ids=te_golden.name_of)
def test_the_gpus_own_numbers_through_its_own_classes(number: int, storage: bool) -> None:
    entry, tensor = te_golden.ENTRIES[number], golden_tensor(number, storage=storage)
    assert is_te(tensor)
    assert is_quantized(tensor)
    parts = parts_of(tensor)
    te_golden.assert_as_the_gpu(decoded(parts).reshape(entry["shape"]), te_golden.arrays_of(number))
    words = parts.info.metadata["quantizer"]
    assert words["class"] == entry["quantizer"]["class"]
    for name in ("rowwise_usage", "columnwise_usage", "force_pow_2_scales", "amax_epsilon", "block_scaling_dim"):
        assert words.get(name) == entry["quantizer"].get(name)
    assert words["dtype"] == parts.info.format == te_golden.FP8_FORMATS[entry["fields"]["fp8_dtype"]]
    assert parts.info.metadata["original_dtype"] == "bfloat16"
    assert ("scale" in parts.components) == (entry["recipe"] == "delayed")
    assert parts.pair_codes == ("data" if entry["quantizer"]["rowwise_usage"] else "columnwise_data")
    shares = {tensor.untyped_storage().data_ptr() for tensor in parts.components.values()}
    buffers = {value.untyped_storage().data_ptr() for value in vars(tensor).values() if isinstance(value, torch.Tensor)}
    quantizer = tensor._quantizer
    live = {v.untyped_storage().data_ptr() for v in vars(quantizer).values() if isinstance(v, torch.Tensor)}
    assert shares <= buffers | live, "views only"


# -- per-tensor FP8


@pytest.mark.parametrize("shape", [(64, 48), (3, 4, 16), (16,)])
def test_columnwise_only_codes_come_in_logical_order(shape) -> None:
    whole, transposed = float8(shape), float8(shape, data=False, transpose=True)
    assert np.array_equal(decoded(parts_of(whole)), whole.dequantize(dtype=torch.float32).numpy())
    assert np.array_equal(decoded(parts_of(transposed)), decoded(parts_of(whole)))
    both = parts_of(float8(shape, transpose=True))
    assert set(both.components) == {"data", "scale_inv"}, "a transpose is stored once"


def test_a_transpose_that_is_invalid_is_not_read() -> None:
    stale = float8(data=False, transpose=True, transpose_invalid=True)
    parts, reason = extract(stale)
    assert parts is None
    assert "holds no data" in reason


def test_buffers_that_are_saved_for_the_backward_pass() -> None:
    tensor = float8()
    tensor.prepare_for_saving()
    assert "saved for the backward pass" in extract(tensor).reason
    assert device_of(tensor) is None


def test_live_words_of_delayed_scaling_are_no_contradiction() -> None:
    parts = parts_of(float8(quantizer=delayed_quantizer(scale=123.0)))
    assert parts.components["scale"].item() == 123.0
    assert parts.components["amax"].item() == 7.0
    assert parts.info.metadata["live"] == ["scale", "amax"]
    assert build_plan(None, parts).inverse == -1, "the scale of the next call is not one over scale_inv"


def test_state_of_the_module_goes_before_the_quantizers_words() -> None:
    recipe = {"margin": 0, "amax_history_len": 4}
    history = torch.tensor([3.0, 2.0, 1.0, 0.0])
    state = QuantizerState(scale=torch.tensor([4.0]), amax_history=history, recipe=recipe, at_quantizing=True)
    tensor = float8(quantizer=delayed_quantizer(scale=123.0))
    parts = extract_te(tensor, state=state).parts
    assert parts.components["scale"].item() == 4.0
    assert parts.components["amax"].item() == 7.0
    assert parts.components["amax_history"].data_ptr() == history.data_ptr()
    assert parts.info.metadata["recipe"] == recipe
    assert "live" not in parts.info.metadata
    plan = build_plan(None, parts)
    names = list(parts.components)
    assert names[plan.inverse] == "scale"
    assert names[plan.history] == "amax_history"
    assert extract_te(tensor, state=QuantizerState(recipe=recipe)).parts.info.metadata["live"] == ["scale", "amax"]


def test_metadata_are_built_once() -> None:
    first, second = parts_of(float8(quantizer=delayed_quantizer())), parts_of(float8(quantizer=delayed_quantizer(9.0)))
    assert first.info is second.info
    assert parts_of(float8()).info is not first.info
    state = QuantizerState(recipe={"margin": 0})
    assert extract_te(float8(), state=state).parts.info is extract_te(float8(), state=state).parts.info
    other = QuantizerState(recipe={"margin": 1})
    assert extract_te(float8(), state=other).parts.info.metadata["recipe"] == {"margin": 1}


def test_a_stranger_is_none_of_theirs() -> None:
    assert not is_te(torch.zeros(2))
    assert not is_te(None)
    assert "not of Transformer Engine" in extract_te(torch.zeros(2)).reason


def test_the_local_part_of_a_sharded_parameter() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    local = golden_tensor(0, storage=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        meta = TensorMeta(local.shape, local.stride(), local.dtype)
        sharded = DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
        parts = parts_of(sharded)
    finally:
        dist.destroy_process_group()
    assert np.array_equal(decoded(parts), decoded(parts_of(local)))
    assert parts.info.metadata["dtensor"]["placements"] == ["Shard(dim=0)"]
    assert parts.info.metadata["scheme"] == "float8"


# -- MXFP8


def mxfp8(shape=(96, 160), *, rowwise=True, columnwise=True, swizzled=False, storage=True):
    te_cpu.install()
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    quantizer = MXFP8Quantizer(E4M3, rowwise=rowwise, columnwise=columnwise)
    generator = torch.Generator().manual_seed(0)

    def codes(wanted, size, low, high):
        return torch.randint(low, high, size, generator=generator).to(torch.uint8) if wanted else None

    made = {
        "rowwise_data": codes(rowwise, shape, 0, 0x7F),
        "rowwise_scale_inv": codes(rowwise, quantizer.get_scale_shape(shape, False), 110, 140),
        "columnwise_data": codes(columnwise, shape, 0, 0x7F),
        "columnwise_scale_inv": codes(columnwise, quantizer.get_scale_shape(shape, True), 110, 140),
        "fp8_dtype": E4M3,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": swizzled,
        "fake_dtype": torch.bfloat16,
    }
    if storage:
        return MXFP8TensorStorage(**made)
    return MXFP8Tensor(shape=shape, dtype=torch.bfloat16, device=CPU, **made)


def mxfp8_by_definition(tensor, side):
    """In torch, from Transformer Engine's buffers: scales without padding, repeated over their blocks."""
    data, scale = (getattr(tensor, f"_{side}_{name}") for name in ("data", "scale_inv"))
    flat = data.reshape(-1, data.shape[-1])
    rows, columns = flat.shape
    spread = scale.repeat_interleave(32, 1 if side == "rowwise" else 0)[:rows, :columns]
    values = flat.view(torch.float8_e4m3fn).float() * spread.contiguous().view(torch.float8_e8m0fnu).float()
    return values.view(data.shape).numpy()


@pytest.mark.parametrize("shape", [(96, 160), (32, 32), (128, 128), (2, 32, 96)])
@pytest.mark.parametrize("storage", [True, False])
def test_mxfp8_is_its_definition_on_both_sides(shape, storage) -> None:
    tensor = mxfp8(shape, storage=storage)
    parts = parts_of(tensor)
    for side in ("rowwise", "columnwise"):
        expected = mxfp8_by_definition(tensor, side)
        assert decoded(parts, side).reshape(shape).tobytes() == expected.tobytes()
        only = parts_of(mxfp8(shape, rowwise=side == "rowwise", columnwise=side == "columnwise"))
        assert decoded(only).shape == shape
    assert parts.format("scale_inv") == "float8_e8m0fnu"
    assert parts.components["scale_inv"].shape == (*shape[:-1], shape[-1] // 32), "no padding"


def test_swizzled_scales_are_kept_and_come_back_in_order() -> None:
    from format_contract import swizzled

    plain = mxfp8((160, 288))
    ordered = mxfp8((160, 288), swizzled=True)
    for name, turn in (("_rowwise_scale_inv", lambda t: t), ("_columnwise_scale_inv", lambda t: t.T)):
        scales = getattr(plain, name)
        setattr(ordered, name, torch.from_numpy(swizzled(turn(scales.numpy()))).view(scales.shape))
    parts = parts_of(ordered)
    for side in ("rowwise", "columnwise"):
        assert decoded(parts, side).tobytes() == mxfp8_by_definition(plain, side).tobytes()
    x = torch.from_numpy(decoded(parts, "rowwise").copy()) + torch.linspace(-1, 1, 160 * 288).view(160, 288)
    row = reference.statistics(build_plan(x, parts), x, list(parts.components.values()))
    errors = (torch.from_numpy(mxfp8_by_definition(plain, "rowwise").copy()) - x).double()
    errors = errors[errors.isfinite()]
    assert row[Statistic.SQUARED_ERROR].item() == pytest.approx(errors.square().sum().item(), rel=1e-6)


# -- NVFP4


def nvfp4_by_definition(codes, scale, amax, e4m3_max=448):
    """In torch, as the kernel rounds; codes [lines, length / 2] packed, amax one or one a line."""
    te_cpu.install()
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    values = cast_from_fp4x2(codes, torch.float32)
    scales = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)[: values.shape[0], : values.shape[1]]
    factor = torch.tensor(1.0 / (6.0 * e4m3_max), dtype=torch.float32)
    return values * (scales * amax.view(-1, 1) * factor)


REFERENCE_OPTIONS = [
    {},
    {"quant_tile_shape": (16, 16)},
    {"with_rht": True},
    {"with_rht": True, "with_random_sign_mask": False},
    {"row_scaled_nvfp4": True},
    {"nvfp4_use_4over6": True},
    {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
    {"nvfp4_use_4over6": True, "nvfp4_4over6_err_use_fast_math": True, "row_scaled_nvfp4": True},
    {"nvfp4_use_4over6": True, "quant_tile_shape": (16, 16), "nvfp4_e4m3_max": 256},
    {"rowwise": False},
    {"columnwise": False},
]


def reference_quantizer(**options):
    te_cpu.install()
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    return reference_nvfp4.NVFP4QuantizerRef(dtype=reference_utils.Fp4Formats.E2M1, **options)


def values_of(shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[-1])
    x[..., 0, :] = 0
    return x


@pytest.mark.parametrize("shape", [(64, 96), (48, 32), (2, 16, 64)])
@pytest.mark.parametrize(
    "options", REFERENCE_OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain"
)
def test_nvfp4_of_the_reference_quantizer(options, shape) -> None:
    x = values_of(shape)
    tensor = reference_quantizer(**options).quantize(x)
    parts = parts_of(tensor)
    e4m3_max = options.get("nvfp4_e4m3_max", 448)
    if tensor.data is not None:
        expected = nvfp4_by_definition(tensor.data, tensor.scale, tensor.global_amax_row, e4m3_max)
        assert decoded(parts, "rowwise").tobytes() == expected.view(shape).numpy().tobytes()
        assert np.linalg.norm(expected.view(shape) - x) < 0.15 * np.linalg.norm(x)
        assert parts.pair_codes == "data"
    if tensor.data_t is not None:
        expected = nvfp4_by_definition(tensor.data_t, tensor.scale_t, tensor.global_amax_col, e4m3_max).t()
        found = decoded(parts, "columnwise")
        assert found.tobytes() == expected.reshape(shape).contiguous().numpy().tobytes()
        words = parts.info.metadata["columnwise"]
        assert words.get("rht", False) == options.get("with_rht", False)
        if "rht" in words:
            from flightrec.codecs.nvfp4 import undo_hadamard

            assert np.linalg.norm(found - x.numpy()) > 0.5 * np.linalg.norm(x)
            found = undo_hadamard(found, words["rht_sign_mask"])
        assert np.linalg.norm(found - x.numpy()) < 0.15 * np.linalg.norm(x)
    if tensor.data is None:
        assert parts.pair_codes is None


def test_the_sign_mask_of_the_reference_is_that_of_the_kernel() -> None:
    te_cpu.install()
    from transformer_engine.pytorch.tensor.nvfp4_tensor import get_sign_from_vector, get_wgrad_sign_vector

    from flightrec.codecs.nvfp4 import hadamard

    parts = parts_of(reference_quantizer(with_rht=True).quantize(values_of((16, 32))))
    mask = get_sign_from_vector(get_wgrad_sign_vector("cpu").to(torch.int64))
    assert parts.info.metadata["columnwise"]["rht_sign_mask"] == mask
    quantizer = reference_quantizer(with_rht=True)
    matrix = quantizer._build_hadamard_matrix(16, CPU, torch.float32) / 4
    assert np.array_equal(hadamard(mask), matrix.numpy())


def nvfp4(shape=(64, 96), *, swizzled=False, row_scaled=False, e4m3_max=448, columnwise_only=False, storage=True):
    """Transformer Engine's class over the reference quantizer's buffers, its scales padded as the kernel pads them."""
    te_cpu.install()
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": e4m3_max} if e4m3_max != 448 else {}
    made = reference_quantizer(row_scaled_nvfp4=row_scaled, **options).quantize(values_of(shape))

    def pad(scale):
        rows, columns = (-(-size // to) * to for size, to in zip(scale.shape, (128, 4), strict=True))
        padded = torch.full((rows, columns), 0x7F, dtype=torch.uint8)  # whatever memory held: NaN
        padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
        if swizzled:
            from format_contract import swizzled as in_tiles

            padded = torch.from_numpy(in_tiles(padded.numpy())).view(padded.shape)
        return padded

    lead = (*shape[:-1], shape[-1] // 2)
    fields = {
        "rowwise_data": None if columnwise_only else made.data.view(lead),
        "rowwise_scale_inv": None if columnwise_only else pad(made.scale),
        "columnwise_data": made.data_t.view(shape[-1], *shape[:-2], shape[-2] // 2),
        "columnwise_scale_inv": pad(made.scale_t),
        "amax_rowwise": None if columnwise_only else made.global_amax_row,
        "amax_columnwise": made.global_amax_col,
        "fp4_dtype": FP4,
        "quantizer": None,
        "with_gemm_swizzled_scales": swizzled,
        "row_scaled_nvfp4": row_scaled,
        "nvfp4_use_4over6": bool(options),
        "nvfp4_e4m3_max": e4m3_max,
        "fake_dtype": torch.bfloat16,
    }
    if storage:
        return NVFP4TensorStorage(**fields), made
    return NVFP4Tensor(shape=shape, dtype=torch.bfloat16, device=CPU, **fields), made


@pytest.mark.parametrize("shape", [(64, 96), (144, 80), (2, 16, 64)])
@pytest.mark.parametrize(
    "how", [{}, {"swizzled": True}, {"row_scaled": True}, {"e4m3_max": 256}, {"storage": False}], ids=str
)
def test_nvfp4_through_its_own_class(how, shape) -> None:
    tensor, made = nvfp4(shape, **how)
    parts = parts_of(tensor)
    e4m3_max = how.get("e4m3_max", 448)
    row = nvfp4_by_definition(made.data, made.scale, made.global_amax_row, e4m3_max)
    column = nvfp4_by_definition(made.data_t, made.scale_t, made.global_amax_col, e4m3_max).t()
    assert decoded(parts, "rowwise").reshape(shape).tobytes() == row.view(shape).numpy().tobytes()
    assert decoded(parts, "columnwise").reshape(-1, shape[-1]).tobytes() == column.contiguous().numpy().tobytes()
    only, _ = nvfp4(shape, columnwise_only=True, **how)
    assert decoded(parts_of(only)).shape == shape
    assert parts_of(only).info.metadata["logical_shape"] == list(shape)


def test_the_second_scale_is_there_for_statistics() -> None:
    tensor, made = nvfp4(row_scaled=True)
    parts = parts_of(tensor)
    torch.testing.assert_close(parts.components["tensor_scale_inv"], made.global_amax_row / (6 * 448))
    assert parts.components["amax"].data_ptr() == tensor._amax_rowwise.data_ptr()
    assert not (parts.components["scale_inv"] == 0x7F).any(), "padding is cropped"


# -- tensors of tensors


def test_hybrid_tensors_have_a_format_for_each_side() -> None:
    te_cpu.install()
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
    from transformer_engine.pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
    from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage

    plain = torch.randn(64, 48, dtype=torch.bfloat16)
    quantizer = HybridQuantizer(rowwise_quantizer=delayed_quantizer(), columnwise_quantizer=IdentityQuantizer())

    def hybrid(row, column):
        return HybridQuantizedTensorStorage(rowwise_storage=row, columnwise_storage=column, quantizer=quantizer)

    row = float8()
    parts = parts_of(hybrid(row, IdentityTensorStorage(hp_data=plain)))
    assert parts.info.class_name.endswith("HybridQuantizedTensorStorage")
    assert np.array_equal(decoded(parts, "rowwise"), row.dequantize(dtype=torch.float32).numpy())
    assert np.array_equal(decoded(parts, "columnwise"), plain.float().numpy())
    column = mxfp8((64, 64), rowwise=False)
    parts = parts_of(hybrid(None, column))
    assert decoded(parts).tobytes() == mxfp8_by_definition(column, "columnwise").tobytes()
    parts = parts_of(hybrid(float8((64, 64)), mxfp8((64, 64))))  # of the second only the column-wise side counts
    assert set(parts.components) == {"data", "scale_inv", "columnwise_data", "columnwise_scale_inv"}
    assert parts.info.metadata["columnwise"]["scheme"] == "mxfp8"
    again = parts_of(hybrid(float8((64, 64)), mxfp8((64, 64))))
    assert again.info is parts.info
    assert "holds no data" in extract(hybrid(None, None)).reason


def test_identity_tensors_are_high_precision() -> None:
    te_cpu.install()
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityTensor
    from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage

    plain = torch.randn(4, 6, dtype=torch.bfloat16)
    storage = IdentityTensorStorage(hp_data=plain)
    assert np.array_equal(decoded(parts_of(storage)), plain.float().numpy())
    assert torch.equal(identity_data(storage), plain)
    assert identity_data(float8()) is None
    tensor = IdentityTensor(shape=plain.shape, dtype=plain.dtype, device=CPU, hp_data=plain)
    seen = observe(tensor)
    assert seen.quantized is None
    assert torch.equal(seen.plain, plain), "statistics are those of the values"


def test_debug_tensors_hold_one_for_each_direction() -> None:
    te_cpu.install()
    from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizedTensor

    row, column = float8(), float8(data=False, transpose=True)
    parts = parts_of(DebugQuantizedTensor(row, column, None))
    assert np.array_equal(decoded(parts, "rowwise"), decoded(parts, "columnwise"))
    same = parts_of(DebugQuantizedTensor(row, row, None))
    assert set(same.components) == {"data", "scale_inv"}
    mixed = parts_of(DebugQuantizedTensor(row, torch.ones(64, 48), None))
    assert (decoded(mixed, "columnwise") == 1).all()


def test_the_reference_of_current_scaling() -> None:
    te_cpu.install()
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    x = values_of((32, 48))
    for sides in ({}, {"rowwise": False}):
        quantizer = CurrentScalingQuantizerRef(torch.float8_e5m2, **sides)
        tensor = quantizer.quantize(x)
        data, scale = (tensor.data, tensor.scale) if not sides else (tensor.data_t.t(), tensor.scale_t)
        expected = quantizer.dequantize(data, scale)
        parts = parts_of(tensor)
        assert np.array_equal(decoded(parts), expected.numpy())
        assert parts.info.metadata["quantizer"]["pow_2_scales"] is False


def grouped(scheme, shapes):
    te_cpu.install()
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    quantizer = {
        "identity": lambda: None,
        "float8": delayed_quantizer,
        "mxfp8": lambda: MXFP8Quantizer(E4M3),
        "float8_block": lambda: Float8BlockQuantizer(E5M2, rowwise=True, columnwise=True),
    }[scheme]()
    if quantizer is not None:
        quantizer.internal = True  # the other kind asks for a GPU
    group = GroupedTensorStorage.make_grouped_tensor_with_shapes(
        num_tensors=len(shapes), shapes=shapes, quantizer=quantizer, device=CPU, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(0)
    for name in ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv"):
        buffer = getattr(group, name)
        if buffer is not None and buffer.dtype == torch.uint8:
            buffer.copy_(torch.randint(1, 0x78, buffer.shape, generator=generator).to(torch.uint8))
        elif buffer is not None:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return group


@pytest.mark.parametrize("shapes", [[(64, 128)] * 3, [(32, 128), (0, 128), (96, 128)]], ids=["equal", "by rows"])
@pytest.mark.parametrize("scheme", ["identity", "float8", "mxfp8", "float8_block"])
def test_members_of_a_group_are_those_that_it_splits_into(scheme, shapes) -> None:
    group = grouped(scheme, shapes)
    parts = parts_of(group)
    arrays, formats = stored(parts)
    whole = {"formats": formats}
    found = quantized.dequantize_members(arrays, parts.info.to_json(), **whole)
    members = group.split_into_quantized_tensors()
    assert len(found) == len(members)
    for values, member, shape in zip(found, members, shapes, strict=True):
        assert values.shape == shape
        expected = member.float().numpy() if scheme == "identity" else decoded(parts_of(member), "rowwise")
        assert np.array_equal(values, expected.reshape(shape))
    if group.columnwise_data is not None and scheme != "float8":
        other = quantized.dequantize_members(arrays, parts.info.to_json(), side="columnwise", **whole)
        for values, member, shape in zip(other, members, shapes, strict=True):
            assert np.array_equal(values, decoded(parts_of(member), "columnwise").reshape(shape))
    assert parts.info.metadata["num_tensors"] == 3
    assert ("first_dims" in parts.components) == (len(set(shapes)) > 1)
    assert np.concatenate([m.reshape(-1) for m in found]).any()


def test_group_metadata_do_not_change_with_the_number_of_rows() -> None:
    first = parts_of(grouped("mxfp8", [(32, 128), (64, 128)]))
    second = parts_of(grouped("mxfp8", [(96, 128), (64, 128)]))
    assert first.info is second.info


def test_an_unknown_class_is_kept_by_the_tensors_it_names() -> None:
    te_cpu.install()
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    class Mystery(QuantizedTensorStorage):
        def __init__(self):
            self._codes = torch.arange(6, dtype=torch.uint8)
            self.level = 3

    parts = parts_of(Mystery())
    assert not parts.is_understood
    assert parts.info.scale_direction == "unknown"
    assert parts.info.metadata["attributes"] == {"level": 3}
    assert parts.components["codes"].tolist() == list(range(6))

    class Broken(Mystery):
        def get_metadata(self):
            raise RuntimeError("no")

    assert "get_metadata failed: RuntimeError: no" in extract(Broken()).reason


# -- what rules see


@pytest.mark.parametrize("number", [0, 9, 17, 21, 24, 25, 46, 47, 48])
def test_the_error_beside_the_high_precision_tensor_is_that_of_the_decoded_numbers(number) -> None:
    parts = parts_of(golden_tensor(number, storage=True))
    shape = te_golden.ENTRIES[number]["shape"]
    values = torch.from_numpy(decoded(parts).reshape(shape).copy())
    x = values + torch.linspace(-1, 1, values.numel()).view(shape)
    plan = build_plan(x, parts)
    assert plan.pairs
    row = reference.statistics(plan, x, list(parts.components.values()))
    expected = ((values.double() - x.double()) ** 2).sum()
    torch.testing.assert_close(row[Statistic.SQUARED_ERROR], expected, rtol=1e-5, atol=0)
    assert row[Statistic.SCALE_NONFINITE_COUNT] == 0
    assert row[Statistic.QUANTIZED_NUMEL] == values.numel()


# -- into an incident and out of it


@pytest.mark.parametrize("kind", ["float8", "block", "mxfp8", "nvfp4"])
def test_a_storage_object_into_an_incident_and_out(kind, tmp_path) -> None:
    block = next(n for n, e in enumerate(te_golden.ENTRIES) if e["recipe"] == "block1d" and len(e["shape"]) == 3)
    made = {
        "float8": lambda: float8(quantizer=delayed_quantizer()),
        "block": lambda: golden_tensor(block, storage=True),
        "mxfp8": mxfp8,
        "nvfp4": lambda: nvfp4()[0],
    }
    tensor = made[kind]()
    config = {"budget": "none", "select": [{"tensors": "*"}], "incident": {"after": 0}}
    with flightrec.Recorder(config, directory=tmp_path) as recorder:
        for _ in range(2):
            recorder.record("layer", "activation", quantized=tensor)
            recorder.step()
        recorder.record("layer", "activation", quantized=tensor)
        recorder.trigger("look")
        recorder.step()
    (folder,) = tmp_path.iterdir()
    parts = parts_of(tensor)
    with flightrec.open(folder) as incident:
        record = incident.records(layer="layer", iteration=2)[0]
        assert not incident.blind
        for side in quantized.sides_of(parts.components):
            expected = decoded(parts, side)
            assert record.quantized.dequantize(side=side).tobytes() == expected.tobytes()
        assert record.quantized.dequantize().shape == record.shape
        assert record.statistics["quantized_numel"] == np.prod(record.shape)
        assert record.metadata["metadata"]["scheme"] == parts.info.metadata["scheme"]
