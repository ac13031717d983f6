from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flightrec.config.document import parse
from flightrec.config.load import load, load_text, packaged
from flightrec.config.model import Config, HistoryConfig, IncidentConfig, RingConfig, Selection
from flightrec.config.rules import RULE_CLASSES
from flightrec.errors import ConfigError

DOCS = Path(__file__).parents[1] / "docs" / "configuration.md"
PACKAGED = ["default", "long-pretrain", "nan-hunt", "te-fp8-pretrain"]


def test_sources(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("ring: {iterations: 3}\n")
    expected = Config(ring={"iterations": 3})
    assert load(path) == load(str(path)) == load({"ring": {"iterations": 3}}) == expected
    assert load(expected) is expected
    assert load() == Config()


def test_the_text_of_the_file_is_kept(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfring: {iterations: 3}  # \xc3\xa9\n")
    assert load(path).text == "ring: {iterations: 3}  # \u00e9\n"


def test_errors_stand_in_the_order_of_the_file_and_name_it(tmp_path):
    path = tmp_path / "pretrain.yaml"
    path.write_text(
        "ring: {iteratons: 3}\n"
        "triggers:\n"
        "  - kind: amax_spike\n"
        "    window: 32\n"
        "  - kind: nonfinit\n"
        "    layers: a\n"
        "incident:\n"
        "  limit: 3\n"
        "  limit: 0\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} has 5 errors:"
    places = [re.match(rf"{re.escape(str(path))}:(\d+):(\d+): (\S+): ", line).groups() for line in lines[1:]]
    assert places == [
        ("1", "8", "ring.iteratons"),
        ("4", "13", "triggers[0].window"),
        ("5", "11", "triggers[1].kind"),
        ("9", "3", "incident.limit"),
        ("9", "10", "incident.limit"),
    ]


def test_a_cross_check_is_placed_too():
    with pytest.raises(ConfigError) as caught:
        load_text("select:\n  - {}\n  - layers: a\ntriggers:\n  - kind: nonfinite\n  - {kind: nonfinite}\n", "f.yaml")
    assert [(p.line, p.column, p.dotted) for p in caught.value.problems] == [
        (3, 5, "select[1]"),
        (6, 5, "triggers[1].name"),
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: no such file"),
        ("nan-hunt.yaml", "the packaged configuration of this name is .*configs/nan-hunt.yaml"),
        (Path("/"), "/: cannot be read"),
        (3, "expected a path, a mapping or a Config as configuration, got a int"),
        ({1: 2}, "expected texts as keys, got 1"),
    ],
)
def test_sources_that_are_none(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(source)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"ring: \xff\n")
    with pytest.raises(ConfigError, match="expected UTF-8 text, got the byte 0xff at 6"):
        load(path)
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="at most 1048576 bytes"):
        load(path)


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_files_load_and_explain_themselves(name):
    path = packaged(name)
    assert path == packaged(f"{name}.yaml")
    config = load(path)
    assert load_text(config.to_yaml()) == config
    lines = path.read_text().splitlines()
    assert lines[0] == "# yaml-language-server: $schema=flightrec.schema.json"
    assert len([line for line in lines if "#" in line]) >= 10


def test_default_yaml_is_the_default_and_names_every_setting_but_the_common_ones():
    text = packaged().read_text()
    assert load_text(text) == Config()
    written = parse(text, "default.yaml").data
    assert list(written) == list(Config.model_fields)
    for section, model in {"ring": RingConfig, "incident": IncidentConfig, "history": HistoryConfig}.items():
        assert set(written[section]) == set(model.model_fields)
    assert set(written["select"][0]) == set(Selection.model_fields)
    common = {"name", "severity", "cooldown_iterations", "layers", "tensors", "phases", "min_samples", "rearm"}
    for rule in written["triggers"]:
        own = (
            set(RULE_CLASSES[rule["kind"]].model_fields)
            - common
            - ({"factor"} if rule["kind"] == "loss_jump" else set())
        )
        assert own <= set(rule)


def test_the_example_in_the_comments_of_nan_hunt_works():
    text = packaged("nan-hunt").read_text()
    rules = re.findall(r"^  #   - (\{.*\})$", text, re.M)
    config = load_text("triggers:\n" + "".join(f"  - {rule}\n" for rule in rules))
    masks, nan, _ = config.triggers
    assert [masks.sees("a.mask", "output", "train"), nan.sees("a.mask", "output", "train")] == [True, False]
    assert [masks.sees("a.fc", "output", "train"), nan.sees("a.fc", "output", "train")] == [False, True]


@pytest.mark.parametrize("name", ["nope", "../pyproject", "flightrec.schema", "/etc/passwd", ""])
def test_only_what_is_packaged_is_found(name):
    with pytest.raises(ConfigError, match=r"available: default\.yaml, .*long-pretrain\.yaml, nan-hunt\.yaml"):
        packaged(name)


def _fenced(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(), re.S)


@pytest.mark.parametrize("text", _fenced("yaml"))
def test_yaml_examples_in_the_documentation_load(text):
    load_text(text)


def test_the_python_example_in_the_documentation_runs():
    (example,) = [text for text in _fenced("python") if "load_text" in text]
    names = {}
    exec(example, names)
    assert names["config"] == load(packaged("nan-hunt"))


def test_the_error_example_in_the_documentation_is_what_is_printed():
    (example,) = _fenced("text")
    source = "ring: {iteratons: 4}\ntriggers:\n  - kind: amax_spike\n    window: 32\n  - kind: nonfinit\n"
    with pytest.raises(ConfigError) as caught:
        load_text(source, "pretrain.yaml")
    assert str(caught.value) == example.strip()


def _documented(heading):
    """Defaults that the table under a heading of the documentation gives, by key."""
    section = re.split(r"^#+ ", DOCS.read_text().split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.M))


@pytest.mark.parametrize(
    ("heading", "model", "left_out"),
    [
        ("ring", RingConfig, set()),
        ("select", Selection, set()),
        ("incident", IncidentConfig, set()),
        ("history", HistoryConfig, set()),
        *[
            (kind, RULE_CLASSES[kind], {"kind", "name", "severity", "cooldown_iterations", "layers", "phases", "rearm"})
            for kind in RULE_CLASSES
            if kind not in ("exception", "manual", "metric_threshold")
        ],
    ],
)
def test_the_documentation_lists_every_key_with_its_default(heading, model, left_out):
    documented = _documented(heading)
    assert set(documented) == set(model.model_fields) - left_out
    written = parse("".join(f"{key}: {value.strip('`')}\n" for key, value in documented.items()), "docs").data
    documented_model = model(**written)
    assert documented_model == model()


def test_packaged_files_are_found_beside_an_installed_package(tmp_path):
    """In a wheel ``configs/`` lies inside the package; the checkout must not be needed."""
    root = Path(__file__).parents[1]
    package = tmp_path / "flightrec"
    shutil.copytree(root / "flightrec" / "config", package / "config")
    shutil.copytree(root / "configs", package / "configs")
    for name in ("errors.py", "records.py"):
        shutil.copy(root / "flightrec" / name, package / name)
    (package / "__init__.py").write_text("")
    code = "from flightrec.config.load import load, packaged; load(); print(packaged())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(printed.stdout.strip()) == (package / "configs" / "default.yaml").resolve()
