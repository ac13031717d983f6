"""The verdict on the page: complete whatever it lacks, and as text whatever it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_support import FAULTY, HOSTILE, LAYERS, write_report_incident
from storage_samples import firing, plain, write_incident

from flightrec.analysis.blame import blame
from flightrec.analysis.incident import open_incident
from flightrec.records import Key
from flightrec.reports.page import document, html, story, suspects
from flightrec.reports.summary import key_of
from flightrec.storage import read

KEY = key_of(Key(LAYERS[1], "activation"))
PLACE = {"rank": 0, "attempt": 0, "iteration": FAULTY, "key": KEY, "sequence": 1, "record": 1}
CHANGE = {"label": "origin", "rank": 0, "attempt": 0, "iteration": FAULTY, "key": KEY, "sentence": f"amax {HOSTILE[0]}"}
VERDICT = {
    "kind": "numbers",
    "confidence": "certain",
    "began": {"after": PLACE, "before": PLACE, "between": ["softmax", HOSTILE[1]]},
    "cause": "a cause of its own",
    "evidence": [HOSTILE[2]],
    "precursors": [{**CHANGE, "label": "precursor"}],
    "changes": [CHANGE] * 20,
    "elements": {"num_faulty": 7, "numel": 128, "shape": [8, 16], "indices": [[3, 5]], "values": ["NaN"]},
    "missing": ["nobody recorded the router"],
    "advice": "select:\n  - {layers: '*'}",
    "story": f"All began with {HOSTILE[0]}.",
}


def test_without_a_verdict_the_first_finding_is_the_story(tmp_path: Path) -> None:
    with read.open_incident(write_report_incident(tmp_path)) as incident:  # storage's own: it has no verdict
        found = story.verdict_of(incident, blame(incident))
    assert found.keys() == story.EMPTY.keys()
    assert found["story"].startswith(
        f"What went wrong first, in iteration {FAULTY}: {LAYERS[1]} activation holds 1 NaN"
    )
    assert f"noticed in iteration {FAULTY} by the rule {LAYERS[0]}" in found["story"]
    assert found["began"]["before"]["key"]["layer"] == LAYERS[1]


def test_nothing_blamed(tmp_path: Path) -> None:
    with read.open_incident(write_incident(tmp_path, {1: []}, [firing(None, 1, rule="hang", kind="hang")])) as incident:
        found = story.verdict_of(incident, [])
    assert found["story"] == (
        "No recorded tensor shows where it began. It was noticed in iteration 1 by the rule hang: hang fired."
    )
    assert found["began"]["before"] is None


def test_every_field_is_there_for_real_incidents(tmp_path: Path) -> None:
    with open_incident(write_report_incident(tmp_path)) as incident:
        found = story.verdict_of(incident, blame(incident))
    assert story.EMPTY.keys() <= found.keys()
    assert found["story"]


@pytest.mark.parametrize("lacking", [{}, {"began": None, "elements": None, "changes": None}, {"began": {}}])
def test_complete(lacking: dict) -> None:
    found = story.complete(lacking)
    assert found["began"] == {"after": None, "before": None, "between": []}
    assert found["changes"] == []
    assert story.complete({"changes": [{"sentence": "x"}]})["changes"][0]["label"] == ""


def test_the_page_tells_all_of_a_verdict_as_text(tmp_path: Path) -> None:
    told = document.document_of_path(write_report_incident(tmp_path))
    page = html.render({**told, "verdict": story.complete(VERDICT)})
    for words in ("a cause of its own", "nobody recorded the router", "select:", "certain", "7 of 128", "and 8 more"):
        assert words in page, words
    assert "All began with &lt;script&gt;window.hacked=1&lt;/script&gt;." in page
    for name in HOSTILE:
        assert name not in page


def test_where_a_statistic_changed_is_looked_at(tmp_path: Path) -> None:
    with open_incident(write_report_incident(tmp_path)) as incident:
        chosen = suspects.choose(incident, story.complete({"changes": [CHANGE, {**CHANGE, "iteration": 1}]}), [])
        assert chosen[0][0].key.series == Key(LAYERS[1], "activation")
        assert chosen[0][0].iteration == FAULTY
        assert chosen[0][1] == ("where a statistic changed first", "what the trigger fired on")
        assert suspects.choose(incident, story.complete({"changes": [{**CHANGE, "rank": 5}]}), [])


def test_a_record_without_bytes_is_still_a_suspect(tmp_path: Path) -> None:
    keys = [Key(f"layer.{number}", "output", microbatch=0) for number in range(12)]
    samples = {1: [plain(key, [float("nan")], nan_count=1.0) for key in keys]}
    for sample in samples[1][:3]:
        sample.arrays = {}
    with open_incident(write_incident(tmp_path, samples, [firing(keys[0], 1)])) as incident:
        chosen = suspects.choose(incident, {}, blame(incident))
    assert [record.index for record, _ in chosen] == [0, 1, 3, 4, 5, 6]
