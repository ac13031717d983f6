"""What the host tier costs beside training on a GPU, and how fast it copies.

    python tests/benchmarks/host_tier.py [--host-memory "8 GiB"] [--rounds 12] [--steps 20]

Stretches with and without the tier alternate in one run with the recorder on; a step is timed by CUDA events. Prints a
Markdown table, and what making the memory ready costs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time

import torch
import triton
from torch import nn

import flightrec


class Block(nn.Module):
    """Two products with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def intervals(values: list[float]) -> str:
    """Median with a 95% interval of the median, by order statistics."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5
    low = ordered[max(0, round(len(ordered) / 2 - half))]
    high = ordered[min(len(ordered) - 1, round(len(ordered) / 2 + half))]
    return f"{statistics.median(ordered):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host-memory", default="8 GiB")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", default="*", help="pattern of the layers that are recorded")
    options = parser.parse_args()
    config = {
        "budget": "none",
        "select": [{"layers": options.layers, "tensors": ["output", "gradient"]}],
        "ring": {"iterations": 4, "memory": "32 GiB", "host_memory": options.host_memory},
        "triggers": [{"kind": "nonfinite"}],
        "incident": {"staging_memory": "64 MiB"},
    }
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(4096) for _ in range(4))).cuda().bfloat16()
    x = torch.randn(options.tokens, 4096, device="cuda", dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, flightrec.Recorder(config, directory=folder) as recorder:
        recorder.attach(net)

        def stretch(num_steps: int) -> list[float]:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
            events[0].record()
            for event in events[1:]:
                net(x).square().mean().backward()
                net.zero_grad()
                recorder.step()
                event.record()
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

        stretch(5)
        engine = recorder._capture.engine
        tier, growth = engine.tier, engine.tier._growth
        pieces: list[float] = []
        growing: list[float] = []
        lock = growth._lock

        def timed(memory: torch.Tensor, num_bytes: int) -> bool:
            start = time.perf_counter()
            locked = lock(memory, num_bytes)
            pieces.append((time.perf_counter() - start) * 1000)
            return locked

        growth._lock = timed
        began = time.perf_counter()
        while growth.ready_bytes < growth.tensor.numel() and not growth.problem and time.perf_counter() - began < 60:
            growing += stretch(10)
        ready_s = time.perf_counter() - began
        modes: dict[str, list[float]] = {"without": [], "with": []}
        before, seen = tier._dropped.total(), tier._num_seen
        for _ in range(options.rounds):
            for mode in ("without", "with"):
                engine.tier = tier if mode == "with" else None
                stretch(2)
                modes[mode] += stretch(options.steps)
        dropped, seen = tier._dropped.total() - before, tier._num_seen - seen
        size = tier._bytes_per_iteration
        with_s = statistics.median(modes["with"]) / 1000
        versions = f"torch {torch.__version__}, Triton {triton.__version__}, flightrec {flightrec.__version__}"
        print(f"{torch.cuda.get_device_name()}; {versions}; Python {sys.version.split()[0]}")
        print(f"\n{size / 1e9:.3f} GB an iteration, {tier._depth} iterations in {options.host_memory}; {tier.told()}\n")
        print("| host tier | n | ms a step, median (95% interval) |\n|---|---|---|")
        for mode, values in modes.items():
            print(f"| {mode} | {len(values)} | {intervals(values)} |")
        print(f"| while its memory is made ready | {len(growing)} | {intervals(growing)} |")
        rate = size / 1e9 / with_s * (1 - dropped / max(1, seen))
        pairs = zip(modes["with"], modes["without"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"\nwith/without: {ratio:.4f}; {dropped} of {seen} iterations left out, {rate:.1f} GB/s on average")
        per_gib = sum(pieces) / 1000 / max(1, len(pieces)) * (2**30 / growth._piece_bytes)
        median_ms, size_mib = statistics.median(pieces), growth._piece_bytes >> 20
        print(f"ready after {ready_s:.1f} s; a piece of {size_mib} MiB: {median_ms:.1f} ms, {per_gib:.2f} s a GiB")


if __name__ == "__main__":
    main()
