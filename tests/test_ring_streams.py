from __future__ import annotations

import pytest
import torch
from kernels_support import GPU

from flightrec.ring.streams import Streams


def test_a_cpu_has_nothing_to_wait_for():
    streams = Streams(torch.device("cpu"))
    with streams.allocating():
        streams.enter()
    streams.join()
    streams.stepped()


@pytest.mark.gpu
@GPU
def test_memory_initialised_while_allocating_is_ready_for_every_stream():
    device = torch.device("cuda", torch.cuda.current_device())
    streams, side = Streams(device), torch.cuda.Stream()
    for round_number in range(1, 5):
        with streams.allocating():
            torch.cuda._sleep(20_000_000)
            memory = torch.full((1 << 20,), round_number, device=device)
        with torch.cuda.stream(side):
            streams.enter()
            copied = memory.clone()
        streams.join()
        assert int(copied.min()) == round_number
        streams.stepped()


@pytest.mark.gpu
@GPU
def test_the_next_record_waits_for_the_step():
    device = torch.device("cuda", torch.cuda.current_device())
    streams, side = Streams(device), torch.cuda.Stream()
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    slot.fill_(7)
    streams.stepped()
    with torch.cuda.stream(side):
        streams.enter()
        seen = slot.clone()
    side.synchronize()
    assert seen.item() == 7
