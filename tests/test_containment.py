"""Every inner function raises once in a real training: the run does not notice, the log says it once.

Which functions there are is found by looking: all that the trainer's side of the package calls between ``attach`` and
the end of ``close``. Walls are not injected: what is left of a wall that is broken itself is Python.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import pkgutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import pytest
import torch
from models import RECORD_ALL, loss_of

import flightrec
from flightrec.capture import MAX_DEAD_PARTS
from flightrec.sources import stamps, torchao_patch
from flightrec.sources.plain import forget_plain

pytestmark = pytest.mark.filterwarnings("ignore")

SEAMS = (
    "attachment", "budget", "capture", "engine", "flush", "hostrules", "kernels", "recorder", "ring", "rules",
    "runfacts", "sources",
)  # fmt: skip
MORE = ("flightrec.writer.client", "flightrec.writer.messages")
WALLS = {
    # public: what they call is injected instead
    *(f"recorder.Recorder.{name}" for name in ("microbatch", "loss", "record", "valid_rows", "trigger", "step")),
    *(f"recorder.Recorder.{name}" for name in ("summary", "state_dict", "load_state_dict", "close", "iteration")),
    *(f"recorder.Recorder.{name}" for name in ("on_uncaught", "on_thread_uncaught")),
    # what catches
    "capture.Capture.guard", "capture.Capture.disarm", "engine.Engine._contain", "sources.base.Keeper.fail",
    "sources.modules._Layer.entered", "sources.modules._Layer.left", "sources.modules.ModulesSource._on_gradient",
    "sources.modules.ModulesSource.failed", "sources.parameters.Parameters._on_accumulated",
    "sources.watched._entering", "sources.watched._leaving",
    "sources.torchao.TorchaoSource.failed", "sources.torchao_patch._listeners", "sources.stamps.must_not_record",
}  # fmt: skip

ERRORS = (OSError("injected"), MemoryError("injected"), RuntimeError("CUDA error: injected"))


class _Injection:
    """What the wrapped functions consult; off unless a test arms it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.counting = False
        self.target, self.nth, self.error = "", 0, None  # nth 0: every call
        self.iteration = 0
        self.raised_in: int | None = None

    def call(self, name: str, function: Callable, args: tuple, kwargs: dict) -> object:
        if self.counting:
            self.counts[name] += 1
            if name == self.target and self.nth in (0, self.counts[name]):
                self.raised_in = self.iteration
                raise self.error
        return function(*args, **kwargs)


injection = _Injection()


def modules() -> Iterator[str]:
    for seam in SEAMS:
        module = importlib.import_module(f"flightrec.{seam}")
        yield module.__name__
        for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
            yield f"{module.__name__}.{info.name}"
    yield from MORE


def wrapped(name: str, function: FunctionType) -> Callable:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return injection.call(name, function, args, kwargs)

    return call


def places() -> Iterator[tuple[object, str, object, str]]:
    """(owner, attribute, what stands there, name) of every function of ours."""
    for module_name in modules():
        module = importlib.import_module(module_name)
        short = module_name.removeprefix("flightrec.")
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != module_name:
                continue
            if isinstance(value, FunctionType) and not inspect.isgeneratorfunction(value):
                yield module, name, value, f"{short}.{name}"
            elif inspect.isclass(value) and not issubclass(value, Exception):
                for inner, member in vars(value).items():
                    bare = getattr(member, "__func__", member)
                    if isinstance(bare, FunctionType) and not inner.startswith("__"):
                        yield value, inner, member, f"{short}.{value.__name__}.{inner}"


@contextmanager
def installed() -> Iterator[None]:
    """All functions wrapped, also where another module imported them by name; not those that only the writer calls."""
    undo: list[tuple[object, str, object]] = []
    replaced: dict[int, object] = {}
    for owner, attribute, member, name in list(places()):
        if (
            name in WALLS
            or name.endswith("_from_json")
            or inspect.isgeneratorfunction(getattr(member, "__func__", member))
        ):
            continue
        bare = getattr(member, "__func__", member)
        made: object = wrapped(name, bare)
        if isinstance(member, (staticmethod, classmethod)):
            made = type(member)(made)
        undo.append((owner, attribute, member))
        setattr(owner, attribute, made)
        replaced[id(member)] = made
    for module in [m for n, m in sys.modules.items() if n.startswith("flightrec.") and m is not None]:
        for attribute, value in list(vars(module).items()):
            if id(value) in replaced and isinstance(value, FunctionType):
                undo.append((module, attribute, value))
                setattr(module, attribute, replaced[id(value)])
    try:
        yield
    finally:
        for owner, attribute, member in reversed(undo):
            setattr(owner, attribute, member)


WIDTH = 16
CONFIG = {
    **RECORD_ALL,
    "select": [{"tensors": "*"}],
    "ring": {"iterations": 2},
    "incident": {"after": 0, "writer": "thread", "cooldown": 0},
}
DATA = [[torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7 + k)) for k in range(2)] for _ in range(6)]
TRIGGERS = (1, 4)


def small_net() -> torch.nn.Module:
    """A Float8 product and a plain one; the parametrised sources and the patch both have work."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)]
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return torch.nn.Sequential(*layers)
    convert = functools.partial(convert_to_float8_training, config=Float8LinearConfig(emulate=True))
    return torch.nn.Sequential(convert(torch.nn.Sequential(layers[0])), layers[1])


def train(directory: Path | None) -> list[torch.Tensor]:
    """Six iterations of two microbatches; losses, gradients and parameters."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    recorder = None
    if directory is not None:
        recorder = flightrec.Recorder(CONFIG, directory=directory)
        recorder.attach(net)
        injection.counts.clear()
        injection.counting = True
    trace = []
    try:
        for iteration, microbatches in enumerate(DATA):
            injection.iteration = iteration
            for index, x in enumerate(microbatches):
                if recorder is not None:
                    with recorder.microbatch(index, data={"ids": [1, 2]}):
                        loss = loss_of(net, x)
                        recorder.loss(loss)
                        loss.backward()
                else:
                    loss = loss_of(net, x)
                    loss.backward()
                trace.append(loss.detach().clone())
            if recorder is not None:
                recorder.valid_rows("elsewhere", 3)
                recorder.record("own", "output", high_precision=x)
            optimizer.step()
            trace += [p.grad.clone() for p in net.parameters()]
            optimizer.zero_grad()
            if recorder is not None:
                if iteration in TRIGGERS:
                    recorder.trigger("look")
                if iteration == 3:
                    recorder.load_state_dict(recorder.state_dict())
                recorder.step(loss=loss, metrics={"norm": 1.0})
        injection.iteration = len(DATA)
        if recorder is not None:
            recorder.close()
    finally:
        injection.counting = False
        if recorder is not None:
            recorder.close()
    return trace + [p.detach().clone() for p in net.parameters()]


@functools.cache
def calls() -> dict[str, int]:
    """How often each function is called in a healthy run."""
    with tempfile.TemporaryDirectory() as directory, installed():
        injection.target = ""
        forget()
        train(Path(directory))
        return dict(injection.counts)


EVERY = os.environ.get("FLIGHTREC_TEST_SLOW") == "1"
"""Inject every function, at its first and at its third call, which takes ten minutes; else a share of them."""

SHARE = 8


def cases(seam: str) -> Iterator[tuple[str, int]]:
    """Function and number of the call, of one seam."""
    mine = [(name, count) for name, count in sorted(calls().items()) if name.split(".")[0] == seam]
    for number, (name, count) in enumerate(mine if EVERY else mine[::SHARE]):
        for nth in (1, 3) if EVERY else ((1, 3)[number % 2],):
            if count >= nth:
                yield name, nth
            elif not EVERY:
                yield name, 1


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of level ERROR that tell of our own failures."""
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR and r.name == "flightrec"]
    return [line for line in lines if "an incident is being written" not in line]


def incidents(directory: Path) -> dict[int, flightrec.Incident]:
    whole = {index.parent for index in directory.glob("*/*.index.h5")}  # a close that failed did not wait for all
    found = [flightrec.open(folder) for folder in sorted(whole)]
    return {incident.trigger.iteration: incident for incident in found}


@functools.cache
def without_recorder() -> list[torch.Tensor]:
    return train(None)


@pytest.mark.parametrize("seam", sorted({*SEAMS, "writer"}))
def test_one_failure_is_logged_once_and_costs_the_run_nothing(seam, tmp_path, caplog):
    mine = list(cases(seam))
    assert mine
    problems = []
    with installed():
        for number, (name, nth) in enumerate(mine):
            caplog.clear()
            directory = tmp_path / str(number)
            injection.target, injection.nth, injection.raised_in = name, nth, None
            injection.error = ERRORS[0 if name in ALLOCATING else number % len(ERRORS)]
            forget()
            trace = train(directory)
            injection.target = ""
            problems += [f"{name}, call {nth}: {problem}" for problem in wrong(name, trace, directory, caplog)]
    assert not problems, "\n".join(problems)


def forget() -> None:
    """Undo what an earlier failure left in the process, and empty caches, so that each run calls the same functions."""
    for source in list(torchao_patch._sources):
        torchao_patch.unregister(source)
    for module in [m for n, m in sys.modules.items() if n.startswith("flightrec.sources")]:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    forget_plain()
    stamps._complained = False


ALLOCATING = {
    "ring.layout.Segment.resized", "ring.layout.Segments._take", "ring.layout.Segments._open",
    "ring.layout.Segments.find", "ring.layout.Segments.resize", "ring.layout.align",
    "ring.registry.Registry._rebind", "ring.registry.Registry._unbind", "ring.registry.Registry._bind",
    "ring.registry.Registry.resize", "ring.statistics.StatisticsMatrix.resize",
}  # fmt: skip
"""Here a ``RuntimeError`` or ``MemoryError`` says that the device has no memory, which is answered by keeping less."""

UNTOLD = {"sources.stamps._is_traced"}
"""Asked before it is known who records; the log says it."""


def wrong(name: str, trace: list[torch.Tensor], directory: Path, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    expected = without_recorder()
    if len(trace) != len(expected) or not all(map(torch.equal, trace, expected)):
        yield "training differs"
    errors = errors_of(caplog)
    if injection.raised_in is None:
        yield "was not called"
    elif len(errors) != 1:
        yield f"{len(errors)} lines of level ERROR: {errors}"
    found = incidents(directory)
    last = found.get(TRIGGERS[-1])
    if last is not None and injection.raised_in is not None and injection.raised_in < TRIGGERS[-1]:
        reasons = [entry.reason for entry in last.blind]
        if name not in UNTOLD and not any("injected" in reason for reason in reasons):
            yield f"the later incident does not tell of it: {reasons}"
    ends_recording = any("the recorder failed" in line for line in errors)
    if last is None and not ends_recording and injection.raised_in not in (None, *TRIGGERS, len(DATA)):
        yield f"no later incident: {sorted(found)}, {errors}"


def test_a_failure_while_layers_take_turns_costs_the_run_nothing(tmp_path, caplog, monkeypatch):
    """What is called, and how often, depends on the clock here: the run and the log are judged, not the incidents."""
    monkeypatch.setitem(CONFIG, "budget", "30%")
    problems = []
    with installed():
        injection.target = ""
        train(tmp_path / "healthy")
        mine = [name for name in sorted(injection.counts) if name.startswith("budget.")]
        assert len(mine) > 20
        for number, name in enumerate(mine if EVERY else mine[::SHARE]):
            caplog.clear()
            injection.target, injection.nth, injection.error = name, 1 + number % 2, ERRORS[number % len(ERRORS)]
            trace = train(tmp_path / str(number))
            injection.target = ""
            if not all(map(torch.equal, trace, without_recorder())):
                problems.append(f"{name}: training differs")
            if len(errors_of(caplog)) > 1:
                problems.append(f"{name}: {errors_of(caplog)}")
    assert not problems, "\n".join(problems)


HARD = (
    "capture.Capture.capture", "ring.ring.Ring.record", "sources.observe.observe", "sources.base.Keeper.keep",
    "rules.evaluate.Evaluator.evaluate", "flush.flusher.Flusher.pump", "capture.Capture.keep_scalar",
    "sources.stamps.Stamps.enter", "ring.slots.SlotTable.advance",
)  # fmt: skip


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_error_passes_untouched(name, error, tmp_path):
    raised = error("by hand")
    with installed():
        injection.target, injection.nth, injection.error = name, 2, raised
        try:
            with pytest.raises(error) as caught:
                train(tmp_path)
        finally:
            injection.target = ""
    assert caught.value is raised


@pytest.mark.parametrize("name", ["ring.ring.Ring.record", "engine.Engine.step", "sources.stamps.Stamps.enter"])
def test_what_fails_always_ends_recording_after_few_lines(name, tmp_path, caplog):
    with installed():
        injection.target, injection.nth, injection.error = name, 0, RuntimeError("CUDA error: injected")
        try:
            trace = train(tmp_path)
        finally:
            injection.target = ""
    assert all(map(torch.equal, trace, without_recorder()))
    assert 1 <= len(errors_of(caplog)) <= MAX_DEAD_PARTS + 2


class Hostile:
    """Raises whatever it is asked."""

    def __getattribute__(self, name: str) -> object:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise RuntimeError("hostile")

    def __repr__(self) -> str:
        raise RuntimeError("hostile")

    __str__ = __format__ = __index__ = __float__ = __len__ = __iter__ = __bool__ = __repr__


GARBAGE = (None, "text", b"", 3, 2.5, 1j, [], [1, "x"], {}, {"a": None}, object(), Hostile(), torch.ones(2, 3), float)


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda value: type(value).__name__)
def test_no_public_method_raises_whatever_it_is_given(garbage, tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        for round_number in range(2):
            recorder.record("mine", "output", high_precision=torch.ones(2))
            recorder.record(garbage, garbage, part=garbage, high_precision=garbage, quantized=garbage)
            recorder.record("mine", "output", high_precision=torch.ones(2), columnwise=garbage, valid_rows=garbage)
            recorder.record("other", "output", high_precision=garbage, valid_rows=garbage)
            recorder.valid_rows("mine", garbage)
            recorder.valid_rows(garbage, garbage)
            recorder.loss(garbage)
            for data in (garbage, {"ids": garbage}):
                with recorder.microbatch(garbage, data=data):
                    pass
                with recorder.microbatch(0, data=data):
                    pass
            recorder.trigger(garbage)
            recorder.iteration = garbage
            recorder.load_state_dict(garbage)
            recorder.load_state_dict({"attempt": garbage, "iteration": garbage, "engine": garbage})
            recorder.load_state_dict({"attempt": 0, "iteration": 5 + round_number, "engine": garbage})
            engine = {"rules": garbage, "limits": garbage, "history": garbage}
            recorder.load_state_dict({"attempt": 0, "iteration": 5 + round_number, "engine": engine})
            recorder.step(loss=garbage, metrics=garbage)
            recorder.step(metrics={"m": garbage, "good": 1.0})
            assert isinstance(recorder.state_dict(), dict)
            assert isinstance(recorder.summary(), str)
        recorder.record("after", "output", high_precision=torch.full((2,), torch.nan))
        recorder.step()
        recorder.step()
    assert any(
        firing.kind == "nonfinite" and firing.key.layer == "after"
        for folder in tmp_path.iterdir()
        for firing in flightrec.open(folder).firings
    )


def test_a_log_handler_that_raises_does_not_reach_the_loop(tmp_path):
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("a broken handler")

    handler = Broken(logging.ERROR)
    log = logging.getLogger("flightrec")
    log.addHandler(handler)
    try:
        with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
            recorder.record("mine", "output", high_precision=torch.ones(2))
            recorder.valid_rows("mine", "text")
            recorder.step(metrics={"m": "text"})
    finally:
        log.removeHandler(handler)
