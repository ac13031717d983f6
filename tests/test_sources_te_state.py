from __future__ import annotations

import types

import pytest
import te_cpu
import torch

from flightrec.sources.te_classes import is_storage
from flightrec.sources.te_state import has_columnwise, recipe_fields, state_of


def recipes():
    te_cpu.install()
    from transformer_engine.common import recipe

    return recipe


def module_of(recipe: object, history: torch.Tensor, *, is_operation: bool = False) -> types.SimpleNamespace:
    forward = {"recipe": recipe, "scaling_fwd": types.SimpleNamespace(amax_history=history)}
    if is_operation:
        return types.SimpleNamespace(_fp8_metas={"forward": forward, "backward": None})
    return types.SimpleNamespace(fp8_meta=forward)


def test_a_recipe_comes_with_all_its_fields_by_name_and_as_the_same_object():
    made = recipes().DelayedScaling(margin=2, amax_history_len=8, amax_compute_algo="most_recent")
    fields = recipe_fields(made)
    assert fields["class"] == "DelayedScaling"
    assert (fields["margin"], fields["amax_history_len"], fields["amax_compute_algo"]) == (2, 8, "most_recent")
    assert (fields["fp8_format"], fields["reduce_amax"], fields["backward_override"]) == ("HYBRID", True, None)
    assert recipe_fields(made) is fields


def test_a_recipe_that_was_changed_in_place_is_read_again():
    made = recipes().DelayedScaling(margin=0)
    before = recipe_fields(made)
    made.margin = 3
    assert (before["margin"], recipe_fields(made)["margin"]) == (0, 3)
    assert recipe_fields(made) is recipe_fields(made)


def test_functions_and_nested_settings_of_a_recipe_are_named():
    def latest(history):
        return history[0]

    assert recipe_fields(recipes().DelayedScaling(amax_compute_algo=latest))["amax_compute_algo"].endswith("latest")
    block = recipe_fields(recipes().Float8BlockScaling())
    assert block["class"] == "Float8BlockScaling"
    assert block["fp8_gemm_fprop"]["use_split_accumulator"] is True


@pytest.mark.parametrize("is_operation", [False, True])
def test_the_history_is_the_column_whose_first_word_the_quantizer_fills(is_operation):
    history = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    quantizer = types.SimpleNamespace(scale=torch.ones(()), amax=history[0][1].reshape(1))
    operand = types.SimpleNamespace(_quantizer=quantizer)
    module = module_of(recipes().DelayedScaling(), history, is_operation=is_operation)
    state = state_of(module, operand, at_quantizing=True)
    assert state.amax_history.tolist() == [1, 4, 7, 10]
    assert state.amax is quantizer.amax
    assert state.scale is quantizer.scale
    assert state.at_quantizing
    assert state.recipe["class"] == "DelayedScaling"


def test_a_quantizer_of_another_module_has_no_history_here():
    history = torch.zeros(4, 3)
    quantizer = types.SimpleNamespace(scale=torch.ones(()), amax=torch.zeros(1))
    operand = types.SimpleNamespace(_quantizer=quantizer)
    state = state_of(module_of(recipes().DelayedScaling(), history), operand, at_quantizing=False)
    assert state.amax_history is None
    assert state.amax is quantizer.amax


def test_without_delayed_scaling_there_is_the_recipe_only():
    module = types.SimpleNamespace(fp8_meta={"recipe": recipes().Float8CurrentScaling()})
    state = state_of(module, types.SimpleNamespace(_quantizer=None), at_quantizing=True)
    assert (state.scale, state.amax, state.amax_history) == (None, None, None)
    assert state.recipe["class"] == "Float8CurrentScaling"
    assert state_of(types.SimpleNamespace(), types.SimpleNamespace(), at_quantizing=True).recipe == {}


def test_a_plain_tensor_is_no_storage_and_lacks_nothing():
    assert not is_storage(torch.ones(2))
    assert has_columnwise(torch.ones(2))
