from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flightrec.budget import turns

WEIGHTS = st.lists(st.floats(0, 1e12) | st.integers(0, 9).map(float), min_size=1, max_size=60)


def test_the_ladder():
    assert list(turns.ladder(1)) == [1]
    assert list(turns.ladder(20)) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert list(turns.ladder(16)) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert len(list(turns.ladder(10**6))) < 45


@given(WEIGHTS, st.data())
def test_every_layer_has_its_turn_and_no_turn_is_empty(weights, data):
    num_turns = data.draw(st.integers(1, len(weights)))
    starts = turns.cut(weights, num_turns)
    assert starts[0] == 0
    assert len(starts) == num_turns
    stops = [*starts[1:], len(weights)]
    assert all(start < stop for start, stop in zip(starts, stops, strict=True))
    assert turns.totals([1.0] * len(weights), starts) == [
        stop - start for start, stop in zip(starts, stops, strict=True)
    ]


@given(st.lists(st.floats(1, 2), min_size=1, max_size=60), st.data())
def test_layers_of_like_weight_are_shared_out_evenly(weights, data):
    num_turns = data.draw(st.integers(1, len(weights)))
    assert max(turns.totals(weights, turns.cut(weights, num_turns))) <= sum(weights) / num_turns + 2 * max(weights)


@given(WEIGHTS, st.floats(0, 1e13), st.none() | st.integers(1, 60))
def test_the_budget_is_kept_or_a_turn_is_one_layer(weights, allowance, current):
    costs = [3 * weight for weight in weights]
    num_turns = turns.choose(weights, costs, allowance, current)
    assert 1 <= num_turns <= len(weights)
    starts = turns.cut(weights, num_turns)
    for start, stop, cost in zip(starts, [*starts[1:], len(weights)], turns.totals(costs, starts), strict=True):
        assert cost <= allowance or stop - start == 1
    assert num_turns == turns.choose(list(weights), list(costs), allowance, current)
    if sum(costs) <= turns.SLACK * allowance:
        assert num_turns == 1


@given(WEIGHTS, st.floats(1, 1e13), st.floats(0.9, 1.1))
def test_a_small_change_of_the_allowance_does_not_shorten_a_round(weights, allowance, change):
    current = turns.choose(weights, weights, allowance)
    changed = turns.choose(weights, weights, allowance * change, current)
    assert changed >= current or turns.fits(weights, weights, changed, turns.SLACK * allowance * change)
    assert turns.choose(weights, weights, allowance, current) <= current


def test_a_spent_budget_leaves_one_layer_a_turn():
    assert turns.choose([1.0] * 7, [1.0] * 7, 0.0) == 7
    assert turns.choose([1.0] * 7, [1.0] * 7, -5.0) == 7
