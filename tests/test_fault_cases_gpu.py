"""Public fault reports that need a CUDA device: synchronisation, streams and freed memory, more than 2^32 elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flightrec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CONFIG = {
    "budget": "none",
    "select": [{"tensors": "*"}],
    "ring": {"iterations": 2, "memory": "1 GiB"},
    "triggers": [{"kind": "nonfinite"}, {"kind": "manual"}],
    "incident": {"after": 0, "cooldown": 0, "limit": 10},
}


def only(directory):
    (folder,) = directory.iterdir()
    return flightrec.open(folder)


def steps(recorder, count):
    """Further iterations, each of which the host sees the end of, so that verdicts arrive."""
    for _ in range(count):
        torch.cuda.synchronize()
        recorder.step()


def test_f22_healthy_iterations_and_a_flush_beside_training_wait_for_nothing(tmp_path):
    x = torch.randn(1024, 1024, device="cuda")
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:

        def iterate(count):
            for _ in range(count):
                recorder.record("layer", "output", high_precision=x * 2)
                recorder.step()

        iterate(10)  # kernels are compiled, memory is pinned
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            iterate(20)
            assert not list(tmp_path.iterdir())
            recorder.trigger("looks odd")
            iterate(40)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not recorder._capture.off
    with only(tmp_path) as incident:
        assert not incident.blind
        for record in incident.records(layer="layer"):
            assert np.array_equal(record.high_precision, (x * 2).cpu().numpy())


def stream_beside_the_main_one():
    """Streams share hardware queues: not every pair of them can run at the same time."""
    x = torch.zeros(1, device="cuda")
    for _ in range(32):
        side, slow, quick = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            torch.zeros(1, device="cuda")
            slow.record()
        x.add_(1)
        quick.record()
        quick.synchronize()
        if not slow.query():
            torch.cuda.synchronize()
            return side
    pytest.skip("no stream runs beside the main one here")


@pytest.mark.parametrize("recorded", [False, True])
def test_f22_a_race_keeps_its_nan_while_one_looks(recorded, tmp_path):
    """The main stream reads a buffer that a side stream will have filled later: nobody told it to wait."""
    side = stream_beside_the_main_one()
    buffer = torch.zeros(1 << 20, device="cuda")
    seen = [torch.empty_like(buffer) for _ in range(6)]  # now: a new allocation might wait for the device
    torch.mul(buffer, 3, out=seen[0])  # now: loading a kernel takes longer than the side stream sleeps
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        for iteration, y in enumerate(seen):
            torch.cuda.synchronize()  # the iteration before has filled it
            buffer.fill_(math.nan if iteration == 4 else 1.0)  # what was in the memory before
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)  # a tenth of a second
                buffer.fill_(2.0)
            torch.mul(buffer, 3, out=y)
            if recorded:
                recorder.record("reader", "output", high_precision=y)
                recorder.step()
        torch.cuda.synchronize()
    assert [bool(y.isnan().all()) for y in seen] == [False] * 4 + [True, False]
    assert [float(y[0]) for y in seen if not y.isnan().any()] == [3.0] * 5
    if recorded:
        with only(tmp_path) as incident:
            assert (incident.trigger.kind, incident.trigger.iteration) == ("nonfinite", 4)
            (record,) = incident.records(layer="reader", iteration=4)
            assert np.isnan(record.high_precision).all()


def test_f32_a_tensor_changed_and_freed_right_after_the_record_is_kept_as_it_was(tmp_path):
    """Recorded on stream A, changed in place, freed, its memory filled with something else; B copies to the host."""
    stream = torch.cuda.Stream()
    expected = torch.arange(3 << 20, dtype=torch.float32)
    source = expected.cuda()
    torch.cuda.synchronize()
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:
        for iteration in range(8):
            with torch.cuda.stream(stream):
                x = source + iteration
                torch.cuda._sleep(20_000_000)  # the record waits in the queue while the host goes on
                recorder.record("layer", "output", high_precision=x)
                recorder.record("layer", "input", high_precision=x.view(3, -1).t())
                x.add_(1)
                address = x.data_ptr()
                del x
                fillers = [torch.full((3 << 20,), -1.0, device="cuda") for _ in range(3)]
                assert address in {filler.data_ptr() for filler in fillers}  # the memory is really used again
                del fillers
            if iteration == 5:
                recorder.trigger("looks odd")
            recorder.step()
        steps(recorder, 3)
    with only(tmp_path) as incident:
        records = incident.records(layer="layer")
        assert {record.iteration for record in records} == {4, 5}
        for record in records:
            values = (expected + record.iteration).numpy()
            wanted = values if record.key.tensor == "output" else values.reshape(3, -1).T
            assert np.array_equal(record.high_precision, wanted)


def test_f29_one_nan_code_behind_2_to_the_32_others(tmp_path):
    index = 2**32 + 7
    codes = torch.zeros(index + 1, dtype=torch.uint8, device="cuda")
    made = {**CONFIG, "ring": {"iterations": 1, "memory": "24 GiB"}}
    made["incident"] = {**CONFIG["incident"], "staging_memory": "256 MiB"}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(3):
            if iteration == 2:
                codes[-1] = 0x7F
            recorder.record("huge", "activation", quantized=flightrec.Quantized(codes, "float8_e4m3fn"))
            recorder.step()
        steps(recorder, 4)
    with only(tmp_path) as incident:
        assert (incident.trigger.kind, incident.trigger.iteration, incident.trigger.value) == ("nonfinite", 2, 1.0)
        (record,) = incident.records(layer="huge", iteration=2)
        assert record.shape == (index + 1,)
        assert record.statistics["quantized_nan_count"] == 1
        assert not record.why_absent  # all of it is in the file, through a sixteenth of its size of staging memory
        assert np.flatnonzero(record.raw("data")).tolist() == [index]


def test_f29_the_amax_of_the_last_of_2_to_the_31_halves(tmp_path):
    halves = torch.zeros(2**31 + 8, dtype=torch.float16, device="cuda")
    halves[-1] = 60000
    made = {**CONFIG, "select": [{"tensors": "*", "keep": "statistics"}]}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for _ in range(3):
            recorder.record("huge", "activation", high_precision=halves)
            recorder.step()
        recorder.trigger("look")
        recorder.record("huge", "activation", high_precision=halves)
        steps(recorder, 4)
    with only(tmp_path) as incident:
        statistics = incident.records(layer="huge")[-1].statistics
        assert (statistics["amax"], statistics["numel"], statistics["nan_count"]) == (60000, 2**31 + 8, 0)
        assert statistics["zero_count"] == 2**31 + 7
