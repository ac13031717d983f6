"""Incidents whose numbers agree, of every format, made with libraries' own arithmetic written anew, one rule at a time.

The quantizers here are the plain way: one block after the other, ``ml_dtypes`` for the codes; not flightrec's encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.records import Key, Stage

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E2M1 = ml_dtypes.float4_e2m1fn
F = np.float32
Arrays = dict[str, tuple[np.ndarray, str]]
ROWS, COLUMNS, WIDTH = 32, 64, 48


def codes_of(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Saturating, to nearest even."""
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        return np.clip(values, -largest, largest).astype(F).astype(dtype).view("u1")


def name_of(dtype: Any) -> str:
    return np.dtype(dtype).name


def amax(values: np.ndarray) -> np.float32:
    return np.fmax.reduce(np.abs(values), axis=None, initial=F(0))


def te_scale(largest: float, a: np.float32, power: bool, limit: float) -> np.float32:
    with np.errstate(all="ignore"):
        if a == 0 or np.isinf(a) or np.isnan(a):
            return F(1)
        scale = F(largest) / a
    if np.isinf(scale):
        scale = F(limit)
    return F(2.0 ** np.floor(np.log2(float(scale)))) if power else scale


def info(family: str, format_name: str, direction: str = "multiply_to_decode", **metadata: Any) -> dict[str, Any]:
    blocks = metadata.pop("block_shape", ())
    return {
        "class_name": family,
        "format": format_name,
        "scale_direction": direction,
        "block_shape": list(blocks),
        "metadata": metadata,
    }


TE = "transformer_engine.pytorch.tensor.Sample"
FLOAT32_MAX = float(np.finfo(F).max)


def te_float8(x: np.ndarray, rng: np.random.Generator, dtype: Any = E4M3) -> tuple[Arrays, dict[str, Any]]:
    delayed = bool(rng.integers(2))
    power = bool(rng.integers(2)) and not delayed
    scale = te_scale(float(ml_dtypes.finfo(dtype).max), amax(x), power, FLOAT32_MAX)
    if delayed:
        scale = F(scale * rng.uniform(0.3, 3))
        if not np.isfinite(scale):
            scale = F(1)
    with np.errstate(all="ignore"):
        arrays: Arrays = {
            "data": (codes_of(x * scale, dtype), name_of(dtype)),
            "scale_inv": (np.array([F(1) / scale]), "float32"),
        }
    kind = "Float8Quantizer" if delayed else "Float8CurrentScalingQuantizer"
    words = {"class": kind, "force_pow_2_scales": power, "amax_epsilon": 0.0}
    return arrays, info(TE, name_of(dtype), scheme="float8", quantizer=words)


def te_blocks(x: np.ndarray, rng: np.random.Generator, dtype: Any = E4M3) -> tuple[Arrays, dict[str, Any]]:
    power, two_d = bool(rng.integers(2)), bool(rng.integers(2))
    largest = float(ml_dtypes.finfo(dtype).max)
    arrays: Arrays = {}
    for prefix, block in (("", (128, 128) if two_d else (1, 128)), ("columnwise_", (128, 128) if two_d else (128, 1))):
        codes, scales = np.zeros(x.shape, "u1"), []
        for top in range(0, x.shape[0], block[0]):
            for left in range(0, x.shape[1], block[1]):
                part = x[top : top + block[0], left : left + block[1]]
                scale = te_scale(largest, amax(part), power, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max))
                with np.errstate(all="ignore"):
                    codes[top : top + block[0], left : left + block[1]] = codes_of(part * scale, dtype)
                    scales.append(F(1) / scale)
        shape = (-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
        arrays[f"{prefix}data"] = (codes, name_of(dtype))
        arrays[f"{prefix}scale_inv"] = (np.array(scales, F).reshape(shape), "float32")
        own = {"block_shape": list(block)}
    words = {"class": "Float8BlockQuantizer", "force_pow_2_scales": power, "amax_epsilon": 0.0}
    column = {"scheme": "float8_block", "format": name_of(dtype), "scale_direction": "multiply_to_decode", **own}
    row = (128, 128) if two_d else (1, 128)
    return arrays, info(TE, name_of(dtype), block_shape=row, scheme="float8_block", quantizer=words, columnwise=column)


def e8m0(value: np.float32) -> int:
    """Rounded up."""
    if np.isnan(value):
        return 255
    if np.isinf(value):
        return 254
    if value == 0:
        return 0
    return int(np.clip(np.ceil(np.log2(float(value))), -127, 127)) + 127


def te_mx(x: np.ndarray, rng: np.random.Generator, dtype: Any = E4M3) -> tuple[Arrays, dict[str, Any]]:
    largest = F(ml_dtypes.finfo(dtype).max)
    arrays: Arrays = {}
    for prefix, values in (("", x), ("columnwise_", x.T)):
        codes, scales = np.zeros(values.shape, "u1"), np.zeros((values.shape[0], values.shape[1] // 32), "u1")
        for row in range(values.shape[0]):
            for block in range(scales.shape[1]):
                part = values[row, 32 * block : 32 * block + 32]
                scale = e8m0(F(amax(part) * (F(1) / largest)))
                scales[row, block] = scale
                with np.errstate(all="ignore"):
                    codes[row, 32 * block : 32 * block + 32] = codes_of(part * F(2.0 ** (127 - scale)), dtype)
        turned = [some.T.copy() if prefix else some for some in (codes, scales)]
        arrays[f"{prefix}data"] = (turned[0], name_of(dtype))
        arrays[f"{prefix}scale_inv"] = (turned[1], "float8_e8m0fnu")
    words = {"class": "MXFP8Quantizer"}
    column = {"scheme": "mxfp8", "format": name_of(dtype), "scale_direction": "multiply_to_decode"}
    return arrays, info(
        TE, name_of(dtype), block_shape=(1, 32), scheme="mxfp8", quantizer=words,
        columnwise={**column, "block_shape": [32, 1]},
    )  # fmt: skip


SIGN_MASK = 0b1101_0111_1110_1000


def hadamard(values: np.ndarray) -> np.ndarray:
    matrix = np.array([[1.0]])
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.array([-1.0 if SIGN_MASK >> i & 1 else 1.0 for i in range(16)])
    with np.errstate(all="ignore"):
        return (values.reshape(-1, 16).astype("f8") @ (signs[:, None] * matrix / 4)).astype(F).reshape(values.shape)


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[..., ::2] | codes[..., 1::2] << 4


def fp4_side(values: np.ndarray, rng: np.random.Generator, stochastic: bool, two_d: bool) -> tuple[np.ndarray, ...]:
    whole = amax(values)
    with np.errstate(all="ignore"):
        over = min(F(448 * 6) / whole, F(FLOAT32_MAX)) or F(1)
        rows, across = values.shape[0], values.shape[1] // 16
        codes, scales = np.zeros(values.shape, "u1"), np.zeros((rows, across), "u1")
        for row in range(rows):
            for block in range(across):
                part = values[row, 16 * block : 16 * block + 16]
                near = values[row // 16 * 16 : row // 16 * 16 + 16, 16 * block : 16 * block + 16] if two_d else part
                scale = codes_of(np.array([amax(near) * (over * (F(1) / F(6)))], F), E4M3)
                scales[row, block] = scale[0]
                multiplier = min(F(1) / (scale.view(E4M3).astype(F)[0] * (F(1) / over)), F(FLOAT32_MAX))
                scaled = part * multiplier
                nearest = codes_of(np.where(np.isnan(scaled), F(0), scaled), E2M1)
                if stochastic:
                    other = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
                    for i, value in enumerate(np.clip(np.abs(np.nan_to_num(scaled)), 0, 6)):
                        low, high = other[other <= value].max(), other[other >= value].min()
                        chosen = low if rng.integers(2) else high
                        nearest[i] = codes_of(np.array([np.copysign(chosen, scaled[i])], F), E2M1)[0]
                codes[row, 16 * block : 16 * block + 16] = nearest
    return pack(codes), scales, np.array([whole], F)


def te_fp4(x: np.ndarray, rng: np.random.Generator, _dtype: Any = None) -> tuple[Arrays, dict[str, Any]]:
    stochastic, two_d = bool(rng.integers(2)), bool(rng.integers(2))
    rht = not two_d and bool(rng.integers(2))
    arrays: Arrays = {}
    for prefix, values in (("", x), ("columnwise_", hadamard(x.T.copy()) if rht else x.T)):
        codes, scales, whole = fp4_side(values, rng, stochastic, two_d)
        arrays[f"{prefix}data"] = (codes, "float4_e2m1fn_x2")
        arrays[f"{prefix}scale_inv"] = (scales, "float8_e4m3fn")
        arrays[f"{prefix}amax"] = (whole, "float32")
    words = {"class": "NVFP4Quantizer", "stochastic_rounding": stochastic, "with_2d_quantization": two_d}
    column: dict[str, Any] = {"scheme": "nvfp4", "format": "float4_e2m1fn_x2", "scale_direction": "multiply_to_decode"}
    column |= {"block_shape": [1, 16], "transposed": True, "e4m3_max": 448, "quantizer": words}
    if rht:
        column |= {"rht": True, "rht_sign_mask": SIGN_MASK}
    return arrays, info(
        TE, "float4_e2m1fn_x2", block_shape=(1, 16), scheme="nvfp4", e4m3_max=448, quantizer=words, columnwise=column
    )


def ao_float8(x: np.ndarray, rng: np.random.Generator, dtype: Any = E4M3) -> tuple[Arrays, dict[str, Any]]:
    by_row = bool(rng.integers(2))
    largest = float(ml_dtypes.finfo(dtype).max)
    a = np.max(np.abs(x), axis=1, keepdims=True) if by_row else np.max(np.abs(x)).reshape(())
    with np.errstate(all="ignore"):
        scale = (largest / np.maximum(a.astype("f8"), 1e-12)).astype(F)
        arrays: Arrays = {"data": (codes_of(x * scale, dtype), name_of(dtype)), "scale": (np.asarray(scale), "float32")}
    name = "torchao.float8.float8_training_tensor.Float8TrainingTensor"
    blocks = (1, x.shape[1]) if by_row else ()
    words = {"granularity": "axiswise" if by_row else "tensorwise", "axiswise_dim": -1 if by_row else None}
    return arrays, info(name, name_of(dtype), "multiply_to_encode", block_shape=blocks, **words)


def ao_mx(x: np.ndarray, _rng: np.random.Generator, dtype: Any = E4M3) -> tuple[Arrays, dict[str, Any]]:
    """With ``floor``, torchao's own choice."""
    power = 8 if dtype is E4M3 else 15
    codes, scales = np.zeros(x.shape, "u1"), np.zeros((x.shape[0], x.shape[1] // 32), "u1")
    for row in range(x.shape[0]):
        for block in range(scales.shape[1]):
            part = x[row, 32 * block : 32 * block + 32]
            a = np.max(np.abs(part))
            exponent = 128 if np.isinf(a) else int(np.floor(np.log2(float(a)))) if a >= 2.0**-126 else -127
            scale = 255 if np.isnan(a) else int(np.clip(exponent - power, -127, 128)) + 127
            scales[row, block] = scale
            with np.errstate(all="ignore"):
                by = F(np.nan) if scale == 255 else F(max(2.0 ** (scale - 127), 2.0**-126))
                codes[row, 32 * block : 32 * block + 32] = codes_of(part / by, dtype)
    arrays: Arrays = {"data": (codes, name_of(dtype)), "scale_inv": (scales, "float8_e8m0fnu")}
    return arrays, info("torchao.prototype.mx_formats.mx_tensor.MXTensor", name_of(dtype), block_shape=(1, 32))


def ao_fp4(x: np.ndarray, rng: np.random.Generator, _dtype: Any = None) -> tuple[Arrays, dict[str, Any]]:
    whole = amax(np.where(np.isfinite(x), x, 0))
    second = F(whole / F(448 * 6)) if rng.integers(2) and whole > 0 else None
    codes, scales = np.zeros(x.shape, "u1"), np.zeros((x.shape[0], x.shape[1] // 16), "u1")
    with np.errstate(all="ignore"):
        for row in range(x.shape[0]):
            for block in range(scales.shape[1]):
                part = x[row, 16 * block : 16 * block + 16]
                scale = np.max(np.abs(part)) / F(6)
                scale = scale if second is None else scale / second
                code = np.clip(scale, F(2.0**-6), F(448)).astype(E4M3)
                scales[row, block] = np.asarray(code).view("u1")
                factor = (F(1) if second is None else F(1) / second) / F(code)
                scaled = part * factor
                codes[row, 16 * block : 16 * block + 16] = codes_of(np.where(np.isnan(scaled), F(6), scaled), E2M1)
    arrays: Arrays = {"data": (pack(codes), "float4_e2m1fn_x2"), "scale_inv": (scales, "float8_e4m3fn")}
    if second is not None:
        arrays["tensor_scale_inv"] = (np.array(second, F), "float32")
    name = "torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor"
    return arrays, info(name, "float4_e2m1fn_x2", block_shape=(1, 16), use_triton_kernel=False)


Quantize = Callable[..., tuple[Arrays, dict[str, Any]]]
FORMATS: dict[str, Quantize] = {
    "te-float8": te_float8,
    "te-blocks": te_blocks,
    "te-mxfp8": te_mx,
    "te-nvfp4": te_fp4,
    "torchao-float8": ao_float8,
    "torchao-mx": ao_mx,
    "torchao-nvfp4": ao_fp4,
}
"""Every format that has a high-precision partner."""

SPECIAL = np.array([0.0, -0.0, 1e-40, -1e-39, 1e-30, 6e4, -6e4, 0.25, -0.75, 5.0, 448.0], F)


def bfloat16(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounded values, and their bits."""
    rounded = values.astype(ml_dtypes.bfloat16)
    return rounded.astype(F), rounded.view("<u2")


def values_of(rng: np.random.Generator, shape: tuple[int, int], hostile: bool) -> np.ndarray:
    """Random, over some orders of magnitude; hostile ones hold zeros, denormals, NaN and infinities."""
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 4, size=(1, shape[1]))).astype(F)
    if hostile:
        places = rng.integers(0, x.size, size=len(SPECIAL))
        x.reshape(-1)[places] = SPECIAL
        x[rng.integers(shape[0])] = 0
        x[rng.integers(shape[0])] *= F(1e-38)
        for value in (np.nan, np.inf, -np.inf):
            if rng.integers(2):
                x.reshape(-1)[rng.integers(x.size)] = value
    return x


def quantized(key: Key, x: np.ndarray, quantize: Quantize, rng: np.random.Generator, **more: Any) -> tuple[Sample, Any]:
    """A record of a tensor with its codes, and what its quantizer says."""
    values, bits = bfloat16(x)
    arrays, words = quantize(values, rng, **more)
    return Sample(key, {"high_precision": (bits, "bfloat16"), **arrays}, statistics(), shape=x.shape), words


def pair_incident(folder: Path, name: str, seed: int, *, hostile: bool = True, iterations: int = 2) -> list[Sample]:
    """An incident of activations of two layers in some iterations; gives its records in order."""
    rng = np.random.default_rng(seed)
    samples: dict[int, list[Sample]] = {}
    infos: list[Any] = []
    for iteration in range(10, 10 + iterations):
        samples[iteration] = []
        for layer in ("blocks.0.fc1", "blocks.1.fc1"):
            more = {"dtype": E5M2 if rng.integers(2) else E4M3} if "fp4" not in name else {}
            x = values_of(rng, (ROWS, COLUMNS), hostile)
            sample, words = quantized(Key(layer, "activation", microbatch=0), x, FORMATS[name], rng, **more)
            sample.quantizer = len(infos)
            infos.append(words)
            samples[iteration].append(sample)
    write(folder, samples, infos)
    return [sample for group in samples.values() for sample in group]


def product_incident(folder: Path, name: str, seed: int, *, bias: bool = False) -> list[Sample]:
    """Three products of a layer: activation, weight, output, gradient, dgrad, wgrad; gives its records in order."""
    rng = np.random.default_rng(seed)
    x, w, g = (values_of(rng, shape, False) for shape in ((ROWS, COLUMNS), (WIDTH, COLUMNS), (ROWS, WIDTH)))
    w, g = w[: WIDTH - WIDTH % 32 or WIDTH], g[:, : WIDTH - WIDTH % 32 or WIDTH]
    infos, made = [], []
    keys = [("activation", Stage.FORWARD), ("weight", Stage.FORWARD), ("gradient", Stage.BACKWARD)]
    for (tensor, stage), values in zip(keys, (x, w, g), strict=True):
        key = Key("blocks.0.fc1", tensor, microbatch=0, stage=stage)
        sample, words = quantized(key, values, FORMATS[name], np.random.default_rng(seed))  # the same options
        sample.quantizer = len(infos)
        infos.append(words)
        made.append(sample)
    from flightrec.codecs import quantized as codec  # decoding is tested elsewhere; multiplying is what is made here

    def decoded(number: int, side: str) -> np.ndarray:
        sample = made[number]
        arrays = {n: a for n, (a, _) in sample.arrays.items() if n != "high_precision"}
        formats = {n: f for n, (_, f) in sample.arrays.items()}
        has = "columnwise_data" in arrays
        return codec.dequantize(
            arrays, infos[number], formats=formats, shape=sample.shape, side=side if has else "rowwise"
        ).astype(F)

    added = (rng.standard_normal(w.shape[0]) * 3).astype(F) if bias else F(0)
    results = {
        "output": decoded(0, "rowwise") @ decoded(1, "rowwise").T + added,
        "dgrad": decoded(2, "rowwise") @ decoded(1, "columnwise"),
        "wgrad": decoded(2, "columnwise").T @ decoded(0, "columnwise"),
    }
    for tensor, values in results.items():
        stage = Stage.FORWARD if tensor == "output" else Stage.BACKWARD
        key = Key("blocks.0.fc1", tensor, microbatch=0, stage=stage)
        made.append(
            Sample(key, {"high_precision": (bfloat16(values)[1], "bfloat16")}, statistics(), shape=values.shape)
        )
    write(folder, {10: made}, infos)
    return made


def write(folder: Path, samples: dict[int, list[Sample]], infos: list[Any]) -> None:
    first = next(iter(samples.values()))[0].key
    folder.mkdir(parents=True, exist_ok=True)
    write_incident(folder, samples, [firing(first, max(samples))], quantizers=infos)
