"""What all tests share: one thread, no torch in the offline environments, a small incident."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

faulthandler.enable()
os.environ.setdefault("OMP_NUM_THREADS", "1")

OFFLINE = (
    "analysis",
    "cli",
    "codecs",
    "commands",
    "config",
    "errors",
    "golden",
    "offline",
    "plain",
    "records",
    "reports",
    "storage",
    "writer",
)
"""First words of the test files that need no torch: all that the offline environments run."""

HAS_TORCH = importlib.util.find_spec("torch") is not None

if os.environ.get("FLIGHTREC_TEST_OFFLINE") == "1":
    assert not HAS_TORCH, "torch is installed in an environment that shall show that none is needed"
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem.split("_")[1] not in OFFLINE
    ]

if HAS_TORCH:
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its own functions are kernels, too
    if torch.cuda.is_available():
        with warnings.catch_warnings():  # torch says once that the mode is a prototype, in the first test that uses it
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
            torch.cuda.set_sync_debug_mode("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    if HAS_TORCH and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _synchronising_is_allowed_again() -> Iterator[None]:
    """A test that failed under the ban on synchronisation does not take the others along."""
    yield
    if HAS_TORCH and torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def incident_folder(tmp_path: Path) -> Path:
    """An incident of one rank: a NaN that began in ``blocks.0.fc2`` in iteration 212."""
    from incident_support import write_incident

    return write_incident(tmp_path / "incidents")
