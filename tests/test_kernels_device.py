"""Triton's kernels beside the torch reference: by Triton's interpreter where there is no GPU, there for real.

What the kernels share with every implementation is compared with numpy in test_kernels_reference, on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernels_support import bits, destination_for, run_capture

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from flightrec.kernels import arguments, device, launch, reference  # noqa: E402
from flightrec.kernels.plan import CapturePlan  # noqa: E402
from flightrec.records import Statistic  # noqa: E402

pytestmark = [
    pytest.mark.gpu
    if DEVICE == "cuda"
    else pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
]
FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
ONE_SCALE = CapturePlan(codes=0, pairs=True, scale=1, scales=((1, "float32"),))
VALID = [None, 7, torch.tensor([11])]


@pytest.fixture(autouse=True)
def _works() -> Iterator[None]:
    assert not device._gave_up
    yield
    assert not device._gave_up, "a kernel failed and the reference took its place"


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Filled whenever the kernels leave a record to the reference."""
    calls: list[object] = []
    whole = reference.capture

    def counted(*arguments: object) -> None:
        calls.append(arguments)
        whole(*arguments)

    monkeypatch.setattr(reference, "capture", counted)
    return calls


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 to 512 elements, four programs joined at once: small tensors have many blocks, programs, groups."""
    monkeypatch.setattr(arguments, "SIZES", {kind: (1, 1, 5 if kind == "values" else 3) for kind in arguments.SIZES})
    monkeypatch.setattr(arguments, "GROUP", 4)
    monkeypatch.setattr(launch, "GROUP", 4)
    monkeypatch.setattr(launch, "_scratch", {})


def compare(x, parts, plan, valid_rows=None) -> None:
    wanted, expected = run_capture((_reference, DEVICE), x, parts, plan, valid_rows)
    got, row = run_capture((device.capture, DEVICE), x, parts, plan, valid_rows)
    assert_same(got, row, wanted, expected)


def assert_same(got, row, wanted, expected) -> None:
    for column in Statistic:
        one, two = expected[column], row[column]
        same = one == two or (math.isnan(one) and math.isnan(two)) or math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-5)
        assert same, (column.name, one, two)
    for mine, its in zip([got.high_precision, *got.parts], [wanted.high_precision, *wanted.parts], strict=True):
        if mine is not None or its is not None:
            np.testing.assert_array_equal(bits(mine), bits(its))


_reference = reference.capture  # before a fixture counts it


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    x.view(-1)[:: max(x.numel() // 9, 3)] = 0
    return x.to(dtype)


def spoiled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[1:5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).to(x.dtype)
    return x


def codes_of(x: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    codes = (x.float() / scale).to(FORMATS[name]).view(torch.uint8)
    codes.view(-1)[5:9] = torch.tensor([0x7F, 0xFF, 0x7E, 0x7C], dtype=torch.uint8)
    return codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("valid_rows", VALID)
def test_values(dtype, valid_rows, by_reference):
    for x in (values(40, 64, dtype=dtype), spoiled(values(40, 64, dtype=dtype)), values(13, 4, dtype=dtype) * 1e-4):
        compare(x, [], CapturePlan(), valid_rows)
    assert not by_reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_neither_overflow_nor_underflow(dtype, by_reference):
    for size in (1e-38, 1e-20, 1e20, 3e38):
        compare(torch.full((64, 8), size, dtype=dtype), [], CapturePlan())
    mixed = values(64, 64, dtype=torch.float32) * torch.logspace(-30, 18, 64)
    compare(mixed.to(dtype), [], CapturePlan())
    assert not by_reference


def test_nothing_finite_has_no_amax(by_reference):
    compare(torch.full((4, 8), math.nan, dtype=torch.bfloat16), [], CapturePlan())
    assert not by_reference


def test_shapes_whose_rows_do_not_fill_words(by_reference):
    compare(values(6, 3), [], CapturePlan())
    compare(values(2, 1), [], CapturePlan())
    assert not by_reference


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("valid_rows", VALID)
@pytest.mark.parametrize("direction", ["decode", "encode"])
def test_codes_with_a_scale_for_all(name, valid_rows, direction, by_reference):
    scale, x = torch.tensor([0.02]), spoiled(values(40, 64))
    codes = codes_of(x, scale, name)
    words = [scale, 1 / scale] if direction == "decode" else [1 / scale, scale]
    history = torch.rand(20, 6)[:, 2]
    plan = CapturePlan(
        codes=0, format=name, pairs=True, scale=1, multiply_to_decode=direction == "decode",
        scales=((1, "float32"), (2, "float32")), inverse=2, history=3, amax=4,
    )  # fmt: skip
    parts = [codes, *words, history, torch.tensor([3.0])]
    compare(x, parts, plan, valid_rows)
    compare(None, parts, plan, valid_rows)
    assert not by_reference


@pytest.mark.parametrize("word", [0.0, math.inf, math.nan, 1e-30])
def test_a_scale_that_is_no_number(word, by_reference):
    x, scale = values(16, 32), torch.tensor([word])
    plan = CapturePlan(
        codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"), (2, "float32")), inverse=2
    )
    compare(x, [codes_of(x, torch.tensor(0.02), "float8_e4m3fn"), scale, 1 / scale], plan)
    assert not by_reference


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128)])
def test_codes_with_a_scale_a_block(name, block_shape, by_reference):
    """As Transformer Engine holds them: scales transposed and padded, over flattened leading dimensions."""
    x = spoiled(values(2, 3, 256))
    padded = torch.rand(2, 8) + 0.1
    scale = padded.t()[:6] if block_shape[0] == 1 else torch.rand(1, 2) + 0.1
    scale[0, 1] = math.inf
    codes = codes_of(x, torch.tensor(0.5), name)
    other = torch.rand(1, 256) + 0.1
    columnwise = codes.view(6, 256).t()
    plan = CapturePlan(codes=0, format=name, pairs=True, scale=1, block_shape=block_shape, scales=((1, "float32"),))
    compare(x, [codes, scale], plan)
    compare(None, [codes, scale], plan)
    both = CapturePlan(
        codes=0, format=name, pairs=True, scale=1, block_shape=block_shape, scales=((1, "float32"), (3, "float32"))
    )
    compare(x, [codes, scale, columnwise, other], both)
    assert not by_reference


def test_what_the_kernels_do_not_know_is_the_references(by_reference):
    x = values(16, 32)
    scale = torch.tensor([0.5])
    codes = codes_of(x, scale, "float8_e4m3fn")
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    unknown = [
        (torch.zeros(4, 8, dtype=torch.complex64), [], CapturePlan()),
        (values(15, 3), [codes_of(values(15, 3), scale, "float8_e4m3fn"), scale], plan),
        (x, [codes, scale.double()], plan),
        (
            x,
            [codes, scale, torch.tensor([2.0])],
            dataclasses.replace(
                plan, scales=((1, "float32"), (2, "float32")), tensor_scale=2, multiply_to_decode=False
            ),
        ),
    ]
    for number, (given, parts, wanted) in enumerate(unknown, start=1):
        compare(given, parts, wanted)
        assert by_reference, number
        by_reference.clear()
    compare(x, [codes, torch.rand(16, 1)], plan)
    assert not by_reference, "a scale a row is known"


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("valid_rows", [None, 3])
def test_many_blocks_and_programs_are_joined(valid_rows, by_reference):
    """Whole blocks and a rest, one and two levels of joining, on the fast way and on the exact one."""
    compare(values(8, 260), [], CapturePlan(), valid_rows)
    compare(spoiled(values(2, 260)), [], CapturePlan(), valid_rows)
    scale, x = torch.tensor([0.05]), values(3, 328)
    codes = (x.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    compare(x, [codes, scale], plan, valid_rows)
    compare(None, [codes, scale], plan, valid_rows)
    assert not by_reference


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("multiply", [True, False])
def test_ordinary_pairs_in_blocks(dtype, multiply, by_reference):
    """Neither clipped nor NaN: what one look tells. The scale of a block is found across rows and columns."""
    x = values(5, 3, 96, dtype=dtype) * torch.logspace(-3, 3, 96).to(dtype)
    x = x.to(dtype)
    blocks = x.float().view(15, 3, 32).abs().amax(2) / 448
    codes = (x.float().view(15, 3, 32) / blocks[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8).view(5, 3, 96)
    plan = CapturePlan(
        codes=0, format="float8_e4m3fn", pairs=True, scale=1, block_shape=(1, 32), scales=((1, "float32"),),
        multiply_to_decode=multiply,
    )  # fmt: skip
    compare(x, [codes, blocks if multiply else 1 / blocks], plan)
    assert not by_reference


def test_codes_that_are_no_partner_of_the_values(by_reference):
    """Two launches write one row."""
    x, scale = values(6, 32), torch.tensor([0.5])
    plan = CapturePlan(codes=0, format="float8_e5m2", pairs=False, scale=1, scales=((1, "float32"),))
    compare(x, [codes_of(values(4, 16), scale, "float8_e5m2"), scale], plan)
    assert not by_reference


def test_statistics_alone_write_no_copies(by_reference):
    x, scale = values(16, 32), torch.tensor([0.02])
    parts = [codes_of(x, scale, "float8_e4m3fn"), scale]
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    slot, tick = torch.tensor([2], device=DEVICE), torch.tensor([9], device=DEVICE)
    for given, plan_of, those in ((x, CapturePlan(), []), (None, plan, parts), (x, plan, parts)):
        found = []
        on_device = [part.to(DEVICE) for part in those]
        for capture in (_reference, device.capture):
            whole = destination_for(None if given is None else given.to(DEVICE), on_device, DEVICE)
            bare = dataclasses.replace(whole, high_precision=None, parts=[None] * len(those))
            capture(plan_of, bare, None if given is None else given.to(DEVICE), on_device, slot, tick)
            found += [bare, bare.statistics[2].tolist()]
        assert_same(*found[2:], *found[:2])
    assert not by_reference


def test_a_place_serves_tensors_of_another_layout(by_reference):
    """What was prepared for one tensor is not used for another that lies differently."""
    x = values(16, 32).to(DEVICE)
    room = destination_for(x, [], DEVICE)
    slot, tick = torch.tensor([2], device=DEVICE), torch.tensor([9], device=DEVICE)
    for given in (x, x.clone() * 2, x.t().contiguous().t(), x * 3):
        device.capture(CapturePlan(), room, given, [], slot, tick)
        assert torch.equal(room.high_precision[2].view(torch.bfloat16), given)
        assert room.statistics[2, Statistic.AMAX].item() == given.abs().max().item()
    assert not by_reference


@pytest.mark.parametrize("valid_rows", [2**70, -(2**70)])
def test_more_rows_than_there_are_and_fewer_than_none(valid_rows, by_reference):
    compare(values(8, 16), [], CapturePlan(), valid_rows)
    assert not by_reference


@pytest.mark.parametrize("value", [2.5, 0.0, math.nan, -math.inf])
def test_a_loss_is_one_number(value, by_reference):
    compare(torch.tensor(value), [], CapturePlan())
    compare(torch.tensor([value, 1.0, -3.0]), [], CapturePlan())
    assert not by_reference


def test_views_of_a_wider_tensor_are_put_in_order_first(by_reference):
    """As query, key and value are views of one product; nothing of the size of an expanded tensor is made."""
    wide, scale = spoiled(values(6, 4, 3, 16)), torch.tensor([0.02])
    compare(wide[:, :, 1], [], CapturePlan())
    codes = codes_of(wide.transpose(0, 1).contiguous(), scale, "float8_e4m3fn").transpose(0, 1)
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),))
    compare(wide, [codes, scale], plan)
    assert not by_reference
    everywhere = values(1, 16).to(DEVICE).expand(6, 16)
    compare(everywhere, [codes_of(values(6, 16), scale, "float8_e4m3fn"), scale], plan)
    assert by_reference


def test_a_kernel_without_a_slot_leaves_and_touches_nothing(by_reference):
    """What takes turns in a captured graph: the next launch, with a slot, finds all in order."""
    scale, x = torch.tensor([0.02]), spoiled(values(40, 64))
    parts = [codes_of(x, scale, "float8_e4m3fn"), scale, torch.rand(6), torch.arange(1024, dtype=torch.int32)]
    plan = CapturePlan(codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),), history=2)

    def capture(plan, destination, x, parts, slot, tick, valid_rows):
        planes = [destination.high_precision, *destination.parts]
        before = [bits(plane).copy() for plane in planes]
        for _ in range(2):
            device.capture(plan, destination, x, parts, torch.tensor([-1, 3], device=DEVICE), tick, valid_rows)
        assert all(np.array_equal(bits(plane), old) for plane, old in zip(planes, before, strict=True))
        assert (destination.stamp == -1).all()
        assert (destination.statistics == -5).all()
        device.capture(plan, destination, x, parts, slot.repeat(2), tick, valid_rows)

    wanted, expected = run_capture((_reference, DEVICE), x, parts, plan)
    got, row = run_capture((capture, DEVICE), x, parts, plan)
    assert_same(got, row, wanted, expected)
    assert not by_reference


def test_operations_that_cannot_leave_write_where_nobody_reads(by_reference):
    x = values(8, 8, dtype=torch.float32).to(torch.complex64)  # not of the kernels
    got = destination_for(x.to(DEVICE), [], DEVICE)
    slot, tick = torch.tensor([-1, 3], device=DEVICE), torch.tensor([9], device=DEVICE)
    with torch.no_grad():
        device.capture(CapturePlan(), got, x.to(DEVICE), [], slot, tick)
    assert by_reference
    assert got.stamp.tolist() == [-1, -1, -1, 9]
    assert (got.high_precision[:3] == 7).all()


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 96, 1000, 2**30 + 1, 2**31 - 1])
def test_division_by_multiplication(divisor):
    factor, shift = arguments.magic_of(divisor)
    for number in (0, 1, divisor - 1, divisor, divisor + 1, 2**31 // divisor * divisor - 1, 2**31 - 1):
        if number < 2**31:
            assert number * factor >> shift == number // divisor
            assert number * factor < 2**63


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.int16])
def test_a_kernel_never_seen_is_captured_into_a_graph_and_replayed(dtype):
    x = values(64, 264, dtype=torch.float16).to(DEVICE, dtype)
    room = destination_for(x, [], DEVICE)
    slot, tick = torch.tensor([2], device=DEVICE), torch.tensor([9], device=DEVICE)
    rows = torch.tensor([60], device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        device.capture(CapturePlan(), room, x, [], slot, tick, rows)
    for size in (1, 2, 3):
        x.fill_(size)
        graph.replay()
        assert room.statistics[2, Statistic.SUM].item() == size * 60 * 264


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_launches_go_to_the_driver_directly():
    x = values(64, 264).to(DEVICE)
    room = destination_for(x, [], DEVICE)
    slot, tick = torch.tensor([2], device=DEVICE), torch.tensor([9], device=DEVICE)
    for size in (1, 2):
        x.fill_(size)
        device.capture(CapturePlan(), room, x, [], slot, tick)
        assert room.statistics[2, Statistic.AMAX].item() == size
    prepared = room.cache[device._PREPARED]
    assert prepared._directs
    prepared._directs = [(lambda *arguments: 1, *prepared._directs[0][1:])]  # as where the driver refuses
    device.capture(CapturePlan(), room, x.fill_(3), [], slot, tick)
    assert room.statistics[2, Statistic.AMAX].item() == 3
    prepared._directs = None  # as where the driver sees other parameters
    device.capture(CapturePlan(), room, x.fill_(4), [], slot, tick)
    assert room.statistics[2, Statistic.AMAX].item() == 4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_two_threads_on_two_streams_share_a_place():
    """Each launch goes to its own stream with its own addresses, whoever came between."""
    plan, tick = CapturePlan(), torch.tensor([9], device=DEVICE)
    given = [torch.full((64, 264), size, dtype=torch.bfloat16, device=DEVICE) for size in (1.0, 2.0)]
    slots = [torch.tensor([number], device=DEVICE) for number in range(2)]
    room = destination_for(given[0], [], DEVICE)
    device.capture(plan, room, given[0], [], slots[0], tick)
    torch.cuda.synchronize()

    def record(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                device.capture(plan, room, given[number], [], slots[number], tick)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for number, x in enumerate(given):
        assert torch.equal(room.high_precision[number], x)
        assert room.statistics[number, Statistic.SUM].item() == (number + 1) * x.numel()


def test_a_kernel_that_fails_ends_their_use_and_loses_nothing(monkeypatch, caplog):
    monkeypatch.setattr(device, "_gave_up", False)
    monkeypatch.setattr(device.Prepared, "_queue", lambda *arguments: 1 / len([]))
    x = values(8, 8)
    for _ in range(2):
        compare(x, [], CapturePlan())
    assert device._gave_up
    assert caplog.text.count("Triton kernels do not work here") == 1
    monkeypatch.undo()
