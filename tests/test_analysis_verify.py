"""Verify finds planted faults at their very place, and nothing in incidents whose numbers agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from cli_support import flightrec
from storage_samples import Sample, firing, plain, write_incident
from verify_samples import FORMATS, pair_incident, product_incident, write

from flightrec.analysis.verify import AGREES, CODES_AGREE, DIFFERS, NOTHING, PRODUCTS_AGREE, Verified, verify
from flightrec.analysis.verify_facts import Mismatch
from flightrec.records import Key, Stage
from flightrec.storage import read

PRODUCTS = ("te-float8", "te-blocks", "te-mxfp8", "te-nvfp4")


def verified(folder: Path, **options: object) -> Verified:
    with read.open_incident(folder) as incident:
        return verify(incident, **options)


def again(folder: Path, samples: list[Sample], number: int, name: str, array: np.ndarray) -> Path:
    """The same incident with one array changed."""
    with read.open_incident(folder) as incident:
        infos = incident.ranks[0].quantizers
        iterations = [record.iteration for record in incident.records()]
    changed = list(samples)
    old = changed[number]
    arrays = {**old.arrays, name: (array, old.arrays[name][1])}
    changed[number] = Sample(old.key, arrays, old.statistics, old.quantizer, old.shape)
    groups: dict[int, list[Sample]] = {}
    for iteration, sample in zip(iterations, changed, strict=True):
        groups.setdefault(iteration, []).append(sample)
    target = folder.with_name(f"changed.{number}.{name}")
    write(target, groups, infos)
    return target


def only(found: Verified) -> Mismatch:
    assert len(found.mismatches) == 1, found.mismatches
    assert found.sentence == DIFFERS
    return found.mismatches[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(3 if os.environ.get("FLIGHTREC_TEST_SLOW") == "1" else 1))
def test_clean_incidents_agree(tmp_path: Path, name: str, seed: int) -> None:
    pair_incident(tmp_path / "a", name, seed)
    found = verified(tmp_path / "a")
    assert not found.mismatches, found.mismatches
    assert found.sentence == CODES_AGREE  # it holds no products
    assert all(not outcome.why_not for outcome in found.outcomes)
    assert sum(outcome.num_compared for outcome in found.outcomes) > 0


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("FLIGHTREC_TEST_SLOW") != "1", reason="takes minutes: set FLIGHTREC_TEST_SLOW=1")
@pytest.mark.parametrize("name", FORMATS)
def test_a_hundred_clean_incidents_agree(tmp_path: Path, name: str) -> None:
    for seed in range(100, 200):
        pair_incident(tmp_path / str(seed), name, seed)
        found = verified(tmp_path / str(seed))
        assert not found.mismatches, (seed, found.mismatches)
        assert all(not outcome.why_not for outcome in found.outcomes)


@pytest.mark.parametrize("name", FORMATS)
def test_one_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    samples = pair_incident(tmp_path / "a", name, 7, hostile=False)
    codes = samples[3].arrays["data"][0].copy()
    codes[17, 5] ^= 0x40  # of FP4 the upper nibble: element 11
    mismatch = only(verified(again(tmp_path / "a", samples, 3, "data", codes)))
    column = 11 if "fp4" in name else 5
    assert (mismatch.kind, mismatch.num_wrong, mismatch.rows) == ("codes", 1, (17,))
    assert mismatch.elements[0].index == (17, column)
    where = mismatch.where
    assert (where.key.layer, where.key.tensor, where.iteration) == ("blocks.1.fc1", "activation", 11)
    assert "hardware" in mismatch.meaning


@pytest.mark.parametrize("name", PRODUCTS[1:])
def test_one_flipped_bit_of_the_other_side_is_found(tmp_path: Path, name: str) -> None:
    samples = pair_incident(tmp_path / "a", name, 8, hostile=False)
    codes = samples[0].arrays["columnwise_data"][0].copy()
    codes[9, 3] ^= 0x04
    mismatch = only(verified(again(tmp_path / "a", samples, 0, "columnwise_data", codes)))
    assert (mismatch.side, mismatch.num_wrong) == ("columnwise", 1)
    assert mismatch.elements[0].index == ((6, 9) if "fp4" in name else (9, 3))


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_from_another_iteration_is_found(tmp_path: Path, name: str) -> None:
    samples = pair_incident(tmp_path / "a", name, 9, hostile=False)
    word = "scale" if "scale" in samples[0].arrays else "scale_inv"
    mine, other = (samples[number].arrays[word][0] for number in (0, 2))
    if mine.shape != other.shape or np.array_equal(mine, other):
        other = np.asarray(mine.astype("f8") * 3, mine.dtype) if mine.dtype.kind == "f" else mine + np.uint8(1)
    found = verified(again(tmp_path / "a", samples, 2, word, mine))
    wrong = [mismatch for mismatch in found.mismatches if mismatch.where.record == 2]
    assert wrong
    assert len(wrong) == len(found.mismatches)
    assert any("another iteration" in mismatch.meaning for mismatch in wrong)


@pytest.mark.parametrize("seed", [3, 4])
def test_the_iteration_that_a_stale_scale_is_of_is_named(tmp_path: Path, seed: int) -> None:
    samples = pair_incident(tmp_path / "a", "te-float8", seed, hostile=False)
    first, later = samples[0], samples[2]  # the same tensor in iterations 10 and 11
    assert not np.array_equal(first.arrays["scale_inv"][0], later.arrays["scale_inv"][0])
    samples[2] = Sample(later.key, first.arrays, first.statistics, first.quantizer, first.shape)
    mismatches = verified(again(tmp_path / "a", samples, 2, "scale_inv", later.arrays["scale_inv"][0])).mismatches
    codes = next(mismatch for mismatch in mismatches if mismatch.kind == "codes")
    assert codes.where.iteration == 11
    assert "what the scale of iteration 10 (attempt 0) makes" in codes.meaning


@pytest.mark.parametrize(
    ("name", "bias", "max_terms"),
    [
        *((name, index % 2 == 0, 1 << 35) for index, name in enumerate(PRODUCTS)),
        ("te-blocks", True, 1),
        ("te-mxfp8", False, 1),
    ],
)
def test_products_agree_and_one_wrong_row_is_found(tmp_path: Path, name: str, bias: bool, max_terms: int) -> None:
    samples = product_incident(tmp_path / "a", name, 2, bias=bias)
    found = verified(tmp_path / "a", max_terms=max_terms)
    assert not found.mismatches, found.mismatches
    assert [outcome.side for outcome in found.outcomes if outcome.what == "product"] == ["forward", "dgrad", "wgrad"]
    assert all(not outcome.why_not for outcome in found.outcomes)
    assert found.sentence == AGREES
    products = tuple(outcome for outcome in found.outcomes if outcome.what == "product")
    assert Verified(products).sentence == PRODUCTS_AGREE
    told = " ".join(note for outcome in found.outcomes for note in outcome.notes)
    assert ("bias" in told) == bias
    assert ("projections" in told) == (max_terms == 1)
    for number, tensor in ((3, "output"), (4, "dgrad"), (5, "wgrad")):
        rows = samples[number].arrays["high_precision"][0].copy()
        rows[13] = rows[14]
        mismatch = only(verified(again(tmp_path / "a", samples, number, "high_precision", rows), max_terms=max_terms))
        assert (mismatch.kind, mismatch.where.key.tensor, mismatch.rows) == ("product", tensor, (13,))


def test_what_cannot_be_compared_is_told(tmp_path: Path) -> None:
    layer = "plain"
    values = np.arange(12.0).reshape(3, 4)
    samples = [
        plain(Key(layer, "activation", microbatch=0), values),
        plain(Key(layer, "weight", microbatch=0), values),
        plain(Key(layer, "output", microbatch=0), values @ values.T),
        plain(Key(layer, "wgrad", "main_grad", microbatch=0, stage=Stage.BACKWARD), values),
        plain(Key("alone", "output", microbatch=0), values),
    ]
    write_incident(tmp_path, {3: samples}, [firing(samples[0].key, 3)])
    found = verified(tmp_path)
    assert found.sentence == NOTHING
    reasons = [outcome.why_not for outcome in found.outcomes]
    for part in ("both operands are in high precision", "running sum", "activation was not recorded"):
        assert any(part in reason for reason in reasons), reasons


def test_products_of_unknown_classes_are_not_accused(tmp_path: Path) -> None:
    samples = product_incident(tmp_path / "a", "te-float8", 2)
    with read.open_incident(tmp_path / "a") as incident:
        infos = [{**info, "class_name": "flightrec.Quantized"} for info in incident.ranks[0].quantizers]
    rows = samples[3].arrays["high_precision"][0].copy()
    rows[13] = rows[14]
    samples[3] = Sample(samples[3].key, {"high_precision": (rows, "bfloat16")}, samples[3].statistics)
    write(tmp_path / "b", {10: samples}, infos)
    found = verified(tmp_path / "b", tensor="output")
    assert not found.mismatches
    assert "nothing says" in found.outcomes[-1].why_not


def test_the_command(tmp_path: Path) -> None:
    samples = pair_incident(tmp_path / "a", "te-blocks", 7, hostile=False)
    done = flightrec("verify", tmp_path / "a")
    assert (done.returncode, done.stderr) == (0, "")
    assert "recorded codes agree" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    codes = samples[3].arrays["data"][0].copy()
    codes[17, 5] ^= 0x40
    folder = again(tmp_path / "a", samples, 3, "data", codes)
    done = flightrec("verify", folder)
    assert done.returncode == 1
    assert "Codes differ: blocks.1.fc1 activation" in done.stdout
    assert "1 row: 17" in done.stdout
    assert flightrec("verify", folder, "--iteration", "10").returncode == 0
    document = json.loads(flightrec("verify", folder, "--layer", "*.1.fc1", "--json").stdout)
    assert document["agrees"] is False
    assert document["mismatches"][0]["elements"][0]["index"] == [17, 5]
    assert document["summary"]["codes"]["num_compared"] == 4


def test_the_page_lists_every_field(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "verify.md").read_text()
    samples = pair_incident(tmp_path / "a", "te-blocks", 7, hostile=False)
    codes = samples[3].arrays["data"][0] ^ np.uint8(0x40)
    found = verified(again(tmp_path / "a", samples, 3, "data", codes)).to_json()
    names = {*found, *found["summary"]["codes"], *found["mismatches"][0], *found["outcomes"][0]}
    assert not [name for name in names if f"`{name}`" not in page]
