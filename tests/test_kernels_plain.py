"""Values that the vector kernels do not read, beside the torch reference: see test_kernels_device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from kernels_support import run_capture

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from test_kernels_device import assert_same  # noqa: E402

from flightrec.kernels import device, launch, lying, plain_arguments, prepared, reference  # noqa: E402
from flightrec.kernels.lying import Way, way_of  # noqa: E402
from flightrec.kernels.plan import CapturePlan  # noqa: E402
from flightrec.records import Statistic  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
INTEGERS += [torch.uint16, torch.uint32] * (DEVICE == "cpu")  # of which torch itself knows little on a GPU
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _never_by_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    calls: list[object] = []
    monkeypatch.setattr(device.reference, "capture", lambda *arguments: calls.append(arguments))
    yield
    assert not calls
    assert not device._gave_up


_reference = reference.capture  # before the fixture


def compare(x: torch.Tensor, valid_rows: int | torch.Tensor | None = None) -> None:
    """The views stay such: nothing is moved here."""
    x = view_on(x, DEVICE)
    wanted, expected = run_capture((_reference, DEVICE), x, [], CapturePlan(), valid_rows)
    got, row = run_capture((device.capture, DEVICE), x, [], CapturePlan(), valid_rows)
    assert_same(got, row, wanted, expected)


def view_on(x: torch.Tensor, where: str) -> torch.Tensor:
    whole = x if x._base is None else x._base
    return whole.to(where).as_strided(x.shape, x.stride(), x.storage_offset())


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 40
    if dtype.is_floating_point:
        x.view(-1)[1:6] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0])
        return x.to(dtype)
    return (x.abs() if dtype in (torch.uint8, torch.uint16, torch.uint32) else x).int().to(dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_any_number_alignment_and_count(dtype):
    x = numbers(5, 3, dtype=dtype)
    compare(x.view(-1)[1:])
    compare(x, torch.tensor([3], dtype=torch.int32))


def test_rows_and_no_elements():
    x = numbers(5, 3, dtype=torch.bfloat16)
    compare(x[:0])
    compare(x[4, 2], 0)  # one number has no rows
    for rows in (2, 9, torch.tensor(-1)):
        compare(x, rows)


def test_any_order():
    x = numbers(4, 3, 5, dtype=torch.bfloat16)
    compare(x.transpose(0, 2))
    compare(x[:, 1, ::2], 3)
    compare(x[0, 0, 0].expand(6, 7))
    compare(x[:, :1].expand(4, 6, 5), torch.tensor([3]))
    compare(numbers(4, 3, 5, dtype=torch.int64).transpose(0, 1), torch.tensor([2]))


def test_large_integers_are_rounded_as_the_reference_rounds_them():
    compare(torch.tensor([2**62 + 1, -(2**63), 2**53 + 1, 0]))
    compare(torch.tensor([255, 128, 0, 7], dtype=torch.uint8))


def test_numbers_too_large_and_small_for_float32():
    compare(torch.tensor([1e-320, 1e-200]))
    compare(torch.tensor([1e300, 1e150, -3.0], dtype=torch.float64))
    compare(torch.full((5,), math.nan))


def test_many_programs_are_joined(monkeypatch):
    monkeypatch.setattr(plain_arguments, "_ROWS", 8)
    monkeypatch.setattr(launch, "GROUP", 4)  # seven programs: two levels of joining
    monkeypatch.setattr(launch, "_scratch", {})
    compare(numbers(6, 9, dtype=torch.bfloat16).t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slices_of_a_wider_tensor_are_read_where_they_lie(dtype, monkeypatch):
    """As query, key and value of one product: rows of whole vectors, on the fast way and on the exact one."""
    monkeypatch.setattr(prepared.Prepared, "_dense", lambda *arguments: 1 / len([]))
    wide = numbers(5, 2, 4, 48, dtype=dtype)
    for x, rows in (
        (wide[..., 16:32], torch.tensor([2])),
        (torch.rand(5, 2, 48).to(dtype)[..., 32:], None),
        (wide[:1, :1, 0, 8:24].expand(3, 2, 16), None),
        (wide[:, :, 1, 8:].transpose(0, 1), torch.tensor(1)),  # three dimensions that do not become two
        (wide.flatten(2).transpose(0, 1)[..., 24:72], None),
    ):
        assert way_of(x, is_pair=False, is_masked=True) is Way.ROWS
        compare(x, rows)


def test_what_is_large_and_in_no_such_order_is_put_in_order_first(monkeypatch):
    monkeypatch.setattr(lying, "_FEW", 16)
    x = numbers(9, 5, dtype=torch.float32).t()
    assert way_of(x, is_pair=False, is_masked=False) is Way.COPIED
    compare(x)
    compare(numbers(3, 5, 7, dtype=torch.int32).transpose(0, 2), 4)


def test_a_place_takes_its_tensors_wherever_they_begin():
    """Nothing is prepared again for another address."""
    from kernels_support import destination_for

    memory = numbers(40, dtype=torch.float32).to(DEVICE)
    room = destination_for(memory[:3], [], DEVICE)
    slot, tick = torch.tensor([2], device=DEVICE), torch.tensor([9], device=DEVICE)
    made, plan = [], CapturePlan()
    for start in (7, 8, 12, 13):
        device.capture(plan, room, memory[start : start + 3], [], slot, tick)
        assert room.statistics[2, Statistic.AMAX].item() == memory[start : start + 3].abs().max().item()
        made.append(room.cache[device._PREPARED])
    assert made[0] is made[1] is made[2] is made[3]
