"""What an nvdlfw_inspect configuration asks of flightrec, and how it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flightrec.config.inspection import InspectPlan, is_inspect_file, load_inspect, looks_like_inspect
from flightrec.config.inspection_section import FlightRecorderSection, TensorOptions
from flightrec.config.load import packaged
from flightrec.errors import ConfigError


def section(**recorder: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {"FlightRecorder": {"enabled": True, **recorder}},
    }


def load(**recorder: Any) -> InspectPlan:
    return load_inspect({"a": section(**{"tensors": ["activation"], **recorder})})


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_inspect(source)
    return str(caught.value)


def text(recorder: str, name: str = "flight") -> str:
    body = "".join(f"      {line}\n" for line in recorder.splitlines())
    return (
        f"{name}:\n  enabled: True\n  layers: {{layer_name_regex_pattern: .*}}\n  transformer_engine:\n"
        f"    FlightRecorder:\n{body}"
    )


def test_the_shipped_file_is_one_and_the_other_shipped_files_are_not() -> None:
    for path in packaged().parent.glob("*.yaml"):
        assert is_inspect_file(path) == path.name.startswith("inspect-"), path
    plan = load_inspect(packaged("inspect-transformer-engine"))
    assert [s.name for s in plan.sections] == ["mlp", "attention"]
    assert plan.sections[0].tensors["weight"].freq == 10
    assert plan.sections[0].tensors["wgrad"].keep == {"statistics"}
    assert {t.freq for t in plan.sections[1].tensors.values()} == {4}
    assert [rule.name for rule in plan.config.triggers][:2] == ["nan", "amax"]
    assert plan.directory == "incidents"


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, {"high_precision", "quantized"}),
        ({"high_precision_tensor": True}, {"high_precision"}),
        ({"quantized_tensor": True}, {"quantized"}),
        ({"high_precision_tensor": True, "quantized_tensor": True}, {"high_precision", "quantized"}),
        ({"high_precision_tensor": False, "quantized_tensor": False}, {"statistics"}),
        ({"quantized_tensor": False}, {"statistics"}),
    ],
)
def test_what_is_kept_has_the_words_of_dump_tensors(options: dict[str, bool], kept: set[str]) -> None:
    assert load(**options).sections[0].tensors["activation"].keep == kept


def test_an_entry_takes_what_it_leaves_out_from_beside_it() -> None:
    entries = [{"tensor": "weight", "freq": 7}, {"tensor": "output", "phases": ["eval"], "start_step": None}]
    raw = section(tensors_struct=entries, freq=3, start_step=2, end_step=9, high_precision_tensor=True)
    tensors = load_inspect({"a": raw}).sections[0].tensors
    assert (tensors["weight"].freq, tensors["output"].freq) == (7, 3)
    assert tensors["weight"].intervals == ((2, 9),)
    assert tensors["output"].intervals == ((0, 9),)
    assert [phase.value for phase in tensors["output"].phases] == ["eval"]
    assert {plan.keep for plan in tensors.values()} == {frozenset({"high_precision"})}


def test_the_recorder_records_what_any_section_asks_for_and_takes_no_turns() -> None:
    plan = load_inspect(
        {"a": section(tensors=["weight"], quantized_tensor=True), "b": section(tensors=["output"], phases="recompute")}
    )
    (select,) = plan.config.select
    assert select.tensors == ("weight", "output")
    assert select.keep == {"high_precision", "quantized"}
    assert [phase.value for phase in select.phases] == ["train", "recompute"]
    assert plan.config.budget == "none"


def test_sections_that_do_not_record_are_left_alone() -> None:
    other = {"enabled": True, "layers": {}, "transformer_engine": {"DumpTensors": {"enabled": True}}, "Odd": {"x": 1}}
    off = section(tensors=["nonsense"])
    off["transformer_engine"]["FlightRecorder"]["enabled"] = False
    plan = load_inspect({"other": other, "off": off, "skipped": {"enabled": False}, "a": section(tensors=["weight"])})
    assert [s.name for s in plan.sections] == ["a"]


def test_a_section_that_ends_does_not_make_its_tensors_go_missing() -> None:
    def kinds(**when: Any) -> set[str]:
        return {rule.kind for rule in load(tensors=["gradient"], **when).config.triggers}

    assert "missing_record" in kinds()
    assert "missing_record" not in kinds(end_step=100)
    assert "missing_record" not in kinds(start_end_list=[[1, 2]])
    assert "missing_record" in kinds(end_step=100, triggers=[{"kind": "missing_record"}])


@pytest.mark.parametrize(
    "recorder, told",
    [
        ("enabled: True\ntensors: [activaton]", ":7:17: flight.{F}.tensors[0]: expected activation, weight, gradient"),
        ("enabled: True\ntensor: [weight]", ":7:7: flight.{F}.tensor: unknown key, it belongs into tensors_struct."),
        ("enabled: True", "expected tensors or tensors_struct to name at least one of activation"),
        ("enabled: True\ntensors: []", ":7:16: flight.{F}.tensors: expected tensors or tensors_struct to name"),
        ("enabled: True\ntensors: [weight]\nfreq: 0", ":8:13: flight.{F}.freq: expected at least 1, got 0"),
        ("enabled: True\ntensors: [weight]\nfreq: 1.5", ":8:13: flight.{F}.freq: expected an integer, got 1.5"),
        ("enabled: True\ntensors: [weight]\nend_step: -2", ":8:17: flight.{F}.end_step: expected at least -1, got -2"),
        ("enabled: True\ntensors: [weight]\nstart_step: 5\nend_step: 4", "expected at least start_step = 5, got 4"),
        ("enabled: True\ntensors: [weight]\nstart_end_list: [[3, 1]]", "expected [first, last] with first <= last"),
        ("enabled: True\ntensors: [weight]\nhigh_precision_tensor: 1", "expected true or false, got 1"),
        ("enabled: True\ntensors: [weight]\nphases: [warmup]", "expected train, recompute, eval"),
        ("enabled: True\ntensors: [weight]\ntensors_struct: [{tensor: output}]", "give tensors or tensors_struct"),
        (
            "enabled: True\ntensors_struct:\n  - {tensor: output, frq: 3}\n  - {tensor: output}",
            ":8:28: flight.{F}.tensors_struct[0].frq: unknown key, did you mean freq?",
        ),
        ("enabled: True\ntensors_struct: [{tensor: output}, {tensor: output}]", "output stands in two entries"),
        ("enabled: True\ntensors: [weight]\nselect: []", ":8:15: flight.{F}.select: the section's layers and tensors"),
        ("enabled: True\ntensors: [weight]\nbudget: 1%", ":8:15: flight.{F}.budget: freq, start_step and end_step say"),
        (
            "enabled: True\ntensors: [weight]\nring: {iteratons: 4}",
            ":8:14: flight.{F}.ring.iteratons: unknown key, did you mean iterations?",
        ),
        (
            "enabled: True\ntensors: [weight]\ntriggers:\n  - {kind: nonfinit}",
            ":9:18: flight.{F}.triggers[0].kind: expected one of nonfinite",
        ),
        (
            "enabled: True\ntensors: [weight]\ntriggers: [{kind: zero_gradient, tensors: [gradient]}]",
            "flight.{F}.triggers[0].tensors: the rule zero_gradient looks at gradient, but select records only weight",
        ),
        ("enabled: True\ntensors: [weight]\nrecorder: gone.yaml", ":8:17: flight.{F}.recorder: no such file"),
        ("tensors: [weight]", "flight.{F}: missing key enabled"),
        ("- 1", "flight.{F}: expected a mapping with enabled and tensors, got [1]"),
    ],
)
def test_what_cannot_work_is_refused_with_file_line_section_and_key(recorder: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "inspect.yaml"
    file.write_text(text(recorder))
    message = refused(file)
    assert told.replace("{F}", "transformer_engine.FlightRecorder") in message
    assert message.startswith(str(file))


def test_all_errors_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "inspect.yaml"
    file.write_text(
        text("enabled: True\ntensors: [x]", "one") + text("enabled: True\ntensors: [weight]\nfreq: 0", "two")
    )
    lines = refused(file).splitlines()
    assert lines[0] == f"{file} has 2 errors:"
    assert [line.split(": ")[1].split(".")[0] for line in lines[1:]] == ["one", "two"]


def test_conflicting_settings_of_the_one_recorder_are_refused() -> None:
    both = {"a": section(tensors=["weight"], ring={"iterations": 4})}
    both["b"] = section(tensors=["weight"], ring={"iterations": 5})
    assert "b.transformer_engine.FlightRecorder.ring: one recorder serves the whole file, and section a" in refused(
        both
    )
    both["b"]["transformer_engine"]["FlightRecorder"]["ring"] = {"iterations": 4}
    assert load_inspect(both).config.ring.iterations == 4
    both["b"]["transformer_engine"]["FlightRecorder"]["directory"] = "there"
    assert load_inspect(both).directory == "there"


def test_a_recorder_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pretrain.yaml").write_text(
        "budget: 1%\nring: {iterations: 9}\nselect: [{layers: x, tensors: parameter}]\ntriggers: [{kind: nonfinite}]\n"
    )
    file = tmp_path / "inspect.yaml"
    file.write_text(text("enabled: True\ntensors: [weight]\nrecorder: pretrain.yaml"))
    config = load_inspect(file).config
    assert config.ring.iterations == 9
    assert config.select[0].tensors == ("weight",)
    assert config.budget == "none"
    monkeypatch.chdir(tmp_path)
    mapping = {"a": section(tensors=["weight"], recorder="pretrain.yaml")}
    assert load_inspect(mapping).config.ring.iterations == 9
    mapping["a"]["transformer_engine"]["FlightRecorder"]["ring"] = {"iterations": 4}
    assert "section a takes the settings from pretrain.yaml; set ring there" in refused(mapping)
    (tmp_path / "pretrain.yaml").write_text("ring: {iteratons: 9}\n")
    assert "recorder: pretrain.yaml:1:8: ring.iteratons: unknown key" in refused(
        {"a": section(tensors=["weight"], recorder="pretrain.yaml")}
    )
    (tmp_path / "pretrain.yaml").write_text("triggers: [{kind: zero_gradient, tensors: [gradient]}]\n")
    message = refused({"a": section(tensors=["weight"], recorder="pretrain.yaml")})
    assert "pretrain.yaml, with the tensors of this file: triggers[0].tensors: the rule zero_gradient" in message


def test_what_nvdlfw_inspect_would_stumble_over_is_told_too(tmp_path: Path) -> None:
    assert "found none: nothing would be recorded" in refused({"a": {"enabled": True, "layers": {}}})
    assert "no section is enabled" in refused({"a": {"enabled": False}})
    assert "expected a section with enabled" in refused({"a": {"layers": {}}})
    assert "missing key layers" in refused({"a": {"enabled": True, "transformer_engine": {}}})
    beside = {"enabled": True, "layers": {}, "FlightRecorder": {"enabled": True}}
    assert "FlightRecorder stands under transformer_engine" in refused({"a": beside})
    assert "no such file" in refused(tmp_path / "gone.yaml")
    for name, content in (("list", "[1]"), ("broken", "a: ["), ("binary", "\x00"), ("date", "2020-01-01")):
        (tmp_path / name).write_text(content)
        assert str(tmp_path / name) in refused(tmp_path / name)
        assert not is_inspect_file(tmp_path / name)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in refused(tmp_path / "bytes")
    assert not is_inspect_file(tmp_path)


def test_the_file_is_read_with_the_yaml_of_nvdlfw_inspect(tmp_path: Path) -> None:
    file = tmp_path / "inspect.yaml"
    file.write_text(text("enabled: yes\ntensors: [weight]\nquantized_tensor: on"))
    assert load_inspect(file).sections[0].tensors["weight"].keep == {"quantized"}
    file.write_text(text("enabled: yes\ntensors: [weight]\ntriggers: [{kind: amax_spike, factor: 4e0}]"))
    assert "expected a number, got the text '4e0'" in refused(file)


def test_a_recorders_own_file_is_told_apart() -> None:
    assert not looks_like_inspect({"ring": {"iterations": 4}})
    assert not looks_like_inspect({"rings": {"iterations": 4}})
    assert not looks_like_inspect([1])
    assert looks_like_inspect({"a": {"layers": {}}})


def test_the_example_of_the_page_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "inspect-feature.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "inspect.yaml").write_text(example)
    (tmp_path / "pretrain.yaml").write_text("ring: {iterations: 3}\n")
    assert load_inspect(tmp_path / "inspect.yaml").config.ring.iterations == 3
    for key in (*TensorOptions.model_fields, *FlightRecorderSection.model_fields):
        assert key == "enabled" or f"`{key}`" in page, key


def test_a_plan_describes_itself() -> None:
    plan = load(freq=3, start_step=2, end_step=8, phases=["train", "eval"], quantized_tensor=True)
    told = plan.sections[0].tensors["activation"].describe()
    assert told == "activation (keeps quantized) every 3 iterations, from 2 to 8, in train, eval"
    assert load().sections[0].tensors["activation"].describe() == (
        "activation (keeps high_precision, quantized) in every iteration"
    )


LAYERS = "layer_name_regex_pattern, layer_types, layer_numbers, exact_layer_names"


@pytest.mark.parametrize(
    "layers, message",
    [
        ({}, f"a.layers: expected one of {LAYERS}, such as"),
        ({"layer_name_regex_pattern": None}, f"a.layers: expected one of {LAYERS}, such as"),
        (
            {"layer_name_regexp": ".*"},
            "a.layers.layer_name_regexp: unknown key, which nvdlfw_inspect ignores, did you ",
        ),
        ({"layer_name_regex_pattern": "*fc1"}, "a.layers.layer_name_regex_pattern: no regular expression: nothing to "),
        ({"layer_name_regex_pattern": ["fc1"]}, "a.layers.layer_name_regex_pattern: expected a regular expression as"),
        ({"layer_types": "fc1"}, "a.layers.layer_types: expected a list of texts, got the text 'fc1'"),
        ({"exact_layer_names": [3]}, "a.layers.exact_layer_names: expected a list of texts, got [3]"),
        ({"layer_numbers": 5}, "a.layers.layer_numbers: expected a list of numbers and spans such as [0, 4-7], or all"),
        ({"layer_numbers": ["4 to 7"]}, "a.layers.layer_numbers: expected a list of numbers and spans"),
    ],
)
def test_layers_that_nvdlfw_inspect_would_not_match_as_meant_are_refused(layers: Any, message: str) -> None:
    assert message in refused({"a": {**section(tensors=["weight"]), "layers": layers}})


@pytest.mark.parametrize(
    "layers", [{"layer_types": ["fc1"], "layer_numbers": [0, "4-7"]}, {"layer_numbers": "all"}, {"layer_types": "all"}]
)
def test_layers_as_nvdlfw_inspect_takes_them_are_accepted(layers: Any) -> None:
    assert load_inspect({"a": {**section(tensors=["weight"]), "layers": layers}}).sections


def test_a_switch_that_does_not_mean_what_it_says_is_refused() -> None:
    taken = "expected True or False, got the text 'no', which nvdlfw_inspect takes for True"
    assert f"a.enabled: {taken}" in refused({"a": {**section(tensors=["weight"]), "enabled": "no"}})
    assert f"a.transformer_engine.FlightRecorder.enabled: {taken}" in refused(
        {"a": section(tensors=["weight"], enabled="no")}
    )


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "inspect.yaml"
    file.write_text(text("enabled: True\ntensors: [weight]\nfreq: 1\nfreq: 100"))
    assert f"{file}:9:13: flight.transformer_engine.FlightRecorder.freq: the key stands here a second" in refused(file)


def test_a_file_without_sections_is_told_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "inspect.yaml"
    file.write_text("- a list\n")
    assert "expected a mapping with a section for each group of layers, got a list" in refused(file)


@pytest.mark.parametrize(
    "recorder, message",
    [
        ({"start_end_list": [[-5, -1]]}, "start_end_list[0][0]: expected at least 0, got -5"),
        ({"start_end_list": [[0, 5, 6]]}, "start_end_list[0]: expected at most 2 entries, got [0, 5, 6]"),
        ({"triggers": {"kind": "nonfinite"}}, "triggers: expected a list, got a mapping with kind"),
        ({"tensors": None, "tensors_struct": [{"freq": 1}]}, "tensors_struct[0].tensor: missing key"),
    ],
)
def test_wrong_values_are_told_in_words_of_the_file(recorder: Any, message: str) -> None:
    assert message in refused({"a": section(**{"tensors": ["weight"], **recorder})})
