"""What an incident costs on a CUDA device, from the ring to the disk.

    python tests/benchmarks/flush.py [--ring-gb 20] [--rounds 3] [--directory incidents] [--fast-directory /dev/shm]

Three measurements in one process: the copies of a whole ring to the host beside a plain copy to pinned memory; steps
of a training loop while an incident is written against quiet ones, alternating; and what the writer gets onto the disk
against a plain write and fsync of as many bytes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import time
from pathlib import Path

import h5py
import torch

import flightrec
from flightrec.flush.staging import pin, unpin
from flightrec.kernels import pinned
from flightrec.writer.shared import SharedMemory

MIB, GIB = 1 << 20, 1 << 30
TOKENS = 8192
WIDTH = 8192
NUM_LAYERS = 4


def config(iterations: int, memory_gib: int, staging_gib: float) -> dict:
    return {
        "budget": "none",
        "select": [{"tensors": "*"}],
        "ring": {"iterations": iterations, "memory": f"{memory_gib} GiB"},
        "triggers": [{"kind": "manual"}],
        "incident": {"after": 0, "limit": 1000, "cooldown": 0, "staging_memory": f"{staging_gib} GiB"},
    }


def seconds_of(call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def pinned_bandwidth(rounds: int = 7) -> float:
    """Bytes a second of a plain copy of 1 GiB to torch's own pinned memory; median."""
    source = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    times = [seconds_of(lambda: target.copy_(source, non_blocking=True)) for _ in range(rounds)]
    return GIB / statistics.median(times)


def pinning(num_bytes: int = GIB) -> dict[str, float]:
    """Seconds a GiB to pin shared memory: by the driver alone, and after its pages were taken in several threads."""
    found = {}
    for name in ("driver alone", "pages first"):
        memory = SharedMemory.create(4096, 4096, num_bytes)
        staging = torch.frombuffer(memory.staging, dtype=torch.uint8)
        start = time.perf_counter()
        if name == "driver alone":
            assert pinned.register(staging, num_bytes)
        else:
            pinned.populate(staging, num_bytes)
            found["of which pages"] = (time.perf_counter() - start) * GIB / num_bytes
            assert pin(staging, num_bytes) == num_bytes
        found[name] = (time.perf_counter() - start) * GIB / num_bytes
        unpin(staging)
        memory.close()
    return found


def copies(ring_gb: float, directory: Path) -> dict[str, float]:
    """The ring to the host: nothing else runs."""
    iterations, record_bytes = 5, 128 * MIB
    num_records = round(ring_gb * 1e9 / iterations / record_bytes)
    num_bytes = iterations * num_records * record_bytes
    source = torch.ones(record_bytes // 2, dtype=torch.bfloat16, device="cuda")
    slots = iterations + 3
    memory_gib = -(-slots * num_records * record_bytes // GIB) + 2
    before = pinned_bandwidth()
    with flightrec.Recorder(config(iterations, memory_gib, -(-num_bytes // GIB)), directory=directory) as recorder:
        first_s = 0.0
        for iteration in range(iterations + 1):
            for index in range(num_records):
                recorder.record(f"layer{index}", "output", high_precision=source)
            if iteration < iterations:
                elapsed = seconds_of(recorder.step)
                first_s = first_s or elapsed
        recorder.trigger("benchmark")
        torch.cuda.synchronize()
        flusher = recorder._capture.engine.flusher
        start = time.perf_counter()
        recorder.step()
        while not flusher._incidents and not flusher.done:  # its verdict has not arrived yet
            start = time.perf_counter()
            recorder.step()
        queued_s = time.perf_counter() - start
        while flusher._copies.ticks or any(incident.to_stage for incident in flusher._incidents):
            flusher.pump()
        copied_s = time.perf_counter() - start
        while not flusher.done:
            flusher.pump()
            time.sleep(0.005)
        written_s = time.perf_counter() - start
        assert not flusher.done[-1]["error"], flusher.done[-1]
    plain = statistics.mean([before, pinned_bandwidth()])
    return {
        "bytes": num_bytes,
        "first step s (pins)": first_s,
        "ms of the step that queues all": 1e3 * queued_s,
        "copied s": copied_s,
        "GB/s": num_bytes / copied_s / 1e9,
        "pinned copy GB/s": plain / 1e9,
        "share": num_bytes / copied_s / plain,
        "written s": written_s,
    }


def plain_write(directory: Path, num_bytes: int, source: memoryview) -> float:
    """Seconds to write and fsync that many bytes."""
    path = directory / "plain"
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    left = num_bytes
    while left:
        left -= os.write(descriptor, source[: min(left, source.nbytes)])
    os.fsync(descriptor)
    os.close(descriptor)
    elapsed = time.perf_counter() - start
    path.unlink()
    return elapsed


def beside(rounds: int, quiet_steps: int, directory: Path) -> dict[str, object]:
    """A training loop with the recorder on: quiet steps, steps while an incident is written, and the disk's speed."""
    layers = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 90 for _ in range(NUM_LAYERS)]
    for layer in layers:
        layer.requires_grad_()
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    times: dict[str, list[float]] = {"quiet": [], "beside": []}
    rates: dict[str, list[float]] = {"writer": [], "plain": []}
    noise = memoryview(os.urandom(64 * MIB))
    with flightrec.Recorder(config(5, 12, 4), directory=directory) as recorder:

        def iterate(kind: str | None) -> None:
            torch.cuda.synchronize()
            start = time.perf_counter()
            h = x
            for index, layer in enumerate(layers):
                h = torch.nn.functional.silu(h @ layer)
                recorder.record(f"layer{index}", "output", high_precision=h.detach())
            h.sum().backward()
            for layer in layers:
                layer.grad = None
            recorder.step()
            torch.cuda.synchronize()
            if kind is not None:
                times[kind].append(time.perf_counter() - start)

        for _ in range(12):
            iterate(None)
        flusher = recorder._capture.engine.flusher
        for index in range(rounds):
            for _ in range(quiet_steps):
                iterate("quiet")
            recorder.trigger("benchmark")
            start = time.perf_counter()
            while len(flusher.done) <= index:
                iterate("beside")
            elapsed = time.perf_counter() - start
            done = flusher.done[-1]
            assert not done["error"], done
            num_bytes = done["bytes"]
            rates["writer"].append(num_bytes / elapsed)
            shutil.rmtree(done["path"])
            rates["plain"].append(num_bytes / plain_write(directory, num_bytes, noise))
    return {"times": times, "rates": rates, "bytes": num_bytes}


def interval(quiet: list[float], other: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Ratio of the medians, and its 95% interval by resampling."""
    pick = random.Random(0)

    def median(values: list[float]) -> float:
        return statistics.median(pick.choices(values, k=len(values)))

    ratios = sorted(median(other) / median(quiet) for _ in range(draws))
    middle = statistics.median(other) / statistics.median(quiet)
    return middle, ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring-gb", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet-steps", type=int, default=60)
    parser.add_argument("--directory", type=Path, default=Path("flush-benchmark"))
    parser.add_argument("--fast-directory", type=Path, help="for the large ring, whose way to the disk is not measured")
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    print(
        f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch "
        f"{torch.__version__}, h5py {h5py.__version__}, flightrec {flightrec.__version__}\n"
    )
    print("Pinning shared memory, s a GiB:", json.dumps({k: round(v, 3) for k, v in pinning().items()}), flush=True)
    fast = options.fast_directory
    if fast is None or shutil.disk_usage(fast).free < 1.5e9 * options.ring_gb:
        fast = options.directory
    fast = fast / "flightrec-flush-benchmark"
    found = copies(options.ring_gb, fast)
    shutil.rmtree(fast, ignore_errors=True)
    print("The ring to the host:", json.dumps({k: round(v, 3) for k, v in found.items()}), flush=True)
    if options.rounds == 0:
        return
    result = beside(options.rounds, options.quiet_steps, options.directory)
    quiet, other = result["times"]["quiet"], result["times"]["beside"]
    ratio, low, high = interval(quiet, other)
    writer, plain = (statistics.median(result["rates"][kind]) for kind in ("writer", "plain"))
    print("\n| step | n | median ms | against quiet |\n|---|---|---|---|")
    print(f"| recorder on, quiet | {len(quiet)} | {1e3 * statistics.median(quiet):.2f} | 1 |")
    print(
        f"| while an incident is written | {len(other)} | {1e3 * statistics.median(other):.2f} | "
        f"{ratio:.3f}x ({low:.3f} to {high:.3f}) |"
    )
    print(
        f"\nIncidents of {result['bytes'] / 1e9:.2f} GB: {writer / 1e9:.2f} GB/s from the trigger to the last fsync, a "
        f"plain write with fsync {plain / 1e9:.2f} GB/s: {writer / plain:.2f}x; rounds: "
        + ", ".join(f"{a / 1e9:.2f}/{b / 1e9:.2f}" for a, b in zip(*result["rates"].values(), strict=True))
    )


if __name__ == "__main__":
    main()
