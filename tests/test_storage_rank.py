from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from storage_samples import firing, iterations, plain, write_incident

from flightrec.errors import IncidentError
from flightrec.records import Key
from flightrec.storage.facts import IterationFacts
from flightrec.storage.rank import Rank

KEYS = [Key("a", "weight"), Key("b", "output", "x", 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entry = iterations({3: [plain(key, [1.0]) for key in KEYS]})[0]
    facts = IterationFacts(
        0,
        3,
        17,
        2,
        None,
        entry.layouts,
        entry.statistics,
        partial=True,
        blind="why",
        metrics={"grad_norm": float("inf")},
    )
    samples = {3: [plain(key, [1.0]) for key in KEYS]}
    return write_incident(tmp_path, samples, [firing(KEYS[1], 3)], iterations=[facts], ended="trainer died")


def test_iterations_and_attributes(folder: Path) -> None:
    rank = Rank(folder / "rank00000.test.facts.h5", folder / "rank00000.test.tensors.h5", "test")
    (entry,) = rank.iterations
    assert (entry.tick, entry.num_microbatches, entry.loss, entry.partial, entry.blind) == (17, 2, None, True, "why")
    assert entry.metrics == {"grad_norm": float("inf")}
    assert rank.num_microbatches == {(0, 3): 2}
    assert rank.attribute("ended") == "trainer died"
    assert rank.attribute("none", "default") == "default"
    assert not rank.salvaged
    rank.close()


def test_keys_one_by_one_and_at_once(folder: Path) -> None:
    rank = Rank(folder / "rank00000.test.facts.h5", None)
    assert rank.keys(np.array([1, 0])) == KEYS[::-1]
    assert [rank.key(row) for row in rank.records] == KEYS
    rank.close()


def test_payload_needs_a_tensors_file(folder: Path) -> None:
    rank = Rank(folder / "rank00000.test.facts.h5", None)
    assert not rank.has_payload(0, "/x", "data")
    with pytest.raises(IncidentError, match="no tensors file"):
        rank.read_payload(0, "/x", "data")
    rank.close()


def test_another_incident_is_refused_and_closed(folder: Path) -> None:
    with pytest.raises(IncidentError, match="expected other"):
        Rank(folder / "rank00000.test.facts.h5", None, "other")


def test_what_was_read_outlives_close(folder: Path) -> None:
    rank = Rank(folder / "rank00000.test.facts.h5", folder / "rank00000.test.tensors.h5")
    assert len(rank.records) == 2
    assert len(rank.names) > 2
    rank.close()
    assert rank.keys(np.array([0])) == KEYS[:1]
    with pytest.raises(IncidentError, match="/quantizers"):
        _ = rank.quantizers
