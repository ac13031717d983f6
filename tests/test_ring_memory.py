from __future__ import annotations

import torch

from flightrec.ring.memory import (
    Contributor,
    decide,
    default_memory_bytes,
    format_bytes,
    format_table,
    free_memory_bytes,
    keep_smallest,
)


def made(policy, budget, sizes=None, microbatches="all", iterations=4):
    by_setting = sizes or {"all": {"a": 100, "b": 60, "c": 10}, "first": {"a": 50, "b": 30, "c": 5}}
    return decide(
        by_setting.__getitem__,
        budget_bytes=budget,
        policy=policy,
        iterations=iterations,
        more_slots=3,
        microbatches=microbatches,
    )


def test_what_fits_is_left_alone():
    for policy in ("fewer_microbatches", "fewer_iterations", "statistics_only", "error"):
        decision = made(policy, 170 * 7)
        assert (decision.iterations, decision.microbatches, decision.dropped) == (4, "all", frozenset())


def test_error_refuses():
    assert made("error", 170 * 7 - 1) is None


def test_statistics_only_drops_the_largest_first():
    assert made("statistics_only", 170 * 7 - 1).dropped == {"a"}
    assert made("statistics_only", 70 * 7 - 1).dropped == {"a", "b"}
    assert made("statistics_only", 0).dropped == {"a", "b", "c"}


def test_fewer_iterations_keeps_all_tensors_as_long_as_it_can():
    decision = made("fewer_iterations", 170 * 5)
    assert (decision.iterations, decision.dropped) == (2, frozenset())
    decision = made("fewer_iterations", 169 * 4)
    assert (decision.iterations, decision.dropped) == (1, {"a"})


def test_fewer_microbatches_takes_the_first():
    decision = made("fewer_microbatches", 85 * 7)
    assert (decision.microbatches, decision.dropped) == ("first", frozenset())
    decision = made("fewer_microbatches", 85 * 7 - 1)
    assert (decision.microbatches, decision.dropped) == ("first", {"a"})
    assert made("fewer_microbatches", 85 * 7, microbatches="first").dropped == frozenset()


def test_keep_smallest_of_equals_drops_the_later():
    assert keep_smallest({"x": 5, "y": 5, "z": 5}, 10) == {"z"}


def test_free_memory_and_default():
    cpu = torch.device("cpu")
    free = free_memory_bytes(cpu)
    assert 1 << 20 < free < 1 << 50
    assert 0 < default_memory_bytes(cpu) <= 4 << 30


def test_table_of_contributors():
    rows = [Contributor("fc1", "activation", "", 3 << 20, 0.75, 4, "kept")]
    rows += [Contributor("", "loss", "x", 1 << 18, 0.0625, 1, "too large")] * 4
    lines = format_table(rows, 3)
    assert lines[1].split() == ["3.0", "MiB", "75.0%", "fc1", "activation", "x4"]
    assert lines[2].endswith("(no layer) loss x  [too large]")
    assert lines[4].split() == ["512.0", "KiB", "12.5%", "(2", "more)"]
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
