"""The half that reads incidents needs no torch: shown here in every environment, also where torch is installed."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchao", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""

OFFLINE_PACKAGES = ["analysis", "codecs", "commands", "config", "reports", "storage", "writer"]


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH + program], capture_output=True, text=True, check=False)


def test_every_module_of_the_offline_packages_imports_without_torch() -> None:
    done = run(
        f"""
import importlib, pkgutil
for package in {OFFLINE_PACKAGES!r}:
    parent = importlib.import_module("flightrec." + package)
    names = [module.name for module in pkgutil.iter_modules(parent.__path__, parent.__name__ + ".")]
    assert names, package
    for name in names:
        importlib.import_module(name)
"""
    )
    assert done.returncode == 0, done.stderr


def test_root_imports_and_opens_without_torch() -> None:
    done = run("import flightrec; flightrec.open; flightrec.Config; flightrec.Incident; print(flightrec.__version__)")
    assert done.returncode == 0, done.stderr


def test_recorder_names_the_missing_extra() -> None:
    done = run(
        """
import flightrec
try:
    flightrec.Recorder
except flightrec.MissingExtraError as error:
    print(error)
"""
    )
    assert "torch-flightrec[train]" in done.stdout, done.stdout + done.stderr


def test_demo_names_the_missing_extra() -> None:
    done = run("import sys; sys.argv[1:] = ['demo']; from flightrec.cli import main; main()")
    assert done.returncode == 2
    assert "torch-flightrec[torchao]" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_neither_torch_nor_hdf5() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import flightrec.cli, sys; print([m for m in ('torch', 'h5py') if m in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
