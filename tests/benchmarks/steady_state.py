"""What the recorder adds to a training step: on and off alternating in one run, medians.

    python tests/benchmarks/steady_state.py [--device cuda] [--layers 4] [--hidden 1024] [--tokens 4096]

Prints a Markdown table with versions. The recorder on records everything that is selected by the shipped default.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

import flightrec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        options.hidden, 16, 4 * options.hidden, dropout=0.0, batch_first=True, norm_first=True, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip
    net = nn.TransformerEncoder(block, options.layers, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    x = torch.randn(1, options.tokens, options.hidden, device=device, dtype=torch.bfloat16)

    def step(recorder: flightrec.Recorder | None) -> float:
        synchronize(device)
        start = time.perf_counter()
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
        synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    times: dict[str, list[float]] = {"off": [], "on": []}
    config = {"ring": {"memory": "40 GiB" if device.type == "cuda" else "2 GiB"}}
    for _ in range(5):
        step(None)
    num_records, num_bytes = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(max(1, options.pairs // 10)):  # attach and detach, so that off is off
            times["off"] += [step(None) for _ in range(10)]
            with flightrec.Recorder(config, directory=folder) as recorder:
                recorder.attach(net)
                for _ in range(4):
                    step(recorder)
                times["on"] += [step(recorder) for _ in range(10)]
                ring = recorder._capture.engine.ring
                num_bytes = ring.bytes_per_iteration
                num_records = len(ring.index(recorder._tick - 1).layout_ids)
    off, on = (statistics.median(times[name]) for name in ("off", "on"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{name}; Python {platform.python_version()}, torch {torch.__version__}, flightrec {flightrec.__version__}; "
        f"{options.layers} TransformerEncoderLayer, bf16, hidden {options.hidden}, {options.tokens} tokens; "
        f"{num_records} records, {num_bytes / 2**20:.0f} MiB an iteration\n"
    )
    print("| | n | median ms a step |")
    print("|---|---|---|")
    print(f"| recorder off | {len(times['off'])} | {off:.2f} |")
    print(f"| recorder on, everything selected by default | {len(times['on'])} | {on:.2f} |")
    print(f"\nAdded: {on - off:.2f} ms, {100 * (on / off - 1):.0f}%.")


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
