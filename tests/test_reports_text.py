"""The terminal report: content, width, and that texts of a file are data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from incident_support import write_incident

from flightrec.reports import text
from flightrec.reports.summary import summarize_path
from flightrec.storage.facts import Blind


def rendered(document: dict[str, Any]) -> str:
    file = io.StringIO()
    text.render(document, text.report_console(file))
    return file.getvalue()


def section(report: str, title: str) -> list[str]:
    lines = report.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((number for number in range(start, len(lines)) if not lines[number]), len(lines))
    return lines[start:end]


def test_sections_tell_the_story(incident_folder: Path) -> None:
    report = rendered(summarize_path(incident_folder))
    assert "iterations 210 to 212, 21 records" in report
    assert section(report, "What fired")[0].startswith("  fault   nan in iteration 212: blocks.0.fc2 activation")
    assert section(report, "Where it began")[0] == "  1. blocks.0.fc2 activation"
    way = section(report, "Its way")
    assert [line.split()[:2] for line in way[2:]] == [
        ["forward", "blocks.0.fc2"],
        ["forward", "blocks.0"],
        ["forward", "blocks.1.fc1"],
        ["loss", "loss"],
        ["backward", "blocks.1.fc1"],
        ["backward", "blocks.0.fc2"],
    ]
    around = section(report, "Statistics around it")
    assert [line.split()[0] for line in around[1:]] == ["210", "211", "212"]
    assert "<" in around[3]
    assert "63 iterations" in report


def test_80_columns_whatever_the_names_are(tmp_path: Path) -> None:
    layer = "model.decoder." + "very_long_module_name." * 20 + "fc2"
    message = "a sentence without any " + "x" * 300
    report = rendered(summarize_path(write_incident(tmp_path, layer=layer, message=message)))
    assert max(map(len, report.splitlines())) <= text.WIDTH
    assert "fc2 activation" in section(report, "Its way")[2]


def test_no_line_ends_in_spaces(incident_folder: Path) -> None:
    assert not [line for line in rendered(summarize_path(incident_folder)).splitlines() if line != line.rstrip()]


def test_same_rule_in_the_same_iteration_is_told_once(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    document["firings"] += [{**document["trigger"], "message": f"tensor {number}"} for number in range(40)]
    fired = section(rendered(document), "What fired")
    assert "and 40 more" in fired[0] + fired[1]
    assert len(fired) <= 4


def test_long_ways_are_folded(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    first = document["way"][0]
    document["way"] = [{**first, "sequence": number} for number in range(100)] + document["way"][-2:]
    way = section(rendered(document), "Its way")
    assert len(way) < 22
    assert "... and 88 more" in "\n".join(way)


def test_blindness_is_told(tmp_path: Path) -> None:
    blind = [Blind(-1, -1, "embedding", "activation", "sparse"), Blind(0, 211, "", "", "the writer was late")]
    told = section(rendered(summarize_path(write_incident(tmp_path, blind=blind))), "Not recorded")
    assert told == ["  embedding activation: sparse", "  iteration 211: the writer was late"]


def test_nothing_blamed(incident_folder: Path) -> None:
    document = {**summarize_path(incident_folder), "blame": [], "way": [], "around": []}
    report = rendered(document)
    assert "nothing was found" in report
    assert "no recorded tensor shows it" in report


def test_ties_are_told(incident_folder: Path) -> None:
    document = summarize_path(incident_folder)
    document["blame"][0]["tied_with"] = [{"rank": 3, "microbatch": 1}]
    assert "as early as rank 3 microbatch 1" in rendered(document)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"),
        ("Infinity", "Inf"),
        ("-Infinity", "-Inf"),
        ("NaN", "NaN"),
        (2048.0, "2048"),
        (1048576.0, "1.05e+06"),
        (0.0, "0"),
        (5.36e32, "5.36e+32"),
        (-0.25, "-0.25"),
    ],
)
def test_number(value: Any, told: str) -> None:
    assert text.number(value) == told


@pytest.mark.parametrize(
    ("value", "told"), [(None, "-"), (0, "0%"), (1e-6, "<0.01%"), (0.998, "99.8%"), (1, "100%"), ("NaN", "-")]
)
def test_share(value: Any, told: str) -> None:
    assert text.share(value) == told


def test_shorten_keeps_both_ends() -> None:
    assert text.shorten("abc", 3) == "abc"
    short = text.shorten("decoder.layers.17.self_attention.linear_qkv activation", 30)
    assert len(short) == 30
    assert short.startswith("decoder")
    assert short.endswith("linear_qkv activation"[-12:])


def test_clean_shows_what_a_terminal_would_obey() -> None:
    assert text.clean("a\x1b[2Jb\u202e\ud800\n") == "a\\x1b[2Jb\\u202e\\ud800\\n"
    assert text.clean("blöck.層") == "blöck.層"


def test_sparkline() -> None:
    assert text.sparkline([1, 2, 3]) == "▁▅█"
    assert text.sparkline([5.0, 5.0]) == "▁▁"
    assert text.sparkline([1.0, "NaN", 2.0]) == "▁!█"
    assert text.sparkline(["NaN"]) == "!"
    assert len(text.sparkline(list(range(500)), width=60)) == 60
