"""Two sides of a comparison: which records are paired, what differs first, and what differs beside the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_samples import FP8, Sample, firing, iterations, plain, statistics, write_incident

from flightrec.errors import IncidentError
from flightrec.records import Key, Stage
from flightrec.reports.diff import diff_paths

IN, OUT = Key("fc1", "activation", microbatch=0), Key("fc2", "activation", microbatch=0)
GRADIENT = Key("fc2", "gradient", microbatch=0, stage=Stage.BACKWARD)
BIAS = Key("fc2", "wgrad", "bias", microbatch=0, stage=Stage.BACKWARD)
WEIGHT = Key("fc1", "weight", microbatch=0)
CODES = np.array([[0x38, 0x40, 0x08, 0x00]], "u1")


def fp8(codes: np.ndarray = CODES, scale: float = 4.0, **counts: float) -> Sample:
    arrays = {"data": (codes, "float8_e4m3fn"), "scale": (np.array(scale, "<f4"), "float32")}
    return Sample(WEIGHT, arrays, statistics(quantized_numel=4, scale_min=scale, scale_max=scale, **counts), 0)


def usual(value: float = 1.0, **more: Any) -> list[Sample]:
    """The bias's gradient was seen before the gradient that it is made from, as autograd does it."""
    return [
        plain(IN, [1.0, 2.0], amax=2.0, nan_count=0),
        fp8(**more),
        plain(OUT, [value, 3.0], amax=3.0, nan_count=0),
        plain(BIAS, [value], amax=value),
        plain(GRADIENT, [value], amax=value),
    ]


def write(folder: Path, name: str, samples: Mapping[int, Sequence[Sample]], **changes: Any) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    return write_incident(path, samples, [firing(OUT, max(samples))], incident_id=name, **changes)


def keys(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(entry["key"]["layer"], entry["key"]["tensor"]) for entry in entries]


def test_the_same_twice_is_no_difference(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", {1: usual(), 2: usual()}), write(tmp_path, "b", {1: usual(), 2: usual()})
    found = diff_paths(a, other=str(b))
    assert (found["differ"], found["num_pairs"], found["num_equal"], found["first"]) == (False, 10, 10, None)
    assert len(found["compared"]) == 2


def test_the_first_divergence_in_blame_order(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", {1: usual(), 2: usual()}), write(tmp_path, "b", {1: usual(), 2: usual(1.5)})
    found = diff_paths(a, other=str(b))
    assert found["differ"]
    assert keys(found["differences"]) == [("fc2", "activation"), ("fc2", "gradient"), ("fc2", "wgrad")]
    first = found["first"]
    assert (first["a"]["iteration"], first["reasons"]) == (2, ["bytes"])
    assert first["sentence"].startswith("1 of 2 elements of high_precision differ, at most 0.5 apart")
    assert first["side_by_side"]["amax"] == {"a": 3.0, "b": 3.0}


def test_scales_codes_and_quantizers_are_told_apart(tmp_path: Path) -> None:
    a = write(tmp_path, "a", {1: usual()})
    other = write(tmp_path, "scale", {1: usual(scale=2.0)})
    assert diff_paths(a, other=str(other))["first"]["reasons"] == ["scales"]
    other = write(tmp_path, "codes", {1: usual(codes=CODES ^ 1)})
    first = diff_paths(a, other=str(other))["first"]
    assert (first["reasons"], first["components"][0]["num_different"]) == (["bytes"], 4)
    info = replace(FP8, metadata={"axiswise": True}).to_json()
    other = write(tmp_path, "words", {1: usual()}, quantizers=[info])
    first = diff_paths(a, other=str(other))["first"]
    assert first["reasons"] == ["quantizer"]
    assert first["quantizer"] == [{"path": "metadata.axiswise", "a": False, "b": True}]


def test_records_of_one_side_are_named_and_differ(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", {1: usual()}), write(tmp_path, "b", {1: usual()[:-1]})
    found = diff_paths(a, other=str(b))
    assert found["differ"]
    assert (found["num_different"], keys(found["only_a"]), found["only_b"]) == (0, [("fc2", "gradient")], [])
    assert not diff_paths(a, other=str(b), layer="fc1")["differ"]
    assert keys(diff_paths(b, other=str(a))["only_b"]) == [("fc2", "gradient")]


def test_statistics_speak_where_there_are_no_bytes_and_must_agree_with_equal_bytes(tmp_path: Path) -> None:
    bare = Sample(IN, {}, statistics(numel=2, amax=2.0, nan_count=1), shape=(2,), dtype="float32")
    a, b = write(tmp_path, "a", {1: usual()}), write(tmp_path, "b", {1: [bare]})
    first = diff_paths(a, other=str(b))["first"]
    assert (first["reasons"], first["statistics"]) == (["statistics"], {"nan_count": {"a": 0.0, "b": 1.0}})
    agreeing = replace(bare, statistics=statistics(numel=2, amax=2.0, nan_count=0))
    found = diff_paths(a, other=str(write(tmp_path, "c", {1: [agreeing]})), layer="fc1", tensor="activation")
    assert (found["num_not_compared"], found["differ"]) == (1, False)
    miscounted = [plain(IN, [1.0, 2.0], amax=2.0, nan_count=2), *usual()[1:]]
    found = diff_paths(a, other=str(write(tmp_path, "d", {1: miscounted})))
    assert (found["num_different"], found["first"]["reasons"]) == (1, ["statistics"])


def test_two_iterations_of_one_incident_by_statistics(tmp_path: Path) -> None:
    bad = [plain(IN, [3.0, 2.0], amax=3.0), fp8(scale=64.0), plain(OUT, [0.0], amax=3.0, nan_count=1)]
    a = write(tmp_path, "a", {1: usual(), 9: bad})
    found = diff_paths(a, iterations=["1", "0.9"])
    assert (found["by"], found["differ"]) == ("statistics", True)
    assert keys(found["differences"]) == [("fc1", "weight"), ("fc2", "activation")]
    assert found["first"]["statistics"]["scale_max"] == {"a": 4.0, "b": 64.0}
    assert "nan_count" in found["differences"][1]["statistics"]
    assert {fact["path"] for fact in found["iterations"][0]["facts"]} >= {"loss", "num_records"}
    assert not diff_paths(a, iterations=["1", "9"], factor=100, tensor="weight")["differ"]
    assert diff_paths(a, iterations=["1", "9"], by="bytes")["first"]["key"]["layer"] == "fc1"


def test_shares_and_magnitudes_that_vanish(tmp_path: Path) -> None:
    def sample(key: Key, underflow: float, amax: float) -> Sample:
        counts = {"numel": 100, "nan_count": 0, "positive_inf_count": 0, "negative_inf_count": 0, "zero_count": 0}
        return Sample(key, {}, statistics(**counts, underflow_count=underflow, amax=amax), dtype="float32")

    samples = {1: [sample(IN, 5, 1.0), sample(OUT, 5, 1.0)], 2: [sample(IN, 14, 3.9), sample(OUT, 16, 0.0)]}
    found = diff_paths(write(tmp_path, "a", samples), iterations=["1", "2"])
    assert found["num_different"] == 1
    assert found["first"]["statistics"].keys() == {"underflow_share", "amax"}


def test_two_ranks_of_one_incident(tmp_path: Path) -> None:
    folder = write(tmp_path, "a", {1: usual()}, index=False)
    write(tmp_path, "a", {1: usual(2.0)}, rank=1, index=False)
    found = diff_paths(folder, ranks=[0, 1])
    assert found["compared"] == [
        {"a": {"rank": 0, "attempt": 0, "iteration": 1}, "b": {"rank": 1, "attempt": 0, "iteration": 1}}
    ]
    assert keys([found["first"]]) == [("fc2", "activation")]
    with pytest.raises(IncidentError, match="has no rank 7; it has 0, 1"):
        diff_paths(folder, ranks=[0, 7])


def test_iterations_are_paired_by_number_else_by_their_distance_from_the_trigger(tmp_path: Path) -> None:
    a = write(tmp_path, "a", {3: usual(), 4: usual(), 5: usual()})
    b = write(tmp_path, "b", {14: usual(), 15: usual(2.0)})
    found = diff_paths(a, other=str(b))
    assert [(it["a"]["iteration"], it["b"]["iteration"]) for it in found["compared"]] == [(4, 14), (5, 15)]
    assert found["first"]["a"]["iteration"] == 5
    with pytest.raises(IncidentError, match=r"has no records of iteration 7; it has 0\.3, 0\.4, 0\.5"):
        diff_paths(a, iterations=["7", "3"])
    with pytest.raises(IncidentError, match=r"expected a number, or ATTEMPT\.ITERATION"):
        diff_paths(a, iterations=["last", "3"])


def test_of_two_attempts_the_later_one_counts(tmp_path: Path) -> None:
    entries = iterations({1: usual(), 2: usual(2.0)})
    again = [entries[0], replace(entries[1], attempt=1, iteration=1)]
    a = write(tmp_path, "a", {1: usual(), 2: usual(2.0)}, iterations=again)
    b = write(tmp_path, "b", {1: usual(2.0)})
    assert not diff_paths(a, other=str(b))["differ"]
    assert diff_paths(a, other=str(b), iterations=["0.1", "1"])["differ"]


def test_what_differs_beside_the_records(tmp_path: Path) -> None:
    entries = iterations({1: usual()})
    states = {"random_states": {"torch_cpu": np.arange(4, dtype=np.uint8)}}
    a = write(
        tmp_path, "a", {1: usual()}, config_text="budget: none\nring: {iterations: 4}\n",
        environment={"pid": 1, "commit": "abc", "gpu": {"name": "H"}}, iterations=[replace(entries[0], **states)],
    )  # fmt: skip
    b = write(
        tmp_path, "b", {1: usual()}, config_text="budget: none\nring: {iterations: 8}\n",
        environment={"pid": 2, "commit": "abd", "gpu": {"name": "H"}}, iterations=[replace(entries[0], loss=9.0)],
    )  # fmt: skip
    found = diff_paths(a, other=str(b))
    assert not found["differ"], "only records count"
    assert found["configuration"] == [{"path": "ring.iterations", "a": 4, "b": 8}]
    assert found["environment"] == [{"path": "commit", "a": "abc", "b": "abd"}]
    facts = {fact["path"]: (fact["a"], fact["b"]) for fact in found["iterations"][0]["facts"]}
    assert facts == {"loss": (0.5, 9.0), "rng.torch_cpu": ("crc32 8bb98613", None)}
    b = write(tmp_path, "c", {1: usual()}, config_text="budget: [\n")
    assert diff_paths(a, other=str(b))["configuration"]
