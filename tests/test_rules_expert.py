from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from rules_support import DEVICES, HISTORIES, PlainRule, ReferenceArming, Run, compare, healthy, key, statistics_row

from flightrec.config.expert_rule import ExpertRule, expert_of
from flightrec.rules.siblings import build_siblings

QUICK = {"min_samples": 4, "window": 8, "consecutive": 3, "min_numel": 1}
NUM_EXPERTS = 4


def part(number: int, tensor: str = "activation"):
    """The key of one expert of a grouped product."""
    return replace(key("moe", tensor), part=f"expert.{number}")


def layer(number: int, tensor: str = "activation"):
    """The key of an expert that is a layer of its own."""
    return key(f"blocks.0.experts.{number}.w1", tensor)


def tokens(count: float, amax: float = 3.0) -> dict[str, float]:
    return healthy(numel=64 * count, amax=amax if count else np.nan)


def feed(run: Run, counts, name=part, times: int = 1):
    """Numbers of the experts that fire, by tick; an expert whose count is None has no record."""
    fired = []
    for _ in range(times):
        records = {name(number): tokens(count) for number, count in enumerate(counts) if count is not None}
        fired.append({int(expert_of(seen)[1]) for seen in run.fired(records)})
    return fired


@pytest.mark.parametrize("name", [part, layer])
def test_an_exploding_expert_is_named_in_its_second_iteration(name):
    run = Run([ExpertRule(**QUICK)])
    feed(run, [40] * 4, name, 6)
    records = {name(number): tokens(40, 90.0 if number == 2 else 3.0) for number in range(4)}
    first, second = run.tick(records), run.tick(records)
    assert (run.marked(first.fired), run.marked(first.watch)) == (set(), {name(2)})
    assert not first.hold.item()
    assert (run.marked(second.fired), run.marked(second.watch)) == ({name(2)}, set())


def test_an_expert_far_above_its_siblings_needs_no_history():
    run = Run([ExpertRule(min_numel=1, confirm=1)])
    far = {part(number): tokens(5, 200.0 if number == 1 else 3.0) for number in range(3)}
    assert run.fired(far) == {part(1)}
    run = Run([ExpertRule(min_numel=1, confirm=1)])
    assert (
        run.fired({part(0): tokens(5, 3.0), part(1): tokens(5, 1e9), part(2): tokens(0)}) == set()
    )  # one sibling only
    assert run.fired({part(3): tokens(5, 3.0), part(1): tokens(5, 190.0), part(2): tokens(5)}) == set()


@pytest.mark.parametrize("name", [part, layer])
@pytest.mark.parametrize("nothing", [0, None])
def test_router_collapse_fires_for_the_crowded_and_the_starved(name, nothing):
    run = Run([ExpertRule(**QUICK)])
    assert not any(feed(run, [30, 20, 40, 10], name, 8))
    fired = feed(run, [100, nothing, nothing, nothing], name, 6)
    assert fired == [set(), set(), {0, 1, 2, 3}, set(), set(), set()]


def test_experts_that_take_turns_are_neither_starved_nor_crowded():
    run = Run([ExpertRule(**QUICK)])
    assert not any(feed(run, [30, 20, 40, 10], layer, 8))
    for turn in range(20):
        here = {layer(number): tokens(30) for number in ((0,) if turn % 2 else (1, 2, 3))}
        waiting = [layer(number) for number in range(4) if layer(number) not in here]
        for _ in range(5):  # longer than `consecutive`
            assert run.fired(here, left_out=waiting) == set()
    # The same without a turn to wait for is a collapse, and so is one among those that are all in turn.
    assert any(run.fired({layer(0): tokens(30)}) for _ in range(4))


def test_an_exploding_expert_is_named_in_its_turn():
    run = Run([ExpertRule(**QUICK)])
    feed(run, [40] * 4, layer, 6)
    waiting = [layer(number) for number in range(3)]
    fired = [run.fired({layer(3): tokens(40, 90.0)}, left_out=waiting) for _ in range(2)]
    assert fired == [set(), {layer(3)}]


def test_an_expert_that_is_often_empty_is_silent():
    run = Run([ExpertRule(**QUICK)])
    for _ in range(30):
        assert not any(feed(run, [30, 30, 30, 0], times=2))
        assert not any(feed(run, [30, 30, 0, 2]))


def test_one_that_was_always_the_busy_one_and_one_that_never_had_a_token_are_silent():
    run = Run([ExpertRule(**QUICK)])
    assert not any(feed(run, [95, 5, 0, 0], times=40))


def test_an_iteration_without_tokens_for_anyone_counts_for_nothing():
    run = Run([ExpertRule(**QUICK)])
    feed(run, [30, 20, 40, 10], times=8)
    assert not any(feed(run, [0, 0, 0, 0], times=10))
    assert not any(feed(run, [None] * 4, times=10))
    assert feed(run, [50, 0, 40, 10], times=4) == [set(), set(), {1}, set()]


def test_layers_without_siblings_and_tensors_of_no_expert_are_not_looked_at():
    run = Run([ExpertRule(**QUICK, confirm=1)])
    for _ in range(6):
        run.tick({layer(0): tokens(9), key("experts.mlp"): tokens(9), key("fc"): tokens(9)})
    assert run.fired({key("experts.mlp"): tokens(9, 1e9), key("fc"): tokens(9, 1e9)}) == set()
    assert run.fired({layer(0): tokens(9, 1e9)}) == {layer(0)}  # alone: its own history is all there is


def test_another_pattern_for_layers():
    rule = ExpertRule(**QUICK, confirm=1, experts=r"^ffn_(\d+)\.")
    run = Run([rule])
    names = [key(f"ffn_{number}.up") for number in range(3)]
    for _ in range(6):
        run.tick({name: tokens(9) for name in names})
    records = {name: tokens(9, 3.0 if at else 90.0) for at, name in enumerate(names)}
    assert run.fired(records | {layer(0): tokens(9, 1e9)}) == {names[0]}


def test_names():
    grouped = replace(key("moe"), part="x.expert.12")
    assert expert_of(grouped) == (replace(grouped, part="x.expert.*"), 12)
    assert expert_of(key("a.experts.local_experts.3.fc1")) == (key("a.experts.local_experts.*.fc1"), 3)
    assert expert_of(key("experts.0")) == (key("experts.*"), 0)
    for name in ("experts", "blocks.0.mlp", "myexperts.3", "experts.x.3"):
        assert expert_of(key(name)) is None
    assert expert_of(replace(key("moe"), part="expert.1.weight")) is None


def test_siblings_answer_for_those_without():
    import torch

    names = [part(0), key("fc"), part(1), part(2)]
    tables = build_siblings(names, lambda seen: (expert_of(seen) or (None,))[0], torch.from_numpy)
    values = torch.tensor([3.0, 50.0, 0.0, 5.0], dtype=torch.float64)
    assert tables.total(values).tolist() == [8.0, 50.0, 8.0, 8.0]
    assert tables.largest(values).tolist() == [5.0, 50.0, 5.0, 5.0]
    largest, count = tables.others(values)
    assert (largest.tolist(), count.tolist()) == ([5.0, 0.0, 5.0, 3.0], [1, 0, 2, 1])
    assert tables.size.tolist() == [3.0, 1.0, 3.0, 3.0]
    assert build_siblings(names[:2], lambda seen: (expert_of(seen) or (None,))[0], torch.from_numpy) is None


class PlainExpert:
    def __init__(self, rule) -> None:
        self.amaxes, self.shares = deque(maxlen=rule.window), deque(maxlen=rule.window)
        self.run = self.starved = self.crowded = 0
        self.pending, self.usual = 0.0, np.nan
        self.arming, self.watch_arming = ReferenceArming(rule.rearm), ReferenceArming(rule.rearm)


class PlainGroups(PlainRule):
    """Groups of siblings; one that this process did not see yet is no member."""

    def __init__(self, rule, num_groups: int) -> None:
        self.rule = rule
        self.experts = [[PlainExpert(rule) for _ in range(NUM_EXPERTS)] for _ in range(num_groups)]
        self.known: list[set[int]] = [set() for _ in range(num_groups)]

    def restart(self) -> None:
        self.known = [set() for _ in self.known]

    def tick(self, records):
        fired, watched = set(), set()
        for group, values in records.items():
            found: list[dict] = [{} for _ in range(NUM_EXPERTS)]
            for seen, statistics in values.items():
                found[expert_of(seen)[1]][seen] = statistics
            self.known[group] |= {number for number, some in enumerate(found) if some}
            for marks, more in zip((fired, watched), self.judge(group, found), strict=True):
                marks |= more
        return fired, watched

    def judge(self, group, found):
        rule, fired, watched = self.rule, set(), set()
        numels = [{seen: s.get("numel", s.get("quantized_numel")) for seen, s in one.items()} for one in found]
        amaxes = [
            {
                seen: s["amax"]
                for seen, s in one.items()
                if s.get("amax", 0) > 0 and numels[number][seen] >= rule.min_numel
            }
            for number, one in enumerate(found)
        ]
        samples = [max(one.values(), default=0.0) for one in amaxes]
        counts = [sum(one.values()) for one in numels]
        total = sum(counts)
        members = sorted(self.known[group])
        for number in members:
            one, sample = self.experts[group][number], samples[number]
            limits = [rule.factor * max(one.amaxes)] if len(one.amaxes) >= rule.min_samples else []
            others = [samples[other] for other in members if other != number and samples[other] > 0]
            limits += [rule.siblings * max(others)] if len(others) > 1 else []
            limit = min(limits, default=np.inf)
            excess = sample > limit
            if sample > 0:
                one.run = one.run + 1 if excess else 0
            large = excess and one.run >= rule.confirm
            if sample > 0:
                one.pending = max(one.pending, sample)
                if large or not excess:
                    one.amaxes.append(one.pending if large else sample)
                    one.pending = 0.0
            collapsed = total > 0 and self.collapses(one, counts[number] / total, len(members))
            if total > 0:
                one.shares.append(counts[number] / total)
                fires = one.arming.fire(large or collapsed)
                watches = one.watch_arming.fire(excess and not large and not collapsed)
                rows = {seen for seen, amax in amaxes[number].items() if amax > limit}
                fired |= (rows if large else self.first(group, number)) if fires else set()
                watched |= rows if watches else set()
        return fired, watched

    def collapses(self, one, share, size):
        rule = self.rule
        none, most = (share == 0, share > rule.max_share) if size > 1 else (False, False)
        if not (none or most) or not (one.starved or one.crowded):
            one.usual = sum(one.shares) / len(one.shares) if len(one.shares) >= rule.min_samples else np.nan
        one.starved = one.starved + 1 if none else 0
        one.crowded = one.crowded + 1 if most else 0
        starves = none and one.starved >= rule.consecutive and one.usual * size >= rule.minimum_share
        return starves or (most and one.crowded >= rule.consecutive and share >= 1.5 * one.usual)

    def first(self, group, number):
        return {name(group, number)}


def name(group: int, number: int):
    """Every other group are layers of their own."""
    if group % 2:
        return key(f"blocks.{group}.experts.{number}.w1")
    return replace(key(f"moe.{group}"), part=f"expert.{number}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_implementation(device, seed):
    rule = ExpertRule(
        window=5 + seed, min_samples=3, consecutive=1 + seed % 3, confirm=1 + seed % 2, rearm=2, min_numel=100,
        siblings=8.0, minimum_share=0.2371, max_share=0.8613,
    )  # fmt: skip

    def draw(generator):
        if generator.random() < 0.25:
            return None
        numel = float(generator.choice([0, 50, 1000, 40000], p=[0.3, 0.1, 0.4, 0.2])) * generator.uniform(0.8, 1.2)
        amax = generator.choice([0.0, np.nan, 1.0, 2.0, 9.0, 70.0], p=[0.05, 0.05, 0.4, 0.4, 0.06, 0.04])
        values = healthy(numel=round(numel), amax=amax * generator.uniform(0.9, 1.1) if numel else np.nan)
        if generator.random() < 0.1:
            values = {"quantized_numel": float(round(numel))}
        return values

    num_groups = HISTORIES // 4 // NUM_EXPERTS
    proof = compare(
        rule, None, draw, device=device, seed=seed, num_series=num_groups,
        keys=lambda group: [name(group, number) for number in range(NUM_EXPERTS)],
        whole=lambda rule: PlainGroups(rule, num_groups),
    )  # fmt: skip
    assert proof.tells


def test_sentences():
    run = Run([ExpertRule()])

    def told(value, threshold, **values):
        return run.evaluator.explain(0, part(7, "gradient"), value, threshold, statistics_row(healthy(**values)))

    where = "gradient.expert.7 of moe (microbatch 0, forward)"
    assert told(300.0, 32.0, amax=300.0) == (
        f"the largest magnitude of {where} is 300, above 32: beyond 4 times the largest of this expert's last 128 "
        "samples, or 64 times the largest of its siblings now"
    )
    assert told(0.0, 0.21, numel=0, amax=np.nan) == (
        f"expert 7 got no token in 64 iterations in a row ({where}); before, it got 21.0% of them"
    )
    assert told(0.97, 0.9) == (
        f"expert 7 got 97.0% of the tokens ({where}), more than 90.0% in 64 iterations in a row, which it did not "
        "before"
    )


def test_what_the_configuration_refuses():
    for settings, message in (
        ({"experts": "experts.("}, "regular expression"),
        ({"experts": "experts"}, "one group"),
        ({"tensors": "loss"}, "no expert's"),
        ({"min_samples": 200}, "never"),
    ):
        with pytest.raises(ValueError, match=message):
            ExpertRule(**settings)
