from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from format_contract import described, swizzled

from flightrec.codecs import quantized, te_layout
from flightrec.errors import FormatError

SHAPES = [(128, 64), (0, 64), (32, 64), (256, 64)]
FORMATS = {"float8": "float8_e4m3fn", "float8_block": "float8_e5m2", "mxfp8": "float8_e4m3fn", "identity": "bfloat16"}
FORMATS["nvfp4"] = "float4_e2m1fn_x2"
SCALES = {"mxfp8": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}


def group(scheme: str, shapes=SHAPES, *, columnwise=False, order=False, two_d=False, row_scaled=False, gap=0):
    """Buffers of a group as Transformer Engine lays them out, and the members' numbers by decoding each alone."""
    rng = np.random.default_rng(0)
    side, prefix = ("columnwise", "columnwise_") if columnwise else ("rowwise", "")
    data, scales, amaxes, members, offsets = [], [], [], [], [0]
    per_item = 2 if scheme == "nvfp4" else 1
    for rows, columns in shapes:
        transposed = columnwise and scheme in ("float8", "float8_block", "nvfp4")
        held = (columns, rows) if transposed else (rows, columns)
        codes = rng.integers(0, 0x78, (held[0], held[1] // per_item)).astype(np.uint8)
        own: dict[str, Any] = {"data": codes.T if transposed and scheme != "nvfp4" else codes}
        blocks: tuple[int, ...] = ()
        if scheme == "identity":
            own["data"] = codes = codes.astype(np.uint16) << 7
        elif scheme == "float8":
            own["scale_inv"] = np.exp2(rng.integers(-3, 3, 1)).astype(np.float32)
            scales.append(own["scale_inv"])
        else:
            shape = te_layout.scale_shape(scheme, rows, columns, columnwise=columnwise, two_d=two_d)
            kind = np.float32 if scheme == "float8_block" else np.uint8
            raw = rng.integers(1, 100, shape).astype(kind)
            own["scale_inv"], blocks = te_layout.logical_scale(
                scheme, raw, rows, columns, columnwise=columnwise, two_d=two_d
            )
            scales.append(swizzled(raw.T if scheme == "mxfp8" and columnwise else raw) if order else raw.reshape(-1))
        if scheme == "nvfp4":
            own["amax"] = rng.uniform(1, 9, held[0] if row_scaled else 1).astype(np.float32)
            amaxes.append(own["amax"])
        more = {"transposed": True} if transposed and scheme == "nvfp4" else {}
        info = described(scheme, FORMATS[scheme], "rowwise", block_shape=blocks, **more)
        info["scale_direction"] = "none" if scheme == "identity" else "multiply_to_decode"
        formats = {
            "data": FORMATS[scheme],
            "scale_inv": {"mxfp8": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}.get(scheme),
        }
        formats = {name: form for name, form in formats.items() if form}
        members.append(quantized.dequantize(own, info, formats=formats, shape=(rows, columns)))
        data += [codes.reshape(-1), np.full(gap, 0x7F, codes.dtype)]
        offsets.append(offsets[-1] + rows * columns + gap * per_item)
    components = {f"{prefix}data": np.concatenate(data)}
    if scales:
        components[f"{prefix}swizzled_scale_inv" if order else f"{prefix}scale_inv"] = np.concatenate(scales)
    if amaxes:
        components[f"{prefix}amax"] = np.concatenate(amaxes)
    words = {
        "member": scheme,
        "num_tensors": len(shapes),
        "group_shape": [-1, 64],
        "two_d": two_d,
        "row_scaled": row_scaled,
    }
    info = described("grouped", FORMATS[scheme], side, **words)
    if scheme == "identity":
        info["scale_direction"] = "none"
    if len(set(shapes)) > 1 or gap:
        components["first_dims"] = np.array([rows for rows, _ in shapes], np.int64)
    if gap:
        components["tensor_offsets"] = np.array(offsets, np.int64)
    return components, info, members, side


CASES = [
    ("float8", {}),
    ("float8", {"columnwise": True}),
    ("float8_block", {}),
    ("float8_block", {"columnwise": True}),
    ("float8_block", {"two_d": True}),
    ("float8_block", {"two_d": True, "columnwise": True}),
    ("mxfp8", {}),
    ("mxfp8", {"columnwise": True}),
    ("mxfp8", {"order": True}),
    ("mxfp8", {"order": True, "columnwise": True}),
    ("nvfp4", {}),
    ("nvfp4", {"columnwise": True}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"order": True}),
    ("identity", {}),
]


@pytest.mark.parametrize("more", [{}, {"gap": 64}, {"shapes": [(64, 64)] * 3}], ids=["splits", "gaps", "uniform"])
@pytest.mark.parametrize(("scheme", "how"), CASES)
def test_members_are_those_that_are_decoded_alone(scheme: str, how: dict[str, bool], more: dict[str, Any]) -> None:
    components, info, members, side = group(scheme, **how, **more)
    formats = {name: FORMATS[scheme] for name in components if name.endswith("data")}
    if scheme in ("mxfp8", "nvfp4") and not how.get("order"):
        formats |= {name: SCALES[scheme] for name in components if name.endswith("scale_inv")}
    found = quantized.dequantize_members(components, info, formats=formats, side=side)
    assert [member.shape for member in found] == [member.shape for member in members]
    for one, other in zip(found, members, strict=True):
        assert np.array_equal(one, other, equal_nan=True)
    whole = quantized.dequantize(components, info, formats=formats)
    assert np.array_equal(whole, np.concatenate(members), equal_nan=True)
    assert any(member.any() for member in members)


def test_members_that_differ_in_columns_come_flat() -> None:
    components = {
        "data": np.full(10, 0x38, np.uint8),
        "scale_inv": np.array([1.0, 2.0], np.float32),
        "last_dims": np.array([2, 3]),
    }
    info = described("grouped", "float8_e4m3fn", "rowwise", member="float8", num_tensors=2, group_shape=[2, -1])
    assert [m.shape for m in quantized.dequantize_members(components, info)] == [(2, 2), (2, 3)]
    assert quantized.dequantize(components, info).tolist() == [1.0] * 4 + [2.0] * 6


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_tensors": None}, "num_tensors"),
        ({"member": "float9"}, "float9"),
        ({"num_tensors": 5}, "5 members"),
    ],
)
def test_words_that_do_not_fit_are_refused(change: dict[str, Any], why: str) -> None:
    components, info, _, _ = group("float8")
    info["metadata"] |= change
    with pytest.raises(FormatError, match=why):
        quantized.dequantize_members(components, info)


def test_buffers_that_are_missing_or_too_short_are_named() -> None:
    components, info, _, _ = group("float8_block")
    for name in ("data", "scale_inv"):
        short = {**components, name: components[name][:-1]}
        with pytest.raises(FormatError, match=f"'{name}' holds"):
            quantized.dequantize_members(short, info)
        with pytest.raises(FormatError, match=f"'{name}'"):
            quantized.dequantize_members({k: v for k, v in components.items() if k != name}, info)
    with pytest.raises(FormatError, match="1 tensor_offsets"):
        quantized.dequantize_members({**components, "tensor_offsets": np.zeros(1, np.int64)}, info)


def test_only_a_grouped_tensor_has_members() -> None:
    info = described("float8", "float8_e4m3fn", "rowwise")
    with pytest.raises(FormatError, match="has members"):
        quantized.dequantize_members({"data": np.zeros(2, ml_dtypes.float8_e4m3fn)}, info)
