"""docs/cost_picture.py: its arithmetic, and that every number on a page comes from the results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from flightrec.bench.results import Comparison, Recorded, Study, document

ROOT = Path(__file__).parent.parent
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}


@pytest.fixture(scope="module")
def picture() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("cost_picture", ROOT / "docs" / "cost_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cost_picture"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cost_picture"]


def made(name: str, share: float, num_records: float = 0, num_bytes: float = 0) -> Comparison:
    """A step of 10 ms that becomes longer by a share."""
    off, on = (0.01, 0.01, 0.01), (0.01 * (1 + share),) * 3
    recorded = Recorded(num_records, num_bytes, 0.0, 0.01 * share * 1.2, 0.01 * share / 2, ("a <line>",))
    return Comparison(name, off, on, off, on, recorded=recorded if num_records else None)


STUDY = Study(
    "a model",
    (
        made("flightrec, default.yaml", 0.01, 30, 2e6),
        made("a <tool>", 10.0),
        made("faster than nothing", -0.02),
        Comparison("absent", missing="absent is not installed"),
    ),
)
SCALING = [
    Study("records", tuple(made(str(n), (1e-3 + 20e-6 * n) / 0.01, n, 1e3) for n in (16, 200, 2000))),
    Study("bytes", tuple(made(str(n), (1e-3 + n / 2e12) / 0.01, 32, n) for n in (1 << 20, 1 << 30))),
    Study("tokens", tuple(made(str(n), share, 16, 1e6) for n, share in ((1024, 0.5), (16384, 0.05)))),
]


def test_a_bar_is_as_long_as_its_logarithm(picture: ModuleType) -> None:
    assert picture.share_of_axis(0.05, 4) == 0.0
    assert picture.share_of_axis(1.0, 4) == pytest.approx(0.25)
    assert picture.share_of_axis(1000.0, 4) == pytest.approx(1.0)
    assert picture.decades_of(STUDY.comparisons[:3]) == 4  # 0.1% to 1000%
    lengths = {}
    tree = ET.fromstring(picture.bar_chart(STUDY))
    for name, bar in zip(STUDY.comparisons, tree.iter("{http://www.w3.org/2000/svg}rect"), strict=False):
        lengths[name.name] = (float(bar.get("width")), bar.get("class"))
    assert lengths["a <tool>"][0] == pytest.approx(4 * lengths["flightrec, default.yaml"][0], abs=0.2)
    assert lengths["faster than nothing"] == (0.0, "other")
    assert lengths["flightrec, default.yaml"][1] == "ours"


def test_curves_are_explained_by_their_own_points(picture: ModuleType) -> None:
    assert picture.line_through([(1, 3), (3, 7), (5, 11)]) == pytest.approx((1, 2))
    with pytest.raises(ValueError, match="two different"):
        picture.line_through([(1, 3)])
    records, kept, tokens = picture.explained(SCALING)
    assert "20 us a record and 1 ms an iteration" in records
    assert "from 16 to 2000 records" in records
    assert "2 TB/s" in kept and "2.00 times the byte bound" in kept
    assert "from 50% to 5% of a step" in tokens
    tree = ET.fromstring(picture.curves(SCALING))
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polyline"))) == 9
    assert picture.count(65536.0) == "64Ki" and picture.count(320.0) == "320"
    assert picture.count(2000.0) == "2000"
    assert (picture.signed(46712.0), picture.signed(-0.123456), picture.signed(9.999)) == ("+46700", "-0.123", "+10")


def test_readme_section_is_put_in_and_replaced(picture: ModuleType) -> None:
    text = "# Title\n\n## Use it\n\nThree lines.\n\n## Install\n\npip\n"
    once = picture.with_section(text, picture.readme_section(STUDY, "NVIDIA H200"))
    assert once.index("Three lines") < once.index("## What it costs") < once.index("## Install") < once.index("pip")
    assert "**flightrec, default.yaml** | +1% | 0.1 ms" in once
    assert "| absent | absent is not installed |" in once
    again = picture.with_section(once, picture.readme_section(STUDY, "another"))
    assert again == once.replace("NVIDIA H200: ", "another: ")
    with pytest.raises(ValueError, match="## Install"):
        picture.with_section("# Title\n", "x")


def test_command_writes_pages_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Title\n\n## Install\n")
    for name, studies in (("side", [STUDY]), ("scaling", SCALING), ("prediction", [STUDY])):
        (tmp_path / f"{name}.json").write_text(json.dumps(document(studies, MACHINE), allow_nan=False))
    program = [sys.executable, ROOT / "docs" / "cost_picture.py", tmp_path / "side.json", "--root", tmp_path]
    program += ["--scaling", tmp_path / "scaling.json", "--prediction", tmp_path / "prediction.json"]
    subprocess.run([str(word) for word in program], check=True)
    page = (tmp_path / "docs" / "benchmarks" / "cost-h200.md").read_text()
    assert page.startswith("# What recording costs on an H200\n")
    for words in (
        "a step without recorder takes 10 ms",
        "| 30 | 1.907 | 0.12 | 0.1 | +20% |",
        "absent is not installed",
    ):
        assert words in page, words
    assert "## What it costs" in (tmp_path / "README.md").read_text()
    for name in ("cost.svg", "cost_scaling.svg"):
        text = (tmp_path / "docs" / name).read_text()
        ET.fromstring(text)
        assert "url(" not in text and len(text) < 30_000
