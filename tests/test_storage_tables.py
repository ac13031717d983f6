from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import firing, identity, iterations, plain, write_incident

from flightrec.errors import FormatError
from flightrec.records import Key, Severity, Stage
from flightrec.storage import schema, tables, text
from flightrec.storage.facts import Blind, IncidentFacts, IterationFacts

KEY = Key("fc", "output", "x", 1, stage=Stage.BACKWARD)


def filled(tmp_path: Path, **changes) -> h5py.File:
    values = {
        "identity": identity(),
        "config_text": "a: 1",
        "environment": {},
        "trigger": firing(KEY, 4),
        "firings": [],
        "iterations": iterations({4: [plain(Key("a", "weight"), [1.0]), plain(KEY, [1.0], nan_count=1)]}),
    }
    file = h5py.File(tmp_path / "x.h5", "w")
    tables.fill_facts(file, IncidentFacts(**(values | changes)))
    return file


def test_the_trigger_is_among_the_firings_and_finds_its_record(tmp_path: Path) -> None:
    other = firing(Key("gone", "output"), 4, rule="other")
    with filled(tmp_path, firings=[other]) as file:
        names = file["names"].asstr()[()]
        assert [names[row["rule"]] for row in file["firings"]] == ["nan", "other"]
        assert file["firings"]["record"].tolist() == [1, -1]
        trigger = file["trigger"].attrs
        assert (trigger["firing"], trigger["record"], trigger["layer"], trigger["microbatch"]) == (0, 1, "fc", 1)


def test_a_trigger_with_nan_value_is_not_doubled(tmp_path: Path) -> None:
    firings = [firing(None, 4, rule="manual"), firing(KEY, 4, value=float("nan"))]
    with filled(tmp_path, firings=firings, trigger=firing(KEY, 4, value=float("nan"))) as file:
        assert len(file["firings"]) == 2
        assert file["trigger"].attrs["firing"] == 1


def test_a_firing_about_the_run_has_no_key(tmp_path: Path) -> None:
    with filled(tmp_path, trigger=firing(None, 4, rule="exception", severity=Severity.FAULT)) as file:
        assert file["firings"]["has_key"].tolist() == [0]
        assert "layer" not in file["trigger"].attrs


def test_statistics_have_their_columns_and_layouts_their_text(tmp_path: Path) -> None:
    with filled(tmp_path) as file:
        records, names = file["records"][()], file["names"].asstr()[()]
        assert np.nan_to_num(records["nan_count"]).tolist() == [0, 1]
        assert np.isnan(records["amax"]).all()
        assert records["sequence"].tolist() == [0, 1]
        assert [names[row] for row in records["shape"]] == ["[1]", "[1]"]
        assert records["stage"].tolist() == [b"forward", b"backward"]


def test_wrong_number_of_statistics_is_told(tmp_path: Path) -> None:
    entry = iterations({4: [plain(KEY, [1.0])]})[0]
    broken = IterationFacts(0, 4, 4, 1, None, entry.layouts, np.zeros((2, len(schema.STATISTIC_COLUMNS))))
    with pytest.raises(FormatError, match="2 rows of statistics for 1 records"):
        filled(tmp_path, iterations=[broken])


def test_loss_none_and_loss_nan_differ(tmp_path: Path) -> None:
    rows = np.empty((0, len(schema.STATISTIC_COLUMNS)))
    entries = [IterationFacts(0, n, n, 1, loss, [], rows) for n, loss in enumerate([None, float("nan"), 1.5])]
    with filled(tmp_path, iterations=entries) as file:
        assert file["iterations"]["has_loss"].tolist() == [0, 1, 1]
        assert file["iterations"]["loss"][2] == 1.5


def test_history_is_nxdata_with_scales(tmp_path: Path) -> None:
    wide = np.arange(600 * 300.0).reshape(600, 300)
    history = {"loss": (range(3), [1.0, 2.0, 3.0]), "a/max": (range(600), wide), "flag": ([1], [True])}
    with filled(tmp_path, history=history) as file:
        assert file["history"].attrs["default"] == "loss"
        loss = file["history/loss"]
        assert (loss.attrs["NX_class"], loss.attrs["signal"]) == ("NXdata", "values")
        assert loss["values"].dims[0][0].name == "/history/loss/iterations"
        assert file["history/a%2Fmax"].attrs["name"] == "a/max"
        assert file["history/a%2Fmax/values"].chunks == (250, 256)
        assert file["history/a%2Fmax/values"].compression is None
        assert file["history/flag/values"].dtype == np.uint8


def test_what_is_absent_is_left_out(tmp_path: Path) -> None:
    with filled(tmp_path) as file:
        assert not {"history", "problems"} & set(file)
        assert not {"tensors_file", "ended"} & set(file.attrs)


def test_blind_rows_take_plain_tuples() -> None:
    table = text.TextTable()
    rows = tables.blind_rows([Blind(0, 1, "a", "b", "why"), (-1, -1, "", "", "all")], table)  # type: ignore[list-item]
    assert rows["iteration"].tolist() == [1, -1]


def test_the_sizes_of_fixed_columns_hold_every_word() -> None:
    from flightrec.records import Phase, Representation

    for words, column in ((Phase, "phase"), (Stage, "stage"), (Representation, "representation")):
        assert max(len(word.value) for word in words) <= schema.RECORD[column].itemsize
    assert max(len(word.value) for word in Severity) <= schema.FIRING["severity"].itemsize


def test_an_incident_without_any_iteration(tmp_path: Path) -> None:
    write_incident(tmp_path, {}, [firing(None, 0, rule="manual")])
    with h5py.File(tmp_path / "rank00000.test.facts.h5") as file:
        assert file["records"].shape == (0,)
        assert file["records"].dtype == schema.RECORD
