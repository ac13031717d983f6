from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from sources_support import bits
from torch import nn

from flightrec.sources.traversal import MAX_DEPTH, MAX_ITEMS, observe, walk, walk_arguments

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


def test_plain_tensors_are_observed_without_copy_and_without_history():
    x = torch.ones(3, requires_grad=True) * 2
    plain = observe(x).plain
    assert plain.data_ptr() == x.data_ptr()
    assert not plain.requires_grad
    parameter = nn.Parameter(torch.ones(2))
    assert observe(parameter).plain.data_ptr() == parameter.data_ptr()
    assert type(observe(parameter).plain) is torch.Tensor
    expanded = torch.ones(1, 3).expand(4, 3).t()
    assert observe(expanded).plain.stride() == expanded.stride()


def test_subclasses_with_their_own_memory_are_seen_as_plain():
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("ran") if func is not torch.Tensor.as_subclass else None

    x = torch.tensor([1.0, torch.nan]).as_subclass(torch.Tensor)
    tagged = torch.Tensor._make_subclass(Tagged, x)
    with torch._C.DisableTorchFunction():
        plain = observe(tagged).plain
    assert type(plain) is torch.Tensor
    assert torch.equal(bits(plain), bits(x))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: torch.ones(2).to_sparse(), "sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: torch.ones(2, dtype=torch.complex64), "complex64"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "torch.quantized"),
        (nn.UninitializedParameter, "lazy"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_plain_memory_gives_a_reason(made, why):
    observed = observe(made())
    assert observed.plain is None
    assert observed.quantized is None
    assert why in observed.reason


def test_fake_tensors_are_passed_over_in_silence():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert observe(fake) == (None, None, "")


def test_quantized_wrappers_are_handed_on_as_they_are():
    module = pytest.importorskip("torchao.float8.float8_training_tensor")
    tensor = module.hp_tensor_and_scale_to_float8(torch.ones(2, 2), torch.tensor(3.0), torch.float8_e4m3fn)
    assert observe(tensor).quantized is tensor
