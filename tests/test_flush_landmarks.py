"""One iteration of about each age, at any time of a long run."""

from __future__ import annotations

import pytest

from flightrec.flush.landmarks import AGES, CANDIDATES_PER_AGE, Landmarks


def test_over_25_000_iterations_there_is_one_of_about_each_age():
    landmarks = Landmarks()
    for now in range(25_000):
        landmarks.add(now)
        kept = landmarks.kept(now)
        assert len(kept) <= len(AGES) * CANDIDATES_PER_AGE
        found = landmarks.at(now)
        assert set(found) <= kept
        for age in AGES:
            tick = max((tick for tick in kept if now - tick >= age), default=None)
            assert (tick is None) == (now < age)
            if tick is not None:
                assert age <= now - tick < 1.5 * age
                assert found[tick] >= age  # one tick may serve two ages


def test_iterations_that_are_not_there_move_a_landmark_by_as_much():
    landmarks = Landmarks()
    for now in range(5_000):
        if now % 45 >= 20:  # of the others no copy was made
            landmarks.add(now)
        kept = landmarks.kept(now)
        if now >= 200:
            assert any(100 <= now - tick < 150 + 20 for tick in kept)


@pytest.mark.parametrize("depth, ages", [(5, 0), (6, 1), (11, 1), (12, 2), (18, 3), (1000, 3)])
def test_landmarks_take_half_of_the_tier_at_most(depth, ages):
    landmarks = Landmarks()
    landmarks.limit(depth)
    for now in range(16_000):
        landmarks.add(now)
        assert len(landmarks.kept(now)) <= max(0, depth // 2)
    assert sorted(landmarks.at(16_000).values()) == list(AGES[:ages])


def test_what_the_tier_gave_up_is_no_landmark():
    landmarks = Landmarks()
    for now in range(151):
        landmarks.add(now)
        landmarks.kept(now)
    assert landmarks.at(150) == {50: 100}
    landmarks.forget(50)
    assert landmarks.at(150) == {}
