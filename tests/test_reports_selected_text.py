from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from storage_samples import Sample, firing, statistics, write_incident

from flightrec.records import Key
from flightrec.reports import selected_text
from flightrec.reports.selected import inspect_path
from flightrec.reports.text import report_console

EVIL = "evil\x1b[2J\u202e[bold]." + "long" * 20


def told(path: Path, **options: object) -> str:
    file = io.StringIO()
    selected_text.render_selected(inspect_path(path, {}, **options), report_console(file))
    return file.getvalue()


def incident(tmp_path: Path, *, microbatches: int = 1, layer: str = "blocks.0.fc1", records: int = 1) -> Path:
    arrays = {
        "high_precision": (np.array([[0.5, 1.0], [2.0, np.nan]], "<f4"), "float32"),
        "data": (np.array([[0x38, 0x40], [0x48, 0x7F]], "u1"), "float8_e4m3fn"),
        "scale": (np.array(2.0, "<f4"), "float32"),
    }
    numbers = statistics(numel=4, nan_count=1, quantized_numel=4, quantized_saturated_count=2, amax=2.0)
    samples = [
        Sample(Key(layer if not n else f"{layer}.{n}", "activation", microbatch=m), arrays, numbers, 0)
        for m in range(microbatches)
        for n in range(records)
    ]
    return write_incident(tmp_path, {4: samples}, [firing(samples[0].key, 4)])


def test_records_and_elements(tmp_path: Path) -> None:
    lines = [line.rstrip() for line in told(incident(tmp_path), values=True).splitlines()]
    assert lines[2] == "Selected records  1 of 1"
    assert lines[3].split() == ["iter", "layer", "and", "tensor", "amax", "NaN,", "Inf", "satur.", "underfl."]
    assert lines[4].split() == ["4", "blocks.0.fc1", "activation", "2", "1", "50%", "-"]
    assert "iteration 4, microbatch 0, forward, 2 x 2, float8_e4m3fn" in lines[7]
    assert lines[8].strip() == "around [1, 1]: the first value that is not finite"
    assert lines[9].split() == ["index", "value", "code", "number", "x", "scale", "decoded"]
    assert [line.split() for line in lines[10:]] == [
        ["[0,", "1]", "1", "0x40", "2", "0.5", "1"],
        ["[1,", "0]", "2", "0x48", "4", "0.5", "2"],
        ["[1,", "1]", "<", "NaN", "0x7f", "NaN", "0.5", "NaN"],
    ]


def test_microbatches_have_a_column_where_there_are_several(tmp_path: Path) -> None:
    lines = told(incident(tmp_path, microbatches=2)).splitlines()
    assert lines[3].split()[:2] == ["iter", "mb"]
    assert [line.split()[:2] for line in lines[4:6]] == [["4", "0"], ["4", "1"]]


def test_names_are_shown_and_never_obeyed_in_80_columns(tmp_path: Path) -> None:
    shown = told(incident(tmp_path, layer=EVIL), values=True)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert r"evil\x1b" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_more_records_than_are_printed_are_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(selected_text, "NUM_ROWS", 2)
    path = incident(tmp_path, records=5)
    assert "... and 3 more; --json has all, --worst N the worst" in told(path)
    assert "5 of 5, the worst 2" in told(path, worst=2)
    assert "more" not in told(path, worst=2)
