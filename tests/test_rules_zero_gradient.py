from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rules_support import DEVICES, PlainSeries, Run, compare, healthy, key, statistics_row

from flightrec.config.training_rules import ZeroGradientRule

GRADIENT = key("fc", "gradient")


def grouped(number: int):
    """The key of an expert of a grouped product."""
    return replace(key("moe", "gradient"), part=f"expert.{number}")


def fires(run: Run, amaxes) -> list[bool]:
    return [bool(run.fired({GRADIENT: healthy(amax=amax)})) for amax in amaxes]


def test_zeros_after_something_fire_once():
    run = Run([ZeroGradientRule(min_samples=3, consecutive=4)])
    assert fires(run, [1.0] * 3 + [0.0] * 9) == [False] * 6 + [True] + [False] * 5


def test_a_gradient_that_was_never_anything_is_silent():
    run = Run([ZeroGradientRule(min_samples=1, consecutive=2)])
    assert not any(fires(run, [0.0] * 20))


def test_single_zeros_are_silent():
    run = Run([ZeroGradientRule(min_samples=1, consecutive=2)])
    assert not any(fires(run, [1.0, 0.0] * 20))


def test_an_expert_without_tokens_is_silent():
    run = Run([ZeroGradientRule(min_samples=1, consecutive=2)])
    run.tick({GRADIENT: healthy()})
    for values in (healthy(numel=0, amax=np.nan), healthy(nan_count=4096, amax=np.nan)) * 5:
        assert run.fired({GRADIENT: values}) == set()


class Plain(PlainSeries):
    run = nonzero = 0

    def judge(self, values):
        usable = {seen: found["amax"] for seen, found in values.items() if found["numel"] > 0 and found["amax"] >= 0}
        if not usable:
            return False, set()
        if max(usable.values()) > 0:
            self.run, self.nonzero = 0, self.nonzero + 1
            return True, set()
        self.run += 1
        return True, set(
            usable
        ) if self.run >= self.rule.consecutive and self.nonzero >= self.rule.min_samples else set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    def draw(generator):
        if generator.random() < 0.1:
            return None
        amax = generator.choice([0.0, 1e-30, np.nan], p=[0.75, 0.2, 0.05])
        return healthy(numel=0, amax=np.nan) if generator.random() < 0.05 else healthy(amax=float(amax))

    rule = ZeroGradientRule(tensors="activation", consecutive=1 + seed, min_samples=1 + seed, rearm=1 + seed % 2)
    assert compare(rule, Plain, draw, device=device, seed=seed).tells


def test_sentence():
    run = Run([ZeroGradientRule()])
    assert run.evaluator.explain(0, GRADIENT, 16.0, 16.0, statistics_row(healthy(amax=0.0))) == (
        "gradient of fc (microbatch 0, forward) is all zero (4096 elements), as in 16 samples in a row; before, it was "
        "not"
    )


@pytest.mark.parametrize("number_of", [lambda n: key(f"experts.{n}.w1", "wgrad"), grouped], ids=["layers", "splits"])
def test_an_expert_that_is_left_without_tokens_for_long_is_silent_and_all_of_them_are_not(number_of):
    run = Run([ZeroGradientRule(min_samples=3, consecutive=4)])
    names = [number_of(number) for number in range(3)]

    def fired(amaxes):
        return run.fired(
            {name: healthy(amax=amax) for name, amax in zip(names, amaxes, strict=True) if amax is not None}
        )

    for _ in range(5):
        assert fired([1.0, 1.0, 1.0]) == set()
    for _ in range(40):
        assert fired([1.0, 0.0, None]) == set()
    assert [bool(fired([0.0, 0.0, None])) for _ in range(5)] == [False, False, False, True, False]
