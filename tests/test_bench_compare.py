"""The engine of ``flightrec bench``: what an arm leaves behind, what is counted, when it ends."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from flightrec.bench.arms import Bare, Plain, WithRecorder
from flightrec.bench.bound import byte_bound_s
from flightrec.bench.compare import Plan, compare
from flightrec.bench.results import Comparison
from flightrec.bench.timing import look
from flightrec.bench.workload import Workload
from flightrec.config.load import load
from flightrec.errors import AttachError
from flightrec.recorder import Recorder

CPU = torch.device("cpu")
EVERYTHING = load({"budget": "none", "select": [{"layers": "*", "tensors": ["activation", "output", "gradient"]}]})


def num_hooks(model: nn.Module) -> int:
    """Of the model's modules, and those that torch keeps for all modules."""
    names = [name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))]
    everywhere = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    own = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    return own + sum(len(value) for value in everywhere if isinstance(value, dict))


def workload(on_step: Callable[[], object] = lambda: None) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.ones(4, 8)

    def step() -> torch.Tensor:
        on_step()
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return Workload("small", model, step, CPU)


def test_arm_without_has_no_recorder_and_the_arm_with_leaves_none() -> None:
    seen: dict[str, set[tuple[int, int]]] = {"off": set(), "on": set()}
    where = ["off"]

    def note() -> None:
        recorders = sum(type(one) is Recorder and not one._closed for one in gc.get_objects())
        seen[where[0]].add((num_hooks(small.model), recorders))

    small = workload(note)

    class Named(WithRecorder):
        @contextmanager
        def open(self) -> Iterator[object]:
            where[0] = "on"
            with super().open() as running:
                yield running
            where[0] = "off"

    plan = Plan(num_steps=1, num_warm_up=2, min_pairs=2, max_pairs=2, num_looks=0, num_host_steps=1)
    compare(Plain(small), Named(small, EVERYTHING, "all"), plan, CPU)
    assert seen["off"] == {(0, 0)}
    assert all(hooks > 0 and recorders == 1 for hooks, recorders in seen["on"])
    assert seen["on"]


def test_what_a_recorder_did_is_told() -> None:
    plan = Plan(num_steps=4, num_warm_up=8, min_pairs=2, max_pairs=2, num_looks=3)
    told: list[Comparison] = []
    small = workload()
    found = compare(Plain(small), WithRecorder(small, EVERYTHING, "all"), plan, CPU, told.append)
    assert [len(one.off_s) for one in told] == [1, 2]
    recorded = found.recorded
    assert recorded is not None
    outputs = 3 * 4 * 8 * 4  # three layers
    assert recorded.num_bytes >= 3 * outputs
    assert recorded.num_records >= 9 + 1  # and the loss
    assert recorded.predicted_s is not None and recorded.predicted_s > 0
    assert recorded.bound_s is not None and 0 < recorded.bound_s < recorded.predicted_s
    assert found.on is not None and (found.on.num_steps, found.on.num_files, found.on.num_syncs) == (3, 0, None)
    assert found.added_host_s is not None
    assert Comparison.from_json(found.to_json()) == found


@dataclasses.dataclass(frozen=True)
class Sleeping:
    """An arm whose steps take what a clock of its own says."""

    name: str
    step_s: float

    @contextmanager
    def open(self) -> Iterator[Bare]:
        yield Bare(lambda: time.sleep(self.step_s))


def test_pairs_end_when_the_interval_is_narrow_enough() -> None:
    plan = Plan(num_steps=1, num_warm_up=0, min_pairs=2, max_pairs=4, half_width=1e9, num_looks=0)
    found = compare(Sleeping("off", 0.001), Sleeping("on", 0.003), plan, CPU)
    assert len(found.off_s) == len(found.on_s) == 2
    assert found.overhead.median > 0.5
    assert found.recorded is None and found.bound_ratio is None and found.prediction_error is None
    exact = dataclasses.replace(plan, half_width=0.0)
    assert len(compare(Sleeping("off", 0.001), Sleeping("on", 0.003), exact, CPU).off_s) == 4


def test_a_recorder_that_switched_itself_off_is_no_measurement() -> None:
    small = workload()
    with WithRecorder(small, EVERYTHING, "all").open() as running:
        running.step()
        running._recorder._capture.off = True
        with pytest.raises(AttachError, match="switched itself off"):
            running.told(1)


def test_warnings_of_one_kind_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flightrec")

    def warn() -> None:
        logger.warning("flightrec: %s takes %.3g ms", "recording", time.perf_counter())

    @dataclasses.dataclass(frozen=True)
    class Noisy(Sleeping):
        @contextmanager
        def open(self) -> Iterator[Bare]:
            yield Bare(warn)

    plan = Plan(num_steps=2, num_warm_up=0, min_pairs=2, max_pairs=2, num_looks=0)
    compare(Sleeping("off", 0.0), Noisy("on", 0.0), plan, CPU)
    assert len(caplog.records) == 1
    warn()
    assert len(caplog.records) == 2


def test_files_are_counted(tmp_path) -> None:
    (tmp_path / "before").write_text("")
    number = iter(range(99))
    quiet = look(lambda: (tmp_path / f"{next(number)}").write_text(""), 3, CPU, tmp_path)
    assert quiet.num_files == 3


def test_byte_bound_grows_with_the_bytes() -> None:
    assert byte_bound_s([], [], CPU) == 0.0
    small, large = byte_bound_s([1 << 12], [], CPU), byte_bound_s([1 << 26] * 2, [1 << 26], CPU)
    assert 0 < small < large


@pytest.mark.gpu
def test_waits_and_allocations_are_counted_on_the_device() -> None:
    device, kept = torch.device("cuda"), []
    x = torch.ones(1 << 20, device=device)
    quiet = look(lambda: (x.sum().item(), torch.cuda.synchronize()), 3, device, None)
    assert quiet.num_syncs == 6
    quiet = look(lambda: kept.append(torch.empty(1 << 20, device=device)), 3, device, None)
    assert (quiet.num_syncs, quiet.num_allocations) == (0, 3)
    assert quiet.peak_bytes is not None and quiet.peak_bytes >= 3 << 20
    assert look(lambda: x.mul_(1), 3, device, None).num_allocations == 0
    assert byte_bound_s([1 << 20] * 8, [1 << 20], device) > byte_bound_s([1 << 20], [], device) > 0
