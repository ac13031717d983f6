"""Transformer Engine's own modules where there is no GPU: the few kernels that they call, written in torch.

``running`` lets the real ``te.Linear``, ``LayerNormLinear``, ``LayerNormMLP``, ``GroupedLinear`` and the ``te.ops`` run
forward and backward on a CPU, without FP8, with per-tensor FP8 (delayed and current scaling) and with FP8 block
scaling. The kernels compute what the real ones compute, not bit for bit; all above them is Transformer Engine's own.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import te_cpu
import torch
from torch.nn import functional

FP8_MAX = {7: 448.0, 8: 57344.0}
FP8_DTYPES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
_SM = (9, 0)  # what the modules are told about the device: a Hopper
_active = False
quantized_from: list[tuple[torch.Tensor, Any]] = []
"""What the quantizing kernels read and made, in order, while a test asks for it."""
products: list[dict[str, Any]] = []
"""What the products read and made, in order, while a test asks for it."""
watching = False


def _te_dtype(dtype: torch.dtype) -> Any:
    return importlib.import_module(f"{te_cpu._PACKAGE}.constants").TE_DType[dtype]


def _torch_dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
    return names[int(dtype)]


# -- quantization


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    if quantizer is None:
        return tensor
    if hasattr(quantizer, "block_len"):
        made = _quantize_blocks(tensor.detach(), quantizer, output)
        if watching:
            quantized_from.append((tensor.detach().clone(), made))
        return made
    code = int(quantizer.dtype)
    source = tensor.detach()
    amax = source.abs().amax().float() if source.numel() else torch.zeros(())
    if hasattr(quantizer, "scale"):  # delayed: with the scale that is there, and note the amax
        scale = quantizer.scale.clone()
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(1)))
    else:
        limit = torch.tensor(FP8_MAX[code])
        scale = torch.where(amax > 0, limit / amax.clamp(min=1e-30), torch.ones(()))
        scale = torch.where(torch.isfinite(scale), scale, torch.ones(()))
    limit = FP8_MAX[code]
    data = (source.float() * scale).clamp(-limit, limit).to(FP8_DTYPES[code]).view(torch.uint8)
    if source.isnan().any():
        data = (source.float() * scale).to(FP8_DTYPES[code]).view(torch.uint8)
    scale_inv = scale.reciprocal().reshape(1)
    if output is not None:
        output._data.copy_(data.view(output._data.shape))
        output._scale_inv = scale_inv
        if output._transpose is not None:
            output._transpose.copy_(_transposed(data))
            output._transpose_invalid = False
        result = output
    else:
        result = _make(quantizer, data, scale_inv, tensor.dtype)
    if watching:
        quantized_from.append((source.clone(), result))
    return result


def _quantize_blocks(source: torch.Tensor, quantizer: Any, output: Any) -> Any:
    """Blocks of 1 x 128, or 128 x 128, with scales that are powers of 2; column-wise codes stand transposed."""
    values = source.reshape(-1, source.shape[-1]).float()
    sides: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    for side, used, matrix, shape in (
        ("rowwise", quantizer.rowwise_usage, values, source.shape),
        ("columnwise", quantizer.columnwise_usage, values.t(), quantizer.get_columnwise_shape(source.shape)),
    ):
        if used:
            codes, scale_inv = _blocks(matrix, int(quantizer.dtype), quantizer.block_scaling_dim == 2)
            held = torch.zeros(*quantizer.get_scale_shape(source.shape, columnwise=side == "columnwise"))
            held[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv
            sides[f"{side}_data"], sides[f"{side}_scale_inv"] = codes.reshape(*shape), held
    if output is not None:
        for name, tensor in sides.items():
            setattr(output, f"_{name}", tensor)
        return output
    package = importlib.import_module(f"{te_cpu._PACKAGE}.tensor")
    shared = {
        **sides, "fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": quantizer.block_scaling_dim == 2
    }  # fmt: skip
    if quantizer.internal:
        return package.Float8BlockwiseQTensorStorage(fake_dtype=source.dtype, **shared)
    return package.Float8BlockwiseQTensor(shape=source.shape, dtype=source.dtype, device=source.device, **shared)


def _blocks(matrix: torch.Tensor, code: int, is_square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and inverse scales as they are held: [rows/128, columns/128], or transposed [columns/128, rows]."""
    rows, columns = matrix.shape
    height = 128 if is_square else 1
    padded = functional.pad(matrix, (0, -columns % 128, 0, -rows % height))
    tiles = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // 128, 128)
    amax = tiles.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(FP8_MAX[code] / amax.clamp(min=1e-30)))), 1.0)
    codes = (tiles * scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    scale_inv = scale.reciprocal()
    codes = codes.contiguous().to(FP8_DTYPES[code]).view(torch.uint8)
    return codes, scale_inv if is_square else scale_inv.t().contiguous()


def _decoded_blocks(tensor: Any, side: str) -> torch.Tensor:
    data, scales = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
    matrix = data.reshape(data.shape[0], -1) if side == "columnwise" else data.reshape(-1, data.shape[-1])
    values = matrix.view(FP8_DTYPES[int(tensor._fp8_dtype)]).float()
    rows, columns = values.shape
    if tensor._is_2D_scaled:
        factors = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        factors = scales.t()[:rows].repeat_interleave(128, 1)[:, :columns]
    values = values * factors
    return values.t() if side == "columnwise" else values.reshape(data.shape)


def _make(quantizer: Any, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> Any:
    package = importlib.import_module(f"{te_cpu._PACKAGE}.tensor")
    transpose = _transposed(data) if quantizer.columnwise_usage else None
    rowwise = data.contiguous() if quantizer.rowwise_usage else None
    shared = {
        "data": rowwise, "fp8_scale_inv": scale_inv, "fp8_dtype": quantizer.dtype, "data_transpose": transpose,
        "quantizer": quantizer,
    }  # fmt: skip
    if quantizer.internal:
        return package.Float8TensorStorage(fake_dtype=dtype, **shared)
    return package.Float8Tensor(shape=data.shape, dtype=dtype, device=data.device, **shared)


def _transposed(data: torch.Tensor) -> torch.Tensor:
    return data.movedim(-1, 0).contiguous()


def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    made = _transposed(data)
    return made if out is None else out.copy_(made)


def decoded(tensor: Any, side: str = "rowwise") -> torch.Tensor:
    """Values of an operand in float32, in logical order; of blocks those of one side."""
    if hasattr(tensor, "_rowwise_data"):
        return _decoded_blocks(tensor, side)
    if not hasattr(tensor, "_scale_inv"):
        return tensor.detach().float()
    data = tensor._data
    if data is None:
        data = tensor._transpose.movedim(0, -1)
    if side == "columnwise":  # this chip multiplies TN only
        assert tensor._transpose is not None and not tensor._transpose_invalid, "the codes are not there transposed"
    return data.view(FP8_DTYPES[int(tensor._fp8_dtype)]).float() * tensor._scale_inv


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    return decoded(tensor).to(_torch_dtype(dtype))


def bgrad_quantize(gradient: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    return gradient.reshape(-1, gradient.shape[-1]).sum(dim=0), quantize(gradient, quantizer)


def split_quantize(tensor: torch.Tensor, splits: Any, quantizers: Any, **_: Any) -> list[Any]:
    parts = torch.split(tensor, [int(n) for n in splits])
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def fused_amax_and_scale_update_after_reduction(
    amaxes: torch.Tensor, histories: Any, scales: Any, algorithm: str, dtype: Any, margin: float
) -> None:
    limit = FP8_MAX[int(dtype)] * 2.0**-margin
    start = 0
    for history, scale in zip(histories, scales, strict=True):
        history[0].copy_(amaxes[start : start + scale.numel()])
        start += scale.numel()
        amax = history.amax(dim=0) if algorithm == "max" else history[0]
        good = (amax > 0) & torch.isfinite(amax)
        scale.copy_(torch.where(good, limit / amax, scale))
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()


# -- products


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, out_dtype: Any, bias: Any, bias_dtype: Any,
    gelu: bool, gelu_in: Any, grad: bool, workspace: Any, workspace_size: int, accumulate: bool, split: bool,
    comm_overlap: Any = None, comm_type: Any = None, extra_output: Any = None, bulk_overlap: bool = False,
    alpha: float = 1.0, beta: float = 0.0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    first, second = decoded(a, "rowwise" if transa else "columnwise"), decoded(b, "columnwise" if transb else "rowwise")
    shape = second.shape
    first, second = first.reshape(-1, first.shape[-1]), second.reshape(-1, second.shape[-1])
    bias_grad = gelu_input = None
    if transa:
        made = second @ first.t()
    elif not transb:
        made = second @ first
    else:
        made = second.t() @ first
    leading = shape[:-1] if not transb else (made.shape[0],)
    if bias is not None and not grad:
        made = made + bias.detach().float()
    dtype = _torch_dtype(out_dtype) if out_dtype is not None else (out.dtype if out is not None else torch.float32)
    if grad and bias is not None:
        bias_grad = second.sum(dim=0).to(bias.dtype)
    made = made.reshape(*leading, made.shape[-1])
    if gelu and not grad:
        gelu_input = made.to(dtype)
        made = functional.gelu(gelu_input.float(), approximate="tanh")
    elif gelu:
        made = _dgelu(made, gelu_in.float())
    made = made.to(dtype)
    if out is not None:
        target = out.view(made.shape)
        if accumulate:
            target.add_(made)
        else:
            target.copy_(made)
        made = out
    elif quantizer is not None:
        made = quantize(made, quantizer)
    if watching:
        products.append(
            {"a": copied(a, "rowwise" if transa else "columnwise"),
             "b": copied(b, "columnwise" if transb else "rowwise"),
             "layout": ("T" if transa else "N") + ("T" if transb else "N"),
             "out": copied(made), "gelu_input": copied(gelu_input), "accumulate": accumulate, "split": split}
        )  # fmt: skip
    return made, bias_grad, gelu_input, extra_output


def copied(operand: Any, side: str = "rowwise") -> Any:
    """Codes that were read, in logical order, and the inverse scales, as they are held; or a plain tensor. Cloned."""
    if operand is None:
        return None
    if hasattr(operand, "_rowwise_data"):
        data = getattr(operand, f"_{side}_data")
        data = data.movedim(0, -1) if side == "columnwise" else data
        return data.clone(memory_format=torch.contiguous_format), getattr(operand, f"_{side}_scale_inv").clone(), side
    if hasattr(operand, "_scale_inv"):
        data = operand._data if operand._data is not None else operand._transpose.movedim(0, -1)
        return data.clone(memory_format=torch.contiguous_format), operand._scale_inv.clone()
    return operand.detach().clone(memory_format=torch.contiguous_format)


def te_general_grouped_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, out_dtype: Any, m_splits: Any, bias: Any, bias_dtype: Any,
    single_output: bool, pre_gelu: Any, grad: bool, workspaces: Any, workspace_size: int, accumulate: bool,
    split: bool, sms: int,
) -> Any:  # fmt: skip
    outs = list(torch.split(out[0], [int(n) for n in m_splits])) if single_output else out
    for i in range(len(a)):
        given = bias[i] if bias[i].numel() else None
        _, bias_grad, _, _ = generic_gemm(
            a[i], transa, b[i], transb, outs[i], None, out_dtype, given, None, False, None, grad, None, 0, accumulate,
            split,
        )  # fmt: skip
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
    return bias


# -- norms and activations


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, margin, zero_centered):
    value = x.float()
    mean = value.mean(dim=-1)
    rsigma = (value.var(dim=-1, unbiased=False) + eps).rsqrt()
    gamma = weight.float() + (1 if zero_centered else 0)
    made = ((value - mean[:, None]) * rsigma[:, None] * gamma + bias.float()).to(_torch_dtype(dtype)).detach()
    return (made if quantizer is None else quantize(made, quantizer)), mean.detach(), rsigma.detach()


def layernorm_bwd(dz, x, mean, rsigma, weight, margin, zero_centered):
    gamma = weight.float() + (1 if zero_centered else 0)
    normed = (x.float() - mean[:, None]) * rsigma[:, None]
    inner = dz.float() * gamma
    dx = rsigma[:, None] * (
        inner - inner.mean(dim=-1, keepdim=True) - normed * (inner * normed).mean(dim=-1, keepdim=True)
    )
    return dx.to(x.dtype), (dz.float() * normed).sum(dim=0).to(weight.dtype), dz.float().sum(dim=0).to(weight.dtype)


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, zero_centered):
    value = x.float()
    rsigma = (value.square().mean(dim=-1) + eps).rsqrt()
    gamma = weight.float() + (1 if zero_centered else 0)
    made = (value * rsigma[:, None] * gamma).to(_torch_dtype(dtype)).detach()
    return (made if quantizer is None else quantize(made, quantizer)), None, rsigma.detach()


def rmsnorm_bwd(dz, x, rsigma, weight, margin, zero_centered):
    gamma = weight.float() + (1 if zero_centered else 0)
    normed = x.float() * rsigma[:, None]
    inner = dz.float() * gamma
    dx = rsigma[:, None] * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), (dz.float() * normed).sum(dim=0).to(weight.dtype)


def gelu(x: torch.Tensor, quantizer: Any, **_: Any) -> Any:
    made = functional.gelu(x.detach().float(), approximate="tanh").to(x.dtype)
    return made if quantizer is None else quantize(made, quantizer)


def _dgelu(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(gradient.float(), x.float().view(gradient.shape), approximate="tanh")


def dgelu(gradient: torch.Tensor, x: torch.Tensor, quantizer: Any, **_: Any) -> Any:
    made = _dgelu(gradient, x).to(gradient.dtype)
    return made if quantizer is None else quantize(made, quantizer)


def dbias_dgelu(gradient: torch.Tensor, x: torch.Tensor, quantizer: Any, **_: Any) -> tuple[torch.Tensor, Any]:
    made = _dgelu(gradient, x).to(gradient.dtype)
    return made.sum(dim=0), quantize(made, quantizer)


def get_num_cublas_streams() -> int:
    return 4


def get_cublasLt_version() -> int:
    return 0  # too old for the grouped kernels that a Hopper could have


_IMPLEMENTED = (
    *(quantize, dequantize, fp8_transpose, bgrad_quantize, split_quantize, fused_amax_and_scale_update_after_reduction),
    *(generic_gemm, te_general_grouped_gemm, layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, gelu, dgelu),
    *(dbias_dgelu, get_num_cublas_streams, get_cublasLt_version),
)
_NOT_HERE = (
    *(f"te_general_grouped_gemm_for_{what}" for what in ("discrete_out", "discrete_in", "grouped_tensor")),
    *(f"{d}{name}" for d in ("", "d") for name in (
        "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu", "situglu", "sglu")),
    *(f"dbias_d{name}" for name in ("relu", "qgelu", "srelu", "silu")),
    *("clamped_swiglu", "clamped_dswiglu", "rmsnorm_bwd_add", "group_quantize", "fused_attn_fwd", "fused_attn_bwd"),
    "bulk_overlap_ag_with_external_gemm",
)  # fmt: skip


def _kernel(function: Any) -> Any:
    """As ``te_cpu`` has it while no test runs the modules; a kernel of the modules then."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _active:
            raise RuntimeError(f"{te_cpu.EXTENSION}.{function.__name__} is a GPU kernel and not here")
        return function(*args, **kwargs)

    return kernel


class _Names(type):
    """Stands for an enumeration of the extension: every member is there, with a number of its own."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return vars(cls)["members"]
        if name.startswith("__"):
            raise AttributeError(name)
        members = vars(cls)["members"]
        return members.setdefault(name, len(members))


def _install() -> types.SimpleNamespace:
    te_cpu.install()
    extension: Any = sys.modules[te_cpu.EXTENSION]
    package = te_cpu._PACKAGE
    if not hasattr(extension, "generic_gemm"):
        for function in _IMPLEMENTED:
            setattr(extension, function.__name__, _kernel(function))
        for name in _NOT_HERE:
            setattr(extension, name, te_cpu._kernel(name))
        enums = ("Bias_Type", "Fused_Attn_Backend", "Mask_Type", "QKV_Format", "QKV_Layout", "Softmax_Type")
        for name in (*(f"NVTE_{enum}" for enum in enums), "CommOverlapType"):
            setattr(extension, name, _Names(name, (), {"members": {}}))
        for name in ("FP8TensorMeta", "CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "CommOverlapBase"):
            setattr(extension, name, type(name, (), {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("module", "ops"):
                importlib.import_module(f"{package}.{name}")
    module, ops = (importlib.import_module(f"{package}.{name}") for name in ("module", "ops"))
    distributed, quantization = (importlib.import_module(f"{package}.{n}") for n in ("distributed", "quantization"))
    return types.SimpleNamespace(
        device="cpu", Linear=module.Linear, LayerNormLinear=module.LayerNormLinear, LayerNormMLP=module.LayerNormMLP,
        GroupedLinear=module.GroupedLinear, ops=ops, checkpoint=distributed.checkpoint,
        autocast=quantization.autocast, quantized_model_init=quantization.quantized_model_init,
        gemm=importlib.import_module(f"{package}.cpp_extensions.gemm"),
        state=quantization.FP8GlobalStateManager, recipe=importlib.import_module("transformer_engine.common.recipe"),
    )  # fmt: skip


def _on_the_cpu(factory: Any) -> Any:
    """What asks for a CUDA device gets the CPU."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return make


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Transformer Engine's classes, running on the CPU for the length of a test."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in is for machines without a GPU")
    te = _install()
    global _active
    _active = True
    properties = types.SimpleNamespace(major=_SM[0], minor=_SM[1], multi_processor_count=1, total_memory=1 << 30)
    patches: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: _SM,
        "get_rng_state": lambda *_: torch.zeros(1, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda *_: None,
    }
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda *_: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda *_: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda *_: contextlib.nullcontext())
    for name in ("empty", "zeros", "ones", "tensor", "empty_like", "full", "arange"):
        monkeypatch.setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", "0")  # it would compile
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    distributed: Any = sys.modules[f"{te_cpu._PACKAGE}.distributed"]
    mlp: Any = sys.modules[f"{te_cpu._PACKAGE}.module.layernorm_mlp"]
    for place in (distributed, mlp):
        monkeypatch.setattr(place, "_get_cuda_rng_state", lambda *_, **__: None, raising=False)
        monkeypatch.setattr(place, "_set_cuda_rng_state", lambda *_, **__: None, raising=False)
    quantization: Any = sys.modules[f"{te_cpu._PACKAGE}.quantization"]
    monkeypatch.setattr(quantization, "_FP8_BLOCK_SCALING_SUPPORT", (True, ""))
    monkeypatch.setattr(distributed, "has_te_modules", lambda function: True)  # looking would import attention
    te.state.reset()
    try:
        yield te
    finally:
        _active = False
        te.state.reset()


@contextlib.contextmanager
def watch() -> Iterator[tuple[list[dict[str, Any]], list[tuple[torch.Tensor, Any]]]]:
    """Let the kernels note what they read and made: (products, quantizations)."""
    global watching
    products.clear()
    quantized_from.clear()
    watching = True
    try:
        yield products, quantized_from
    finally:
        watching = False
