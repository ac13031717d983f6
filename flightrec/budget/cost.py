"""What recording costs: seconds = (a + b x bytes) x a factor that observation corrects.

``calibrate`` measures a and b when a recorder is attached, with the real capture path in throw-away memory; there it
may wait for the device. ``Costs`` observes while the run goes on and never waits: on the CPU by the clock around every
record, on CUDA by a pair of events around some records of the first iterations and one of each later one, read later.
What stands between two events is what the stream takes for a record, whoever the slower one is: the kernels where the
host runs ahead, the host where the device waits for it. Records come from any thread.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flightrec.records import Key, RecordLayout
from flightrec.ring.ring import Ring
from flightrec.sources.sink import quiet

logger = logging.getLogger("flightrec")

NUM_REPETITIONS = 5
SMALL_NUMEL = 64
LARGE_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 21}
"""Elements of the tensors that are recorded for measurement, float32 and bfloat16: 1 and 4 MiB."""

SLEEP_CYCLES = 20_000_000
"""How long the device is kept busy (some 10 ms), so that launches pile up and their own time shows."""

WINDOW = 64
MAX_FACTOR = 16.0
MAX_PENDING = 16
"""Probes that wait for the device; as many are made in one of the first iterations."""

NUM_EARLY_ITERATIONS = 8
"""Iterations with many probes: the start-up line is said of what they tell."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of recording as measured before training.

    Attributes:
        record_s: a, what any record takes.
        byte_s: b, what each byte read takes.
    """

    record_s: float
    byte_s: float

    def seconds(self, num_records: float, num_bytes: float) -> float:
        """Predicted seconds."""
        return self.record_s * num_records + self.byte_s * num_bytes


FALLBACK = {"cpu": CostModel(50e-6, 0.5e-9), "cuda": CostModel(1e-3, 1e-11)}
"""Where measuring fails."""


def calibrate(device: torch.device) -> CostModel:
    """Measure the cost of a record on ``device``. Waits for it, some 50 ms; before training only. Never raises.

    Draws no random numbers; some MiB are allocated and given back.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    try:
        with quiet():
            model = _calibrate_cuda(device) if kind == "cuda" else _calibrate_cpu(device)
        if model.record_s > 0 and model.byte_s >= 0:
            return model
        logger.info("flightrec: measuring what a record costs gave %s; typical figures are used", model)
    except Exception as error:
        logger.info("flightrec: what a record costs could not be measured (%s); typical figures are used", error)
    return FALLBACK[kind]


def _calibrate_cpu(device: torch.device) -> CostModel:
    records = _Rehearsal(device)

    def timed(record: Callable[[], None]) -> float:
        began = time.perf_counter()
        record()
        return time.perf_counter() - began

    small = statistics.median(timed(records.small) for _ in range(NUM_REPETITIONS))
    large = statistics.median(timed(records.large) for _ in range(NUM_REPETITIONS))
    return _fit(small, large, records.difference_bytes)


def _calibrate_cuda(device: torch.device) -> CostModel:
    records = _Rehearsal(device)
    torch.cuda.synchronize(device)
    launch_s: list[float] = []

    def timed(record: Callable[[], None]) -> float:
        torch.cuda._sleep(SLEEP_CYCLES)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPETITIONS + 1)]
        events[0].record()
        began = time.perf_counter()
        for event in events[1:]:
            record()
            event.record()
        launch_s.append((time.perf_counter() - began) / NUM_REPETITIONS)
        torch.cuda.synchronize(device)
        return statistics.median(float(a.elapsed_time(b)) / 1e3 for a, b in itertools.pairwise(events))

    with torch.cuda.device(device):
        model = _fit(timed(records.small), timed(records.large), records.difference_bytes)
    # A run whose launches are what takes the time pays for those of a record.
    return CostModel(max(model.record_s, min(launch_s)), model.byte_s)


def _fit(small_s: float, large_s: float, difference_bytes: int) -> CostModel:
    return CostModel(small_s, max(large_s - small_s, 0.0) / difference_bytes)


class _Rehearsal:
    """A ring of its own, committed and warm, and two tensors to record into it."""

    def __init__(self, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        numel = LARGE_NUMEL["cuda" if device.type == "cuda" else "cpu"]
        self._small = torch.full((SMALL_NUMEL,), 0.5, dtype=dtype, device=device)
        self._large = torch.full((numel,), 0.5, dtype=dtype, device=device)
        self._ring = Ring(device, iterations=1, after=0, latency=1, memory_bytes=64 << 20)
        self._tick = -1
        self.difference_bytes = self._large.nbytes - self._small.nbytes
        for _ in range(2):  # the second time everything has its place
            self.small()
            self.large()

    def small(self) -> None:
        self._record("small", self._small)

    def large(self) -> None:
        self._record("large", self._large)

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        self._tick += 1
        self._ring.begin(self._tick)
        self._ring.record(Key(name, "output"), high_precision=tensor)


def source_bytes(layout: RecordLayout) -> int:
    """Bytes that recording reads: those of the tensor, whether they are kept or not, and of its quantized form."""
    numel = 1
    for size in layout.shape:
        numel *= size
    quantized = sum(part.num_bytes for part in layout.components if part.name != "high_precision")
    if layout.quantizer >= 0 and not quantized:
        quantized = numel  # not kept, but read for the statistics: about a byte each
    return numel * _itemsize(layout.dtype) + quantized


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None) if dtype else None
    return found.itemsize if isinstance(found, torch.dtype) else 4 if dtype else 0


@dataclass(slots=True)
class _Probe:
    begin: torch.cuda.Event
    end: torch.cuda.Event
    num_bytes: int


class Costs:
    """The cost model, corrected by what recording was seen to take.

    Args:
        device: the run's.
        model: what was measured before training.

    Attributes:
        factor: observed seconds over predicted ones.
    """

    def __init__(self, device: torch.device, model: CostModel) -> None:
        self.model = model
        self.factor = 1.0
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._bytes: dict[int, int] = {}
        self._observed: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._pending: deque[_Probe] = deque()
        self._free: list[torch.cuda.Event] = []
        self._probed = -1  # none in the first iteration, in which kernels are compiled
        self._probe_every = 0  # 0: only the one
        self._num_iterations = 0
        self._num_records = self._num_bytes = 0
        self._replayed_s = 0.0
        self._spent_s = 0.0

    def seconds(self, num_records: float, num_bytes: float) -> float:
        """Predicted seconds of recording."""
        return self.factor * self.model.seconds(num_records, num_bytes)

    def bytes_of(self, layout: RecordLayout) -> int:
        """``source_bytes``, remembered."""
        num_bytes = self._bytes.get(layout.layout_id)
        if num_bytes is None:
            num_bytes = self._bytes[layout.layout_id] = source_bytes(layout)
        return num_bytes

    # -- around every record, on any thread

    def begin(self) -> float | torch.cuda.Event | None:
        """Before a record; hand the result to ``end``."""
        if not self._is_cuda:
            return time.perf_counter()
        number, every = self._num_records, self._probe_every
        if (number % every != self._probed % every) if every else number != self._probed:
            return None
        if len(self._pending) >= MAX_PENDING:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self, begun: float | torch.cuda.Event | None, layout: RecordLayout | None) -> None:
        """After a record; ``layout`` is None if there was none."""
        if layout is None:
            return
        num_bytes = self.bytes_of(layout)
        # Threads may lose an addition to each other: an estimate, not a count.
        self._num_records += 1
        self._num_bytes += num_bytes
        if isinstance(begun, float):
            self._spent_s += time.perf_counter() - begun
        elif begun is not None:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._pending.append(_Probe(begun, event, num_bytes))

    # -- in step()

    def add_replayed(self, num_records: int, num_bytes: int) -> None:
        """What captured graphs recorded in the iteration that ends; nothing stands around those for observation."""
        self._replayed_s = self.seconds(num_records, num_bytes)

    def end_iteration(self) -> float:
        """Seconds that recording took in the iteration that ends, as far as can be told; learns from them."""
        predicted = self.seconds(self._num_records, self._num_bytes)
        own_s = (predicted if self._is_cuda else self._spent_s) + self._replayed_s
        if self._num_iterations > 0:  # the first one gives every tensor its place
            if self._is_cuda:
                self._read_probes()
            elif self._num_records:
                self._observe(self._spent_s, self.model.seconds(self._num_records, self._num_bytes))
        self._num_iterations += 1
        # Another record each time, spread over the iteration (a prime step visits all).
        self._probed = self._num_iterations * 7919 % max(1, self._num_records)
        is_early = self._num_iterations <= NUM_EARLY_ITERATIONS
        self._probe_every = -(-self._num_records // MAX_PENDING) if is_early else 0
        self._num_records = self._num_bytes = 0
        self._spent_s = self._replayed_s = 0.0
        return own_s

    def _read_probes(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        while self._pending and self._pending[0].end.query():
            probe = self._pending.popleft()
            self._observe(probe.begin.elapsed_time(probe.end) / 1e3, self.model.seconds(1, probe.num_bytes))
            self._free += [probe.begin, probe.end]

    def _observe(self, seconds: float, predicted: float) -> None:
        self._observed.append((min(seconds, MAX_FACTOR * predicted), predicted))
        ratio = sum(seen for seen, _ in self._observed) / sum(said for _, said in self._observed)
        self.factor = min(max(ratio, 1 / MAX_FACTOR), MAX_FACTOR)
