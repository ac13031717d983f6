"""What the recorder adds to a training step: on and off alternating in one run, medians.

    python tests/benchmarks/steady_state.py [--device cuda] [--layers 4] [--hidden 1024] [--tokens 4096]

Prints a Markdown table with versions; records and bytes are those of the last iteration.
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

CONFIGS = [
    ("shipped default, budget 1%", {}),
    ("block boundaries as statistics, budget 1%", {"select": [
        {"tensors": ["output", "gradient"], "keep": "statistics"}, {"tensors": ["activation", "weight", "wgrad"]},
    ]}),
    ("everything selected by default, budget none", {"budget": "none"}),
]  # fmt: skip
"""Name in the table, and configuration."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=60, help="steps after which turns have settled")
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

    memory = {"ring": {"memory": "40 GiB" if device.type == "cuda" else "2 GiB"}}
    times: dict[str, list[float]] = {"recorder off": [], **{name: [] for name, _ in CONFIGS}}
    for _ in range(5):
        step(None)
    sizes, summaries = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(max(1, options.pairs // 10)):  # attach and detach, so that off is off
            times["recorder off"] += [step(None) for _ in range(10)]
            for name, config in CONFIGS:
                with flightrec.Recorder({**memory, **config}, directory=folder) as recorder:
                    recorder.attach(net)
                    for _ in range(options.warm_up):
                        step(recorder)
                    times[name] += [step(recorder) for _ in range(10)]
                    ring = recorder._capture.engine.ring
                    layouts = [ring.layouts[i] for i in ring.index(recorder._tick - 1).layout_ids]
                    sizes[name] = f"{len(layouts)} | {sum(layout.num_bytes for layout in layouts) / 2**20:.0f}"
                    summaries[name] = recorder.summary()
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{device_name}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"flightrec {flightrec.__version__}; {options.layers} TransformerEncoderLayer, bf16, hidden {options.hidden}, "
        f"{options.tokens} tokens\n"
    )
    print("| | records | MiB | n | median ms a step | added |")
    print("|---|---|---|---|---|---|")
    off = statistics.median(times["recorder off"])
    for name, samples in times.items():
        on = statistics.median(samples)
        print(f"| {name} | {sizes.get(name, ' | ')} | {len(samples)} | {on:.2f} | {100 * (on / off - 1):.1f}% |")
    for name, text in summaries.items():
        print(f"\n{name}:\n\n    " + "\n    ".join(text.splitlines()[-4:]))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
