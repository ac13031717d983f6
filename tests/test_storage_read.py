from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import firing, plain, write_incident

from flightrec.errors import ConfigError, IncidentError
from flightrec.records import NO_MICROBATCH, Key, Phase, Severity, Stage
from flightrec.storage.facts import RankFiles
from flightrec.storage.read import Incident, list_incidents, matching, open_incident
from flightrec.storage.write import write_index

KEYS = [
    Key("layers.0.fc1", "activation", microbatch=0),
    Key("layers.0.fc1", "gradient", microbatch=0, stage=Stage.BACKWARD),
    Key("layers.1.fc1", "activation", "x", 1, Phase.RECOMPUTE),
    Key("head[0]", "output", microbatch=1),
    Key("", "loss", stage=Stage.LOSS),
]


def write(folder: Path, rank: int = 0, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    samples = {
        iteration: [plain(key, [iteration, number, rank]) for number, key in enumerate(KEYS)] for iteration in (4, 5)
    }
    return write_incident(folder, samples, [firing(KEYS[0], 5)], rank=rank, world_size=2, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "test", 0, index=False)
    write(tmp_path / "test", 1, index=False)
    ranks = [RankFiles(n, f"rank0000{n}.test.facts.h5", f"rank0000{n}.test.tensors.h5") for n in (0, 1)]
    write_index(tmp_path / "test", "test", ranks)
    return tmp_path / "test"


def keys(records) -> list[tuple[int, int, int]]:
    return [(record.rank, record.iteration, KEYS.index(record.key)) for record in records]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"iteration": 5, "rank": 1}, [(1, 5, n) for n in range(5)]),
        ({"layer": "layers.*", "tensor": "activation", "iteration": 4}, [(0, 4, 0), (0, 4, 2), (1, 4, 0), (1, 4, 2)]),
        ({"layer": "re:layers[.][1-9].*", "rank": [0]}, [(0, 4, 2), (0, 5, 2)]),
        ({"layer": ["head[0]", ""], "rank": 0, "iteration": range(5, 9)}, [(0, 5, 3), (0, 5, 4)]),
        ({"microbatch": NO_MICROBATCH, "rank": 0}, [(0, 4, 4), (0, 5, 4)]),
        ({"phase": Phase.RECOMPUTE, "rank": 0, "iteration": 4}, [(0, 4, 2)]),
        ({"phase": ["recompute"], "rank": 0, "iteration": 4}, [(0, 4, 2)]),
        ({"stage": [Stage.LOSS, "backward"], "rank": 0, "iteration": 4}, [(0, 4, 1), (0, 4, 4)]),
        ({"part": "x", "rank": 0, "iteration": 4}, [(0, 4, 2)]),
        ({"attempt": 7}, []),
        ({"rank": []}, []),
        ({"layer": "none"}, []),
    ],
)
def test_records_are_selected_from_the_table(folder: Path, filters: dict, expected: list) -> None:
    with open_incident(folder) as incident:
        assert keys(incident.records(**filters)) == expected


def test_each_record_reads_its_own_bytes(folder: Path) -> None:
    with open_incident(folder) as incident:
        for record in incident.records():
            assert record.high_precision.tolist() == [record.iteration, record.sequence, record.rank]


def test_no_payload_is_read_before_it_is_asked_for(folder: Path) -> None:
    for path in folder.glob("*.tensors.h5"):
        path.write_bytes(b"x" * 100)
    with open_incident(folder) as incident:
        assert len(incident.records()) == 20
        assert incident.trigger.rule == "nan"
        assert len(incident.firings) == 2
        with pytest.raises(IncidentError, match="missing"):
            incident.records()[0].raw("high_precision")
        assert "damaged" in incident.records()[0].why_absent


def test_what_can_be_opened(folder: Path) -> None:
    for path, ranks in (
        (folder, [0, 1]),
        (folder / "test.index.h5", [0, 1]),
        (folder / "rank00001.test.facts.h5", [1]),
        (folder / "rank00001.test.tensors.h5", [1]),
        (str(folder), [0, 1]),
    ):
        with open_incident(path) as incident:
            assert [rank.rank for rank in incident.ranks] == ranks
            assert incident.records()[0].high_precision is not None
            assert "test" in repr(incident)


def test_without_an_index_the_facts_files_are_found(folder: Path) -> None:
    (folder / "test.index.h5").unlink()
    with open_incident(folder) as incident:
        assert [rank.rank for rank in incident.ranks] == [0, 1]
        assert incident.records()[0].high_precision is not None


def test_the_trigger_is_the_most_severe_and_earliest(tmp_path: Path) -> None:
    for rank, (severity, iteration) in enumerate([(Severity.WARNING, 4), (Severity.FAULT, 5), (Severity.FAULT, 4)]):
        write_incident(
            tmp_path, {}, [firing(None, iteration, severity=severity, message=f"{rank}")], rank=rank, index=False
        )
    with open_incident(tmp_path) as incident:
        assert incident.trigger.message == "2"
        assert [entry.iteration for entry in incident.firings] == [4, 4, 5]


def test_folders_that_are_no_incident(tmp_path: Path) -> None:
    with pytest.raises(IncidentError, match="no such file or folder"):
        open_incident(tmp_path / "none")
    with pytest.raises(IncidentError, match="holds no incident"):
        open_incident(tmp_path)
    write(tmp_path / "one")
    write(tmp_path / "two", incident_id="two")
    with pytest.raises(IncidentError, match=r"holds 2 incident\(s\), is none itself; open one: one, two"):
        open_incident(tmp_path)
    assert list_incidents(tmp_path) == [tmp_path / "one", tmp_path / "two"]
    assert list_incidents(tmp_path / "one") == [tmp_path / "one"]
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / ".x.facts.h5.partial").touch()
    with pytest.raises(IncidentError, match="never completed"):
        open_incident(tmp_path / "three")


def test_files_of_two_incidents_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", 1, incident_id="other")
    shutil.copy(other / "rank00001.other.facts.h5", folder / "rank00001.test.facts.h5")
    with pytest.raises(IncidentError, match="belongs to incident other, expected test"):
        open_incident(folder)
    with pytest.raises(IncidentError, match=r"its facts file rank00000\.test\.facts\.h5 is not beside it"):
        open_incident(shutil.copy(folder / "rank00000.test.tensors.h5", other / "lost.h5"))


def test_tensors_of_another_incident_are_not_read(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", 0, incident_id="other")
    shutil.copy(other / "rank00000.other.tensors.h5", folder / "rank00000.test.tensors.h5")
    with open_incident(folder) as incident:
        record = incident.records(rank=0)[0]
        assert record.high_precision is None
        assert "belongs to incident other" in record.why_absent


def test_two_files_of_one_rank(folder: Path) -> None:
    (folder / "test.index.h5").unlink()
    shutil.copy(folder / "rank00001.test.facts.h5", folder / "rank00002.test.facts.h5")
    with pytest.raises(IncidentError, match="second facts file of rank 1"):
        open_incident(folder)


@pytest.mark.parametrize("kind", ["facts", "tensors", "index"])
def test_truncated_files_are_told(folder: Path, kind: str) -> None:
    path = next(folder.glob(f"*.{kind}.h5"))
    content = path.read_bytes()
    for length in (0, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(IncidentError, match=path.name.replace(".", r"\.")):
            open_incident(path)


@pytest.mark.parametrize(
    "name", ["names", "records", "iterations", "firings", "trigger", "quantizers", "config", "blind"]
)
def test_missing_tables_are_told(folder: Path, name: str) -> None:
    path = folder / "rank00000.test.facts.h5"
    with h5py.File(path, "r+") as file:
        del file[name]
    with open_incident(path) as incident, pytest.raises(IncidentError, match=name):
        read_everything(incident)


def read_everything(incident: Incident) -> None:
    _ = (incident.trigger, incident.iterations, incident.config_text, incident.blind)
    _ = [record.quantized for record in incident.records(layer="*")]
    _ = incident.ranks[0].quantizers


def test_names_that_point_nowhere_are_told(folder: Path) -> None:
    path = folder / "rank00000.test.facts.h5"
    with h5py.File(path, "r+") as file:
        records = file["records"][()]
        records["layer"] = 10_000
        file["records"][...] = records
    with open_incident(path) as incident:
        with pytest.raises(IncidentError, match="/records"):
            incident.records(layer="*")
        with pytest.raises(IncidentError, match="/records"):
            _ = incident.records()[0].key


def test_a_salvaged_file_is_read(folder: Path) -> None:
    (folder / "test.index.h5").unlink()
    path = folder / "rank00000.test.tensors.h5"
    with h5py.File(path, "r+") as file:
        file.attrs["complete"] = np.uint8(0)
        for name in ("components", "names", "firings", "blind"):
            del file[name]
        del file["0.0000005/head[0]"]
    path.rename(folder / "rank00000.test.tensors.salvaged.h5")
    with open_incident(folder) as incident:
        assert incident.ranks[0].salvaged
        found = {record.key.layer: record for record in incident.records(rank=0, iteration=5)}
        assert found["layers.0.fc1"].high_precision.tolist() == [5, 1, 0]
        assert found["head[0]"].high_precision is None
        assert "did not reach" in found["head[0]"].why_absent


def test_patterns() -> None:
    assert matching("a.*.c")("a.b.x.c")
    assert not matching("A*")("abc")
    assert matching("head[0]")("head[0]")
    assert matching(["x", "re:a+"])("aaa")
    assert not matching("re:a+")("aab")
    with pytest.raises(ConfigError, match="regular expression"):
        matching("re:(")
