"""The memory of past statistics: what the writer reads of what the trainer wrote, also while it writes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from flightrec.records import Key, Phase, Stage
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS
from flightrec.writer import launch
from flightrec.writer.history import (
    BLOCK_SERIES,
    NUM_COLUMNS,
    PLAIN,
    QUANTIZED,
    SPARE_SAMPLES,
    HistoryMemory,
    block_bytes,
)

SERIES = Key("blocks.0.fc \u00fc\n", "activation", "x", phase=Phase.RECOMPUTE, call=2, stage=Stage.FORWARD)
MEMORY_BYTES = 4 << 20


def filled(iterations: int, num_samples: int, kind: int = PLAIN) -> HistoryMemory:
    memory = HistoryMemory.create(MEMORY_BYTES + 2 * block_bytes(kind, iterations), iterations)
    block = memory.open_block(kind)
    assert block == 0
    assert memory.name(block, 0, SERIES)
    for number in range(num_samples):
        memory.add(0, number, [([0], matrix(kind, number))])
    return memory


def matrix(kind: int, value: float) -> np.ndarray:
    return np.full((NUM_COLUMNS[kind], BLOCK_SERIES), value, np.float32)


@pytest.mark.parametrize("num_samples", [0, 1, 7, 8, 23, 24, 25, 100])
def test_the_newest_samples_are_read_oldest_first(num_samples):
    piece = filled(8, num_samples).read()
    assert piece.iterations.tolist() == list(range(num_samples))[-8:]
    assert piece.plain[:, 0, 0].tolist() == piece.iterations.tolist()
    assert piece.plain.shape == (min(num_samples, 8), len(PLAIN_STATISTICS), 1)
    assert piece.quantized.shape == (min(num_samples, 8), len(HISTORY_STATISTICS), 0)


def test_only_what_came_since_is_read_again():
    memory = filled(8, 5)
    first = memory.read()
    assert memory.read(first.last).iterations.tolist() == []
    memory.add(1, 3, [([0], matrix(PLAIN, 9.0))])
    later = memory.read(first.last)
    assert (later.attempts.tolist(), later.iterations.tolist()) == ([1], [3])
    assert memory.read(later.last).last == later.last


def test_a_block_that_is_opened_late_has_no_samples_of_earlier_iterations():
    memory = filled(8, 5)
    block = memory.open_block(QUANTIZED)
    assert memory.name(block, 0, SERIES)
    memory.add(0, 5, [([0], matrix(PLAIN, 5.0)), ([block], matrix(QUANTIZED, 7.0))])
    piece = memory.read()
    assert np.isnan(piece.quantized[:5]).all()
    assert (piece.quantized[5] == 7.0).all()
    assert piece.quantized_series == [SERIES]


def test_names_of_any_text_and_their_end():
    memory = HistoryMemory.create(MEMORY_BYTES, 8)
    block = memory.open_block(PLAIN)
    odd = Key('a\0\ud800\u2028 "\\', "output", "\n")
    assert memory.name(block, 0, odd)
    number = 1
    while memory.name(block, number, Key("x" * 40_000, "output", str(number))):
        number += 1
    assert 1 < number < BLOCK_SERIES
    assert memory.name(block, number, Key("short", "output"))  # a shorter one still fits
    keys = memory.read().plain_series
    assert keys[0] == odd
    assert len(keys) == number + 1


def test_blocks_end_with_the_memory():
    num_rows = 8 + SPARE_SAMPLES
    memory = HistoryMemory.create(6 * block_bytes(PLAIN, num_rows) * 32 // 31 + 4096, 8)
    assert [memory.open_block(kind) for kind in (QUANTIZED, PLAIN, PLAIN, PLAIN, QUANTIZED)] == [0, 1, 2, None, None]
    memory.add(0, 0, [([0], matrix(QUANTIZED, 1.0)), ([1, 2], np.hstack([matrix(PLAIN, 2.0), matrix(PLAIN, 3.0)]))])
    for number in range(3):
        assert memory.name(number, 0, Key(str(number), "output"))
    piece = HistoryMemory.attach(memory.fd).read()
    assert piece.quantized[0, :, 0].tolist() == [1.0] * len(HISTORY_STATISTICS)
    assert piece.plain[0, 0].tolist() == [2.0, 3.0]
    assert HistoryMemory.create(4096, 1000).open_block(PLAIN) is None


def test_the_default_holds_two_thousand_series_of_each_kind():
    memory = HistoryMemory.create(256 << 20, 1000)
    opened = [memory.open_block(kind) for _ in range(8) for kind in (PLAIN, QUANTIZED)]
    assert None not in opened
    assert 8 * BLOCK_SERIES >= 2000


def test_untouched_pages_take_no_memory():
    memory = filled(1000, 3)
    allocated = os.fstat(memory.fd).st_blocks * 512
    assert allocated < 100_000


def test_a_refill_replaces_everything():
    memory = filled(8, 30)
    late = memory.open_block(QUANTIZED)
    assert memory.name(late, 0, SERIES)
    values = np.stack([matrix(PLAIN, value) for value in (4.0, 5.0)])
    memory.refill(np.array([0, 1]), np.array([7, 2]), {0: values})
    piece = memory.read()
    assert list(zip(piece.attempts.tolist(), piece.iterations.tolist(), strict=True)) == [(0, 7), (1, 2)]
    assert piece.plain[:, 3, 0].tolist() == [4.0, 5.0]
    assert np.isnan(piece.quantized).all()
    memory.add(1, 3, [([0], matrix(PLAIN, 6.0)), ([late], matrix(QUANTIZED, 6.0))])
    assert memory.read().plain[:, 0, 0].tolist() == [4.0, 5.0, 6.0]


def test_a_sample_is_whole_or_not_there_while_the_trainer_goes_on():
    """Every value of a sample is its number: a torn one would show two."""
    memory = filled(8, 8, QUANTIZED)
    reader = HistoryMemory.attach(memory.fd)
    stop = threading.Event()

    def write() -> None:
        number = 8
        while not stop.is_set():
            memory.add(0, number, [([0], matrix(QUANTIZED, number % 2**20))])
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        total = 0
        for _ in range(300):
            piece = reader.read()
            total += len(piece.iterations)
            assert (np.diff(piece.iterations) > 0).all()
            expected = (piece.iterations % 2**20).astype(np.float32)
            assert (piece.quantized == expected[:, None, None]).all()
    finally:
        stop.set()
        thread.join()
    assert total > 0


def test_a_sample_that_was_never_finished_is_not_read():
    """What a trainer leaves that is killed while it writes: the row's stamp is void."""
    memory = filled(8, 8)
    body = """
        import os, signal, sys
        import numpy as np
        from flightrec.writer.history import HistoryMemory
        memory = HistoryMemory.attach(int(sys.argv[1]))
        memory.read()
        class Killer:
            def __getitem__(self, index):
                os.kill(os.getpid(), signal.SIGKILL)
        memory.add(0, 8, [([0], Killer())])
    """
    command = [sys.executable, "-c", textwrap.dedent(body), str(memory.fd)]
    done = subprocess.run(command, pass_fds=[memory.fd], env=launch.environment(), check=False)
    assert done.returncode < 0
    assert memory.num_samples == 9
    assert memory.read().iterations.tolist() == list(range(8))


def test_another_memory_is_refused():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="needs magic"):
        HistoryMemory.attach(fd)
    os.close(fd)


def test_closing_twice_is_harmless():
    memory = filled(8, 1)
    memory.close()
    memory.close()
    assert memory.read().iterations.tolist() == [0]
