from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
from storage_samples import firing, history_piece, identity, iterations

from flightrec.records import Key, Phase, Stage
from flightrec.storage import schema, tables, text
from flightrec.storage.facts import IncidentFacts
from flightrec.storage.history import Columns


def filled(tmp_path: Path, **changes) -> h5py.File:
    values = {
        "identity": identity(),
        "config_text": "a: 1",
        "environment": {},
        "trigger": firing(None, 4),
        "firings": [],
        "iterations": [],
    }
    file = h5py.File(tmp_path / "x.h5", "w")
    tables.fill_facts(file, IncidentFacts(**(values | changes)))
    return file


def test_statistics_are_nxdata_that_share_their_axes(tmp_path: Path) -> None:
    with filled(tmp_path, statistics=[history_piece(3, 1)]) as file:
        assert set(file["history"]) == set(schema.HISTORY_STATISTICS)
        for name in ("amax", "scale_max"):
            entry = file["history"][name]
            assert (entry.attrs["NX_class"], entry.attrs["signal"], entry.attrs["name"]) == ("NXdata", "values", name)
            assert entry.attrs["axes"].tolist() == ["iterations", "series"]
            assert entry["values"].shape == (4, 3)
            assert entry["values"].dtype == np.float32
            assert entry["values"].dims[0][0] == file["history/numel/iterations"]
            assert entry["iterations"] == file["history/numel/iterations"]
            assert entry["attempts"] == file["history/numel/attempts"]
            assert entry["values"].dims[1][0] == entry["series"] == file["history/numel/series"]
        names = file["names"].asstr()[()]
        assert [names[row["layer"]] for row in file["series"]] == ["blocks.1.fc1", "plain.0", "plain.1"]
        assert entry["labels"].asstr()[()].tolist()[:2] == ["blocks.1.fc1 activation forward", "plain.0 output forward"]
        assert entry["labels"].dims[0][0] == entry["series"]
        assert entry["series"][()].tolist() == [0, 1, 2]
        assert np.isnan(file["history/scale_max/values"][:, 1:]).all()


def test_labels_tell_part_phase_and_call_of_any_name(tmp_path: Path) -> None:
    key = Key("a\0b", "gradient", "aux.0", phase=Phase.RECOMPUTE, call=2, stage=Stage.BACKWARD)
    with filled(tmp_path, statistics=[replace(history_piece(2, 1), plain_series=[key])]) as file:
        labels = text.read_text_table(file["history/amax"], "labels")
        assert labels[1] == "a\0b gradient[aux.0] backward recompute call 2"


def test_a_history_of_rows_has_a_scale_for_each_axis(tmp_path: Path) -> None:
    with filled(tmp_path, history={"metric.x": ([1, 2], np.ones((2, 3, 4)))}) as file:
        entry = file["history/metric.x"]
        assert entry.attrs["axes"].tolist() == ["iterations", "rows", "rows_2"]
        assert [len(dimension[0]) for dimension in entry["values"].dims] == [2, 3, 4]
        assert (file.attrs["default"], file["history"].attrs["default"]) == ("history", "metric.x")


def test_chunks_of_series_without_a_quantized_tensor_take_no_room(tmp_path: Path) -> None:
    piece = history_piece(1000, 10, samples=300)
    with filled(tmp_path, statistics=[piece]) as file:
        plain, quantized = file["history/amax/values"], file["history/scale_max/values"]
        assert plain.shape == quantized.shape == (300, 1000)
        assert plain.chunks == (250, 256)
        assert plain.compression is None
        assert plain.id.get_storage_size() == 8 * 250 * 256 * 4
        assert quantized.id.get_storage_size() == 2 * 250 * 256 * 4
        assert np.array_equal(plain[:, 10:], piece.plain[:, 4])


def test_what_has_no_value_is_left_out(tmp_path: Path) -> None:
    piece = history_piece(3, 1)
    piece.quantized[:, schema.HISTORY_STATISTICS.index("history_ratio")] = np.nan
    piece.plain[:, :, 1] = np.nan  # of a model's earlier shape, say
    with filled(tmp_path, statistics=[piece]) as file:
        assert "history_ratio" not in file["history"]
        assert len(file["series"]) == 2
    empty = history_piece(2, 1, samples=0)
    with filled(tmp_path, statistics=[empty]) as file:
        assert not {"history", "series"} & set(file)


def test_an_error_among_the_statistics_costs_nothing_else(tmp_path: Path) -> None:
    broken = replace(history_piece(), attempts=np.zeros(2, np.int64))
    with filled(tmp_path, statistics=[broken], history={"loss": ([1], [2.0])}) as file:
        assert set(file["history"]) == {"loss"}
        assert "history of statistics" in file["problems"].asstr()[1]


def test_a_series_of_both_kinds_is_one(tmp_path: Path) -> None:
    piece = history_piece(2, 1)
    key = Key("blocks.1.fc1", "activation")
    piece = replace(piece, plain_series=[key])
    piece.quantized[:2] = np.nan
    piece.plain[2:] = np.nan
    columns = Columns([piece])
    assert columns.series == [key]
    assert columns.values("amax")[:, 0].tolist() == [4, 104, 204, 304]
    assert np.isnan(columns.values("scale_min")[:, 0]).tolist() == [True, True, False, False]


def test_random_states_and_facts_of_iterations(tmp_path: Path) -> None:
    states = {"torch_cpu": np.arange(5, dtype=np.uint8), "transformer_engine.a/b": np.ones(3, np.uint8)}
    entries = [
        replace(entry, random_states=states, facts={"step_time_s": 0.5, "data": {"n": {"0": 1.0}}})
        for entry in iterations({4: [], 5: []})
    ]
    with filled(tmp_path, iterations=entries) as file:
        assert list(file["rng"]) == ["0.0000004", "0.0000005"]
        assert file["rng/0.0000005/torch_cpu"][()].tolist() == [0, 1, 2, 3, 4]
        assert file["rng/0.0000005/transformer_engine.a%2Fb"].dtype == np.uint8
        row = file["iterations"][0]
        assert row["step_time_s"] == 0.5
        assert np.isnan([row["data_time_s"], row["loss_scale"]]).all()
        names = file["names"].asstr()[()]
        assert (names[row["optimizer"]], names[row["data"]]) == ("", '{"n": {"0": 1.0}}')
