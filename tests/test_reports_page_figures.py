"""Labels are plain text for Plotly, and every figure is one that Plotly accepts."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from report_support import COLUMNS, FAULTY, HOSTILE, ROWS, values, write_report_incident

from flightrec.reports.page import figures
from flightrec.reports.page.document import document_of_path
from flightrec.reports.page.html import plots_of


@pytest.mark.parametrize("name", HOSTILE)
def test_label_has_neither_tags_nor_templates(name: str) -> None:
    shown = figures.label(name, 1000)
    assert "<" not in shown
    assert "%{" not in shown
    assert shown.isprintable()


def test_label_keeps_what_is_harmless_and_unescapes_to_the_text() -> None:
    assert figures.label("decoder.layers.0.mlp.fc1") == "decoder.layers.0.mlp.fc1"
    assert html.unescape(figures.label("a<b>&lt;")) == "a<b>&lt;"
    assert len(figures.label("x" * 500)) == figures.MAX_LABEL


def test_all_figures_are_valid_and_hold_the_numbers(tmp_path: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    document = document_of_path(write_report_incident(tmp_path))
    plots = plots_of(document)
    for figure in plots.values():
        graph_objects.Figure(figure)  # refuses every word that Plotly does not know
    suspect = document["suspects"][0]
    assert suspect["key"]["layer"] == "blocks.0.fc2"
    bars = plots["values-0"]["data"]
    assert sum(bars[0]["y"]) + sum(bars[1]["y"]) == ROWS * COLUMNS - 1 - 2  # one zero, two not finite
    assert values(FAULTY).size == sum(plots["codes-0"]["data"][0]["y"]) + 1  # one NaN code
    assert plots["values-0"]["layout"]["shapes"]
    assert any(name.startswith("scales-") for name in plots)
    assert plots["history-0"]["data"][0]["x"][-1] == FAULTY
    events = dict(zip(plots["timeline"]["layout"]["yaxis2"]["ticktext"], plots["timeline"]["data"][1:], strict=True))
    assert events["it was noticed"]["x"] == [FAULTY]
    assert events["loss not finite"]["x"] == [FAULTY]
    assert events["recorded"]["x"] == [FAULTY - 1, FAULTY]


def test_rewound_runs_get_a_curve_an_attempt() -> None:
    entry = {"name": "loss", "attempts": [0, 0, 1], "iterations": [5, 6, 5], "values": [1, None, 2]}
    curves = figures.scalar(entry)["data"]
    assert [curve["x"] for curve in curves] == [[5, 6], [5]]
    assert curves[1]["name"] == "loss, attempt 1"
