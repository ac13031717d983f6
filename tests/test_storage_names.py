from __future__ import annotations

import re

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightrec.records import NO_MICROBATCH, Key, Phase, Stage
from flightrec.storage import names

F34_NAMES = ["layers.0.fc1", "a", "a/b", "a_b", "a b", ".", "..", "x//y", "tr/", "n\0m", "n", "", "ü", "z" * 3000]
F34_NAMES += [
    "%",
    "%2E",
    "%~",
    "\ud800",
    "\udfff\ud800",
    "z" * 2999 + "y",
    "ü" * 150,
    "a\nb",
    "/",
    "//",
    "...",
    "n%00m",
]
anything = st.text(st.characters(exclude_categories=()), max_size=300)


def test_f34_names_are_legal_links_that_do_not_meet(tmp_path) -> None:
    links = [names.escape(name) for name in F34_NAMES]
    assert len(set(links)) == len(F34_NAMES)
    with h5py.File(tmp_path / "names.h5", "w") as file:
        for number, link in enumerate(links):
            file[f"top/{link}/value"] = number
    with h5py.File(tmp_path / "names.h5") as file:
        assert {link: file[f"top/{link}/value"][()] for link in file["top"]} == {
            link: number for number, link in enumerate(links)
        }


def test_short_names_come_back_and_long_ones_say_so() -> None:
    for name in F34_NAMES:
        link = names.escape(name)
        assert len(link.encode()) <= names.MAX_LINK_BYTES
        assert names.unescape(link) == (name if len(name.encode("utf-8", "surrogatepass")) <= 150 else None)


def test_ordinary_names_stay_readable() -> None:
    assert names.escape("decoder.layers.0.self_attn.q_proj") == "decoder.layers.0.self_attn.q_proj"
    assert names.escape("größe 1") == "größe 1"


@given(text=anything)
def test_escape_is_reversible(text: str) -> None:
    link = names.escape(text)
    back = names.unescape(link)
    assert back == text or (back is None and len(link.encode()) > names.MAX_LINK_BYTES - 5)
    assert link not in {"", ".", ".."}
    assert not re.search("[/\0]", link)
    assert len(link.encode()) <= names.MAX_LINK_BYTES


@given(one=anything, other=anything)
def test_different_texts_have_different_links(one: str, other: str) -> None:
    assert (names.escape(one) == names.escape(other)) == (one == other)


def test_shortening_never_cuts_an_escape() -> None:
    for length in range(40, 60):
        link = names.escape("é" * length + "/" * 200)
        assert re.fullmatch("(é|%2F)+%~[0-9a-f]{32}", link)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (Key("a.b", "activation", microbatch=2), "/1.0000123/a.b/activation/2.train.0.forward"),
        (Key("a/b", "output", "aux.0/x", 0, Phase.EVAL, 3), "/1.0000123/a%2Fb/output/0.eval.3.forward.aux.0%2Fx"),
        (Key("", "parameter", "w", NO_MICROBATCH, stage=Stage.START), "/1.0000123/%/parameter/-1.train.0.start.w"),
        (Key("", "parameter", "w", stage=Stage.AFTER_STEP), "/1.0000123/%/parameter/4.train.0.after_step.w"),
        (Key("", "loss", microbatch=3, stage=Stage.LOSS), "/1.0000123/%/loss/3.train.0.loss"),
        (Key("", "loss", stage=Stage.LOSS), "/1.0000123/%/loss/4.train.0.loss"),  # given to step, beside the one above
    ],
)
def test_record_paths(key: Key, path: str) -> None:
    assert names.record_path(1, 123, key, 4) == path


def test_iterations_beyond_seven_digits() -> None:
    assert names.iteration_link(0, 12_345_678) == "0.12345678"


@pytest.mark.parametrize("text", ["", "..", "a/b", "ü", "x" * 100, "a b", "\ud800"])
def test_file_words_are_safe_and_distinct(text: str) -> None:
    word = names.file_word(text)
    assert re.fullmatch("[A-Za-z0-9_-]{1,64}", word)
    assert word != names.file_word(text + "x")


def test_a_safe_file_word_stays() -> None:
    assert names.file_word("run-17_b") == "run-17_b"
