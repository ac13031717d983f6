"""The child process that reads incidents: results, refusals, crashes and limits."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import pytest

from flightrec.commands.reading import Limits, read_in_child
from flightrec.errors import IncidentError

# -- tasks that the child imports from this very file ---------------------------------------------------------------


def give_name(path: Path) -> dict[str, object]:
    return {"name": path.name, "pid": os.getpid(), "modules": sorted(sys.modules)}


def refuse(path: Path) -> None:
    raise IncidentError(f"{path}: is not one of ours")


def stumble(path: Path) -> None:
    raise KeyError("records")


def crash(path: Path) -> None:
    ctypes.string_at(1)


def spin(path: Path) -> None:
    while True:
        pass


def sleep(path: Path) -> None:
    time.sleep(60)


def hoard(path: Path) -> None:
    bytearray(16 << 30)


def leave(path: Path) -> None:
    os._exit(9)


def call(task: str, path: Path, **limits: float) -> object:
    return read_in_child(f"{__name__}:{task}", path, limits=Limits(**limits))  # type: ignore[arg-type]


def message(task: str, path: Path, **limits: float) -> str:
    with pytest.raises(IncidentError) as caught:
        call(task, path, **limits)
    return str(caught.value)


# -- tests ------------------------------------------------------------------------------------------------------------


def test_result_comes_from_another_process(tmp_path: Path) -> None:
    result = call("give_name", tmp_path / "x.h5")
    assert isinstance(result, dict)
    assert result["name"] == "x.h5"
    assert result["pid"] != os.getpid()


def test_child_does_not_import_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    assert isinstance(call("give_name", tmp_path), dict)


def test_refusal_keeps_its_message(tmp_path: Path) -> None:
    assert message("refuse", tmp_path / "x.h5") == f"{tmp_path}/x.h5: is not one of ours"


def test_unexpected_error_is_one_sentence(tmp_path: Path) -> None:
    told = message("stumble", tmp_path / "x.h5")
    assert "KeyError: 'records'" in told
    assert "Traceback" not in told
    assert "x.h5" in told


def test_crash_is_told_as_a_crash(tmp_path: Path) -> None:
    told = message("crash", tmp_path / "x.h5")
    assert "SIGSEGV" in told
    assert "libhdf5" in told
    assert "x.h5" in told


def test_cpu_limit(tmp_path: Path) -> None:
    assert "1 s of CPU time" in message("spin", tmp_path, cpu_s=1)


def test_wall_limit(tmp_path: Path) -> None:
    assert "did not end within 2 s" in message("sleep", tmp_path, wall_s=2.0)


def test_memory_limit(tmp_path: Path) -> None:
    told = message("hoard", tmp_path, memory_bytes=2 << 30)
    assert "2048 MiB" in told


def test_odd_exit_code(tmp_path: Path) -> None:
    assert "code 9" in message("leave", tmp_path)
