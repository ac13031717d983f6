"""What a file claims is looked at before it is followed, allocated or believed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from incident_support import write_incident
from storage_samples import write_golden

from flightrec.analysis.incident import open_incident
from flightrec.errors import FormatError, IncidentError
from flightrec.storage import filters, guard, schema, text

SECRET = "the secret of another folder"


@pytest.fixture
def file(tmp_path: Path):
    with h5py.File(tmp_path / "x.h5", "w") as opened:
        opened["group/numbers"] = np.arange(4)
        yield opened


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside.h5"
    with h5py.File(path, "w") as opened:
        opened["numbers"] = np.arange(4)
        opened["names"] = np.array([SECRET.encode()] * 20, dtype=object)
    return path


def test_finds_what_is_there(file: h5py.File) -> None:
    found = guard.find(file, "/group/numbers")
    assert isinstance(found, h5py.Dataset)
    assert guard.read_array(file, "group/numbers").tolist() == [0, 1, 2, 3]
    assert guard.find(file, "group/nothing") is None
    assert guard.find(file, "group/numbers/deeper") is None
    with pytest.raises(KeyError, match="nothing"):
        guard.need(file, "nothing")
    with pytest.raises(ValueError, match="no link can be called"):
        guard.find(file, "group\0")


def test_links_to_other_places_are_never_followed(file: h5py.File, outside: Path) -> None:
    fifo = outside.with_name("fifo")
    os.mkfifo(fifo)  # opening it would wait for ever
    file["soft"] = h5py.SoftLink("/group")
    file["external"] = h5py.ExternalLink(str(outside), "/numbers")
    file["fifo"] = h5py.ExternalLink(str(fifo), "/numbers")
    file["type"] = np.dtype("i4")
    for path in ("soft/numbers", "external", "fifo"):
        with pytest.raises(ValueError, match="link to another place"):
            guard.find(file, path)
    with pytest.raises(ValueError, match="named datatype"):
        guard.find(file, "type")
    with pytest.raises(ValueError, match="link to another place"):
        list(guard.members(file))


def test_bytes_of_other_files_are_never_read(file: h5py.File, outside: Path) -> None:
    file.create_dataset("raw", shape=(8,), dtype="u1", external=[(str(outside), 0, 8)])
    layout = h5py.VirtualLayout(shape=(4,), dtype="i8")
    layout[:] = h5py.VirtualSource(str(outside), "numbers", shape=(4,))
    file.create_virtual_dataset("virtual", layout)
    for path in ("raw", "virtual"):
        with pytest.raises(ValueError, match="bytes in other files"):
            guard.read_array(file, path)


def test_claims_without_bytes(file: h5py.File) -> None:
    file.create_dataset("late", shape=(1 << 20,), dtype="f8")
    file.create_dataset("huge", shape=(1 << 40,), dtype="f8")
    file.create_dataset("holes", shape=(1 << 20,), dtype="u1", chunks=(1 << 10,), compression="gzip")
    file["holes"][:5000] = 1
    file.create_dataset("wide", shape=(2, 2), dtype="u1", chunks=(1 << 15, 1 << 13), maxshape=(None, None))
    with pytest.raises(ValueError, match="claims 8388608 bytes, the file has 0"):
        guard.read_array(file, "late")
    with pytest.raises(ValueError, match="expected at most"):
        guard.read_array(file, "huge")
    with pytest.raises(ValueError, match="claims 1024 chunks, the file has 5"):
        guard.read_array(file, "holes")
    assert guard.read_array(file, "holes", sparse=True).sum() == 5000
    with pytest.raises(ValueError, match="chunks of 268435456 bytes"):
        guard.read_array(file, "wide")
    with pytest.raises(ValueError, match="no shape"):
        file["empty"] = h5py.Empty("f8")
        guard.read_array(file, "empty")
    with pytest.raises(ValueError, match="expected a dataset"):
        guard.read_array(file, "group")


def test_filters_and_bombs(file: h5py.File) -> None:
    file.create_dataset("lzf", data=np.zeros(1000), compression="lzf")
    with pytest.raises(ValueError, match=r"filters \[32000\]"):
        guard.read_array(file, "lzf")
    bomb = file.create_dataset("bomb", shape=(1024,), dtype="u1", chunks=(1024,), compression="gzip")
    bomb.id.write_direct_chunk((0,), b"\0" * (1 << 20))
    with pytest.raises(ValueError, match="1048576 compressed bytes in 1 chunks of 1024"):
        guard.read_array(file, "bomb")


def test_texts(file: h5py.File, monkeypatch: pytest.MonkeyPatch) -> None:
    string = h5py.string_dtype()
    file.create_dataset("texts", data=np.array([b"fine", b"\xff\xfe", b""], dtype=object), dtype=string)
    assert guard.read_texts(file["texts"]) == ["fine", "\\xff\\xfe", ""]
    with pytest.raises(ValueError, match="expected texts"):
        guard.read_texts(file["group/numbers"])
    monkeypatch.setattr(guard, "MAX_TEXT_BYTES", 5)
    with pytest.raises(ValueError, match="more than 5 bytes"):
        guard.read_texts(file["texts"])


def test_tables(file: h5py.File) -> None:
    columns = np.dtype([("a", "<i4"), ("b", "S8"), ("c", "<f8")])
    file["good"] = np.zeros(3, [("b", "S4"), ("a", "<i4"), ("more", "<i8")])
    assert len(guard.read_table(file, "good", columns, frozenset("c"))) == 3
    with pytest.raises(ValueError, match="column c is missing"):
        guard.read_table(file, "good", columns, frozenset())
    for name, bad in (("wide", [("a", "<i8")]), ("float", [("a", "<f4")]), ("array", [("a", "<i4", 3)])):
        file[name] = np.zeros(3, bad)
        with pytest.raises(ValueError, match="column a is"):
            guard.read_table(file, name, columns, frozenset("bc"))
    file["varying"] = np.array([("x",)], dtype=[("a", h5py.string_dtype())])
    with pytest.raises(ValueError, match="expected a fixed length"):
        guard.read_table(file, "varying", columns, frozenset("bc"))
    with pytest.raises(ValueError, match="expected a table"):
        guard.read_table(file, "group/numbers", columns, frozenset("bc"))


# -- whole incidents --------------------------------------------------------------------------------------------------


def facts_of(folder: Path) -> Path:
    return next(path for path in folder.glob("*.facts.h5"))


def read_all(folder: Path) -> None:
    with open_incident(folder) as incident:
        incident.blame()
        assert incident.blind is not None and incident.history is not None
        for name in incident.history:
            incident.history[name]
        for record in incident.records():
            assert record.key
            record.high_precision  # noqa: B018


def edit(folder: Path, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(facts_of(folder), "r+") as opened:
        change(opened)


def replace_with(name: str, put: Callable[[h5py.File], None]) -> Callable[[h5py.File], None]:
    def change(opened: h5py.File) -> None:
        del opened[name]
        put(opened)

    return change


@pytest.mark.parametrize(
    "name", ["records", "names", "firings", "quantizers", "blind", "iterations", "history/loss/values"]
)
def test_tables_that_are_links_out_of_the_file(incident_folder: Path, tmp_path: Path, outside: Path, name: str) -> None:
    def put(opened: h5py.File) -> None:
        opened[name] = h5py.ExternalLink(str(outside), "/names")

    edit(incident_folder, replace_with(name, put))
    with pytest.raises(IncidentError, match="never followed") as caught:
        read_all(incident_folder)
        with open_incident(incident_folder) as incident:
            incident.ranks[0].quantizers  # noqa: B018
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["../outside.h5", "..", ".", "a/b", "/etc/passwd", "x\0y"])
def test_names_of_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_incident(tmp_path)
    for index in folder.glob("*.index.h5"):
        index.unlink()
    edit(folder, lambda opened: text.write_attributes(opened, {"tensors_file": name}))
    with pytest.raises(IncidentError, match="expected the name of a file beside it"):
        open_incident(folder)


def test_symbolic_links_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_incident(tmp_path / "incidents")
    for kind in ("tensors", "facts", "index"):
        path = next(folder.glob(f"*.{kind}.h5"))
        moved = path.rename(tmp_path / path.name)
        path.symlink_to(moved)
        with pytest.raises(IncidentError, match=r"symbolic link out of the incident's folder"):
            open_incident(folder)
        path.unlink()
        inside = folder / f"kept-{kind}"
        moved.rename(inside)
        path.symlink_to(inside.name)
        read_all(folder)


@pytest.mark.parametrize("kind", ["facts", "tensors"])
def test_fifo_and_folder_in_place_of_a_file(tmp_path: Path, kind: str) -> None:
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        folder = write_incident(tmp_path / str(number))
        path = next(folder.glob(f"*.{kind}.h5"))
        path.unlink()
        make(path)
        if kind == "facts":
            with pytest.raises(IncidentError, match="is no file"):
                open_incident(folder)
        else:
            with open_incident(folder) as incident:
                assert "is no file" in incident.ranks[0].tensors_problem


def test_metadata_that_lie(tmp_path: Path) -> None:
    for value in ([-1], [1.5], ["a"], [True], [1 << 63], list(range(100)), 5, {"a": 1}):
        with pytest.raises((ValueError, TypeError)):
            text.sizes(value)
    assert text.sizes([2, 0, 3]) == (2, 0, 3)
    with pytest.raises(ValueError, match="nested deeper"):
        text.from_json_text("[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match="an array of"):
        text.from_json_text('{"$array": ["x"], "dtype": "S2000000000"}')
    assert text.from_json_text('["[[[[", {"a": "]"}]') == ["[[[[", {"a": "]"}]
    deep: object = 1
    for _ in range(30):
        deep = [{"a": deep}]
    assert text.from_json_text(text.to_json_text(deep)) is not None


@pytest.mark.parametrize(
    ("cell", "value"),
    [("layer", 1 << 31), ("components", 0xFFFFFFFF), ("phase", b"\xff"), ("stage", b""), ("tensor", 999_999)],
)
def test_cells_that_point_nowhere(incident_folder: Path, cell: str, value: object) -> None:
    def change(opened: h5py.File) -> None:
        rows = opened["records"][()]
        rows[cell] = value
        opened["records"][...] = rows

    edit(incident_folder, change)
    with pytest.raises(IncidentError, match="/records"):
        read_all(incident_folder)


def test_array_that_claims_more_than_the_records_say(tmp_path: Path) -> None:
    folder = write_golden(tmp_path)
    with open_incident(folder) as incident:
        record = next(r for r in incident.records() if r.quantized is not None)
        path, index, dataset = record.path, record.index, f"{record.path}/high_precision"
    with h5py.File(next(folder.glob("*.tensors.h5")), "r+") as opened:
        form = opened[dataset].attrs["format"]
        del opened[dataset]
        opened[dataset] = np.zeros((100, 100), "<u2")
        opened[dataset].attrs["format"] = form
    with (
        open_incident(folder) as incident,
        pytest.raises(IncidentError, match="claims 20000 bytes, expected at most 12"),
    ):
        incident.ranks[0].records[index]
        next(r for r in incident.records() if r.path == path).high_precision  # noqa: B018


def test_metadata_of_a_quantizer_that_lie(tmp_path: Path) -> None:
    from flightrec.codecs import quantized

    codes = {"data": np.zeros((4, 32), "u1"), "scale_inv": np.ones((4, 1), "f4")}
    formats = {"data": "float8_e4m3fn", "scale_inv": "float32"}
    base = {
        "class_name": "x",
        "format": "float8_e4m3fn",
        "scale_direction": "multiply_to_decode",
        "block_shape": [1, 32],
    }
    assert quantized.dequantize(codes, {**base, "metadata": {}}, formats=formats).shape == (4, 32)
    huge = {**base, "block_shape": [1, 1 << 60], "metadata": {}}
    assert quantized.dequantize(codes, huge, formats=formats).shape == (4, 32)
    lies = [
        {"block_shape": ["a", 0]},
        {"block_shape": [0, 0]},
        {"metadata": {"logical_shape": [1 << 40, 1 << 40]}},
        {"metadata": {"logical_shape": "abc"}},
        {"metadata": {"scheme": ["unhashable"]}},
        {"metadata": {"columnwise": 5}},
        {"metadata": [1]},
        {"metadata": {"scheme": "grouped", "member": "float8", "num_tensors": 10**12, "group_shape": [-1, 0]}},
        {"metadata": {"scheme": "grouped", "member": "float8", "num_tensors": -1, "group_shape": ["x", None]}},
        {"metadata": {"scheme": "nvfp4", "e4m3_max": "many"}},
    ]
    for lie in lies:
        side = "columnwise" if "columnwise" in lie.get("metadata", ()) else None
        with pytest.raises(FormatError):
            quantized.dequantize(codes, {**base, **lie}, formats=formats, side=side)


def test_packed_attribute_that_names_no_filter(tmp_path: Path) -> None:
    for value in ("[]", "{}", '{"filter": "os"}'):
        with h5py.File(tmp_path / "p.h5", "w") as opened:
            opened.attrs["packed"] = value
            with pytest.raises(IncidentError, match="expected one of gzip"):
                filters.need(tmp_path / "p.h5", opened)


def test_every_column_that_version_1_0_lacks_may_be_missing() -> None:
    golden = Path(__file__).parent / "golden" / "incident-1.0.facts.h5"
    with h5py.File(golden, "r") as opened:
        for name, columns in (("records", schema.RECORD), ("iterations", schema.ITERATION)):
            missing = set(columns.names or ()) - set(opened[name].dtype.names)
            assert missing <= schema.LATER
            guard.read_table(opened, name, columns, schema.LATER)
