from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flightrec.records import NO_MICROBATCH, Key, Phase, Stage
from flightrec.rules.series import SeriesIndex, series_name

A, B = Key("a", "activation", microbatch=0), Key("b", "activation", microbatch=0)


def test_series_is_the_key_without_its_microbatch():
    assert replace(A, microbatch=3).series == replace(A, microbatch=NO_MICROBATCH)
    different = [A, replace(A, part="x"), replace(A, call=1), replace(A, stage=Stage.BACKWARD), B]
    assert len({key.series for key in different}) == 5
    assert len({series_name(key.series) for key in different}) == 5


def test_names_of_odd_layers_stay_apart():
    layers = ["", ".", "a.b", "a_b", 'a", "b', "a\0b", "z" * 3000, "\ud800", "ü"]
    assert len({series_name(Key(layer, "weight")) for layer in layers}) == len(layers)
    assert series_name(Key("a", "b,c")) != series_name(Key("a,b", "c"))


def test_tables_gather_rows_into_series_and_back():
    index = SeriesIndex(torch.device("cpu"))
    for row, key in enumerate([A, B, replace(A, microbatch=1), Key("c", "weight"), replace(A, microbatch=2)]):
        index.add(key, row)
        index.add(key, row)
    tables = index.tables(8)
    assert tables.shape == (3, 3)
    assert tables.rows.tolist() == [0, 2, 4, 1, 0, 0, 3, 0, 0]
    assert tables.real.tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert tables.whole.tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert tables.row_is_seen.tolist() == [True] * 5 + [False] * 3
    assert tables.rows[tables.place_of_row][:5].tolist() == [0, 1, 2, 3, 4]
    assert tables.twin is None
    assert index.tables(8) is tables
    assert index.tables(16).place_of_row.shape == (16,)


def test_row_beyond_the_matrix_waits_for_it():
    index = SeriesIndex(torch.device("cpu"))
    index.add(A, 1)
    index.add(B, 20)
    assert index.tables(16).real.tolist() == [[True], [False]]
    assert index.tables(32).real is None


def test_twins_and_tensors():
    index = SeriesIndex(torch.device("cpu"))
    recompute = replace(A, phase=Phase.RECOMPUTE)
    alone = replace(B, phase=Phase.EVAL)
    for row, key in enumerate([recompute, A, replace(A, call=1), alone]):
        index.add(key, row)
    tables = index.tables(4)
    assert tables.twin is not None
    assert tables.twin.tolist() == [1, 1, 2, 3]
    assert tables.feeds.tolist() == [False, True, True, False]
    for flagged, num_tensors in (([1, 1, 1, 0], 1), ([0, 0, 1, 1], 2), ([0, 0, 0, 0], 0)):
        assert int(tables.num_tensors(torch.tensor(flagged, dtype=torch.bool))) == num_tensors


@pytest.mark.parametrize("num_rows", [1, 3])
def test_grouping_may_merge_more_than_microbatches(num_rows):
    index = SeriesIndex(torch.device("cpu"), lambda key: replace(key.series, part=""))
    for row in range(num_rows):
        index.add(replace(A, part=str(row)), row)
    assert index.num_series == 1
    assert index.series == [A.series]
    assert index.tables(4).shape == (1, num_rows)
