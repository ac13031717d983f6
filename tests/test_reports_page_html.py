"""The page: nothing of an incident becomes markup or script, nothing is loaded, and it stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_support import HOSTILE, LAYERS, write_report_incident
from storage_samples import firing, write_incident
from storage_samples import plain as plain_sample

from flightrec.errors import MissingExtraError
from flightrec.records import Key
from flightrec.reports.page import html
from flightrec.reports.page.document import document_of_path


class Page(HTMLParser):
    """Elements, their attributes and all text outside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] and self.tags[-1][0] not in ("script", "style"):
            self.words.append(data)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_report_incident(tmp_path_factory.mktemp("hostile"), HOSTILE)
    return html.render(document_of_path(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return html.render(document_of_path(write_report_incident(tmp_path_factory.mktemp("plain"), LAYERS)))


def test_hostile_names_are_text(hostile: str, plain: str) -> None:
    bad, good = Page(hostile), Page(plain)
    assert {tag for tag, _ in bad.tags} == {tag for tag, _ in good.tags}
    assert [tag for tag, _ in bad.tags].count("script") == 3
    for tag, attributes in bad.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag != "a" or str(attributes["href"]).startswith("#")
    shown = "".join(bad.words)
    for name in HOSTILE[:3]:
        assert name in shown
    assert "\u202e" not in hostile
    assert "\x1b" not in hostile
    hostile.encode("utf-8")  # no lone surrogate is left


def test_data_for_the_script_cannot_end_it(hostile: str) -> None:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', hostile, re.DOTALL)
    assert data
    assert not re.search(r"[<>&]", data[1])
    found = json.loads(data[1])
    assert len(found["maps"]["rows"]) == len(HOSTILE) + 1
    assert "<" not in json.dumps(found["plots"]).replace("<extra>", "").replace("</extra>", "").replace("<br>", "")


def test_policy_allows_the_two_scripts_and_nothing_else(plain: str) -> None:
    page = Page(plain)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", plain, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert len(hashes) == 2
    assert set(re.findall(r"'sha256-(.*?)'", policy)) == hashes
    assert re.search(r"script-src ((?:'sha256-\S+' ?){2})", policy.split(";")[1])
    for tag, attributes in page.tags:
        assert "src" not in attributes
        assert tag != "link"


def test_size(plain: str) -> None:
    assert len(plain.encode()) < 10 * 10**6
    assert plain.count("plotly.js v") == 1


def test_size_with_names_longer_than_any(tmp_path: Path) -> None:
    keys = [Key(f"{number:04d}" + "<x>" * 1500, "output", microbatch=0) for number in range(150)]
    samples = {1: [plain_sample(key, [1.0], amax=1.0) for key in keys]}
    fired = [firing(key, 1, rule=key.layer, message=key.layer) for key in keys[:20]]
    environment = {f"{number}" + "e" * 5000: ["v" * 500] * 50 for number in range(250)}
    page = html.render(document_of_path(write_incident(tmp_path, samples, fired, environment=environment)))
    assert len(page.encode()) < 7 * 10**6  # 4.8 MB are Plotly's; the texts have 8 MB


def test_what_the_page_tells(plain: str) -> None:
    shown = "".join(Page(plain).words)
    for words in ("What happened", "blocks.0.fc2 activation", "no slot for blocks.0.fc2", "train.py", "triggers:"):
        assert words in shown
    assert shown.count("the first faulty record") <= 1
    assert "128 values (float32): 1 NaN, 1 Inf, 1 zeros" in shown
    assert "float8_e4m3fn holds" in shown


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"torch-flightrec\[report\]"):
        html.check_extra()
