"""The history of statistics against plain loops over the records of every iteration."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from history_support import assert_equal, one_record, over_microbatches, samples_of
from models import RECORD_ALL, batches, loss_of, make, train

import flightrec
from flightrec.flush.samples import SampleHistory, derive, worst
from flightrec.records import NUM_STATISTICS, Key, RecordLayout, Representation, Statistic
from flightrec.storage.schema import HISTORY_STATISTICS, STATISTIC_COLUMNS
from flightrec.writer.history import BLOCK_SERIES, PLAIN, QUANTIZED, HistoryMemory, block_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_statistics(generator: np.random.Generator, num_rows: int) -> np.ndarray:
    """Rows with everything that a row may hold: absent columns, zeros, no finite or no non-zero element."""
    rows = generator.uniform(0, 100, (num_rows, NUM_STATISTICS))
    counts = generator.multinomial(1000, generator.dirichlet([0.2] * 5, num_rows))
    rows[:, Statistic.NUMEL] = rows[:, Statistic.QUANTIZED_NUMEL] = 1000
    names = (Statistic.NAN_COUNT, Statistic.POSITIVE_INF_COUNT, Statistic.NEGATIVE_INF_COUNT, Statistic.ZERO_COUNT)
    rows[:, names] = counts[:, :4]
    rows[:, Statistic.SUM] *= generator.choice([-1, 1], num_rows)
    rows[generator.random(num_rows) < 0.1, Statistic.SUM_OF_SQUARES] = 0
    rows[generator.random(rows.shape) < 0.1] = np.nan
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_formulas_and_the_worst_of_microbatches(seed):
    generator = np.random.default_rng(seed)
    counts = np.sort(generator.integers(1, 6, 40))[::-1]
    rows = random_statistics(generator, int(counts.sum()))
    order = [(series, n) for n in range(counts[0]) for series in range(40) if n < counts[series]]
    with np.errstate(all="ignore"):
        got = worst(derive(rows, QUANTIZED), [int((counts > n).sum()) for n in range(counts[0])])
    for series in range(40):
        mine = [rows[at] for at, (owner, _) in enumerate(order) if owner == series]
        wanted = over_microbatches([one_record(dict(zip(STATISTIC_COLUMNS, row, strict=True))) for row in mine])
        np.testing.assert_allclose(got[:, series], [wanted[name] for name in HISTORY_STATISTICS], rtol=1e-12)


def test_a_row_that_was_never_written_is_no_sample_and_an_empty_tensor_is():
    rows = np.zeros((2, NUM_STATISTICS))
    rows[1, Statistic.AMAX] = np.nan
    with np.errstate(all="ignore"):
        values = derive(rows, QUANTIZED)
    assert np.isnan(values[:, 0]).all()
    assert values[HISTORY_STATISTICS.index("numel"), 1] == 0


def layouts_of(names: list[tuple[str, int, int]]) -> list[RecordLayout]:
    """One layout for each (layer, microbatch, quantizer)."""
    return [
        RecordLayout(
            n, Key(layer, "activation", microbatch=m), Representation.STATISTICS, (), "", quantizer, (), -1, 0, n
        )
        for n, (layer, m, quantizer) in enumerate(names)
    ]


def kept(memory: HistoryMemory) -> set[str]:
    piece = memory.read()
    return {key.layer for key in [*piece.plain_series, *piece.quantized_series]}


def test_what_finds_no_room_is_told_once_and_the_rest_goes_on(caplog):
    told: list[str] = []
    memory = HistoryMemory.create((block_bytes(QUANTIZED, 116) + block_bytes(PLAIN, 116)) * 32 // 31 + 8192, 100)
    history = SampleHistory(memory, told.append)
    layouts = layouts_of([(f"layer{n}", 0, 0) for n in range(BLOCK_SERIES + 44)])
    rows = random_statistics(np.random.default_rng(0), len(layouts))
    for iteration in range(120):
        history.add(0, iteration, rows, range(len(layouts)), layouts)
    assert len(told) == 1
    assert "256 series have a history of 100 iterations" in told[0] and "raise history.memory" in told[0]
    assert sum("history.memory is full" in record.message for record in caplog.records) == 1
    piece = memory.read()
    assert kept(memory) == {f"layer{n}" for n in range(BLOCK_SERIES)}
    assert piece.iterations.tolist() == list(range(20, 120))  # never fewer than was promised


def test_a_tensor_that_is_quantized_later_keeps_its_past():
    from flightrec.storage.history import Columns

    memory = HistoryMemory.create(64 << 20, 100)
    history = SampleHistory(memory, pytest.fail)
    layouts = layouts_of([("a", 0, -1), ("a", 0, 0), ("b", 0, -1)])
    rows = random_statistics(np.random.default_rng(3), 3)
    rows[:, Statistic.AMAX] = [1.0, 2.0, 3.0]
    rows[:, Statistic.NUMEL] = 8
    history.add(0, 0, rows, [0, 2], layouts[:1] + layouts[:0] + layouts[1:])
    history.add(0, 1, rows, [2, 1], layouts)
    columns = Columns([memory.read()])
    assert [key.layer for key in columns.series] == ["a", "b"]
    assert columns.values("amax").tolist() == [[1.0, 3.0], [2.0, 3.0]]
    assert columns.num_quantized == 1


def test_an_error_ends_the_history_and_nothing_else(caplog):
    told: list[str] = []
    memory = HistoryMemory.create(64 << 20, 100)
    history = SampleHistory(memory, told.append)
    layouts = layouts_of([("a", 0, -1)])
    history.add(0, 0, np.ones((1, NUM_STATISTICS)), [0], layouts)
    history.add(0, 1, np.ones((1, 3)), [0], layouts)
    history.add(0, 2, np.ones((1, NUM_STATISTICS)), [0], layouts)
    assert len(told) == 1 and "failed and ended" in told[0]
    history.load_state_dict({})
    assert len(told) == 1
    assert memory.read().iterations.tolist() == [0]


# -- whole runs -------------------------------------------------------------------------------------------------------

CONFIG = {
    **RECORD_ALL,
    "select": [{"tensors": "*", "keep": "statistics", "phases": ["train", "recompute", "eval"]}],
    "ring": {"iterations": 12},
    "incident": {"after": 0, "cooldown": 0},
    "triggers": [{"kind": "manual"}],
}


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def records_of(incident):
    for record in incident.records():
        if record.key.tensor not in ("loss", "metric"):
            statistics = {name: math.nan if value is None else value for name, value in record.statistics.items()}
            yield record.key, (record.attempt, record.iteration), statistics


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("device", DEVICES)
def test_three_restarts_and_a_rewind_against_the_records_of_every_iteration(device, writer, tmp_path):
    """Several microbatches, NaNs, tensors that appear late or only now and then; 3 restarts, each a rewind of 2."""
    net = make("torchao" if device == "cpu" else "fp32").to(device)
    made = {**CONFIG, "incident": {**CONFIG["incident"], "writer": writer}}
    state, expected, times = None, {}, []
    for attempt in range(4):
        with flightrec.Recorder(made, directory=tmp_path / str(attempt)) as recorder:
            recorder.attach(net)
            if state is not None:
                recorder.load_state_dict(state)
            first = recorder.iteration
            for iteration, data in enumerate(batches(8, 3, seed=attempt, device=device), first):
                for index, x in enumerate(data[: 1 + iteration % 3]):
                    if iteration == first + 3:
                        x[index, 0] = math.nan
                    with recorder.microbatch(index):
                        loss = loss_of(net, x)
                        loss.backward()
                if iteration >= 10 and iteration % 2:
                    recorder.record("late", "output", high_precision=torch.full((4,), float(iteration), device=device))
                for parameter in net.parameters():
                    parameter.grad = None
                if iteration == first + 7:
                    recorder.trigger("the end of an attempt")
                recorder.step()
                if iteration == first + 5:
                    state = through_a_file(recorder.state_dict())
        (folder,) = (tmp_path / str(attempt)).iterdir()
        with flightrec.open(folder) as incident:
            expected |= samples_of(records_of(incident))
            # What was recorded after the checkpoint is not in it.
            times = [*times, *((attempt, iteration) for iteration in range(first, first + 8))]
            assert_equal(incident.history, expected, times)
            assert incident.history.attempts_of("loss" if "loss" in incident.history else "amax")[-1] == attempt
            nans = incident.history.series(layer="", tensor="input")["nan_count"]
            assert np.nansum(nans) > 0
        times = [time for time in times if time[0] < attempt or time[1] < first + 6]


def test_a_rewind_in_one_process_shows_both_attempts(tmp_path):
    with flightrec.Recorder(CONFIG, directory=tmp_path) as recorder:

        def run(values):
            for value in values:
                recorder.record("x", "output", high_precision=torch.tensor([value]))
                recorder.step(loss=value)

        run([1.0, 2.0, 3.0])
        state = recorder.state_dict()
        run([4.0, 5.0])
        recorder.iteration = 1
        run([20.0])
        recorder.load_state_dict(state)
        recorder.trigger("now")
        run([40.0])
    (folder,) = tmp_path.iterdir()
    history = flightrec.open(folder).history
    series = history.series(layer="x")
    assert series.attempts.tolist() == [0, 0, 0, 0, 0, 1, 2]
    assert series.iterations.tolist() == [0, 1, 2, 3, 4, 1, 3]
    assert series["amax"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 20.0, 40.0]
    assert history.attempts_of("loss").tolist() == series.attempts.tolist()
    assert history["loss"][1].tolist() == series["amax"].tolist()


def test_a_run_longer_than_the_history(tmp_path):
    made = {**CONFIG, "history": {"iterations": 30, "memory": "8 MiB"}}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        for iteration in range(80):
            recorder.record("x", "output", high_precision=torch.full((3,), float(iteration)))
            if iteration == 75:
                recorder.trigger("now")
            recorder.step()
    (folder,) = tmp_path.iterdir()
    series = flightrec.open(folder).history.series(layer="x")
    first, last = series.iterations[[0, -1]]
    assert len(series.iterations) >= 30
    assert last >= 75
    assert series.iterations.tolist() == list(range(first, last + 1))
    assert series["mean"].tolist() == series.iterations.tolist()


def test_training_is_bit_identical_with_a_full_history(tmp_path):
    data = batches(5, 2)
    plain = train(make("torchao"), data)
    net = make("torchao")
    made = {"select": [{"tensors": "*"}], "history": {"memory": "4 KiB"}}
    with flightrec.Recorder(made, directory=tmp_path) as recorder:
        recorder.attach(net)
        recorded = train(net, data, recorder)
        recorder.trigger("now")
        recorder.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    (folder,) = tmp_path.iterdir()
    incident = flightrec.open(folder)
    assert incident.history.all_series == []
    assert any("history.memory is full" in entry.reason for entry in incident.blind)
