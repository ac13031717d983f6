from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flightrec.writer.arena import ALIGNMENT_BYTES, Arena


def test_sizes_are_rounded_and_the_arena_ends():
    arena = Arena(3 * ALIGNMENT_BYTES + 17)
    assert arena.allocate(1) == 0
    assert arena.allocate(ALIGNMENT_BYTES + 1) == ALIGNMENT_BYTES
    assert arena.used_bytes == 3 * ALIGNMENT_BYTES
    assert arena.allocate(0) is None


def test_first_fit_takes_the_lowest_hole():
    arena = Arena(8 * ALIGNMENT_BYTES)
    offsets = [arena.allocate(2 * ALIGNMENT_BYTES) for _ in range(4)]
    assert arena.release(offsets[0])
    assert arena.release(offsets[2])
    assert arena.allocate(ALIGNMENT_BYTES) == offsets[0]
    assert arena.allocate(2 * ALIGNMENT_BYTES) == offsets[2]
    assert arena.allocate(2 * ALIGNMENT_BYTES) is None


def test_release_of_what_is_not_handed_out_changes_nothing():
    arena = Arena(ALIGNMENT_BYTES)
    assert not arena.release(0)
    assert arena.allocate(1) == 0
    assert arena.release(0)
    assert not arena.release(0)
    assert arena.allocate(ALIGNMENT_BYTES) == 0


def test_an_empty_arena_gives_nothing():
    assert Arena(0).allocate(1) is None


@given(
    capacity=st.integers(1, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12 * ALIGNMENT_BYTES), st.randoms()), max_size=60),
)
def test_against_a_list_of_pages(capacity, steps):
    arena = Arena(capacity * ALIGNMENT_BYTES)
    pages = [None] * capacity
    for allocate, num_bytes, random in steps:
        used = sorted({owner for owner in pages if owner is not None})
        if allocate or not used:
            needed = max(1, -(-num_bytes // ALIGNMENT_BYTES))
            starts = [n for n in range(capacity - needed + 1) if all(page is None for page in pages[n : n + needed])]
            offset = arena.allocate(num_bytes)
            assert offset == (starts[0] * ALIGNMENT_BYTES if starts else None)
            if starts:
                pages[starts[0] : starts[0] + needed] = [offset] * needed
        else:
            offset = random.choice(used)
            assert arena.release(offset)
            pages = [None if owner == offset else owner for owner in pages]
        assert arena.used_bytes == sum(page is not None for page in pages) * ALIGNMENT_BYTES
