"""Builds source distribution and wheel, installs the wheel outside the checkout, and uses it there without torch.

First without any extra, then with those of the half that reads incidents.

Usage: python wheel_smoke.py (needs ``build``; works in a temporary folder and removes it).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

INSIDE = """
import pathlib, sys
import flightrec
from flightrec.config.load import load, packaged

place = pathlib.Path(flightrec.__file__).resolve()
assert sys.prefix in str(place), place
for name in ("default", "long-pretrain", "nan-hunt", "te-fp8-pretrain"):
    assert sys.prefix in str(packaged(name)), packaged(name)
    load(packaged(name))
assert (place.parent / "py.typed").is_file()
inspect_file = packaged("inspect-transformer-engine")
feature_directory = pathlib.Path(flightrec.feature_directory(inspect_file))
assert sys.prefix in str(feature_directory), feature_directory
assert [path.name for path in feature_directory.glob("*.py")] == ["flight_recorder.py"]
flightrec.check_inspect(inspect_file)
incident = flightrec.open(sys.argv[1])
assert incident.blame()
assert any(record.quantized is not None for record in incident.records())
assert incident.verdict().story
try:
    flightrec.Recorder
except flightrec.MissingExtraError as error:
    assert "torch-flightrec[train]" in str(error)
else:
    raise AssertionError("torch is not installed, but Recorder was found")
"""


def run(*command: object, folder: Path, code: int = 0) -> str:
    """Run a command; its output, or an error when its exit code is another than expected."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOX"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        raise SystemExit(f"{command}: exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check_wheel(wheel: Path) -> None:
    """Look into the wheel: what must be there, and nothing of the tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("flightrec/py.typed", "flightrec/configs/default.yaml", "flightrec/configs/flightrec.schema.json"):
        assert name in names, f"{name} is missing in {wheel.name}"
    for name in ("page.html", "page.css", "page.js"):  # the template of `flightrec report`
        assert f"flightrec/reports/page/{name}" in names, f"{name} is missing in {wheel.name}"
    assert any(name.endswith("licenses/LICENSE") for name in names), "the license is missing"
    assert not [name for name in names if name.startswith("tests")], "the tests are in the wheel"


def main() -> None:
    """Build, install, use."""
    with tempfile.TemporaryDirectory(prefix="flightrec-wheel-") as name:
        folder = Path(name)
        # Without --wheel the wheel is built from the source distribution: both are shown to be complete.
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, folder=folder)
        (wheel,) = (folder / "dist").glob("*.whl")
        check_wheel(wheel)
        run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
        programs = folder / "venv" / "bin"
        run(programs / "python", "-m", "pip", "install", "--quiet", wheel, folder=folder)

        incident = folder / "incident"
        incident.mkdir()
        for path in (ROOT / "tests" / "golden").glob("incident-1.4.*"):
            shutil.copy(path, incident)
        run(programs / "python", "-W", "error", "-c", INSIDE, incident, folder=folder)
        flightrec = programs / "flightrec"
        assert "inspect" in run(flightrec, "--help", folder=folder)
        told = run(flightrec, "inspect", incident, folder=folder)
        assert "Verdict" in told
        assert "Where it began" in told
        assert '"blame"' in run(flightrec, "inspect", "--json", incident, folder=folder)
        assert "Elements of" in run(flightrec, "inspect", incident, "--worst", 1, "--values", folder=folder)
        assert "Codes differ" in run(flightrec, "verify", incident, folder=folder, code=1)
        assert "0 differ" in run(flightrec, "diff", incident, incident, folder=folder)
        record = ("--layer", "blocks.1.fc1", "--tensor", "activation", "--output")
        run(flightrec, "export", incident, *record, "exported", folder=folder)
        # The script and Transformer Engine's classes come from the package: they are files of the wheel, too.
        files = {path.name for path in (folder / "exported").iterdir()}
        assert files == {"record.json", "reproduce.py", "te_layout.py", "te_tensors.py", "tensors.npz"}, files
        (folder / "good.yaml").write_text("ring: {iterations: 2}\n")
        (folder / "bad.yaml").write_text("rings: {iterations: 2}\n")
        run(flightrec, "check", "good.yaml", folder=folder)
        run(flightrec, "check", "bad.yaml", folder=folder, code=1)
        run(flightrec, "check", folder=folder, code=2)
        run(flightrec, "inspect", "good.yaml", folder=folder, code=3)
        # No plotly, no safetensors and no torch here: each names its extra.
        as_safetensors = (flightrec, "export", incident, *record, "tensors", "--format", "safetensors")
        run(flightrec, "report", incident, folder=folder, code=2)
        run(*as_safetensors, folder=folder, code=2)
        run(flightrec, "demo", folder=folder, code=2)

        extras = f"{wheel}[export,pack,report]"
        run(programs / "python", "-m", "pip", "install", "--quiet", extras, folder=folder)
        run(flightrec, "report", incident, "--output", "report.html", folder=folder)
        assert "<title>" in (folder / "report.html").read_text(encoding="utf-8")
        run(*as_safetensors, folder=folder)
        run(flightrec, "pack", incident, "--output", "packed", "--filter", "zstd", folder=folder)
    print(f"{wheel.name} works outside the checkout")


if __name__ == "__main__":
    main()
