"""No rule fires in a training in which nothing is wrong, and each that should does when something is."""

from __future__ import annotations

import os

import pytest
import torch
from healthy import TRAININGS, train

pytest.importorskip("torchao")

SEEDS = (0, 1)


@pytest.mark.parametrize("name", TRAININGS)
def test_healthy_training_is_silent(name, tmp_path):
    outcome = train(name, 0, 200, tmp_path)
    assert outcome.incidents == [], outcome.rules
    assert sum(outcome.losses[-20:]) < 0.8 * sum(outcome.losses[:20])  # it really learns


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("FLIGHTREC_TEST_SLOW") != "1", reason="takes minutes: set FLIGHTREC_TEST_SLOW=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TRAININGS)
def test_two_thousand_healthy_iterations_are_silent(name, seed, tmp_path):
    outcome = train(name, seed, 2000, tmp_path)
    assert outcome.incidents == [], outcome.rules
    assert sum(outcome.losses[-20:]) < 0.8 * sum(outcome.losses[:20])


def fault(name, tmp_path, kind, num_iterations=110, **spoils):
    """Which rules fired, in a training that is spoiled, with one rule beside the exception's."""
    outcome = train(name, 0, num_iterations, tmp_path, triggers=[{"kind": kind}], **spoils)
    return set(outcome.rules)


def test_gradients_that_become_zero_fire(tmp_path):
    def cut(iteration, model):
        if iteration == 80:
            with torch.no_grad():
                model.net[4].weight.zero_()
                model.net[4].weight.requires_grad_(False)  # the head reads nothing any more: all before it gets zeros

    assert fault("mlp", tmp_path, "zero_gradient", before=cut) == {"zero_gradient"}


def test_a_graph_that_is_cut_fires_missing_record(tmp_path):
    def cut(iteration, model):
        if iteration == 80:
            model.net[2].register_forward_hook(lambda module, args, output: output.detach())

    assert fault("mlp", tmp_path, "missing_record", before=cut) == {"missing_record"}


def test_experts_whose_graph_is_cut_fire_missing_record(tmp_path):
    def cut(iteration, model):
        if iteration == 80:
            for expert in model.first.experts:
                expert.register_forward_hook(lambda module, args, output: output.detach())

    assert fault("moe", tmp_path, "missing_record", before=cut) == {"missing_record"}


def test_parameters_that_stand_still_fire(tmp_path):
    def stop(iteration, model):
        if iteration == 60:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    assert fault("mlp", tmp_path, "unchanged_parameters", before=stop) == {"unchanged_parameters"}


def test_a_router_that_collapses_fires_and_names_the_experts(tmp_path):
    def collapse(iteration, model):
        if iteration == 80:
            with torch.no_grad():
                model.first.router.bias[3] = 1e4

    rules = fault("moe", tmp_path, "expert", num_iterations=150, before=collapse)
    assert rules == {"expert"}


def test_an_expert_that_explodes_fires_where_the_whole_looks_as_ever(tmp_path):
    def explode(iteration, model):
        if iteration == 80:
            with torch.no_grad():
                model.second.experts[1].w1.weight.mul_(40.0)

    assert fault("moe", tmp_path, "expert", before=explode) == {"expert"}
