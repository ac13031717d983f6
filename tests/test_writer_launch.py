from __future__ import annotations

import subprocess
import sys

from flightrec.writer import launch

PROGRAM = "import sys, json, flightrec.records; print(json.dumps([flightrec.records.__file__, sys.path]))"


def test_a_program_finds_the_same_package_from_any_folder(tmp_path, monkeypatch):
    """Also where the folder holds modules of the same names."""
    (tmp_path / "flightrec").mkdir()
    (tmp_path / "flightrec" / "records.py").write_text("raise ImportError")
    (tmp_path / "json.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "extra").mkdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "extra")])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=launch.environment(), cwd="/", capture_output=True, text=True, check=True)
    import json

    from flightrec import records

    file, path = json.loads(done.stdout)
    assert file == records.__file__
    assert str(tmp_path / "extra") in path
    assert str(tmp_path) not in path


def test_one_thread_a_library_and_nothing_else_changed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.setenv("SOMETHING", "kept")
    environment = launch.environment()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["SOMETHING"] == "kept"


def test_command_runs_a_module():
    done = subprocess.run(launch.command("json.tool", "--help"), capture_output=True, text=True, check=False)
    assert done.returncode == 0
