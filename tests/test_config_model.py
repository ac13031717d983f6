from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from flightrec.config.load import load, load_text
from flightrec.config.model import (
    AmaxSpikeRule,
    Config,
    HistoryConfig,
    IncidentConfig,
    LossJumpRule,
    ManualRule,
    NonfiniteRule,
    RingConfig,
    Selection,
    Share,
    UnderflowRule,
)
from flightrec.config.rules import RULE_CLASSES, default_rules
from flightrec.errors import ConfigError
from flightrec.records import Phase


def test_the_defaults():
    config = Config()
    assert config.budget == "none"
    assert config.ring == RingConfig(iterations=4, memory=None, on_out_of_memory="statistics_only", microbatches="all")
    assert config.select == (Selection(),)
    assert config.incident == IncidentConfig(
        after=1, limit=20, cooldown=50, disk_quota=None, writer="process", staging_memory=None
    )
    assert config.history == HistoryConfig(iterations=1000)
    assert config.triggers == Config(triggers=default_rules()).triggers


def test_rules_without_a_cooldown_take_the_incidents():
    config = Config(incident={"cooldown": 7}, triggers=[{"kind": "nonfinite"}, AmaxSpikeRule(cooldown=0)])
    assert [rule.cooldown_iterations for rule in config.triggers] == [7, 0, 0]
    assert NonfiniteRule().cooldown_iterations is None


def test_manual_is_always_there_once():
    assert [rule.kind for rule in Config(triggers=[]).triggers] == ["manual"]
    assert [rule.name for rule in Config(triggers=[{"kind": "manual", "name": "mine"}]).triggers] == ["mine"]


def test_default_rules_that_see_nothing_are_left_out_but_written_ones_are_refused():
    select = [{"tensors": ["parameter"]}]
    left = ["nonfinite", "loss_jump", "loss_drift", "loss_scale_collapse", "exception", "manual"]
    assert [rule.kind for rule in Config(select=select).triggers] == left
    assert [rule.kind for rule in Config(select=[{"phases": "eval"}]).triggers] == left
    with pytest.raises(ConfigError, match=r"triggers\[0\].tensors: the rule amax_spike looks at activation, gradient"):
        Config(select=select, triggers=[{"kind": "amax_spike"}])


@pytest.mark.parametrize("section", ["budget", "ring", "select", "triggers", "incident", "history"])
def test_an_empty_section_is_an_absent_one(section):
    assert Config(**{section: None}) == Config()


def test_mistakes_are_config_errors_also_when_the_class_is_called():
    with pytest.raises(ConfigError, match=r"configuration: ring\.iterations: expected at least 1, got 0"):
        Config(ring={"iterations": 0})
    with pytest.raises(ConfigError, match="ring"):
        Config.model_validate({"ring": 3})
    with pytest.raises(ConfigError, match="unknown key"):
        Config(**{"self": 3, "a b": 4})


def test_sections_may_be_objects():
    built = Config(
        ring=RingConfig(iterations=2, memory=Share(0.5)),
        select=[Selection(layers="a")],
        triggers=[UnderflowRule(), ManualRule()],
        incident=IncidentConfig(after=0),
    )
    written = Config(
        ring={"iterations": 2, "memory": "50%"},
        select=[{"layers": ["a"]}],
        triggers=[{"kind": "underflow"}],
        incident={"after": 0},
    )
    assert built == written
    assert hash(built) == hash(written)


def test_equality_is_of_settings_not_of_origin():
    assert load_text("# a comment\n") == Config()
    assert Config() != Config(ring={"iterations": 5})
    assert Config() != 3


def test_a_config_is_frozen_copied_and_pickled():
    config = load_text("ring: {iterations: 3}  # three\n")
    config.selects("a", "weight")
    with pytest.raises(ValidationError):
        config.budget = "none"
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
        assert again.text == config.text
        assert again.selects("a", "weight") == config.selects("a", "weight")


def test_text_is_the_original_else_a_dump():
    assert load_text("ring: {iterations: 3}  # three\n").text == "ring: {iterations: 3}  # three\n"
    config = Config(ring={"memory": "8 GiB"}, incident={"disk_quota": 10**12 + 1})
    assert "memory: 8 GiB" in config.text
    assert load_text(config.text) == config


def test_a_changed_copy_is_checked_and_looks_up_its_own_select():
    config = load_text("ring: {iterations: 3}  # three\n")
    assert config.selects("a", "weight") is not None
    assert config.model_copy() == config
    assert config.model_copy().text == config.text
    changed = config.model_copy(update={"select": [{"tensors": "activation"}]})
    assert (changed.ring.iterations, changed.selects("a", "weight")) == (3, None)
    assert "activation" in changed.text
    with pytest.raises(ConfigError, match="ring"):
        config.model_copy(update={"ring": 3})


def test_a_used_config_dumps_and_compares_as_an_unused_one():
    used, unused = Config(), Config()
    used.selects("a", "weight")
    assert used == unused
    assert repr(used) == repr(unused)
    assert used.model_dump() == unused.model_dump()
    assert used.to_yaml() == unused.to_yaml()


def test_selects_looks_up_select():
    config = Config(select=[{"layers": "a.*", "tensors": ["weight", "activation", "gradient"]}])
    assert config.selects("a.b", "weight") is config.select[0]
    assert config.selects("b", "weight") is None
    assert config.selects("a.b", "weight", Phase.EVAL) is None
    assert config.selects("", "loss") is not None
    assert config.matcher().selects("a.b", "weight") is config.select[0]


_SIZE = st.none() | st.integers(4096, 2**50)
_NAMES = st.sampled_from(["activation", "gradient", "weight", "input", "output", "dgrad", "wgrad"])
_WINDOW = st.integers(1, 4096)
_TENSORS = st.lists(_NAMES, min_size=1, unique=True)


@st.composite
def _windowed(draw, cls, **strategies):
    window = draw(_WINDOW)
    settings = {name: draw(strategy) for name, strategy in strategies.items()}
    return cls(window=window, min_samples=draw(st.integers(1, window)), **settings)


_RULES = st.one_of(
    st.builds(
        NonfiniteRule,
        layers=st.lists(st.sampled_from(["*", "a.[0-9]", "re:x\\d+:'\"#"]), min_size=1),
        allow=st.lists(st.sampled_from(["-inf", "+inf"])),
        cooldown_iterations=st.none() | st.integers(0, 10**6),
        severity=st.sampled_from(["watch", "warning", "fault"]),
    ),
    _windowed(AmaxSpikeRule, factor=st.floats(1.001, 1e300), confirm=st.integers(1, 64)),
    _windowed(LossJumpRule, sigma=st.floats(1e-300, 1e300), direction=st.sampled_from(["up", "down", "both"])),
    _windowed(UnderflowRule, minimum=st.floats(0, 0.5), new_row=st.floats(0.5, 1)),
)


@given(
    st.builds(
        lambda ring, rules, incident, extra: Config(
            ring=ring,
            select=[{"tensors": extra, "layers": "only.here", "every": 2}, {}],
            triggers=[rule.model_copy(update={"name": f"r{index}"}) for index, rule in enumerate(rules)],
            incident=incident,
        ),
        st.builds(
            RingConfig,
            iterations=st.integers(1, 1024),
            memory=_SIZE | st.integers(1, 100).map(lambda percent: Share(percent / 100)),
            microbatches=st.sampled_from(["all", "first", "last", "rotate"]),
        ),
        st.lists(_RULES, max_size=4),
        st.builds(IncidentConfig, after=st.integers(0, 64), disk_quota=_SIZE, staging_memory=_SIZE),
        _TENSORS,
    )
)
def test_every_configuration_reads_back_from_its_own_dump(config):
    assert load_text(config.to_yaml()) == config
    assert load(config.model_dump()) == config
    assert load(config.model_dump(mode="json", by_alias=True)) == config


def _models():
    return [Config, RingConfig, Selection, IncidentConfig, HistoryConfig, *RULE_CLASSES.values()]


@pytest.mark.parametrize("model", _models(), ids=lambda model: model.__name__)
def test_every_field_is_documented_and_every_model_strict(model: type[BaseModel]):
    assert [name for name, field in model.model_fields.items() if not field.description] == []
    assert model.model_config["frozen"] is True
    assert model.model_config["extra"] == "forbid"


def test_configuration_needs_no_torch_and_no_numpy():
    code = (
        "import sys; import flightrec.config.load as m; m.load()\n"
        "assert not {'torch', 'numpy', 'h5py'} & set(sys.modules), sorted(set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
