from __future__ import annotations

from storage_samples import Sample, iterations, plain

from flightrec.records import Key, Stage
from flightrec.storage.facts import IncidentFacts


def test_paths_name_records_with_bytes_only() -> None:
    samples = [plain(Key("a", "output", microbatch=0), [1.0]), Sample(Key("a", "dgrad", microbatch=0))]
    assert iterations({7: samples})[0].record_paths() == ["/0.0000007/a/output/0.train.0.forward", ""]


def test_a_record_of_the_iteration_never_meets_a_microbatch_beyond_the_count() -> None:
    samples = [plain(Key("a", "output", microbatch=2), [1.0]), plain(Key("a", "output"), [2.0])]
    paths = iterations({7: samples}, num_microbatches=2)[0].record_paths()
    assert len(set(paths)) == 2


def test_first_records() -> None:
    one, two = plain(Key("a", "output"), [1.0]), plain(Key("a", "parameter", stage=Stage.START), [1.0])
    facts = IncidentFacts(None, "", {}, None, [], iterations({1: [one, two], 2: [], 3: [one]}))  # type: ignore[arg-type]
    assert facts.first_records() == [0, 2, 2]
