"""How long scales have stood still, from hand-made histories; a plain loop over the samples is the model."""

from __future__ import annotations

import math

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_samples import FP8, Sample, firing, history_piece, identity, iterations, statistics, write_incident

from flightrec.records import NO_MICROBATCH, Key
from flightrec.storage.facts import HistoryPiece, IncidentFacts, IterationFacts
from flightrec.storage.read import open_incident
from flightrec.storage.scale_age import ScaleAge, ScaleAges
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS

KEY = Key("fc1", "activation", microbatch=0)
SERIES = Key("fc1", "activation")
Word = tuple[float, float] | None  # smallest and largest, None: not recorded


def piece(samples: dict[tuple[int, int], Word], amax: dict[tuple[int, int], float] | None = None) -> HistoryPiece:
    values = np.full((len(samples), len(HISTORY_STATISTICS), 1), np.nan, np.float32)
    for row, (time, word) in enumerate(samples.items()):
        if word is not None:
            values[row, HISTORY_STATISTICS.index("numel")] = 8
            values[row, HISTORY_STATISTICS.index("scale_min")] = word[0]
            values[row, HISTORY_STATISTICS.index("scale_max")] = word[1]
            values[row, HISTORY_STATISTICS.index("amax")] = (amax or {}).get(time, math.nan)
    times = np.array(list(samples), np.int64).reshape(-1, 2)
    empty = np.empty((len(samples), len(PLAIN_STATISTICS), 0), np.float32)
    return HistoryPiece(len(samples), times[:, 0], times[:, 1], [], empty, [SERIES], values)


def entry(attempt: int, iteration: int, *words: Word, key: Key = KEY, **more: float) -> IterationFacts:
    """An iteration with a record a microbatch."""
    keys = [Key(key.layer, key.tensor, microbatch=number) for number in range(len(words))]
    samples = [
        Sample(
            mine, {}, statistics(**({} if word is None else {"scale_min": word[0], "scale_max": word[1]}), **more), 0
        )
        for mine, word in zip(keys, words, strict=True)
    ]
    found = iterations({iteration: samples})[0]
    return IterationFacts(attempt, iteration, iteration, len(words), None, found.layouts, found.statistics)


def facts_of(entries: list[IterationFacts], pieces: list[HistoryPiece], fired=None) -> IncidentFacts:
    fired = fired or firing(KEY, entries[-1].iteration if entries else 0)
    return IncidentFacts(identity(), "", {}, fired, [fired], entries, [FP8.to_json()], statistics=pieces)


def age(entries: list[IterationFacts], pieces: list[HistoryPiece], at: tuple[int, int]) -> ScaleAge | None:
    return ScaleAges(facts_of(entries, pieces)).age(*at, KEY)


def model(samples: dict[tuple[int, int], Word], at: tuple[int, int]) -> ScaleAge | None:
    now = samples[at]
    if now is None:
        return None
    starts = {}
    for attempt, iteration in samples:
        starts[attempt] = min(starts.get(attempt, iteration), iteration)
    past = [
        (iteration, word)
        for (attempt, iteration), word in samples.items()
        if attempt <= at[0]
        and iteration < at[1]
        and all(iteration < start for later, start in starts.items() if attempt < later <= at[0])
        and word is not None
    ]
    unchanged = -1
    for iteration, word in sorted(past, reverse=True):
        if word != now:
            return ScaleAge(max(unchanged, 0), at[1] - iteration)
        unchanged = at[1] - iteration
    return ScaleAge(unchanged, -1)


WORDS = st.sampled_from([None, (1.0, 1.0), (2.0, 2.0), (1.0, 2.0)])


@settings(max_examples=200, deadline=None)
@given(
    attempts=st.lists(st.tuples(st.integers(0, 12), st.lists(WORDS, min_size=1, max_size=8)), min_size=1, max_size=3),
    split=st.integers(0, 8),
)
def test_against_a_loop(attempts, split):
    samples = {(a, first + n): word for a, (first, words) in enumerate(attempts) for n, word in enumerate(words)}
    times = list(samples)
    known = dict(list(samples.items())[:split])
    entries = [entry(*time, samples[time]) for time in times[split:]]
    ages = ScaleAges(facts_of(entries, [piece(known)] if known else []))
    unchanged, differed = ages.columns()
    for row, time in enumerate(times[split:]):
        wanted = model(samples, time)
        assert ages.age(*time, KEY) == wanted
        assert (unchanged[row], differed[row]) == (wanted or ScaleAge())


def test_what_the_numbers_say():
    frozen = {(0, n): (0.5, 0.5) for n in range(30)}
    assert age([entry(0, 30, (0.5, 0.5))], [piece(frozen)], (0, 30)) == (30, -1)
    assert str(ScaleAge(30, -1)) == "unchanged for at least 30 iterations"
    changed = {(0, 4): (0.25, 0.5)} | {(0, n): (0.5, 0.5) for n in range(5, 30)}
    assert age([entry(0, 30, (0.5, 0.5))], [piece(changed)], (0, 30)) == (25, 26)
    assert str(ScaleAge(25, 26)) == "unchanged for 25 iterations"
    assert age([entry(0, 30, (0.5, 0.75))], [piece(changed)], (0, 30)) == (0, 1)
    assert str(ScaleAge(0, 1)) == "changed in this iteration"
    turns = {(0, 0): (1.0, 1.0), (0, 10): (0.5, 0.5), (0, 20): (0.5, 0.5)}
    assert age([entry(0, 30, (0.5, 0.5))], [piece(turns)], (0, 30)) == (20, 30)
    assert str(ScaleAge(20, 30)) == "unchanged for at least 20 iterations"
    assert age([entry(0, 30, (0.75, 0.75))], [piece(turns)], (0, 30)) == (0, 10)
    assert str(ScaleAge(0, 10)) == "changed within the last 10 iterations"
    assert age([entry(0, 0, (1.0, 1.0))], [], (0, 0)) == (-1, -1)
    assert str(ScaleAge()) == "no earlier scale is known"


def test_the_words_of_an_iteration_are_those_of_all_its_microbatches():
    entries = [entry(0, 1, (1.0, 1.0), (4.0, 4.0)), entry(0, 2, (1.0, 1.0), (4.0, 4.0)), entry(0, 3, (1.0, 1.0))]
    assert age(entries, [], (0, 2)) == (1, -1)
    assert age(entries, [], (0, 3)) == (0, 1)


def test_what_had_no_scale_has_no_age():
    entries = [entry(0, 1, None), entry(0, 2, (1.0, 1.0))]
    unchanged, differed = ScaleAges(facts_of(entries, [])).columns()
    assert (unchanged.tolist(), differed.tolist()) == ([-1, -1], [-1, -1])
    assert age(entries, [], (0, 1)) is None
    assert age(entries, [], (0, 7)) is None
    assert ScaleAges(facts_of([], [])).columns()[0].tolist() == []


def test_more_series_than_are_compared_at_once():
    ages = ScaleAges(facts_of([], [history_piece(9000, 5000)]))
    assert ages.age(0, 12, Key("blocks.5000.fc1", "activation", microbatch=3)) == (0, 1)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [(1.2, 37.0, "rose from 1.2 to 37"), (37.0, 1.25, "fell from 37 to 1.25"), (5.0, 5.0, "stayed 5")],
)
def test_a_firing_of_stale_scale_says_it(then, now, words):
    fired = firing(KEY, 30, rule="stale", kind="stale_scale", message="the scale does not follow it.")
    past = {(0, n): (0.5, 0.5) for n in range(30)}
    amaxes = dict.fromkeys(past, then)
    facts = facts_of([entry(0, 30, (0.5, 0.5), amax=now)], [piece(past, amaxes)], fired)
    wanted = f"the scale does not follow it; the scale is unchanged for at least 30 iterations, while amax {words}"
    assert ScaleAges(facts).told(fired).message == wanted
    other = firing(KEY, 30, kind="nonfinite", message="NaN.")
    assert ScaleAges(facts).told(other) is other


def test_without_an_amax_the_quantizers_own_is_told():
    fired = firing(KEY, 3, kind="stale_scale", message="stale")
    entries = [entry(0, n, (0.5, 0.5), quantizer_amax=float(n)) for n in (1, 2, 3)]
    message = ScaleAges(facts_of(entries, [], fired)).told(fired).message
    assert message == "stale; the scale is unchanged for at least 2 iterations, while amax rose from 1 to 3"
    entries = [entry(0, n, (0.5, 0.5)) for n in (1, 2, 3)]
    assert ScaleAges(facts_of(entries, [], fired)).told(fired).message.endswith("for at least 2 iterations")


def test_a_scale_that_just_changed_is_not_called_stale():
    fired = firing(KEY, 2, kind="stale_scale", message="stale")
    entries = [entry(0, 1, (0.5, 0.5)), entry(0, 2, (0.25, 0.25))]
    assert ScaleAges(facts_of(entries, [], fired)).told(fired) is fired


def test_in_the_file_and_read_back(tmp_path):
    samples = {
        n: [Sample(KEY, {}, statistics(numel=1, scale_min=0.5, scale_max=0.5 if n < 3 else 0.75), 0)]
        for n in (1, 2, 3)
    }  # fmt: skip
    fired = firing(KEY, 2, rule="stale", kind="stale_scale", message="stale.")
    write_incident(tmp_path, samples, [fired])
    with h5py.File(next(tmp_path.glob("*.facts.h5"))) as file:
        assert file["records"]["scale_unchanged_iterations"].tolist() == [-1, 1, 0]
        assert file["records"]["scale_differed_iterations"].tolist() == [-1, -1, 1]
        assert file["trigger"].attrs["message"] == "stale; the scale is unchanged for at least 1 iteration"
    with open_incident(tmp_path) as incident:
        assert [record.scale_age for record in incident.records()] == [None, ScaleAge(1, -1), ScaleAge(0, 1)]
        assert incident.firings[0].message == incident.trigger.message


def test_an_error_costs_these_columns_only(tmp_path):
    samples = {1: [Sample(KEY, {}, statistics(numel=1, scale_min=0.5, scale_max=0.5), 0)]}
    broken = [history_piece(), None]
    write_incident(tmp_path, samples, [firing(KEY, 1)], statistics=broken)
    with h5py.File(next(tmp_path.glob("*.facts.h5"))) as file:
        assert file["records"]["scale_unchanged_iterations"].tolist() == [-1]
        assert any("history of statistics" in problem for problem in file["problems"].asstr()[()])
    assert SERIES.microbatch == NO_MICROBATCH
