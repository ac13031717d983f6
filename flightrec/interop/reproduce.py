"""Runs what `flightrec export` wrote into this folder: decodes, multiplies, says where numbers are not finite.

Needs numpy and torch. `record.json` names the arrays, their formats and how codes become numbers. Where Transformer
Engine is installed, its classes are made of the same bytes (`te_tensors.py`) and asked for the same numbers.

    python reproduce.py [--device cuda] [--double]
"""

from __future__ import annotations

import argparse
import importlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parent
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMULAS: dict[str, tuple[str, str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "forward": ("activation", "weight", lambda a, w: a @ w.T),
    "dgrad": ("gradient", "weight", lambda g, w: g @ w),
    "wgrad": ("gradient", "activation", lambda g, a: g.T @ a),
}
SHOWN = 8


def read_arrays(manifest: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays by name, as numpy: bit patterns where numpy has no such number."""
    path = FOLDER / manifest["file"]
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            told = manifest["arrays"][name]
            found[name] = np.frombuffer(data[first:last], told["stored"]).reshape(told["shape"]).copy()
    return found


def to_tensor(array: np.ndarray[Any, Any], form: str) -> torch.Tensor:
    """The recorded dtype, bit by bit; what torch has no dtype of stays as it is stored."""
    stored = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    dtype = getattr(torch, form, None)
    if form == "bool":
        return stored != 0
    return stored.view(dtype) if isinstance(dtype, torch.dtype) and dtype != stored.dtype else stored


def decode(array: np.ndarray[Any, Any], form: str, shape: list[int]) -> torch.Tensor:
    """Numbers of stored elements, float32 (float64 as it is)."""
    stored = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    if form == "float4_e2m1fn_x2":  # two codes a byte, the first in the low nibble
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        nibbles = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
        return table[nibbles.long()][..., : shape[-1]]
    if form in ("float6_e2m3fn", "float6_e3m2fn"):
        bits = 3 if form == "float6_e2m3fn" else 2
        low, bias = (stored & 31).double(), 1 if bits == 3 else 3
        exponent, mantissa = torch.floor(low / 2**bits), torch.remainder(low, 2**bits) / 2**bits
        normal = (1 + mantissa) * torch.exp2(exponent - bias)
        sign = torch.where((stored & 32) > 0, -1.0, 1.0).double()
        return (sign * torch.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias))).float()
    if form == "float8_e8m0fnu":
        values = torch.exp2(stored.double() - 127)
        return torch.where(stored == 255, float("nan"), values).float()
    values = to_tensor(array, form)
    if values.dtype == torch.complex32:
        return values.to(torch.complex64)
    return values if values.dtype in (torch.float64, torch.complex64, torch.complex128) else values.float()


def dequantize(side: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> torch.Tensor:
    """Codes times, or over, the scale of their block, in the tensor's shape."""
    if "values" in side:  # of a format that has no such rule: decoded when it was exported
        return torch.from_numpy(arrays[side["values"]])
    values = decode(arrays[side["codes"]], side["format"], side["codes_shape"])
    if side["scales"]:
        spread = torch.from_numpy(arrays[side["scales"]])
        for axis, block in enumerate(side["block_shape"]):
            spread = spread.repeat_interleave(block, axis).narrow(axis, 0, side["codes_shape"][axis])
        spread = spread.reshape(()) if spread.numel() == 1 else spread
        values = values / spread if side["divide"] else values * spread
    if side["transposed"]:
        values = values.movedim(0, -1)
    return values.reshape(side["shape"]).contiguous()


def checksum(values: torch.Tensor) -> int:
    """Of the float32 numbers; every NaN counts as the same."""
    bits = torch.where(values.isnan(), 0x7FC00000, values.contiguous().view(torch.int32))
    return zlib.crc32(bits.to(torch.int32).numpy().tobytes())


def tell(name: str, values: torch.Tensor) -> None:
    """Statistics, and where numbers are not finite."""
    values = values.abs() if values.is_complex() else values.double() if values.dtype != torch.bool else values.float()
    finite = values.isfinite()
    kept = values[finite]
    amax, rms = (f"{kept.abs().max():.6g}", f"{kept.square().mean().sqrt():.6g}") if kept.numel() else ("-", "-")
    counts = f"NaN {int(values.isnan().sum())}, Inf {int(values.isinf().sum())}, zeros {int((values == 0).sum())}"
    print(f"  {name}: {tuple(values.shape)}, amax {amax}, rms {rms}, {counts}")
    if not finite.all():
        where(~finite, "not finite")


def where(mask: torch.Tensor, what: str) -> None:
    """The first places, and in how many rows and columns they lie."""
    places = mask.nonzero()
    shown = ", ".join(str(place) for place in places[:SHOWN].tolist())
    print(f"    {what} at {shown}{', ...' if len(places) > SHOWN else ''}")
    if mask.dim() > 1:
        flat = mask.reshape(-1, mask.shape[-1])
        rows, columns = int(flat.any(1).sum()), int(flat.any(0).sum())
        print(f"    in {rows} of {flat.shape[0]} rows and {columns} of {flat.shape[1]} columns")


def tell_tensor(name: str, entry: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """One recorded tensor: as it was before it was quantized, and what its codes stand for."""
    key = entry["key"]
    print(f"{name}: {key['layer']} {key['tensor']} {key['part']}".rstrip() + f", iteration {entry['iteration']}, "
          f"microbatch {key['microbatch']}, {key['stage']}")  # fmt: skip
    plain = high_precision(entry, arrays)
    if plain is not None:
        tell(f"high precision ({entry['dtype']})", plain)
    for side, rule in entry["sides"].items():
        values = dequantize(rule, arrays)
        tell(f"{side} codes ({rule['format']})", values)
        if rule["crc32"] is not None:
            same = "yes" if checksum(values) == rule["crc32"] else "NO"
            print(f"    the numbers are those that flightrec decodes: {same}")
        if plain is not None and plain.shape == values.shape and not rule.get("rht"):
            both = plain.isfinite() & values.isfinite()
            error = (values.double() - plain.double())[both].norm() / plain.double()[both].norm()
            print(f"    quantization error {error:.4g}, {int((both & (plain != 0) & (values == 0)).sum())} underflows")


def high_precision(entry: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> torch.Tensor | None:
    """The tensor before it was quantized, as numbers; None if it was not recorded."""
    part = entry["components"].get("high_precision")
    return None if part is None else decode(arrays[part["array"]], part["format"], part["shape"])


def operand(entry: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], side: str) -> tuple[torch.Tensor, str]:
    """What the product read: the codes of its side, those of the other, or the high-precision tensor."""
    for name in (side, *entry["sides"]):
        if name in entry["sides"]:
            return dequantize(entry["sides"][name], arrays), f"{name} codes"
    plain = high_precision(entry, arrays)
    assert plain is not None, "an operand without bytes is not exported"
    return plain, "high precision"


def multiply(manifest: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], options: argparse.Namespace) -> None:
    """Run the product and compare it with the recorded output."""
    entries = manifest["tensors"]
    first, second, formula = FORMULAS[manifest["product"]]
    made = []
    for name in (first, second):
        values, what = operand(entries[name], arrays, manifest["sides"][name])
        print(f"{name} is read from its {what}")
        values = values.reshape(-1, values.shape[-1]).to(options.device)
        made.append(values.double() if options.double else values.float())
    result = formula(*made)
    if "bias" in entries:
        bias = high_precision(entries["bias"], arrays)
        assert bias is not None
        result = result + bias.to(result)
    print(f"{manifest['product']} = {manifest['formula']}")
    tell("computed", result.cpu())
    expected = None if "output" not in entries else high_precision(entries["output"], arrays)
    if expected is None:
        print("its output was not recorded; there is nothing to compare with")
        return
    magnitude = formula(*(values.abs().nan_to_num(0, 0, 0) for values in made)).cpu().double()
    expected, result = expected.reshape(result.shape).double(), result.cpu().double()
    ways = [(result, "")]
    if "before" in entries:
        before = high_precision(entries["before"], arrays)
        assert before is not None
        ways.append((result + before.reshape(result.shape), ", added to what the microbatch before had left"))
    elif manifest["product"] == "forward" and "bias" not in entries:
        bias = (expected - result).nanmedian(0).values
        ways.append((result + bias, " and a constant for each column: a bias that was not recorded"))
    compare(ways, expected, magnitude, manifest["step"])


def compare(ways: list[tuple[torch.Tensor, str]], expected: torch.Tensor, magnitude: torch.Tensor, step: float) -> None:
    """Say whether one of the results is the recorded one, up to rounding and the accumulation of FP8 tensor cores."""
    tell("recorded", expected)
    for result, words in ways:
        bad, distance = differing(result, expected, magnitude, step)
        if not bad.any():
            print(f"  the same up to rounding{words}: at most {float(distance.max()):.6g} apart")
            return
    bad, distance = differing(ways[0][0], expected, magnitude, step)
    print(f"  DIFFERENT: {int(bad.sum())} of {bad.numel()} elements, at most {float(distance.max()):.6g} apart")
    where(bad, "different")


def differing(
    result: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, step: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements are not the same, and how far apart those are that are finite."""
    both = result.isfinite() & expected.isfinite()
    distance = torch.where(both, (result - expected).abs(), 0)
    bad = (distance > step * expected.abs() + 2.0**-11 * magnitude) & both
    return bad | (result.isfinite() != expected.isfinite()), distance


def with_transformer_engine(manifest: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], device: str) -> None:
    """The same numbers and the same product from Transformer Engine's own classes, where they can be used."""
    made = te_tensors_of(manifest, arrays, device)
    if manifest["kind"] == "product" and device != "cpu" and made is not None:
        te_product(manifest, made, arrays)


def te_tensors_of(
    manifest: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], device: str
) -> dict[str, Any] | None:
    """Tensors of Transformer Engine by role, and whether they decode to the same numbers; None: it is not here."""
    try:
        import transformer_engine.pytorch  # noqa: F401

        build = importlib.import_module("te_tensors").build  # beside this file
    except Exception as error:
        print(f"Transformer Engine cannot be used here; torch's numbers stand alone ({type(error).__name__}: {error})")
        return None
    made = {}
    for name, entry in manifest["tensors"].items():
        if not entry["sides"]:
            continue
        names = {part: told["array"] for part, told in entry["components"].items() if part != "high_precision"}
        try:
            parts = {part: torch.from_numpy(arrays[array]).to(device) for part, array in names.items()}
            made[name] = build(entry["metadata"], parts, tuple(entry["shape"]))
            found = made[name].dequantize(dtype=torch.float32).cpu()
        except Exception as error:
            print(f"Transformer Engine, {name}: {type(error).__name__}: {error}")
            continue
        ours = dequantize(next(iter(entry["sides"].values())), arrays).reshape(found.shape)
        same = "the same" if same_numbers(found, ours).all() else "OTHER"
        print(f"Transformer Engine, {name}: {type(made[name]).__name__} decodes to {same} numbers")
    return made


def te_product(manifest: dict[str, Any], made: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """The product by Transformer Engine's kernel, with the bias that was recorded, and into what a running sum held."""
    a, b, layout, gemm = {
        "forward": ("weight", "activation", "TN", "fp8_gemm_fprop"),
        "dgrad": ("weight", "gradient", "NN", "fp8_gemm_dgrad"),
        "wgrad": ("activation", "gradient", "NT", "fp8_gemm_wgrad"),
    }[manifest["product"]]
    missing = [role for role in (a, b) if role not in made]
    if missing:
        print(f"Transformer Engine's product: {' and '.join(missing)} could not be made as its tensors")
        return
    entries = manifest["tensors"]
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        for role in (a, b):
            if manifest["sides"][role] == "columnwise":  # Hopper multiplies TN only: the codes are transposed first
                made[role].update_usage(columnwise_usage=True)
        dtype = as_recorded(entries["output"]) if "output" in entries else torch.bfloat16
        options: dict[str, Any] = {"out_dtype": dtype, "use_split_accumulator": is_split(entries, (a, b), gemm)}
        if "bias" in entries:
            options["bias"] = to_device(entries["bias"], arrays, made[a].device)
        ways = {"": general_gemm(made[a], made[b], layout=layout, **options)[0].detach().cpu()}
        if "before" in entries:
            into = to_device(entries["before"], arrays, made[a].device)
            general_gemm(made[a], made[b], layout=layout, out=into, accumulate=True, **options)
            ways[", added to what the microbatch before had left"] = into.cpu()
    except Exception as error:
        print(f"Transformer Engine's product: {type(error).__name__}: {error}")
        return
    tell("Transformer Engine's product", ways[""])
    expected = high_precision(entries["output"], arrays) if "output" in entries else None
    if expected is None:
        return
    for words, result in ways.items():
        if same_numbers(result, expected.reshape(result.shape)).all():
            print(f"  bit for bit the recorded output{words}")
            return
    result, expected = ways[""].float(), expected.reshape(ways[""].shape).float()
    differ = ~same_numbers(result, expected)
    distance = torch.where(differ, (result - expected).abs(), 0).nan_to_num(0, 0, 0).max()
    print(f"  NOT bit for bit the recorded output: {int(differ.sum())} of {differ.numel()} elements differ, "
          f"at most {float(distance):.6g} apart")  # fmt: skip
    where(differ, "different")


def to_device(
    entry: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], device: torch.device | str
) -> torch.Tensor:
    """A high-precision tensor in the dtype that it had."""
    values = high_precision(entry, arrays)
    assert values is not None
    return values.to(device, as_recorded(entry)).contiguous()


def as_recorded(entry: dict[str, Any]) -> torch.dtype:
    """The dtype that a high-precision tensor had."""
    dtype = getattr(torch, entry["components"]["high_precision"]["format"])
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_split(entries: dict[str, Any], roles: tuple[str, str], gemm: str) -> bool:
    """Whether the kernel adds in a split accumulator: what the recipe says, else what Transformer Engine does."""
    for role in roles:
        recipe = (entries[role]["metadata"].get("metadata") or {}).get("recipe") or {}
        if gemm in recipe:
            return "true" in str(recipe[gemm]).lower()
    return gemm != "fp8_gemm_fprop"


def same_numbers(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Element by element; NaN is NaN."""
    return (first == second) | (first.isnan() & second.isnan())


def main() -> None:
    """Tell everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--double", action="store_true", help="multiply in float64")
    options = parser.parse_args()
    manifest = json.loads((FOLDER / "record.json").read_text(encoding="utf-8"))
    arrays = read_arrays(manifest)
    for name, entry in manifest["tensors"].items():
        tell_tensor(name, entry, arrays)
    if manifest["kind"] == "product":
        multiply(manifest, arrays, options)
    if any(entry["sides"] for entry in manifest["tensors"].values()):
        with_transformer_engine(manifest, arrays, options.device)


if __name__ == "__main__":
    main()
