from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from flightrec.writer import surroundings
from flightrec.writer.surroundings import GPU_FIELDS, Surroundings, git_facts, gpu_facts, parse_gpu

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("1")
    git(folder, "add", "train.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@needs_git
def test_commit_and_dirty_flag(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert git_facts(str(repository)) == {"commit": commit, "dirty": False, "repository": str(repository.resolve())}
    (repository / "untracked").write_text("")
    assert git_facts(str(repository))["dirty"] is False
    (repository / "train.py").write_text("2")
    assert git_facts(str(repository))["dirty"] is True


@needs_git
def test_nothing_of_the_repository_is_run_or_locked(repository: Path) -> None:
    ran = repository / "ran"
    monitor = repository / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {ran}\n")
    monitor.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(monitor))
    os.utime(repository / "train.py", (1, 1))  # git would like to refresh its index
    before = (repository / ".git" / "index").read_bytes()
    assert git_facts(str(repository))["dirty"] is False
    assert not ran.exists()
    assert (repository / ".git" / "index").read_bytes() == before


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert git_facts(str(tmp_path)) == {}
    assert git_facts(str(tmp_path / "gone")) == {}
    assert git_facts("a\0b") == {}


def test_a_program_that_is_missing_fails_or_hangs_tells_nothing(tmp_path: Path) -> None:
    assert surroundings._run(["no-such-program-anywhere"], 5) is None
    assert surroundings._run(["false"], 5) is None
    assert surroundings._run(["sleep", "60"], 0.05) is None
    assert surroundings._run(["echo", "x"], 5) == "x\n"


@needs_git
def test_the_main_scripts_folder_goes_before_the_working_directory(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    for environment in (
        {"main": str(repository / "train.py"), "working_directory": str(tmp_path)},
        {"main": str(tmp_path / "script.py"), "working_directory": str(repository)},
    ):
        found = Surroundings()
        found.ask(environment)
        found.ask(environment)
        facts = found.facts(environment)
        assert (facts["commit"], facts["dirty"], facts["main"]) == (commit, False, environment["main"])
    given = {"commit": "abc", "main": str(repository / "train.py")}
    found = Surroundings()
    found.ask(given)
    assert found.facts(given) == given
    nothing = Surroundings()
    nothing.ask({})
    assert nothing.facts({"argv": []}) == {"argv": []}


LINE = "1650123456789, GPU-1234, 550.54.15, Enabled, 0, 2, [N/A], 7, 41\n"


def test_a_gpus_line_is_read() -> None:
    assert parse_gpu(LINE) == {
        "serial": "1650123456789",
        "uuid": "GPU-1234",
        "driver_version": "550.54.15",
        "ecc_mode": "Enabled",
        "ecc_corrected_volatile": 0,
        "ecc_uncorrected_volatile": 2,
        "ecc_uncorrected_aggregate": 7,
        "temperature_celsius": 41,
    }
    assert parse_gpu("") == parse_gpu("No devices were found\n") == {}


def test_the_gpu_is_asked_by_its_uuid_and_again_with_each_incident(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\necho "{LINE.strip()}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    environment = {"gpu": {"name": "H200", "uuid": "1234"}, "commit": "abc"}
    found = Surroundings()
    found.ask(environment)
    found.facts(environment)
    found.ask(environment)
    gpu = found.facts(environment)["gpu"]
    assert (gpu["name"], gpu["ecc_uncorrected_volatile"]) == ("H200", 2)
    assert (tmp_path / "asked").read_text().split() == ["--id=GPU-1234"] * 2
    assert set(gpu) - {"name"} <= set(GPU_FIELDS)


@pytest.mark.gpu
def test_a_real_gpu_tells_its_driver() -> None:
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert "." in gpu_facts(uuid)["driver_version"]


def test_where_no_thread_can_be_started_the_facts_are_left_out(monkeypatch) -> None:
    def ending(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", ending)
    surroundings = Surroundings()
    environment = {"working_directory": "/", "gpu": {"uuid": "1"}}
    surroundings.ask(environment)
    assert surroundings.facts(environment) == environment
