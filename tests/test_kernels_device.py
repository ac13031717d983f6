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
from kernels_support import bits, run_capture

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from flightrec.kernels import device, reference  # noqa: E402
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


def compare(x, parts, plan, valid_rows=None) -> None:
    wanted, expected = run_capture((_reference, DEVICE), x, parts, plan, valid_rows)
    got, row = run_capture((device.capture, DEVICE), x, parts, plan, valid_rows)
    for column in Statistic:
        one, two = expected[column], row[column]
        same = one == two or (math.isnan(one) and math.isnan(two)) or math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-5)
        assert same, (column.name, one, two)
    if x is not None:
        np.testing.assert_array_equal(bits(got.high_precision), bits(wanted.high_precision))
    for mine, its in zip(got.parts, wanted.parts, strict=True):
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
    x = spoiled(values(2, 20, 256))
    padded = torch.rand(2, 44) + 0.1
    scale = padded.t()[:40] if block_shape[0] == 1 else torch.rand(1, 2) + 0.1
    scale[0, 1] = math.inf
    codes = codes_of(x, torch.tensor(0.5), name)
    other = torch.rand(1, 256) + 0.1
    columnwise = codes.view(40, 256).t()
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
        (values(5, 5), [], CapturePlan()),
        (values(16, 64).to(DEVICE)[:, ::2], [], CapturePlan()),
        (values(17, 32).to(DEVICE).view(-1)[1 : 1 + 512].view(16, 32), [], CapturePlan()),
        (values(16, 32).double(), [], CapturePlan()),
        (torch.zeros(0, 8, dtype=torch.bfloat16), [], CapturePlan()),
        (x, [codes, scale.double()], plan),
        (
            x,
            [codes, scale, torch.tensor([2.0])],
            dataclasses.replace(plan, scales=((1, "float32"), (2, "float32")), tensor_scale=2),
        ),
    ]
    for number, (given, parts, wanted) in enumerate(unknown, start=1):
        compare(given, parts, wanted)
        assert by_reference, number
        by_reference.clear()
    compare(x, [codes, torch.rand(16, 1)], plan)
    assert not by_reference, "a scale a row is known"


def test_threads_do_not_share_partial_results():
    """Between two launches of one record another thread may launch its own, on the same stream."""
    sets = [device._scratch_of(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))]
    thread = threading.Thread(target=lambda: sets.append(device._scratch_of(sets[0].device)))
    thread.start()
    thread.join()
    assert sets[0].data_ptr() != sets[1].data_ptr()
    assert device._scratch_of(sets[0].device) is sets[0]


def test_a_kernel_that_fails_ends_their_use_and_loses_nothing(monkeypatch, caplog):
    monkeypatch.setattr(device, "_gave_up", False)
    monkeypatch.setattr(device._Job, "run", lambda *arguments: (_ for _ in ()).throw(RuntimeError("no compiler here")))
    x = values(8, 8)
    for _ in range(2):
        compare(x, [], CapturePlan())
    assert device._gave_up
    assert caplog.text.count("no compiler here") == 1
    monkeypatch.undo()
