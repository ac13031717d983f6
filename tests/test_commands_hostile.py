"""The commands that read, on hostile files: a clear error or a safe reading; never a hang, a traceback, or a leak."""

from __future__ import annotations

import os
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from cli_support import flightrec_process
from hostile_support import CANARY, UNSAFE_OUTPUT, Tally, bases, figures, fuzz, told
from incident_support import write_incident

from flightrec.commands.reading import Limits, read_in_child
from flightrec.errors import IncidentError
from flightrec.reports.text import MAX_CHARACTERS, clean

ODD = "\x1b]0;owned\x07[bold red]x[/] \u202e\nflightrec: all is well"


def test_odd_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = write_incident(tmp_path, layer=ODD, message=ODD)
    done = flightrec_process("inspect", folder)
    assert done.returncode == 0, done.stderr
    assert UNSAFE_OUTPUT.search(done.stdout) is None
    assert "[bold red]x[/]" in done.stdout
    assert "\nflightrec: all is well" not in done.stdout


def test_messages_of_refusals_are_clean_too(tmp_path: Path) -> None:
    folder = write_incident(tmp_path)
    with h5py.File(next(folder.glob("*.facts.h5")), "r+") as file:
        file.attrs["kind"] = ODD
    done = flightrec_process("inspect", folder)
    assert done.returncode == 3
    assert UNSAFE_OUTPUT.search(done.stderr) is None
    assert len(done.stderr.splitlines()) == 1
    assert "all is well" in done.stderr  # shown, in the line that it belongs to


def test_long_texts_are_cut() -> None:
    assert len(clean("x" * 10_000_000)) == MAX_CHARACTERS


def tell_much(path: Path) -> str:
    return "x" * (300 << 20)


def test_a_result_without_end_does_not_reach_the_command(tmp_path: Path) -> None:
    with pytest.raises(IncidentError, match="300 MiB, more than anybody reads"):
        read_in_child(f"{__name__}:tell_much", tmp_path)


def read_bomb(path: Path) -> int:
    with h5py.File(path, "r") as file:
        return int(file["bomb"][()].sum())


def test_a_bomb_in_a_chunk_meets_the_memory_limit(tmp_path: Path) -> None:
    import zlib

    packer = zlib.compressobj(1)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(512)) + packer.flush()
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("bomb", shape=(1 << 20,), dtype="u1", chunks=(1 << 20,), compression="gzip")
        data.id.write_direct_chunk((0,), bomb)
    with pytest.raises(IncidentError):
        read_in_child(f"{__name__}:read_bomb", path, limits=Limits(memory_bytes=700 << 20, cpu_s=20))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_unreadable_file(tmp_path: Path) -> None:
    folder = write_incident(tmp_path)
    next(folder.glob("*.facts.h5")).chmod(0)
    done = flightrec_process("inspect", folder)
    assert done.returncode == 3
    assert "ermission" in done.stderr


def test_pack_leaves_nothing_when_its_child_dies(tmp_path: Path) -> None:
    folder = write_incident(tmp_path / "in")
    with h5py.File(next(folder.glob("*.tensors.h5")), "r+") as file:
        file["more"] = np.zeros(4)
        file["more"].attrs["record"] = np.arange(3)
        file["more"].attrs["format"] = "float64"
    done = flightrec_process("pack", folder, "--output", tmp_path / "out" / "packed")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_fuzzing_for_some_seconds(tmp_path: Path) -> None:
    """A share of ``tests/benchmarks/fuzz.py``, the same mutations each time as far as the time goes."""
    whole = list(bases(tmp_path / "bases"))
    end = time.monotonic() + 2.0

    def enough(so_far: Tally) -> bool:  # however busy the machine is, some were made
        return so_far.mutations >= 25 or (so_far.mutations >= 2 and time.monotonic() > end)

    tally = fuzz(whole, tmp_path / "work", 7, enough)
    assert not tally.bad, f"{figures(tally)}\n{told(tally)}\n{CANARY} is what must not be told"
