"""What a feature can tell of a quantizer that it is shown without its module."""

from __future__ import annotations

import pytest
import te_cpu
import torch
from te_debug import quantizer

from flightrec.inspection.quantizers import Recipes, with_state
from flightrec.ring.layout import QuantizedParts


@pytest.fixture(autouse=True)
def _real_transformer_engine() -> None:
    te_cpu.install()


def test_a_layer_keeps_the_recipe_of_its_forward() -> None:
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipes = Recipes()
    assert recipes.of("l", is_forward=True) == {}
    state = FP8GlobalStateManager.quantization_state
    before = state.fp8_enabled, state.fp8_recipe
    try:
        state.fp8_enabled, state.fp8_recipe = True, DelayedScaling(margin=2)
        first = recipes.of("l", is_forward=True)
        assert (first["class"], first["margin"]) == ("DelayedScaling", 2)
        state.fp8_recipe = DelayedScaling(margin=2)
        assert recipes.of("l", is_forward=True) is first  # equal: the same object, so the same quantizer
        state.fp8_recipe = Float8CurrentScaling()
        assert recipes.of("l", is_forward=False) is first
        assert recipes.of("other", is_forward=False) == {}
        assert recipes.of("l", is_forward=True)["class"] == "Float8CurrentScaling"
    finally:
        state.fp8_enabled, state.fp8_recipe = before
    assert recipes.of("l", is_forward=True)["class"] == "Float8CurrentScaling"


def test_strangers_come_back_as_they_are() -> None:
    for value in (None, torch.ones(2), object()):
        assert with_state(value, None, {}, at_quantizing=True) is value


def test_parts_say_recipe_and_quantizer() -> None:
    recipe = {"class": "Float8CurrentScaling"}
    parts = with_state(quantizer("fp8")(torch.randn(4, 4)), None, recipe, at_quantizing=True)
    assert isinstance(parts, QuantizedParts)
    assert set(parts.components) == {"data", "scale_inv"}
    assert "Float8CurrentScaling" in str(dict(parts.info.metadata))
