"""The words of captured graphs: the Triton kernel beside the reference, by its interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flightrec.kernels import replays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture
def kernel() -> replays.BeginReplay:
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        from flightrec.kernels import replaying

        if not isinstance(replaying._begin_replay, InterpretedFunction):
            pytest.skip("TRITON_INTERPRET was not set when Triton's kernels were made")
    from flightrec.kernels import replaying

    return replaying.begin_replay


def words(num_replays: int, num_graphs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    head = torch.tensor([0, 5, 70], dtype=torch.int64, device=DEVICE)
    return head, torch.full((num_graphs, replays.ORDERS + num_replays), 0, dtype=torch.int64, device=DEVICE)


def groups(units: list[int], turns: list[int], room: int) -> replays.Groups:
    table = torch.zeros(1 + room, dtype=torch.int64, device=DEVICE)
    table[: 1 + len(units)] = torch.tensor([len(units), *units])
    slots = torch.full((room, 2), -7, device=DEVICE)
    return replays.Groups(table, slots, torch.tensor(turns, dtype=torch.int8, device=DEVICE))


NONE = groups([], [1], 0)


def test_replays_get_virtual_slots_in_turn_and_too_many_go_to_nobody() -> None:
    head, table = words(2)
    seen = []
    for _ in range(4):
        replays.reference(head, table[1], NONE, 2, 999)
        seen.append(table[1, : replays.ORDERS].tolist())
    assert seen == [[1, 10, 70], [2, 11, 70], [3, 999, -1], [4, 999, -1]]
    assert table[1, replays.ORDERS :].tolist() == [0, 1]
    assert head.tolist() == [4, 5, 70]
    assert not table[[0, 2]].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernel_equals_the_reference(kernel: replays.BeginReplay) -> None:
    @settings(max_examples=10, deadline=None)
    @given(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=12), st.integers(0, 1 << 40))
    def check(num_replays: int, order: list[int], tick: int) -> None:
        one, two = words(num_replays), words(num_replays)
        for head, _ in (one, two):
            head[replays.TICK] = tick
        for graph in order:
            replays.reference(one[0], one[1][graph], NONE, num_replays, 77)
            kernel(two[0], two[1][graph], NONE, num_replays, 77)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])

    check()


def test_what_has_no_turn_gets_no_slot_and_a_place_that_nobody_reads() -> None:
    head, table = words(2)
    mine = groups([3, 0, 1], [1, 0, 0, 1], 3)
    replays.reference(head, table[0], mine, 2, 999)
    assert mine.slots.tolist() == [[10, 10], [10, 10], [-1, 999]]
    mine.turns[:] = torch.tensor([0, 1, 0, 0])
    replays.reference(head, table[0], mine, 2, 999)
    assert mine.slots.tolist() == [[-1, 999], [-1, 999], [11, 11]]
    replays.reference(head, table[0], mine, 2, 999)
    assert mine.slots.tolist() == [[-1, 999], [-1, 999], [999, 999]], "a replay too many"
    assert [replays.place_of(slot).tolist() for slot in mine.slots] == [[999]] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernel_gives_the_slots_of_the_reference(kernel: replays.BeginReplay) -> None:
    generator = torch.Generator().manual_seed(1)
    for num_units in (1, 127, 128, 129, 300):
        turns = torch.randint(0, 2, (num_units,), generator=generator).tolist()
        units = torch.randperm(num_units, generator=generator).tolist()
        one, two = groups(units, turns, num_units), groups(units, turns, num_units + 5)
        for run, mine in ((replays.reference, one), (kernel, two)):
            head, table = words(3)
            for _ in range(2):
                run(head, table[2], mine, 3, 999)
        assert torch.equal(one.slots, two.slots[:num_units])
        assert (two.slots[num_units:] == -7).all()
