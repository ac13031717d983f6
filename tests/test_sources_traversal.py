from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from flightrec.sources.traversal import MAX_DEPTH, MAX_ITEMS, walk, walk_arguments

X, Y, Z = torch.ones(1), torch.ones(2), torch.ones(3)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    a: Any
    b: Any = field(default=None)


@dataclass
class Slotted:
    __slots__ = ("a",)
    a: Any


def paths(value: object) -> list[tuple[str, int]]:
    return [(path, tensor.numel()) for path, tensor in walk(value)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, [("", 1)]),
        ((X, None, [Y, "s"]), [("0", 1), ("2.0", 2)]),
        ({"y": X, "aux": [Y], 3: {"z": Z}}, [("y", 1), ("aux.0", 2), ("3.z", 3)]),
        (collections.OrderedDict(b=X, a=Y), [("b", 1), ("a", 2)]),
        (Pair(X, {"k": Y}), [("left", 1), ("right.k", 2)]),
        (Record(X, Record(Y)), [("a", 1), ("b.a", 2)]),
        (Slotted(X), [("a", 1)]),
        (3, []),
        (None, []),
        ("text", []),
        ([], []),
        (Record, []),
    ],
)
def test_paths_of_plain_containers(value, expected):
    assert paths(value) == expected


def test_code_of_containers_is_never_run():
    class Trap(dict):
        def items(self):
            raise AssertionError("ran")

        __iter__ = __getitem__ = keys = values = items

    @dataclass
    class Lazy:
        a: Any

        def __getattribute__(self, name):
            if name == "a":
                raise AssertionError("ran")
            return object.__getattribute__(self, name)

    lazy = Lazy(X)
    assert paths(Trap(a=X)) == [("a", 1)]
    assert paths(lazy) == [("a", 1)]

    class Generator:
        def __iter__(self):
            raise AssertionError("ran")

    assert paths(Generator()) == []
    assert paths(x for x in [X]) == []


def test_deep_long_and_circular_containers_end():
    nested: Any = X
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert len(paths(nested)) == 1
    assert paths([nested]) == []
    circle: list[Any] = [X]
    circle.append(circle)
    assert len(paths(circle)) == MAX_DEPTH
    assert paths([0] * MAX_ITEMS + [X]) == []
    assert len(paths([X] * (MAX_ITEMS + 5))) == MAX_ITEMS


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((X,), {}, [""]),
        ((X, None), {"mask": Y}, ["", "mask"]),
        ((None, X), {}, [""]),
        ((X, Y), {}, ["0", "1"]),
        (((X, Y),), {}, ["0", "1"]),
        ((X, [Y, Z]), {}, ["0", "1.0", "1.1"]),
        (({"a": X},), {}, ["a"]),
        ((), {"x": X, "n": 3, "more": [Y]}, ["x", "more.0"]),
        ((), {}, []),
    ],
)
def test_paths_of_arguments(args, kwargs, expected):
    assert [path for path, _ in walk_arguments(args, kwargs)] == expected
