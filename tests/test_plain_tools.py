"""Incidents in tools that know nothing of flightrec: h5dump, xarray, silx, and the rules of H5Web."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import write_golden

from flightrec.storage import schema
from flightrec.storage.pack import pack_folder

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
FACTS = f"incident-{schema.FORMAT_VERSION}.facts.h5"


KEPT = sorted(path.name for path in GOLDEN.glob("*.facts.h5"))


@pytest.fixture(scope="module", params=["written now", "packed", *KEPT])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts file of an incident: a new one, its packed copy, and those of every version that was released."""
    if request.param in KEPT:
        return GOLDEN / request.param
    folder = write_golden(tmp_path_factory.mktemp("made"))
    if request.param == "packed":
        target = tmp_path_factory.mktemp("packed") / "small"
        pack_folder(folder, str(target), "gzip", 4)
        return target / FACTS
    return folder / FACTS


def is_new(path: Path) -> bool:
    with h5py.File(path) as file:
        return file.attrs["format_version"] >= "1.4"


def default_plot(file: h5py.File) -> h5py.Group:
    """What H5Web opens first: ``default``, followed as a path relative to its group, until an NXdata."""
    group, steps = file, 0
    while group.attrs["NX_class"] != "NXdata":
        group, steps = group[group.attrs["default"]], steps + 1
        assert steps < 5
    return group


def complaints(group: h5py.Group) -> list[str]:
    """What H5Web's viewer of NXdata would refuse: it wants children, not paths, arrays, and numbers."""
    found = []
    signal = group[group.attrs["signal"]]
    if signal.ndim == 0 or signal.dtype.kind not in "iuf":
        found.append(f"signal {signal}")
    axes = [str(axis) for axis in np.atleast_1d(group.attrs["axes"])]
    if len(axes) != signal.ndim:
        found.append(f"axes {axes}")
    for length, name in zip(signal.shape, axes, strict=False):
        if name != "." and ("/" in name or group[name].dtype.kind not in "iuf" or group[name].shape != (length,)):
            found.append(f"axis {name}")
    return found


def test_h5web_shows_the_loss_first_and_takes_every_history(facts: Path) -> None:
    with h5py.File(facts) as file:
        assert default_plot(file).name == "/history/loss"
        assert [(name, told) for name in file["history"] for told in complaints(file["history"][name])] == []


def test_the_rules_can_be_broken(tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN / FACTS, tmp_path / FACTS)
    with h5py.File(tmp_path / FACTS, "r+") as file:
        for name, axes in (("amax", ["iterations", "labels"]), ("rms", ["series", "iterations"]), ("mean", ["series"])):
            file["history"][name].attrs["axes"] = axes
            assert complaints(file["history"][name])


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_tells_names_tables_and_numbers(facts: Path) -> None:
    def h5dump(*options: str) -> str:
        return subprocess.run(["h5dump", *options, facts], capture_output=True, text=True, check=True).stdout

    names = h5dump("-n")
    for path in ("/records", "/history/loss/values", "/trigger"):
        assert path in names
    assert '"train' in h5dump("-d", "/records")
    if is_new(facts):
        assert "blocks.1.fc1 activation forward" in h5dump("-d", "/history/amax/labels")
        dumped = h5dump("-A", "-d", "/history/amax/values")
        assert re.search(r"DIMENSION_LIST.*/history/\w+/iterations.*/history/\w+/series", dumped, re.DOTALL)


@pytest.mark.parametrize("engine", ["h5netcdf", "netcdf4"])
def test_xarray(facts: Path, engine: str) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip({"h5netcdf": "h5netcdf", "netcdf4": "netCDF4"}[engine])
    if not is_new(facts):
        return  # they refuse a file in which one axis has a scale and another has none, as it was before 1.4
    options = {"phony_dims": "sort"} if engine == "h5netcdf" else {}
    with xarray.open_dataset(facts, group="history/loss", engine=engine, **options) as loss:
        assert loss["values"].values.tolist()[:3] == [0.9, 0.8, 0.7]
        assert loss["values"].dims == ("iterations",)
    with xarray.open_dataset(facts, group="history/amax", engine=engine, **options) as amax:
        assert amax["values"].dims == ("iterations", "series")
        assert amax["values"].attrs["long_name"] == "amax"
        assert amax["attempts"].dims == ("iterations",)
        found = amax["values"].sel(iterations=11).where(amax.labels == "plain.0 output forward", drop=True)
        assert found.values.tolist() == [204.0]


def test_xarray_reads_all_histories_as_a_tree() -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    with xarray.open_datatree(GOLDEN / FACTS, group="/history", engine="h5netcdf", phony_dims="sort") as tree:
        assert {"amax", "loss", "rms"} <= set(tree.children)
        assert tree["rms/values"].shape == (4, 2)


def test_the_page_shows_xarray() -> None:
    pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    page = (ROOT / "docs" / "format.md").read_text()
    (block,) = re.findall(r"<!-- xarray -->\n```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], cwd=GOLDEN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^12 +304", done.stdout, re.MULTILINE), done.stdout


def test_silx_plots_the_loss_and_takes_every_history(facts: Path) -> None:
    nxdata = pytest.importorskip("silx.io.nxdata")
    with h5py.File(facts) as file:
        for group in (file, file["history"]):
            assert nxdata.get_default(group).group.name == "/history/loss"
        for name, group in file["history"].items():
            read = nxdata.NXdata(group)
            assert (read.is_valid, read.issues) == (True, []), name
            if is_new(facts):
                assert read.signal_name == name
                assert read.axes_names == ["iterations", "series"][: read.signal.ndim]
        if is_new(facts):
            assert nxdata.NXdata(file["history/amax"]).plot_style.signal_scale_type == "log"


H5WASM = """
import h5wasm from "h5wasm/node";
await h5wasm.ready;
const file = new h5wasm.File(process.argv[2], "r");
let group = file;
while (group.attrs["NX_class"].value != "NXdata") group = group.get(group.attrs["default"].value);
const amax = file.get("history/amax");
console.log(JSON.stringify([
  group.path, Array.from(group.get(group.attrs["signal"].value).value).slice(0, 3),
  amax.attrs["axes"].value, amax.get("labels").value, amax.get("values").shape, file.get("records").shape,
]));
"""


@pytest.mark.skipif("FLIGHTREC_H5WASM" not in os.environ, reason="FLIGHTREC_H5WASM: a folder with node_modules/h5wasm")
def test_h5wasm_reads_what_h5web_shows(tmp_path: Path) -> None:
    folder = Path(os.environ["FLIGHTREC_H5WASM"])
    script = tmp_path / "read.mjs"
    script.write_text(H5WASM)
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    done = subprocess.run(["node", script, GOLDEN / FACTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, loss, axes, labels, shape, records = json.loads(done.stdout)
    assert (path, loss, axes) == ("/history/loss", [0.9, 0.8, 0.7], ["iterations", "series"])
    assert (labels[0], shape, records) == ("blocks.1.fc1 activation forward", [4, 2], [8])
