"""Operands taken from a template are what ``parts_of`` makes of them, and whatever differs is looked at again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import te_cpu_modules
import torch
from sources_support import Watch, bits
from te_layer_support import Layer, batch, loss_of, recipe_of, run, sink_of

from flightrec.sources.te import TeSource
from flightrec.sources.te_parts import parts_of
from flightrec.sources.te_state import state_of
from flightrec.sources.te_template import ModuleLook, Template


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch):
    with te_cpu_modules.running(monkeypatch) as modules:
        yield modules


class Nothing(dict):
    """A cache that keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


def record(te: Any, kind: str, recipe_name: str, *, cached: bool) -> tuple[list[Any], int]:
    te.state.reset()
    torch.manual_seed(0)
    model, recipe, sink = Layer(te, kind), recipe_of(te, recipe_name), sink_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sink) as watch:
        source = next(source for source in watch.sources if isinstance(source, TeSource))
        if not cached:
            source._templates, source._looks = Nothing(), Nothing()
        for iteration in range(3):
            for microbatch in range(2):
                loss_of(run(te, model, batch(2 * iteration + microbatch), recipe)).backward()
            if iteration == 1 and hasattr(recipe, "margin"):
                recipe.margin = 2  # from now on the metadata say so
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
        count = len(source._templates)
    assert not source._templates
    assert not sink.errors
    return sink.seen, count


@pytest.mark.parametrize(
    ("kind", "recipe_name"),
    [
        ("LayerNormMLP", "delayed"),
        ("Linear", "current"),
        ("GroupedLinear", "delayed"),
        ("ops", "delayed"),
        ("LayerNormMLP", "block"),
    ],
)
def test_records_are_the_same_with_and_without_templates(te, kind, recipe_name):
    quick, num_templates = record(te, kind, recipe_name, cached=True)
    slow, none = record(te, kind, recipe_name, cached=False)
    assert num_templates > 2
    assert none == 0
    assert [seen.key for seen in quick] == [seen.key for seen in slow]
    for one, two in zip(quick, slow, strict=True):
        assert (one.tensor is None) == (two.tensor is None)
        assert one.tensor is None or torch.equal(bits(one.tensor), bits(two.tensor))
        if one.quantized is None or two.quantized is None:
            assert one.quantized is two.quantized
            continue
        assert dataclasses.replace(one.quantized, components={}) == dataclasses.replace(two.quantized, components={})
        assert list(one.quantized.components) == list(two.quantized.components)
        for name, tensor in one.quantized.components.items():
            assert torch.equal(bits(tensor), bits(two.quantized.components[name])), name


class Example:
    """A weight of a real layer under delayed scaling, and its template."""

    def __init__(self, te: Any) -> None:
        model = Layer(te, "Linear")
        self.recipe = recipe_of(te, "delayed")
        run(te, model, batch(0), self.recipe)
        self.module = model.layer
        quantizer = self.module.quantizers["scaling_fwd"][0]
        quantizer.internal = True
        self.operand = quantizer(torch.ones(16, 16, dtype=torch.bfloat16))
        self.state = state_of(self.module, self.operand, at_quantizing=True)
        parts = parts_of(self.operand, self.state).parts
        assert parts is not None
        assert self.state.amax_history is not None
        self.look = ModuleLook.of(self.module, None)
        made = Template.of(self.operand, self.look, parts, self.state, True, ())
        assert made is not None
        self.template = made

    def taken(self, is_current: bool = True, facts: Any = ()) -> Any:
        return self.template.parts(self.operand, ModuleLook.of(self.module, self.look), is_current, facts)


def _swap_history(example: Example) -> None:
    held = example.module.fp8_meta["scaling_fwd"]
    held.amax_history = held.amax_history.clone()


def _swap_scale(example: Example) -> None:
    example.operand._quantizer.scale.data = torch.full((1,), 2.0)


CHANGES: dict[str, Callable[[Example], object]] = {
    "usage": lambda e: setattr(e.operand._quantizer, "columnwise_usage", not e.operand._quantizer.columnwise_usage),
    "a new attribute": lambda e: setattr(e.operand._quantizer, "epsilon", 1e-3),
    "another scale": lambda e: setattr(e.operand._quantizer, "scale", torch.ones(1)),
    "the scale's memory": _swap_scale,
    "no quantizer": lambda e: setattr(e.operand, "_quantizer", None),
    "recipe": lambda e: setattr(e.recipe, "margin", 3),
    "history": _swap_history,
    "format": lambda e: setattr(e.operand, "_fp8_dtype", type(e.operand._fp8_dtype).kFloat8E5M2),
    "dtype": lambda e: setattr(e.operand, "_dtype", torch.float32),
    "shape": lambda e: setattr(e.operand, "_data", e.operand._data.reshape(8, 32)),
    "only the transpose": lambda e: setattr(e.operand, "_data", None),
    "no scale": lambda e: setattr(e.operand, "_scale_inv", None),
    "strides": lambda e: setattr(e.operand, "_data", e.operand._data.t()),
    "freed memory": lambda e: e.operand._data.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_an_operand_that_differs_is_looked_at_in_full(te, name):
    example = Example(te)
    assert example.taken() is not None
    CHANGES[name](example)
    assert example.taken() is None


def test_an_operand_that_differs_in_values_alone_is_taken_with_its_own(te):
    example = Example(te)
    quantizer = example.module.quantizers["scaling_fwd"][0]
    example.operand = quantizer(torch.full((16, 16), 2.0, dtype=torch.bfloat16))
    taken, looked_at = example.taken(), parts_of(example.operand, example.state).parts
    assert taken.template is example.template
    assert taken.components["data"] is example.operand._data
    assert taken.info is looked_at.info
    assert list(taken.components) == list(looked_at.components)
    assert all(torch.equal(taken.components[name], tensor) for name, tensor in looked_at.components.items())
    assert example.taken(is_current=False) is None
    assert example.taken(facts=(("gathered", True),)) is None


def test_a_template_holds_no_operand(te):
    example = Example(te)
    held = [example.operand._data, example.operand._scale_inv]
    assert not any(value is tensor for value in _reachable(example.template) for tensor in held)


def _reachable(template: Template) -> list[Any]:
    values = [getattr(template, name) for name in Template.__slots__]
    return [*values, *template._components.values(), *template._parts.components.values(), *template._attributes]
