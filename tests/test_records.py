from __future__ import annotations

import pickle
from dataclasses import fields, replace

from flightrec.records import NO_MICROBATCH, Key, Phase, Stage

KEY = Key("block.0", "wgrad", "bias", 3, Phase.RECOMPUTE, 2, Stage.BACKWARD)


def test_equal_keys_have_equal_hashes_and_every_field_counts():
    assert hash(KEY) == hash(replace(KEY))
    assert replace(KEY) == KEY
    others = {"layer": "", "tensor": "output", "part": "", "microbatch": 0, "phase": Phase.EVAL, "call": 0}
    changed = [replace(KEY, **{name: value}) for name, value in others.items()] + [replace(KEY, stage=Stage.LOSS)]
    assert len({KEY, *changed}) == 1 + len(fields(Key))


def test_a_hash_does_not_travel_with_a_key():
    hash(KEY)
    assert str(hash(KEY)).encode() not in pickle.dumps(KEY, 0)
    copied = pickle.loads(pickle.dumps(KEY))
    assert copied == KEY
    assert hash(copied) == hash(KEY)


def test_phases_and_stages_are_found_by_their_text():
    assert {Phase.TRAIN: 1}["train"] == 1
    assert {"backward": 2}[Stage.BACKWARD] == 2


def test_a_series_is_the_key_without_its_microbatch():
    assert KEY.series == replace(KEY, microbatch=NO_MICROBATCH)
    assert KEY.series.series == KEY.series
