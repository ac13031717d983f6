from __future__ import annotations

import numpy as np
import pytest
from writer_support import QUANTIZER, make_firing, make_layouts

from flightrec.records import NUM_STATISTICS, Key, Phase, RecordLayout, Severity, Stage
from flightrec.storage.facts import Blind
from flightrec.writer import messages, shared


def travel(message: messages.Outgoing) -> shared.Message:
    return shared.decode(b"".join(shared.encode(*message)))


@pytest.mark.parametrize(
    "key",
    [
        None,
        Key("", "loss", stage=Stage.LOSS),
        Key("a/b.\0\ud800", "activation", "aux.0", 3, Phase.RECOMPUTE, 2, Stage.BACKWARD),
    ],
)
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 1e300])
def test_firings_travel(key, value):
    firing = make_firing(key=key, severity=Severity.WARNING)
    data = travel(messages.firing(1, [firing])).header["firings"][0]
    data["value"] = value
    back = messages.firing_from_json(travel(("x", {"f": data}, ())).header["f"], record=5)
    assert back.key == key
    assert back.record == 5
    assert back.severity is Severity.WARNING
    assert np.array_equal(back.value, value, equal_nan=True)


def test_layouts_and_quantizers_travel():
    layouts = make_layouts(3)
    header = travel(messages.layouts(layouts)).header
    assert [RecordLayout.from_json(data) for data in header["layouts"]] == layouts
    header = travel(messages.quantizers(4, [QUANTIZER])).header
    assert header["start_id"] == 4
    assert header["quantizers"] == [QUANTIZER.to_json()]


def test_iteration_travels_as_binary():
    statistics = np.arange(3 * NUM_STATISTICS, dtype=np.float32).reshape(3, -1)
    message = travel(
        messages.iteration(
            1,
            5,
            attempt=0,
            iteration=9,
            num_microbatches=2,
            layout_ids=[7, 8, 9],
            statistics=statistics,
            loss=np.float32(2.0),
            metrics={"grad_norm": 1.5},
        )
    )
    assert np.frombuffer(message.blobs[0], np.int32).tolist() == [7, 8, 9]
    assert np.array_equal(np.frombuffer(message.blobs[1], np.float64).reshape(3, -1), statistics)
    assert message.header["loss"] == 2.0
    assert message.header["metrics"] == {"grad_norm": 1.5}


def test_an_empty_iteration_travels():
    message = travel(
        messages.iteration(
            1, 5, attempt=0, iteration=9, num_microbatches=0, layout_ids=[], statistics=np.empty((0, NUM_STATISTICS))
        )
    )
    assert [blob.nbytes for blob in message.blobs] == [0, 0]
    assert message.header["loss"] is None


def test_history_and_blind_travel():
    history = {"loss": ([1, 2], [0.5, float("nan")]), "amax": (np.arange(2), np.ones((2, 3)))}
    message = travel(messages.open_incident(1, make_firing(), history=history))
    assert message.header["history"] == [["loss", [2], False], ["amax", [2, 3], False]]
    assert np.frombuffer(message.blobs[0], np.int64).tolist() == [1, 2]
    blind = Blind(0, 3, "fc", "activation", "no room")
    assert Blind(*travel(messages.end(1, [blind])).header["blind"][0]) == blind
    assert Blind(*travel(messages.facts_end(1, blind=[blind])).header["blind"][0]) == blind
