from __future__ import annotations

import pytest
import torch

from flightrec.records import Key, QuantizerInfo
from flightrec.ring.layout import (
    LARGEST_AREA_BYTES,
    QuantizedParts,
    Segment,
    Segments,
    build_components,
    build_plan,
)

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


def parts(direction="multiply_to_encode", block_shape=(), formats=None, pair_codes="data", **components):
    return QuantizedParts(
        QuantizerInfo("test", "float8_e4m3fn", direction, block_shape, {}), components, formats or {}, pair_codes
    )


def test_components_are_aligned_and_disjoint():
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    quantized = parts(data=torch.zeros(3, 5, dtype=E4M3), scale=torch.zeros(()), amax=torch.zeros(0))
    components, num_bytes = build_components(x, quantized)
    assert [(c.name, c.shape, c.format, c.offset_bytes, c.num_bytes) for c in components] == [
        ("high_precision", (3, 5), "bfloat16", 0, 30),
        ("data", (3, 5), "float8_e4m3fn", 32, 15),
        ("scale", (), "float32", 48, 4),
        ("amax", (0,), "float32", 64, 0),
    ]
    assert num_bytes == 256
    assert build_components(None, None) == ((), 256)


def test_formats_of_bytes():
    raw = torch.zeros(4, dtype=torch.uint8)
    quantized = parts(
        data=raw, columnwise_data=raw, scale=raw, other=raw, formats={"columnwise_data": "float4_e2m1fn_x2"}
    )
    formats = {name: quantized.format(name) for name in quantized.components}
    assert formats == {
        "data": "float8_e4m3fn", "columnwise_data": "float4_e2m1fn_x2", "scale": "uint8", "other": "uint8"
    }  # fmt: skip


def test_plan_finds_codes_scale_and_pair():
    x, codes = torch.zeros(4, 8), torch.zeros(4, 8, dtype=E4M3)
    plan = build_plan(x, parts(amax=torch.zeros(()), data=codes, scale=torch.zeros(())))
    assert (plan.codes, plan.format, plan.pairs, plan.scale) == (1, "float8_e4m3fn", True, 2)
    assert not plan.multiply_to_decode
    assert plan.scales == ((2, "float32"),)
    plan = build_plan(
        x,
        parts(
            "multiply_to_decode",
            pair_codes="columnwise_data",
            data=codes,
            scale_inv=torch.ones(1),
            columnwise_data=codes,
            columnwise_scale_inv=torch.ones(1),
        ),
    )
    assert (plan.codes, plan.pairs, plan.scale, plan.multiply_to_decode) == (2, True, 3, True)
    assert plan.scales == ((1, "float32"), (3, "float32"))


@pytest.mark.parametrize(
    ("x", "quantized"),
    [
        (None, parts(data=torch.zeros(4, 8, dtype=E4M3))),
        (torch.zeros(4, 8), parts(data=torch.zeros(8, 4, dtype=E4M3))),
        (torch.zeros(4, 8), parts(data=torch.zeros(4, 9, dtype=E4M3))),
        (torch.zeros(4, 8), parts(pair_codes=None, data=torch.zeros(4, 8, dtype=E4M3))),
        (torch.zeros(4, 8), parts(data=torch.zeros(4, 8, dtype=torch.int8))),
        (torch.zeros(4, 8, dtype=torch.int32), parts(data=torch.zeros(4, 8, dtype=E4M3))),
        (torch.zeros(4, 8), parts(formats={"data": "float4_e2m1fn_x2"}, data=torch.zeros(4, 8, dtype=torch.uint8))),
    ],
)
def test_no_pair_without_equal_shapes_and_known_codes(x, quantized):
    assert not build_plan(x, quantized).pairs


def test_packed_codes_pair_with_twice_the_width():
    quantized = parts(formats={"data": "float4_e2m1fn_x2"}, data=torch.zeros(4, 8, dtype=torch.uint8))
    assert build_plan(torch.zeros(4, 16), quantized).pairs


def test_no_scale_direction_means_unscaled():
    plan = build_plan(torch.zeros(4), parts("none", data=torch.zeros(4, dtype=E4M3)))
    assert plan.unscaled
    assert plan.scale == -1


def test_segment_views_address_the_same_place_in_every_slot():
    segment = Segment(0, CPU, 3, 1024)
    segment.buffer.zero_()
    view = segment.view(256, (2, 3), torch.float32)
    assert view.shape == (4, 2, 3)
    view[2] = 1.0
    assert segment.buffer[2, 256:280].view(torch.float32).tolist() == [1.0] * 6
    assert int(segment.buffer.count_nonzero()) == 12
    assert segment.view(16, (), torch.bool).shape == (4,)


def test_resized_segment_is_trimmed_and_keeps_slot_0():
    segment = Segment(5, CPU, 1, 4096)
    segment.buffer[0] = torch.arange(4096) % 251
    segment.used_bytes = 512
    new = segment.resized(6)
    assert new.buffer.shape == (7, 512)
    assert torch.equal(new.buffer[0], segment.buffer[0, :512])
    assert (new.index, new.used_bytes) == (5, 512)


def test_places_fill_the_newest_segment_then_open_larger_ones():
    segments = Segments(CPU, 1, 1 << 30)
    first = segments.find((), 600 << 10)
    second = segments.find((), 500 << 10)
    third = segments.find((), 256)
    assert (first.segment, first.offset_bytes) == (0, 0)
    assert (second.segment, second.offset_bytes) == (1, 0)
    assert (third.segment, third.offset_bytes) == (1, 500 << 10)
    assert [segment.area_bytes for segment in segments.items] == [1 << 20, 2 << 20]
    assert segments.find((first, second), 550 << 10) == first


def test_a_key_that_outgrows_its_place_gets_headroom():
    segments = Segments(CPU, 1, 1 << 30)
    small = segments.find((), 256)
    large = segments.find((small,), 1024)
    assert large.capacity_bytes == 1536
    assert segments.find((small, large), 1500) == large
    assert segments.find((small, large), 200) == large  # the newest that is large enough


def test_memory_is_never_exceeded():
    segments = Segments(CPU, 3, 4 * 1000)
    assert segments.find((), 512).capacity_bytes == 512
    assert segments.num_bytes <= 4000
    assert segments.find((), 1024) is None
    assert segments.find((), 256) is not None
    assert segments.find((), 256) is None
    assert segments.num_bytes <= 4000


def test_fill_makes_exact_segments_below_the_largest_area():
    segments = Segments(CPU, 1, 0)
    keys = [Key(str(number), "activation") for number in range(4)]
    sizes = dict(zip(keys, [256, LARGEST_AREA_BYTES, 512, 1024], strict=True))
    places = segments.fill(sizes)
    assert [segment.area_bytes for segment in segments.items] == [256, LARGEST_AREA_BYTES, 1536]
    assert [(places[key].segment, places[key].offset_bytes) for key in keys] == [(0, 0), (1, 0), (2, 0), (2, 512)]
    assert Segments(CPU, 1, 0).fill({}) == {}


def test_plan_finds_the_inverse_of_the_scale_and_the_history():
    def plan(direction: str, **components: torch.Tensor):
        info = QuantizerInfo("x", "float8_e4m3fn", direction, (), {})
        parts = QuantizedParts(info, {"data": torch.zeros(2, 4, dtype=torch.uint8), **components}, {}, "data")
        made = build_plan(None, parts)
        return [None if at < 0 else list(parts.components)[at] for at in (made.scale, made.inverse, made.history)]

    word, coded = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.float8_e8m0fnu)
    both = {"scale": word, "scale_inv": word}
    assert plan("multiply_to_encode", **both) == ["scale", "scale_inv", None]
    assert plan("multiply_to_decode", **both, amax_history=torch.ones(3)) == ["scale_inv", "scale", "amax_history"]
    assert plan("multiply_to_encode", scale=word) == ["scale", None, None]
    assert plan("multiply_to_encode", scale=word, scale_inv=torch.ones(2)) == ["scale", None, None]
    assert plan("multiply_to_decode", scale=word, scale_inv=coded) == ["scale_inv", None, None]
    assert plan("none", **both) == [None, None, None]
