from __future__ import annotations

import itertools

import torch

from flightrec.records import Key, QuantizerInfo
from flightrec.ring.layout import QuantizedParts, Segments
from flightrec.ring.looks import Latest
from flightrec.ring.registry import Placed, Registry
from flightrec.ring.statistics import StatisticsMatrix
from flightrec.ring.streams import Streams

CPU = torch.device("cpu")
KEEP = frozenset({"high_precision", "quantized"})
LESS = frozenset({"quantized"})
INFO = QuantizerInfo("Some", "float8_e4m3fn", "multiply_to_decode", (), {"a": 1})
OTHER = QuantizerInfo("Some", "float8_e4m3fn", "multiply_to_decode", (), {"a": 2})
Arguments = tuple[torch.Tensor | None, QuantizedParts | None, frozenset[str], str]


def parts(info: QuantizerInfo = INFO, shape: tuple[int, ...] = (2, 4), **more: torch.Tensor) -> QuantizedParts:
    codes = torch.zeros(shape, dtype=torch.uint8)
    return QuantizedParts(info, {"data": codes, "scale_inv": torch.ones(1), **more}, {"data": "float8_e4m3fn"}, "data")


def arguments() -> list[Arguments]:
    """Records of one key, each with another layout."""
    x = torch.zeros(2, 4)
    return [
        (x, None, KEEP, ""),
        (x.flatten(), None, KEEP, ""),
        (x.half(), None, KEEP, ""),
        (x, None, LESS, ""),
        (x, None, KEEP, "left out"),
        (None, parts(), KEEP, ""),
        (x, parts(), KEEP, ""),
        (x, parts(OTHER), KEEP, ""),
        (x, parts(shape=(4, 2)), KEEP, ""),
        (x, parts(amax=torch.ones(1)), KEEP, ""),
        (x, QuantizedParts(INFO, parts().components, {"data": "float8_e5m2"}, "data"), KEEP, ""),
        (x, QuantizedParts(INFO, parts().components, {"data": "float8_e4m3fn"}), KEEP, ""),
    ]


def registry() -> Registry:
    segments, statistics = Segments(CPU, 1, 1 << 20), StatisticsMatrix(CPU, 2)
    return Registry(CPU, segments, statistics, None, Streams(CPU).allocating)


def test_the_layout_is_the_same_whichever_record_came_before():
    quick, slow = registry(), registry()
    entries = [made.claim(Key("a", "output"), 0) for made in (quick, slow)]

    def find(known: Registry, number: int, entry: object) -> Placed:
        return known.find(entry, *arguments()[number])

    numbers = range(len(arguments()))
    for one, two in itertools.product(numbers, numbers):
        for number in (one, two, two):
            entries[1].latest = None
            found = find(quick, number, entries[0]).layout, find(slow, number, entries[1]).layout
            assert found[0] == found[1]
    assert len(quick.layouts) == len(numbers)


def test_only_the_same_looks_fit():
    made = registry()
    placed = made.find(made.claim(Key("a", "output"), 0), torch.zeros(2, 4), None, KEEP, "")
    known = [Latest(placed, *given) for given in arguments()]
    for number, latest in enumerate(known):
        assert [latest.fits(*given) for given in arguments()] == [other == number for other in range(len(known))]


def test_parts_of_the_template_of_before_are_not_looked_at_again():
    template = object()
    first, second = (
        QuantizedParts(INFO, parts().components, parts().formats, "data", template=template) for _ in range(2)
    )
    latest = Latest(None, None, first, KEEP, "")
    assert latest.fits(None, second, KEEP, "")
    assert not latest.fits(torch.zeros(1), second, KEEP, "")
    assert not latest.fits(None, QuantizedParts(OTHER, second.components, template=template), KEEP, "")


def test_forgotten_layouts_are_not_found_by_their_looks():
    made = registry()
    entry = made.claim(Key("a", "output"), 0)
    made.find(entry, torch.zeros(2, 4), None, KEEP, "left out")
    assert entry.latest is not None
    made.replace(Segments(CPU, 1, 1 << 20), {})
    assert entry.latest is None
