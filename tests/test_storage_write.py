from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import Sample, firing, identity, iterations, plain, write_incident

from flightrec.errors import FormatError, WriterError
from flightrec.records import Component, Key, RecordLayout, Representation
from flightrec.storage import schema
from flightrec.storage.facts import Blind, IncidentFacts, RankFiles
from flightrec.storage.read import open_incident
from flightrec.storage.write import TensorsFile, write_facts, write_index

KEY = Key("fc", "output", microbatch=0)


def facts(**changes) -> IncidentFacts:
    values = {
        "identity": identity(),
        "config_text": "{}",
        "environment": {},
        "trigger": firing(KEY, 3),
        "firings": [],
        "iterations": iterations({3: [plain(KEY, [1.0, 2.0])]}),
    }
    return IncidentFacts(**(values | changes))


def test_files_carry_identity_and_completeness(tmp_path: Path) -> None:
    write_incident(tmp_path, {3: [plain(KEY, [1.0, 2.0])]}, [firing(KEY, 3)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank00000.test.facts.h5",
        "rank00000.test.tensors.h5",
        "test.index.h5",
    ]
    for path in tmp_path.iterdir():
        with h5py.File(path) as file:
            assert file.attrs["format"] == schema.FORMAT
            assert file.attrs["format_version"] == schema.FORMAT_VERSION
            assert file.attrs["complete"] == 1
            assert file.attrs["incident_id"] == "test"


def test_payload_lies_where_the_component_table_says(tmp_path: Path) -> None:
    values = np.arange(5, dtype="<f4")
    write_incident(tmp_path, {3: [plain(KEY, values)]}, [firing(KEY, 3)])
    path = tmp_path / "rank00000.test.tensors.h5"
    with h5py.File(path) as file:
        (row,) = file["components"][()]
        dataset = file["0.0000003/fc/output/0.train.0.forward/high_precision"]
        assert dataset.chunks is None
        assert dataset.compression is None
        assert dict(dataset.attrs) == {"format": "float32", "record": 0}
        assert dataset.id.get_offset() == row["offset"]
        assert file["names"].asstr()[row["component"]] == "high_precision"
    stored = path.read_bytes()[row["offset"] : row["offset"] + row["bytes"]]
    assert stored == values.tobytes()
    assert zlib.crc32(stored) == row["crc32"]


def test_nothing_is_ever_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.facts.h5"
    write_facts(path, facts())
    before = path.read_bytes()
    with pytest.raises(WriterError, match="never replaced"):
        write_facts(path, facts(config_text="other"))
    assert path.read_bytes() == before
    tensors = tmp_path / "a.tensors.h5"
    tensors.write_bytes(b"someone else's")
    file = TensorsFile.create(tensors, identity())
    with pytest.raises(WriterError, match="never replaced"):
        file.commit()
    assert tensors.read_bytes() == b"someone else's"


def test_nothing_has_the_final_name_before_commit(tmp_path: Path) -> None:
    file = TensorsFile.create(tmp_path / "t.h5", identity())
    file.add(0, "/g", plain(KEY, [1.0]).layout(0), plain(KEY, [1.0]).buffers())
    assert not (tmp_path / "t.h5").exists()
    with pytest.raises(WriterError, match="exists"):
        TensorsFile.create(tmp_path / "t.h5", identity())
    assert file.commit() == (tmp_path / "t.h5").stat().st_size
    with pytest.raises(WriterError, match="takes nothing more"):
        file.flush()
    file.abort()
    assert (tmp_path / "t.h5").exists()


def test_abort_leaves_nothing(tmp_path: Path) -> None:
    file = TensorsFile.create(tmp_path / "t.h5", identity())
    file.add(0, "/g", plain(KEY, [1.0]).layout(0), plain(KEY, [1.0]).buffers())
    file.abort()
    file.abort()
    assert list(tmp_path.iterdir()) == []


def test_missing_and_read_only_folders(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for action in (
        lambda: write_facts(missing / "a.h5", facts()),
        lambda: TensorsFile.create(missing / "a.h5", identity()),
        lambda: write_index(missing, "x", []),
    ):
        with pytest.raises(WriterError, match="No such file"):
            action()
    with pytest.raises(WriterError, match="/proc"):
        write_facts("/proc/a.h5", facts())


@pytest.mark.parametrize(
    "component",
    [
        Component("data", (2,), "float32", 0, 4),
        Component("data", (1,), "float32", 0, 8),
        Component("data", (2,), "float64", 0, 8),
    ],
)
def test_a_record_that_contradicts_itself_spoils_nothing_else(tmp_path: Path, component: Component) -> None:
    layout = RecordLayout(0, KEY, Representation.QUANTIZED, (2,), "", -1, (component,), 0, 0, 0)
    file = TensorsFile.create(tmp_path / "t.h5", identity())
    with pytest.raises(FormatError, match="bytes"):
        file.add(0, "/bad", layout, [memoryview(bytes(8))])
    good = plain(KEY, [1.0])
    file.add(1, "/good", good.layout(0), good.buffers())
    with pytest.raises(FormatError, match="written already"):
        file.add(2, "/good", good.layout(0), good.buffers())
    file.commit()
    with h5py.File(tmp_path / "t.h5") as opened:
        assert opened["components"]["record"].tolist() == [1]
        assert "bad" not in opened


def test_a_record_in_parts_appears_when_it_is_whole(tmp_path: Path) -> None:
    sample = Sample(KEY, {"data": (np.arange(100, dtype="u1"), "uint8"), "scale": (np.ones(2, "<f4"), "float32")})
    codes, scale = sample.buffers()
    file = TensorsFile.create(tmp_path / "t.h5", identity())
    for record, path in ((4, "/whole"), (5, "/half")):
        assert not file.put_parts(record, path, sample.layout(0), [(0, 60, codes[60:])])
        assert not file.put_parts(record, path, sample.layout(0), [(1, 0, scale), (0, 0, codes[:30])])
    assert file.put_parts(4, "/whole", sample.layout(0), [(0, 30, codes[30:60])])
    file.write_out()
    file.flush()
    partial = tmp_path / ".t.h5.partial"
    with h5py.File(partial, "r", locking=False) as opened:  # as a salvager sees it
        assert list(opened) == ["whole"]
    file.commit()
    with h5py.File(tmp_path / "t.h5") as opened:
        assert "half" not in opened
        assert opened["whole/data"][()].tolist() == list(range(100))
        assert opened["whole/scale"][()].tolist() == [1.0, 1.0]
        rows = opened["components"][()]
        assert rows["record"].tolist() == [4, 4]
        assert rows["crc32"].tolist() == [zlib.crc32(codes), zlib.crc32(scale)]


def test_buffers_may_be_asked_for(tmp_path: Path) -> None:
    sample = Sample(KEY, {"data": (np.arange(3, dtype="u1"), "uint8"), "scale": (np.ones((), "<f4"), "float32")})
    file = TensorsFile.create(tmp_path / "t.h5", identity())
    arrays = dict(zip(sample.arrays, sample.buffers(), strict=True))
    file.add(0, "/g", sample.layout(0), lambda component: arrays[component.name])
    assert file.num_bytes == 7
    file.commit()
    with h5py.File(tmp_path / "t.h5") as opened:
        assert opened["g/data"][()].tolist() == [0, 1, 2]
        assert opened["g/scale"][()] == 1.0


def test_f39_every_kind_of_array_comes_back_bit_for_bit(tmp_path: Path) -> None:
    bits = {
        "bfloat16": np.array([0x7FC1, 0xFFFF, 0x8000, 0x0001], dtype="<u2"),
        "float8_e4m3fn": np.array([0x7F, 0xFF, 0x80], dtype="u1"),
        "float8_e5m2": np.array([0x7C, 0x7D], dtype="u1"),
        "float8_e8m0fnu": np.array([[0xFF]], dtype="u1"),
        "float4_e2m1fn_x2": np.array([[0x21, 0x03]], dtype="u1"),
        "float16": np.array([0x7E01, 0x8000], dtype="<u2").view("<f2"),
        "float64": np.array(-0.0),
        "complex64": np.array([1 + 2j], dtype="<c8"),
        "int64": np.array([2**62]),
        "bool": np.array([1, 0], dtype="u1"),
        "float32": np.zeros((0, 4), dtype="<f4"),
        "mystery_fp3": np.array([1, 2, 3], dtype="u1"),
    }
    samples = [Sample(Key(form, "output"), {"data": (array, form)}) for form, array in bits.items()]
    folder = write_incident(tmp_path, {0: samples}, [firing(None, 0)])
    with open_incident(folder) as incident:
        for record, (form, array) in zip(incident.records(), bits.items(), strict=True):
            assert record.components[0].format == form
            found = record.raw("data")
            assert (found.shape, found.dtype, found.tobytes()) == (array.shape, array.dtype, array.tobytes())
            assert record.why_absent == ""
    with h5py.File(folder / "rank00000.test.tensors.h5") as file:
        offsets = {row["record"]: row["offset"] for row in file["components"][()]}
        assert offsets[list(bits).index("float32")] == -1


def test_all_codes_to_disk_and_back(tmp_path: Path) -> None:
    e4m3, bf16 = np.arange(256, dtype="u1"), np.arange(1 << 16, dtype="<u2")
    samples = [
        Sample(KEY, {"high_precision": (bf16, "bfloat16"), "data": (e4m3, "float8_e4m3fn")}),
    ]
    folder = write_incident(tmp_path, {0: samples}, [firing(KEY, 0)])
    with open_incident(folder) as incident:
        (record,) = incident.records()
        assert record.raw("data").tobytes() == e4m3.tobytes()
        assert record.raw("high_precision").tobytes() == bf16.tobytes()
        assert (record.high_precision.view("u4") >> 16).astype("u2").tolist() == bf16.tolist()


def test_f34_every_name_is_kept(tmp_path: Path) -> None:
    layers = ["layers.0.fc1", "a", "a/b", "a_b", "a b", ".", "..", "x//y", "tr/", "n\0m", "n", "", "ü", "z" * 3000]
    layers += ["\ud800", "z" * 2999 + "y"]
    samples = [
        plain(Key(layer, "output", microbatch=microbatch, call=call), [number, microbatch, call])
        for number, layer in enumerate(layers)
        for microbatch in range(2)
        for call in range(2)
    ]
    folder = write_incident(tmp_path, {5: samples}, [firing(samples[0].key, 5)])
    with open_incident(folder) as incident:
        records = incident.records()
        assert [record.key for record in records] == [sample.key for sample in samples]
        for record in records:
            key = record.key
            assert record.high_precision.tolist() == [layers.index(key.layer), key.microbatch, key.call]
        for layer in layers:
            assert {record.key.layer for record in incident.records(layer=[layer]) if record.key.layer == layer}


def test_index_names_only_files_that_are_there(tmp_path: Path) -> None:
    write_incident(tmp_path, {3: [plain(KEY, [1.0])]}, [firing(KEY, 3)], index=False)
    ranks = [
        RankFiles(0, "rank00000.test.facts.h5", "rank00000.test.tensors.h5"),
        RankFiles(1, "rank00001.test.facts.h5", ""),
    ]
    path = write_index(tmp_path, "test", ranks, {"run_id": "run"})
    with h5py.File(path) as file:
        names = file["names"].asstr()[()]
        assert [(row["rank"], names[row["facts"]]) for row in file["ranks"]] == [(0, ranks[0].facts), (1, "")]
        assert file["rank00000/facts"].attrs["kind"] == "facts"
        assert file["rank00000/tensors"].attrs["kind"] == "tensors"
        assert "rank00001" not in file
        link = file.get("rank00000/facts", getlink=True)
        assert not os.path.isabs(link.filename)


def test_late_firings_and_blind_rows_are_in_the_tensors_file(tmp_path: Path) -> None:
    late = firing(KEY, 3, rule="late")
    blind = Blind(0, 4, "fc", "output", "staging was full")
    folder = write_incident(
        tmp_path, {3: [plain(KEY, [1.0])]}, [firing(KEY, 3)], late_firings=[late], late_blind=[blind]
    )
    with open_incident(folder) as incident:
        assert [entry.rule for entry in incident.firings] == ["nan", "late"]
        assert incident.blind == [blind]


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r}); folder = {str(folder)!r}\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)


FULL_DISK = """
    import resource, signal
    from pathlib import Path
    import numpy as np
    from storage_samples import *
    from flightrec.errors import WriterError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder, key = Path(folder), Key("fc", "output")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    def samples():
        return {3: [plain(Key(f"fc{i}", "output"), np.zeros(1000)) for i in range(count)]}
    write_incident(folder / "whole", samples(), [firing(key, 3)])
    limit = (folder / "whole" / "rank00000.test.tensors.h5").stat().st_size - below
    folder = folder / "full"
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        write_incident(folder, samples(), [firing(key, 3)])
        print("written")
    except WriterError as error:
        print("refused", error)
    print(sorted(path.name for path in folder.iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    write_incident(folder, samples(), [firing(key, 3)], incident_id="second")
    print("second written")
"""


@pytest.mark.parametrize("below", [225_500, 186_000, 76_000, 11_000, 1_000, 1])
def test_f37_a_full_disk_leaves_nothing_under_a_final_name(tmp_path: Path, below: int) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "full").mkdir()
    done = run_python(f"below, count = {below}, 30\n" + textwrap.dedent(FULL_DISK), tmp_path)
    assert done.returncode == 0, done.stderr  # HDF5 would crash at the end if it knew of the error
    first, names, second = done.stdout.splitlines()
    assert first.startswith("refused")
    assert "File too large" in first
    assert names == ("[]" if below > 200_000 else "['rank00000.test.facts.h5']")
    assert second == "second written"
    with open_incident(tmp_path / "full" / "second.index.h5") as incident:
        assert len(incident.records()) == 30


def test_a_killed_writer_leaves_a_readable_file(tmp_path: Path) -> None:
    done = run_python(
        """
        import os, signal
        from pathlib import Path
        from storage_samples import *
        key = Key("fc", "output")
        facts = IncidentFacts(identity(), "{}", {}, firing(key, 3), [], iterations({3: [plain(key, [1.5])]}),
                              tensors_file="t.tensors.h5")
        write_facts(Path(folder) / "t.facts.h5", facts)
        file = TensorsFile.create(Path(folder) / "t.tensors.h5", identity(), "t.facts.h5")
        sample = plain(key, [1.5])
        file.add(0, facts.iterations[0].record_paths()[0], sample.layout(0), sample.buffers())
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with open_incident(tmp_path / "t.facts.h5") as incident:
        (record,) = incident.records()
        assert record.high_precision is None
        assert "still being written" in record.why_absent
    (tmp_path / ".t.tensors.h5.partial").rename(tmp_path / "t.tensors.salvaged.h5")
    with open_incident(tmp_path) as incident:
        (record,) = incident.records()
        assert record.high_precision.tolist() == [1.5]


def test_f38_bad_metadata_loses_nothing_else(tmp_path: Path) -> None:
    write_facts(
        tmp_path / "a.facts.h5",
        facts(
            config_text="# nul \0 and surrogate \ud800\n" + "x" * 70_000,
            environment={"none": None, "big": 2**63, "obj": object(), "nan": float("nan"), "s": "\ud800\0"},
            history={"good": ([1, 2], [1.0, 2.0]), "bad": ([1], [1.0, 2.0]), "worse": ([1], [object()])},
            quantizers=[{"class_name": "x\0", "format": "f", "scale_direction": "ü" * 40, "metadata": {"n": None}}],
            trigger=firing(Key("l\0", "output"), 3, message="m\0" * 40_000),
        ),
    )
    with open_incident(tmp_path / "a.facts.h5") as incident:
        assert incident.config_text.startswith("# nul \0 and surrogate \ud800\n")
        assert incident.environment["big"] == 2**63
        assert incident.environment["s"] == "\ud800\0"
        assert incident.history.keys() == {"good"}
        assert [problem.split(":")[0] for problem in incident.ranks[0].problems] == [
            "quantizer 0",
            "history of 'bad'",
            "history of 'worse'",
        ]
        assert incident.trigger.message == "m\0" * 40_000
        assert incident.ranks[0].quantizers[0]["class_name"] == "x\0"


@pytest.mark.slow
def test_50_000_records(tmp_path: Path) -> None:
    samples = {
        iteration: [plain(Key(f"layers.{i}.fc", "output", microbatch=0), [1.0], nan_count=i % 2) for i in range(10_000)]
        for iteration in range(5)
    }
    write_facts(tmp_path / "a.facts.h5", facts(iterations=iterations(samples)))
    assert (tmp_path / "a.facts.h5").stat().st_size < 40e6
    with open_incident(tmp_path / "a.facts.h5") as incident:
        assert len(incident.records()) == 50_000
        chosen = incident.records(layer="layers.777.*", iteration=range(1, 3))
        assert [(record.iteration, record.key.layer) for record in chosen] == [
            (1, "layers.777.fc"),
            (2, "layers.777.fc"),
        ]
        assert chosen[0].statistics["nan_count"] == 1
