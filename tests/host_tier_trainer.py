"""A trainer with a host tier, run as a process of its own so that it, or its device, can die: ``SCENARIO DIRECTORY``.

``dead``: from iteration 230 on everything that asks the device raises, as in a dead CUDA context, and then the loop
does. ``dead_in_step``: the recorder's own ``step`` is the first to see it. ``dead_without``: there is no host tier.
``killed``: a rule fires in iteration 230, and the trainer is killed before a slot was staged.
"""

from __future__ import annotations

import math
import os
import signal
import sys

import torch

import flightrec
from flightrec.flush.flusher import Flusher
from flightrec.flush.verdicts import VerdictQueue
from flightrec.ring.ring import Ring

NUMEL = 5000
LAST = 230
CONFIG = {
    "budget": "none",
    "select": [{"tensors": ["output"]}],
    "ring": {"iterations": 3, "memory": "64 MiB", "host_memory": "6 MiB"},
    "triggers": [{"kind": "nonfinite"}, {"kind": "exception"}],
    "incident": {"after": 1, "older_iterations": 4},
}


def value_of(iteration: int, layer: int) -> float:
    return iteration + layer / 4


def record(recorder: flightrec.Recorder, iteration: int, layers: int = 3) -> None:
    for layer in range(layers):
        x = torch.full((NUMEL,), value_of(iteration, layer))
        if iteration == LAST and layer == 1:
            x[7] = math.nan
        recorder.record(f"layer{layer}", "output", high_precision=x)


def device_dies() -> None:
    def dead(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for owner, name in (
        (Ring, "read_slot"),
        (Ring, "gather"),
        (Ring, "join"),
        (Ring, "advance"),
        (VerdictQueue, "push"),
        (VerdictQueue, "poll"),
    ):
        setattr(owner, name, dead)


def main(scenario: str, directory: str) -> None:
    if scenario == "killed":
        pump = Flusher.pump
        Flusher.pump = lambda self: os.kill(os.getpid(), signal.SIGKILL) if self.recording_until >= 0 else pump(self)
    config = {**CONFIG, "ring": {"iterations": 3}} if scenario == "dead_without" else CONFIG
    with flightrec.Recorder(config, directory=directory) as recorder:
        for iteration in range(LAST):
            record(recorder, iteration)
            recorder.step()
        record(recorder, LAST, layers=2)
        if scenario.startswith("dead"):
            device_dies()
        if scenario in ("dead_in_step", "killed"):
            recorder.step()
        raise RuntimeError("CUDA error: device-side assert triggered")


if __name__ == "__main__":
    main(*sys.argv[1:])
