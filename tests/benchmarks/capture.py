"""What capturing one tensor costs on the GPU, beside copying it: device time and host time, medians.

    python tests/benchmarks/capture.py [--repeats 30]

Needs a GPU. Each row is the whole capture of one record (bytes, statistics row, stamp) as the recorder does it, by
Triton's kernels and by the torch reference, and ``copy_`` of the same tensors. The device waits before each
measurement until everything is queued, so that launches do not count as device time. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

import flightrec
from flightrec.kernels import device, reference
from flightrec.kernels.formats import copy_dtype
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.records import NUM_STATISTICS

WAIT_CYCLES = 4_000_000


def destination_for(x: torch.Tensor | None, parts: list[torch.Tensor], keep: bool) -> Destination:
    def room(tensor: torch.Tensor) -> torch.Tensor | None:
        return torch.empty(2, *tensor.shape, dtype=copy_dtype(tensor.dtype), device="cuda") if keep else None

    return Destination(
        high_precision=None if x is None else room(x),
        parts=[room(part) for part in parts],
        statistics=torch.empty(2, 64, NUM_STATISTICS, dtype=torch.float64, device="cuda")[:, 3],
        stamp=torch.empty(2, 64, dtype=torch.int64, device="cuda")[:, 3],
    )


def measure(work: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median microseconds on the device and on the host."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    on_device, on_host = [], []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(WAIT_CYCLES)
        start.record()
        begun = time.perf_counter()
        work()
        on_host.append(time.perf_counter() - begun)
        stop.record()
        torch.cuda.synchronize()
        on_device.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(on_device), statistics.median(on_host) * 1e6


Record = tuple[torch.Tensor | None, list[torch.Tensor], CapturePlan]


def cases(num: int) -> dict[str, Record]:
    """Records of ``num`` elements, by name."""
    x = torch.randn(num // 4096, 4096, device="cuda").to(torch.bfloat16)
    scale = torch.tensor([0.01], device="cuda")
    codes = (x.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = torch.rand(num // 4096, 32, device="cuda") * 0.01 + 0.01
    history = torch.rand(1024, 12, device="cuda")[:, 3]
    one = CapturePlan(
        codes=0,
        format="float8_e4m3fn",
        pairs=True,
        scale=1,
        scales=((1, "float32"), (2, "float32")),
        inverse=2,
        history=3,
    )
    many = CapturePlan(
        codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float32"),), block_shape=(1, 128)
    )
    delayed = [codes, scale, 1 / scale, history]
    return {
        "bfloat16": (x, [], CapturePlan()),
        "E4M3 codes, delayed scaling": (None, delayed, one),
        "bfloat16 and its E4M3 codes, delayed scaling": (x, delayed, one),
        "bfloat16 and its E4M3 codes, 1x128 blocks": (x, [codes, blocks], many),
    }


def copying(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Plain copies, the least that keeping the bytes can cost."""
    pairs = [(torch.empty_like(tensor), tensor) for tensor in tensors]

    def work() -> None:
        for to, of in pairs:
            to.copy_(of)

    return work


def row(record: Record, slot: torch.Tensor, tick: torch.Tensor, repeats: int) -> str:
    """The figures of one record: with its bytes, and statistics only."""
    x, parts, plan = record
    tensors = [tensor for tensor in (x, *parts) if tensor is not None]
    copy, _ = measure(copying(tensors), repeats)
    found: dict[bool, tuple[float, float]] = {}
    for keep in (True, False):
        room = destination_for(x, parts, keep)
        found[keep] = measure(lambda room=room: device.capture(plan, room, x, parts, slot, tick), repeats)
        if keep:
            slow = measure(lambda room=room: reference.capture(plan, room, x, parts, slot, tick), repeats)
        del room
    numbers = [f"{copy:.1f}"]
    for took, _ in found.values():
        numbers += [f"{took:.1f}", f"{took / copy:.2f}x"]
    return " | ".join([*numbers, f"{found[True][1]:.0f}", f"{slow[0]:.0f}", f"{slow[1]:.0f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    import triton

    print(
        f"{torch.cuda.get_device_name()}; Python {platform.python_version()}, torch {torch.__version__}, Triton "
        f"{triton.__version__}, flightrec {flightrec.__version__}; medians of {repeats}\n"
    )
    head = ("record", "million elements", "copy_, us", "capture, us", "", "statistics only, us", "", "host, us")
    print("| " + " | ".join((*head, "reference, us", "its host, us")) + " |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    slot, tick = torch.tensor([1], device="cuda"), torch.tensor([5], device="cuda")
    for num in (1 << 16, 1 << 23, 1 << 25, 1 << 27):
        for name, record in cases(num).items():
            print(f"| {name} | {num / 1e6:.2f} | {row(record, slot, tick, repeats)} |", flush=True)
    assert not device._gave_up


if __name__ == "__main__":
    with torch.no_grad():
        main()
