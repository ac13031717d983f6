"""A packed incident: the same bits in fewer bytes, for our readers and for plain h5py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import Sample, firing, plain, write_incident

from flightrec.errors import IncidentError, MissingExtraError
from flightrec.records import Key
from flightrec.storage import pack
from flightrec.storage.disk import ForgivingFile
from flightrec.storage.pack import chunk_shape, pack_folder
from flightrec.storage.read import open_incident
from flightrec.writer.folders import remove_marker, write_marker

FILTERS = [
    "gzip",
    *(
        pytest.param(
            name, marks=pytest.mark.skipif(not importlib.util.find_spec("hdf5plugin"), reason="needs hdf5plugin")
        )
        for name in ("zstd", "blosc")
    ),
]


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """bfloat16 in several chunks, FP8 codes, a scalar, nothing, a NaN payload; two iterations."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((700, 3, 512)).astype("<f4").view("<u4") >> 16).astype("<u2")
    values[5, 1, 7] = 0x7FC1
    codes = rng.integers(0, 8, (1500, 1024), dtype=np.uint8)
    samples = [
        Sample(
            Key("a/b", "activation"),
            {
                "high_precision": (values, "bfloat16"),
                "data": (codes, "float8_e4m3fn"),
                "scale": (np.array(3.0, "<f4"), "float32"),
                "amax": (np.zeros((0, 4), "<f4"), "float32"),
            },
        ),
        plain(Key("small", "output"), [1.0, np.nan]),
    ]
    late = [firing(samples[1].key, 2, rule="late")]
    (tmp_path / "run").mkdir()
    return write_incident(tmp_path / "run", {1: samples, 2: samples}, [firing(None, 2)], late_firings=late)


def contents(folder: Path) -> list[tuple[str, str, bytes]]:
    with open_incident(folder) as opened:
        return [
            (repr(record.key), part.name, record.raw(part.name).tobytes())
            for record in opened.records()
            for part in record.components
        ]


@pytest.mark.parametrize("name", FILTERS)
def test_a_packed_incident_reads_as_the_original_does(incident: Path, name: str, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in incident.iterdir()}
    told = pack_folder(incident, str(tmp_path / "packed"), name, 4)
    assert {path.name: path.read_bytes() for path in incident.iterdir()} == before
    packed = tmp_path / "packed"
    assert sorted(path.name for path in packed.iterdir()) == sorted(before)
    assert contents(packed) == contents(incident)
    assert told["num_arrays"] == 10
    assert told["payload_after"] < 0.9 * told["payload_before"]
    assert told["bytes_after"] == sum(path.stat().st_size for path in packed.iterdir()) < told["bytes_before"]
    with open_incident(packed) as one, open_incident(incident) as two:
        assert [f.rule for f in one.firings] == [f.rule for f in two.firings]
        assert one.blind == two.blind
    assert not list(tmp_path.glob(".*"))


def test_plain_h5py_reads_it(incident: Path, tmp_path: Path) -> None:
    pack_folder(incident, str(tmp_path / "packed"), "gzip", 6)
    (path,) = (tmp_path / "packed").glob("*.tensors.h5")
    with h5py.File(path) as new, h5py.File(incident / path.name) as old:
        assert new.attrs["packed"] == '{"filter": "gzip", "level": 6}'
        assert new.attrs["complete"] == 1
        assert set(new["components"]["offset"]) == {-1}
        for column in ("record", "bytes", "crc32"):
            assert new["components"][column].tolist() == old["components"][column].tolist()
        seen = []
        old.visititems(lambda name, item: seen.append(name) if "record" in item.attrs else None)
        for name in seen:
            assert new[name].dtype == old[name].dtype
            assert np.array_equal(new[name][()].view("u1"), old[name][()].view("u1")) if old[name].shape else True
            assert dict(new[name].attrs) == dict(old[name].attrs)
        shuffled = {name.rsplit("/")[-1]: new[name].shuffle for name in seen if new[name].chunks}
        assert shuffled == {"high_precision": True, "data": False}


def test_a_packed_incident_can_be_packed_again(incident: Path, tmp_path: Path) -> None:
    pack_folder(incident, str(tmp_path / "one"), "gzip", 1)
    pack_folder(tmp_path / "one", str(tmp_path / "two"), "gzip", 9)
    assert contents(tmp_path / "two") == contents(incident)


def test_damage_is_found_and_nothing_is_left(incident: Path, tmp_path: Path) -> None:
    (path,) = incident.glob("*.tensors.h5")
    with h5py.File(path, "r+") as file:
        row = max(file["components"][()], key=lambda row: row["bytes"])
    with path.open("r+b") as file:
        file.seek(int(row["offset"]) + 1000)
        file.write(b"\xff\xfe")
    with pytest.raises(IncidentError, match="is damaged: crc32"):
        pack_folder(incident, str(tmp_path / "packed"), "gzip", 4)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_nothing_is_replaced_and_what_is_no_incident_is_refused(incident: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(IncidentError, match="never replaced"):
        pack_folder(incident, str(tmp_path / "there"), "gzip", 4)
    with pytest.raises(IncidentError, match="expected"):
        pack_folder(tmp_path / "there", str(tmp_path / "packed"), "gzip", 4)
    with pytest.raises(IncidentError, match="no folder"):
        pack_folder(next(incident.glob("*.facts.h5")), str(tmp_path / "packed"), "gzip", 4)
    assert not (tmp_path / "packed").exists()


def test_what_is_still_written_is_not_packed_without_what_is_to_come(incident: Path, tmp_path: Path) -> None:
    write_marker(incident, 0)
    with pytest.raises(IncidentError, match="is not finished"):
        pack_folder(incident, str(tmp_path / "packed"), "gzip", 4)
    remove_marker(incident, 0)
    assert pack_folder(incident, str(tmp_path / "packed"), "gzip", 4)["num_arrays"] > 0


def test_no_copy_goes_into_the_incident_itself(incident: Path, tmp_path: Path) -> None:
    before = sorted(incident.iterdir())
    (tmp_path / "link").symlink_to(incident)
    for output in (incident / "packed", incident / "deep" / "packed", tmp_path / "link" / "packed"):
        with pytest.raises(IncidentError, match="inside the incident"):
            pack_folder(incident, str(output), "gzip", 4)
    assert sorted(incident.iterdir()) == before


_PACK_ON_A_SMALL_DISK = """
import resource, sys
from pathlib import Path
from flightrec.errors import WriterError
from flightrec.storage.pack import pack_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    pack_folder(Path(sys.argv[1]), sys.argv[2], "gzip", 1)
except WriterError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_full_disk_is_told_and_does_not_crash_hdf5(incident: Path, tmp_path: Path) -> None:
    (facts,) = incident.glob("*.facts.h5")
    for limit in (facts.stat().st_size // 2, facts.stat().st_size + 200_000):  # in the facts, and in the tensors
        command = [sys.executable, "-c", _PACK_ON_A_SMALL_DISK, str(incident), str(tmp_path / "packed"), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done
        assert "cannot be written, File too large" in done.stderr
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_what_does_not_come_back_is_not_published(incident: Path, tmp_path: Path, monkeypatch) -> None:
    def spoil(old: h5py.Dataset, new: h5py.Dataset, disk: ForgivingFile) -> int:
        crc = copy(old, new, disk)
        if new.size > 1000:
            new[0] = 0
        return crc

    copy = pack._copy
    monkeypatch.setattr(pack, "_copy", spoil)
    with pytest.raises(IncidentError, match="bit for bit"):
        pack_folder(incident, str(tmp_path / "packed"), "gzip", 4)
    assert not (tmp_path / "packed").exists()


@pytest.mark.skipif(bool(importlib.util.find_spec("hdf5plugin")), reason="hdf5plugin is installed")
def test_a_filter_that_is_not_installed_names_the_extra(incident: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"torch-flightrec\[pack\]"):
        pack_folder(incident, str(tmp_path / "packed"), "zstd", 4)
    (path,) = incident.glob("*.tensors.h5")
    with h5py.File(path, "r+") as file:
        file.attrs["packed"] = '{"filter": "zstd", "level": 3}'
    with open_incident(incident) as opened:
        assert "torch-flightrec[pack]" in opened.records()[0].why_absent
        with pytest.raises(IncidentError, match=r"torch-flightrec\[pack\]"):
            opened.records()[0].raw("data")


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((10,), 4, (10,)),
        ((3, 5), 2, (3, 5)),
        ((4096, 4096), 2, (128, 4096)),
        ((7, 1 << 22), 1, (1, 1 << 20)),
        ((9, 3, 1 << 19), 2, (1, 1, 1 << 19)),
        ((2**32 + 8,), 1, (1 << 20,)),
        ((1000, 1000, 1), 8, (131, 1000, 1)),
    ],
)
def test_chunks_are_ranges_of_the_array_of_about_a_mebibyte(shape, itemsize, expected) -> None:
    assert chunk_shape(shape, itemsize) == expected
