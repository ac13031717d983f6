"""The HTML report in a real, headless Chromium: plots, search, keyboard, phone, and names that would be scripts.

Without a browser these tests skip; ``.ci/run`` installs Debian's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser_support import Browser, find_browser, visible_text
from report_support import HOSTILE, LAYERS, write_report_incident

from flightrec.reports.page.document import document_of_path
from flightrec.reports.page.html import render

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")

NAMES = (*HOSTILE, *LAYERS[2:])
WIDTH_OF = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
DRAWN = """Array.from(document.querySelectorAll('.plot')).filter(place => place.getClientRects().length).map(place =>
  ({name: place.dataset.plot || place.dataset.map,
    marks: place.querySelectorAll('.main-svg :is(.points path, .point, .js-line, .hm image)').length}))"""


@contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """The report of an incident whose layers are named like attacks and like layers; seen on a wide screen."""
    path = folder / "report.html"
    path.write_text(render(document_of_path(write_report_incident(folder, NAMES))), encoding="utf-8")
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(PROGRAM, Path(profile)) as found:
        found.open(path)
        yield found


def keyboard_skips_to_the_report_and_reaches_the_search(page: Browser) -> None:
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.press("Enter")
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "search"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def keyboard_opens_details(page: Browser) -> None:
    closed = "document.querySelector('#setup details')"
    assert page.evaluate(f"{closed}.open") is False
    page.evaluate(f"{closed}.querySelector('summary').focus()")
    page.press("Enter")
    assert page.evaluate(f"{closed}.open") is True


def every_plot_is_drawn(page: Browser) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(entry => { entry.open = true; })")
    page.wait("document.querySelectorAll('.plot').length === document.querySelectorAll('.plot .main-svg').length / 3")
    page.wait("document.documentElement.dataset.drawn === 'all'")
    drawn = page.evaluate(DRAWN)
    names = {entry["name"] for entry in drawn}
    assert {"timeline", "amax", "underflow", "saturated", "error", "nonfinite", "scalar-1"} <= names
    for kind in ("values", "codes", "scales", "history"):
        assert any(name.startswith(kind) for name in names), kind
    assert [entry["name"] for entry in drawn if not entry["marks"]] == []


def search_chooses_tensors_and_rows_of_heat_maps(page: Browser) -> None:
    rows = "Array.from(document.querySelectorAll('#tensors tr[data-name]')).filter(r => !r.hidden).length"
    labels = "document.querySelectorAll('[data-map=amax] .ytick text').length"
    everything = page.evaluate(rows), page.evaluate(labels)
    assert everything == (2 * len(NAMES) + 1, len(NAMES) + 1)
    page.evaluate("document.getElementById('search').focus()")
    page.write("BLOCKS.1.FC2")
    page.wait("document.getElementById('found').textContent !== ''")
    assert page.evaluate("document.getElementById('found').textContent") == f"2 of {everything[0]} tensors"
    assert (page.evaluate(rows), page.evaluate(labels)) == (2, 1)
    page.evaluate("document.getElementById('search').value = ''")
    page.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
    page.wait("document.getElementById('found').textContent === ''")
    assert (page.evaluate(rows), page.evaluate(labels)) == everything


def a_chosen_tensor_changes_the_heat_maps(page: Browser) -> None:
    page.evaluate("document.getElementById('tensor').value = 'output'")
    page.evaluate("document.getElementById('tensor').dispatchEvent(new Event('change'))")
    assert visible_text(page, ["[data-map=amax] .ytick text"]) == ["head"]
    page.evaluate("document.getElementById('tensor').value = ''")
    page.evaluate("document.getElementById('tensor').dispatchEvent(new Event('change'))")


def names_stay_text(page: Browser) -> None:
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
    assert page.evaluate("document.querySelectorAll('.plot a, .plot tspan[style*=bold]').length") == 0
    shown = visible_text(page, ["[data-map=amax] .ytick text"])
    assert HOSTILE[0] in shown
    assert any("<b>bold</b> &lt;i&gt;" in text for text in shown)
    names = visible_text(page, ["#tensors td.name"])
    assert f"{HOSTILE[1]} activation" in names


def nothing_overflows_on_a_phone(page: Browser) -> None:
    page.resize(360, 740)
    page.wait("document.documentElement.clientWidth === 360")
    page.wait("Array.from(document.querySelectorAll('.main-svg')).every(e => e.getBoundingClientRect().right <= 361)")
    assert page.evaluate(WIDTH_OF) == [360, 360]


def dark_and_light_follow_the_system(page: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    letters = "getComputedStyle(document.querySelector('[data-plot=timeline] .xtick text')).fill"
    light = page.evaluate(background), page.evaluate(letters)
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait(f"{letters} !== {light[1]!r}")
    assert page.evaluate(background) != light[0]


def no_error_no_refusal_no_request(page: Browser) -> None:
    """What all steps before made the page do is in its log."""
    assert page.told() == []
    assert page.requests() == []
    assert page.evaluate("typeof window.hacked") == "undefined"


def the_policy_is_what_refuses_foreign_scripts(page: Browser) -> None:
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked=9'}))"
    )
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in line for line in page.told())


STEPS = (
    keyboard_skips_to_the_report_and_reaches_the_search,
    keyboard_opens_details,
    every_plot_is_drawn,
    search_chooses_tensors_and_rows_of_heat_maps,
    a_chosen_tensor_changes_the_heat_maps,
    names_stay_text,
    nothing_overflows_on_a_phone,
    dark_and_light_follow_the_system,
    no_error_no_refusal_no_request,
    the_policy_is_what_refuses_foreign_scripts,
)


def test_report(tmp_path: Path) -> None:
    """One browser, one page, one step after the other: starting and loading take longer than all of them."""
    with opened(tmp_path) as page:
        for step in STEPS:
            step(page)
