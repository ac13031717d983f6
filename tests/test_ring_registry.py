from __future__ import annotations

import contextlib

import torch

from flightrec.records import Key, QuantizerInfo
from flightrec.ring.layout import QuantizedParts, Segments
from flightrec.ring.registry import Registry
from flightrec.ring.statistics import StatisticsMatrix

CPU = torch.device("cpu")
KEEP = frozenset({"high_precision", "quantized"})


def made(on_layout=None, memory_bytes=1 << 20):
    return Registry(CPU, Segments(CPU, 1, memory_bytes), StatisticsMatrix(CPU, 2), on_layout, contextlib.nullcontext)


def test_calls_are_raised_to_the_first_free_one():
    registry = made()
    wanted, second = Key("a", "output"), Key("a", "output", call=1)
    assert [registry.claim(name, 0).key.call for name in (wanted, wanted, second, wanted)] == [0, 1, 2, 3]
    assert [registry.claim(name, 1).key.call for name in (second, wanted, wanted)] == [1, 0, 2]
    assert len(registry.entries) == 4


def test_layouts_are_found_again_by_shape_dtype_and_keep():
    registry = made()
    entry = registry.claim(Key("a", "output"), 0)
    x = torch.ones(2, 3)
    first = registry.find(entry, x, None, KEEP, "")
    assert registry.find(entry, torch.zeros(3, 2).t(), None, KEEP, "") is first  # strides do not matter
    others = [
        registry.find(entry, x.half(), None, KEEP, ""),
        registry.find(entry, x.flatten(), None, KEEP, ""),
        registry.find(entry, x, None, frozenset(), ""),
        registry.find(entry, x, None, KEEP, "left out"),
    ]
    assert [placed.layout.layout_id for placed in (first, *others)] == [0, 1, 2, 3, 4]
    assert others[3].layout.reason == "left out"


def test_formats_and_metadata_tell_quantizers_and_layouts_apart():
    registry = made()
    entry = registry.claim(Key("a", "output"), 0)
    data = torch.zeros(4, dtype=torch.uint8)

    def found(format_name, **metadata):
        info = QuantizerInfo("q", format_name, "none", (), metadata)
        return registry.find(entry, None, QuantizedParts(info, {"data": data}), KEEP, "").layout

    layouts = [found("float8_e4m3fn"), found("float8_e5m2"), found("float8_e4m3fn", amax=1), found("float8_e4m3fn")]
    assert [layout.quantizer for layout in layouts] == [0, 1, 2, 0]
    assert layouts[3] is layouts[0]
    assert [layout.components[0].format for layout in layouts[:2]] == ["float8_e4m3fn", "float8_e5m2"]


def test_moving_leaves_out_bytes_and_tells_the_new_ids():
    told = []
    registry = made(told.append)
    for layer, value in (("a", 1.0), ("b", 2.0)):
        entry = registry.claim(Key(layer, "output"), 0)
        placed = registry.find(entry, torch.ones(64), None, KEEP, "")
        placed.destination.high_precision[0] = value
    changed = registry.replace(Segments(CPU, 5, 1 << 20), {Key("a", "output"): "too large"})
    registry.announce()
    assert changed == {0: 2, 1: 3}
    assert (registry.layouts[2].components, registry.layouts[2].reason) == ((), "too large")
    assert registry.layouts[3].offset_bytes == 0
    segment = registry.segments.items[0]
    assert segment.buffer.shape == (6, 256)
    assert segment.buffer[0].view(torch.float32).tolist() == [2.0] * 64
    assert told == registry.layouts


def test_contributors_add_up_keys():
    registry = made()
    for layer, microbatch in (("a", 0), ("a", 1), ("b", 0)):
        registry.find(registry.claim(Key(layer, "output", microbatch=microbatch), 0), torch.ones(64), None, KEEP, "")
    rows = [(row.layer, row.num_bytes, row.num_records, round(row.share, 3)) for row in registry.contributors()]
    assert rows == [("a", 512, 2, 0.667), ("b", 256, 1, 0.333)]
