"""What only other programs know of a run: the commit of its source, the state of its GPU.

Asked in the writer, on a thread of its own, so that neither the trainer nor the incident waits long: ``git`` once, the
GPU when the run begins and again with each incident, since its error counts change. Whatever fails is left out.
"""

from __future__ import annotations

import csv
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

GIT_TIMEOUT_S = 10.0
GPU_TIMEOUT_S = 20.0
WAIT_S = 5.0
"""How long an incident waits for answers that are on their way."""

GPU_FIELDS = {
    "serial": "serial",
    "uuid": "uuid",
    "driver_version": "driver_version",
    "ecc_mode": "ecc.mode.current",
    "ecc_corrected_volatile": "ecc.errors.corrected.volatile.total",
    "ecc_uncorrected_volatile": "ecc.errors.uncorrected.volatile.total",
    "ecc_corrected_aggregate": "ecc.errors.corrected.aggregate.total",
    "ecc_uncorrected_aggregate": "ecc.errors.uncorrected.aggregate.total",
    "temperature_celsius": "temperature.gpu",
}
"""Facts of a GPU, and what ``nvidia-smi --query-gpu`` calls them."""


class Surroundings:
    """Answers for the incidents of one run."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._threads: list[threading.Thread] = []

    def ask(self, environment: Mapping[str, Any]) -> None:
        """Begin to find out what ``environment`` does not say; returns at once."""
        if "git" not in self._asked and "commit" not in environment:
            self._asked.add("git")
            folders = [os.path.dirname(str(environment.get("main", ""))), str(environment.get("working_directory", ""))]
            self._start(lambda: next(filter(None, (git_facts(folder) for folder in folders if folder)), {}))
        uuid = (environment.get("gpu") or {}).get("uuid")
        if uuid:
            self._start(lambda: {"gpu": gpu_facts(str(uuid))})

    def facts(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """``environment`` with what was found until now; waits a few seconds for what was asked."""
        for thread in self._threads:
            thread.join(WAIT_S)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        found = {key: value for key, value in self._facts.items() if key != "gpu"}
        if "gpu" in environment:
            found["gpu"] = {**environment["gpu"], **self._facts.get("gpu", {})}
        return {**environment, **found}

    def _start(self, find: Callable[[], dict[str, Any]]) -> None:
        def work() -> None:
            self._facts.update(find())

        thread = threading.Thread(target=work, name="flightrec-surroundings", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending: these facts are not worth an incident
            return
        self._threads.append(thread)


def git_facts(folder: str) -> dict[str, Any]:
    """``commit``, ``dirty`` (tracked files differ from it) and ``repository`` of a folder; empty without git."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return {}
    facts: dict[str, Any] = {"commit": commit}
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if status is not None:
        facts["dirty"] = bool(status)
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root:
        facts["repository"] = root
    return facts


def gpu_facts(uuid: str) -> dict[str, Any]:
    """``GPU_FIELDS`` of one GPU, those that it has; empty where nobody can tell.

    Args:
        uuid: with or without the prefix ``GPU-``.
    """
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    query = f"--query-gpu={','.join(GPU_FIELDS.values())}"
    answer = _run(["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"], GPU_TIMEOUT_S)
    return parse_gpu(answer) if answer else {}


def parse_gpu(answer: str) -> dict[str, Any]:
    """Facts of a line of ``nvidia-smi``'s CSV; what it does not support (``[N/A]``) is left out."""
    rows = list(csv.reader(answer.splitlines()[:1], skipinitialspace=True))
    if not rows or len(rows[0]) != len(GPU_FIELDS):
        return {}
    values = {name: value.strip() for name, value in zip(GPU_FIELDS, rows[0], strict=True)}
    return {
        name: int(value) if value.isdigit() and name != "serial" else value
        for name, value in values.items()
        if value and not value.startswith("[")
    }


def _git(folder: str, *arguments: str) -> str | None:
    # No lock on the user's index, and no hook of the repository is run.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder, *arguments]
    answer = _run(command, GIT_TIMEOUT_S)
    return None if answer is None else answer.strip()


def _run(command: list[str], timeout_s: float) -> str | None:
    """What a program prints; None if it fails, is not there, or takes too long."""
    environment = {**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
