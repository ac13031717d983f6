from __future__ import annotations

import dataclasses

from flightrec.budget.story import Story, milliseconds, names, tell

STORY = Story(
    share=0.01, blocks=("h.0", "h.1", "h.2", "h.3", "h.4"), always_records=12, always_bytes=1 << 20, always_s=1e-3,
    num_layers=40, rotating_records=200, rotating_bytes=64 << 20, rotating_s=16e-3, num_turns=8, is_measured=True,
    step_s=0.5, judging_s=2e-3,
)  # fmt: skip


def test_what_is_seen_what_rotates_what_it_costs():
    head, turns, cost = tell(STORY)
    assert head.startswith("budget 1% of a step: in every iteration output and gradient of 5 blocks (h.0, h.1, h.2, ")
    assert head.endswith("h.3, ...), loss and metrics: 12 records, 1.0 MiB, 1 ms")
    assert turns == "in turns 40 layers, 200 records and 64.0 MiB in all; a round takes 8 iterations"
    assert cost == "an iteration: 9.0 MiB, 5 ms predicted, 1% of the observed step of 500 ms; 2 ms of it for judging"


def test_other_cases():
    whole = tell(dataclasses.replace(STORY, num_turns=1))
    assert len(whole) == 2
    assert "enough for everything that is selected in every iteration, 212 records" in whole[0]
    none = tell(dataclasses.replace(STORY, share=None, num_turns=1, step_s=None, judging_s=0.0))
    assert none[1] == "an iteration: 65.0 MiB, 17 ms predicted"
    guess = tell(dataclasses.replace(STORY, is_measured=False, num_turns=40))
    assert "at most 40 iterations" in guess[1]
    assert "no block boundary is selected" in tell(dataclasses.replace(STORY, blocks=()))[0]


def test_words():
    assert milliseconds(0.0012345) == "1.23 ms"
    assert names(("", "a")) == "the model, a"


def test_what_is_predicted_is_recording_and_judging_over_a_round():
    assert STORY.num_bytes == (1 << 20) + (64 << 20) / 8
    assert abs(STORY.predicted_s - (1e-3 + 16e-3 / 8 + 2e-3)) < 1e-12
