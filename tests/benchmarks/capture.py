"""What capturing one tensor costs on the GPU, beside copying it: device time and host time, medians.

    python tests/benchmarks/capture.py [--rounds 60] [--reference]

Needs a GPU. Each row is the whole capture of one record (bytes, statistics row, stamp) as the recorder does it, and
``copy_`` of the same tensors. Both stand in CUDA graphs of several launches each, so that launching does not count, and
take turns; a figure is the median over rounds, a ratio that of the pairs, with a bootstrapped 95% interval. Host time
is that of one call outside of a graph, the device keeping up. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch

import flightrec
from flightrec.kernels import device, reference
from flightrec.kernels.formats import copy_dtype
from flightrec.kernels.plan import CapturePlan, Destination
from flightrec.records import NUM_STATISTICS

MIB = 1 << 20


def destination_for(x: torch.Tensor | None, parts: list[torch.Tensor], keep: bool) -> Destination:
    def room(tensor: torch.Tensor) -> torch.Tensor | None:
        if not keep:
            return None
        numel = -(-tensor.numel() // 128) * 128  # the ring aligns its places
        planes = torch.empty(2, numel, dtype=copy_dtype(tensor.dtype), device="cuda")
        return planes[:, : tensor.numel()].view(2, *tensor.shape)

    return Destination(
        high_precision=None if x is None else room(x),
        parts=[room(part) for part in parts],
        statistics=torch.empty(2, 64, NUM_STATISTICS, dtype=torch.float64, device="cuda")[:, 3],
        stamp=torch.empty(2, 64, dtype=torch.int64, device="cuda")[:, 3],
    )


def graph_of(work: Callable[[], None], num: int) -> torch.cuda.CUDAGraph:
    """``num`` times the work; whatever it makes only once is made before."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(num):
                work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def turns(works: list[Callable[[], None]], rounds: int, num: int) -> list[list[float]]:
    """Microseconds of each work in each round, all of them once a round in changing order."""
    graphs = [graph_of(work, num) for work in works]
    took: list[list[float]] = [[] for _ in works]
    for number in range(rounds):
        order = list(range(len(works)))
        random.Random(number).shuffle(order)
        for at in order:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[at].replay()
            stop.record()
            torch.cuda.synchronize()
            took[at].append(start.elapsed_time(stop) * 1e3 / num)
    return took


def ratio(took: list[float], beside: list[float]) -> str:
    """Median of the paired ratios and its 95% interval."""
    ratios = [one / two for one, two in zip(took, beside, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(400))
    return f"{statistics.median(ratios):.2f}x ({medians[10]:.2f} to {medians[-11]:.2f})"


def host_time(work: Callable[[], None], calls: int = 400) -> float:
    """Median microseconds of one call."""
    took = []
    for number in range(calls):
        begun = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - begun)
        if number % 20 == 19:
            torch.cuda.synchronize()
    return statistics.median(took) / 1e3


Record = tuple[torch.Tensor | None, list[torch.Tensor], CapturePlan]


KINDS = ("values", "codes", "pair", "blocks", "mxfp8", "nvfp4")


def cases(num_bytes: int, kinds: tuple[str, ...] = KINDS) -> dict[str, Record]:
    """Records whose largest tensor has ``num_bytes``, by name."""
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
    scale = torch.tensor([0.02], device="cuda")
    delayed = [scale, 1 / scale, torch.rand(1024, 12, device="cuda")[:, 3]]

    def made(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(max(num // 4096, 1), min(num, 4096), device="cuda").to(torch.bfloat16)
        return x, (x.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)

    x, codes = made(num_bytes // 2)
    blocks = torch.full((x.shape[0], x.shape[1] // 128), 0.02, device="cuda")
    powers = torch.full((x.shape[0], x.shape[1] // 32), 121, dtype=torch.uint8, device="cuda")  # two to the -6
    mxfp8 = CapturePlan(
        codes=0, format="float8_e4m3fn", pairs=True, scale=1, scales=((1, "float8_e8m0fnu"),), block_shape=(1, 32)
    )
    fours = torch.randint(0, 256, (x.shape[0], x.shape[1] // 2), dtype=torch.uint8, device="cuda")
    words = torch.full((x.shape[0], x.shape[1] // 16), 0x78, dtype=torch.uint8, device="cuda")  # 256
    second = torch.tensor([0.004], device="cuda")
    nvfp4 = CapturePlan(
        codes=0,
        format="float4_e2m1fn_x2",
        pairs=True,
        scale=1,
        scales=((1, "float8_e4m3fn"), (2, "float32")),
        block_shape=(1, 16),
        tensor_scale=2,
    )
    found: dict[str, Record] = {
        "values": (x, [], CapturePlan()),
        "codes": (None, [made(num_bytes)[1], *delayed], one),
        "pair": (x, [codes, *delayed], one),
        "blocks": (x, [codes, blocks], many),
        "mxfp8": (x, [codes, powers], mxfp8),
        "nvfp4": (x, [fours, words, second], nvfp4),
    }
    return {kind: found[kind] for kind in kinds}


NAMES = {
    "values": "bfloat16",
    "codes": "E4M3 codes, delayed scaling",
    "pair": "bfloat16 and its E4M3 codes, delayed scaling",
    "blocks": "bfloat16 and its E4M3 codes, 1x128 blocks",
    "mxfp8": "bfloat16 and its MXFP8 codes",
    "nvfp4": "bfloat16 and its NVFP4 codes",
}


def works_of(
    record: Record, slot: torch.Tensor, tick: torch.Tensor, capture: Callable[..., None] = device.capture
) -> list[Callable[[], None]]:
    """Copying, capturing, and capturing without the bytes."""
    x, parts, plan = record
    tensors = [tensor for tensor in (x, *parts) if tensor is not None]
    pairs = [(torch.empty_like(tensor), tensor) for tensor in tensors if tensor.numel() > 4096] or [
        (torch.empty_like(tensors[0]), tensors[0])
    ]

    def copying() -> None:
        for to, of in pairs:
            to.copy_(of)

    def capturing(keep: bool) -> Callable[[], None]:
        room = destination_for(x, parts, keep)
        return lambda: capture(plan, room, x, parts, slot, tick)

    return [copying, capturing(True), capturing(False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--reference", action="store_true", help="the torch reference too")
    asked = parser.parse_args()
    import triton

    print(
        f"{torch.cuda.get_device_name()}; Python {platform.python_version()}, torch {torch.__version__}, Triton "
        f"{triton.__version__}, flightrec {flightrec.__version__}; medians of {asked.rounds}\n"
    )
    head = ["record", "largest tensor", "copy_, us", "capture, us", "", "statistics only, us", "", "host, us"]
    head += ["reference, us"] * asked.reference
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|", flush=True)
    slot, tick = torch.tensor([1], device="cuda"), torch.tensor([5], device="cuda")
    for num_bytes in (1 << 15, 1 << 17, 16 * MIB, 64 * MIB, 256 * MIB):
        for kind, record in cases(num_bytes).items():
            works = works_of(record, slot, tick)
            copy, whole, alone = turns(works, asked.rounds, 10)
            row = [NAMES[kind], f"{num_bytes >> 10} KiB" if num_bytes < MIB else f"{num_bytes // MIB} MiB"]
            row += [f"{statistics.median(copy):.1f}"]
            for took in (whole, alone):
                row += [f"{statistics.median(took):.1f}", ratio(took, copy)]
            row += [f"{host_time(works[1]):.1f}"]
            if asked.reference:
                slow = turns([works_of(record, slot, tick, reference.capture)[1]], 5, 1)[0]
                row += [f"{statistics.median(slow):.0f}"]
            print("| " + " | ".join(row) + " |", flush=True)
    assert not device._gave_up


if __name__ == "__main__":
    with torch.no_grad():
        main()
