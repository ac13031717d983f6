from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from storage_samples import firing, history_piece, write_incident

from flightrec.errors import ConfigError, IncidentError
from flightrec.records import Key, Phase, Stage
from flightrec.storage.read import open_incident
from flightrec.storage.series import History


def history(tmp_path: Path, **changes) -> History:
    loss = {"loss": ([9, 10, 11, 12], [4.0, 3.0, 2.0, 1.0], [0, 0, 1, 1])}
    values = {"history": loss, "statistics": [history_piece(5, 2)], **changes}
    tmp_path.mkdir(exist_ok=True)
    return open_incident(write_incident(tmp_path, {}, [firing(None, 12)], **values)).history


def test_it_is_a_mapping_of_columns(tmp_path: Path) -> None:
    found = history(tmp_path)
    assert found.scalars == ("loss",)
    assert {"loss", "amax", "scale_max"} <= set(found)
    assert len(found) == 1 + len(found.statistics)
    iterations, values = found["amax"]
    assert iterations.tolist() == [9, 10, 11, 12]
    assert values.shape == (4, 5)
    assert values.dtype == np.float32
    assert found["loss"][1].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert found.attempts_of("loss").tolist() == [0, 0, 1, 1]
    assert "5 series" in repr(found)
    with pytest.raises(KeyError, match="no history of 'los'; there is"):
        found["los"]


def test_series_are_selected_by_name(tmp_path: Path) -> None:
    found = history(tmp_path)
    assert [series.key.layer for series in found.find(layer="blocks.*")] == ["blocks.1.fc1", "blocks.2.fc1"]
    assert [series.column for series in found.find(tensor=["output"], phase=Phase.TRAIN, stage="forward")] == [2, 3, 4]
    assert found.find(call=1) == found.find(phase="eval") == found.find(stage=Stage.LOSS) == []
    assert found.series(layer="re:.*2.fc1").key == Key("blocks.2.fc1", "activation")
    with pytest.raises(ConfigError, match="pattern"):
        found.find(layer="re:(")


@pytest.mark.parametrize(("layer", "said"), [("blocks.*", "2 series of 5"), ("none", "no series of 5")])
def test_none_or_several_are_refused_with_some_names(layer: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(IncidentError, match=f"{said} are selected, expected one: activation of 'blocks.1.fc1' in"):
        history(tmp_path).series(layer=layer)


def test_a_series_gives_every_statistic(tmp_path: Path) -> None:
    series = history(tmp_path).series(layer="blocks.2.fc1")
    assert series["mean"].tolist() == [6.125, 106.125, 206.125, 306.125]
    assert series.attempts.tolist() == [0, 0, 0, 0]
    assert repr(series) == "<Series activation of 'blocks.2.fc1' in train, forward>"
    with pytest.raises(KeyError, match="no statistic 'amx'; there are numel"):
        series["amx"]


def test_a_statistic_that_nothing_has_reads_as_nan(tmp_path: Path) -> None:
    piece = history_piece(2, 0)
    series = history(tmp_path, statistics=[piece]).series(layer="plain.1")
    assert np.isnan(series["scale_max"]).all()
    assert len(series["scale_max"]) == 4


def test_an_incident_without_statistics(tmp_path: Path) -> None:
    found = history(tmp_path, statistics=[])
    assert (found.statistics, found.all_series, found.iterations.tolist(), found.attempts.tolist()) == ((), [], [], [])
    with pytest.raises(IncidentError, match=r"no series of 0 are selected, expected one$"):
        found.series(layer="x")
    assert dict(history(tmp_path / "2", statistics=[], history={})) == {}


def test_a_wide_history_lies_in_chunks(tmp_path: Path) -> None:
    wide = history_piece(600, 0)
    found = history(tmp_path, statistics=[wide])
    values = h5py.File(tmp_path / "rank00000.test.facts.h5")["history/amax/values"]
    assert values.chunks == (4, 256)
    assert found.series(layer="plain.599")["amax"].tolist() == wide.plain[:, 4, 599].tolist()


def test_a_damaged_table_is_told(tmp_path: Path) -> None:
    history(tmp_path)
    path = tmp_path / "rank00000.test.facts.h5"
    with h5py.File(path, "r+", locking=False) as file:
        del file["history/amax/values"]
    with open_incident(path) as incident, pytest.raises(IncidentError, match="amax"):
        incident.history["amax"]


def test_later_pieces_add_samples_and_series(tmp_path: Path) -> None:
    first = history_piece(2, 1, samples=3)
    more = history_piece(4, 2, samples=2)
    later = replace(more, iterations=np.array([12, 13]), attempts=np.array([0, 1]))
    found = history(tmp_path, statistics=[first, later])
    times = list(zip(found.attempts.tolist(), found.iterations.tolist(), strict=True))
    assert times == [(0, 10), (0, 11), (0, 12), (1, 13)]  # (0, 12) is in both and counts once
    assert [series.key.layer for series in found.all_series] == ["blocks.1.fc1", "blocks.2.fc1", "plain.0", "plain.1"]
    assert found.series(layer="plain.0")["numel"].tolist() == [0, 100, 200, 100]
    assert np.isnan(found.series(layer="blocks.2.fc1")["numel"]).tolist() == [True, True, True, False]
