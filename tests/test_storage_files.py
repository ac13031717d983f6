from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import firing, plain, write_incident

from flightrec.errors import ConfigError, IncidentError
from flightrec.records import Key
from flightrec.storage import files, schema


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    key = Key("fc", "output")
    write_incident(tmp_path, {1: [plain(key, [1.0])]}, [firing(key, 1)])
    return tmp_path / "rank00000.test.facts.h5"


def change(path: Path, **attributes) -> None:
    with h5py.File(path, "r+") as file:
        for name, value in attributes.items():
            file.attrs[name] = value


def test_another_major_version_is_refused_with_both_versions(facts: Path) -> None:
    change(facts, format_version="2.3")
    with pytest.raises(IncidentError, match=r"version 2\.3, this flightrec reads 1\.4") as caught:
        files.open_file(facts, [schema.FACTS])
    assert str(facts) in str(caught.value)


def test_a_newer_minor_version_is_read(facts: Path) -> None:
    change(facts, format_version="1.7")
    files.open_file(facts, [schema.FACTS]).close()


def test_an_incomplete_file_is_refused_unless_it_was_salvaged(facts: Path) -> None:
    change(facts, complete=np.uint8(0))
    with pytest.raises(IncidentError, match="never completed"):
        files.open_file(facts, [schema.FACTS])
    files.open_file(facts, [schema.FACTS], salvaged=True).close()


def test_other_files_are_refused(facts: Path) -> None:
    with pytest.raises(IncidentError, match="is a facts file, expected tensors or index"):
        files.open_file(facts, [schema.TENSORS, schema.INDEX])
    with pytest.raises(IncidentError, match="no such file"):
        files.open_file(facts.with_name("none"), [schema.FACTS])
    foreign = facts.with_name("foreign.h5")
    h5py.File(foreign, "w").close()
    with pytest.raises(IncidentError, match="no flightrec incident"):
        files.open_file(foreign, [schema.FACTS])
    foreign.write_text("not HDF5")
    with pytest.raises(IncidentError, match="damaged or incomplete"):
        files.open_file(foreign, [schema.FACTS])


def test_missing_attributes_are_damage(facts: Path) -> None:
    with h5py.File(facts, "r+") as file:
        del file.attrs["complete"]
    with pytest.raises(IncidentError, match="root attributes"):
        files.open_file(facts, [schema.FACTS])


def test_identity(facts: Path) -> None:
    with files.open_file(facts, [schema.FACTS]) as file:
        files.check_identity(facts, file, "test", 0)
        with pytest.raises(IncidentError, match="belongs to incident test, expected other"):
            files.check_identity(facts, file, "other")
        with pytest.raises(IncidentError, match="rank 0, expected rank 3"):
            files.check_identity(facts, file, "test", 3)


def test_our_own_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mine"), files.reading(tmp_path):
        raise ConfigError("mine")
    with pytest.raises(IncidentError, match=r"/records cannot be read.*KeyError"), files.reading(tmp_path, "/records"):
        raise KeyError
