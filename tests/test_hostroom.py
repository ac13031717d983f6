"""What the machine cannot give is refused before training, with what to do."""

from __future__ import annotations

import pytest

import flightrec
from flightrec.errors import WriterError
from flightrec.hostroom import check_room, host_memory, machine_memory

GIB = 1 << 30


def test_more_than_is_free_is_refused():
    check_room(64 * GIB, 1, 64 * GIB, 100 * GIB)
    with pytest.raises(WriterError) as caught:
        check_room(64 * GIB, 1, 63 * GIB, 100 * GIB)
    message = str(caught.value)
    for part in ("ring.host_memory", "63.0 GiB", "got 64.0 GiB", "lower ring.host_memory"):
        assert part in message


def test_the_ranks_of_a_machine_are_counted_together():
    check_room(64 * GIB, 8, 600 * GIB, 512 * GIB)
    with pytest.raises(WriterError) as caught:
        check_room(64 * GIB, 8, 600 * GIB, 500 * GIB)
    for part in ("8 ranks", "512.0 GiB together", "at most 500.0 GiB", "lower ring.host_memory to 62.5 GiB or less"):
        assert part in str(caught.value)


def test_this_machine_has_some_memory_and_not_all_of_it_is_free():
    free, limit = machine_memory()
    assert 0 < free <= limit < 1 << 50


def test_none_is_none():
    assert host_memory(None) is None


def test_the_recorder_refuses_before_anything_is_started(tmp_path):
    with pytest.raises(WriterError, match=r"ring.host_memory: expected at most the .* got 1024.0 TiB"):
        flightrec.Recorder({"ring": {"host_memory": "1 PiB"}}, directory=tmp_path)


def test_older_iterations_without_memory_for_them_are_told_to_be_ignored(tmp_path, caplog):
    flightrec.Recorder({"incident": {"older_iterations": 3, "writer": "thread"}}, directory=tmp_path).close()
    assert "incident.older_iterations: 3 is ignored" in caplog.text
    assert "set ring.host_memory" in caplog.text
