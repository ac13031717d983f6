"""``flightrec diff`` as a user meets it: exit codes, the tables, and a document whose fields are a contract."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import flightrec
from test_analysis_compare import usual, write

FIELDS = {
    "document", "version", "differ", "a", "b", "by", "tolerance", "factor", "share", "compared", "num_pairs",
    "num_equal", "num_within", "num_not_compared", "num_different", "first", "differences", "num_only_a", "num_only_b",
    "only_a", "only_b", "configuration", "versions", "environment", "iterations",
}  # fmt: skip


def test_a_difference_is_told_and_is_exit_code_1(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", {1: usual(), 2: usual()}), write(tmp_path, "b", {1: usual(), 2: usual(1.5)[:-1]})
    done = flightrec("diff", a, b)
    assert done.returncode == 1, done.stderr
    parts = done.stdout.split("Where they part first")[1].splitlines()
    assert parts[1].strip() == "fc2 activation"
    assert "at most 0.5 apart" in " ".join(done.stdout.split())
    assert "Only in A" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    told = flightrec("diff", a, b, "--json")
    document = json.loads(told.stdout)
    assert told.returncode == 1
    assert set(document) == FIELDS
    assert (document["document"], document["version"]) == ("flightrec-diff", 1)


def test_the_same_is_exit_code_0_and_a_tolerance_forgives(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", {1: usual()}), write(tmp_path, "b", {1: usual(1.001)})
    assert flightrec("diff", a, a).returncode == 0
    done = flightrec("diff", a, b, "--tolerance", "0.01")
    assert done.returncode == 0, done.stdout
    assert "3 are within the tolerance" in " ".join(done.stdout.split())


def test_usage_and_unreadable_input(tmp_path: Path) -> None:
    a = write(tmp_path, "a", {1: usual()})
    assert flightrec("diff", a).returncode == 2
    assert flightrec("diff", a, "--iterations", "1", "2", "--by", "names").returncode == 2
    assert flightrec("diff", a, a, "--tolerance", "much").returncode == 2
    assert flightrec("diff", a, a, "--layer", "re:(").returncode == 2
    assert flightrec("diff", a, tmp_path / "nowhere").returncode == 3
    assert "flightrec diff incidents/BAD --iterations" in flightrec("diff", "--help").stdout


def test_names_from_a_file_are_shown_never_obeyed(tmp_path: Path) -> None:
    from storage_samples import plain

    from flightrec.records import Key

    key = Key("[red]\x1b[2J", "activation", microbatch=0)
    a = write(tmp_path, "a", {1: [plain(key, [1.0])]})
    b = write(tmp_path, "b", {1: [plain(key, [2.0])]})
    done = flightrec("diff", a, b)
    assert "\x1b" not in done.stdout
    assert "[red]\\x1b[2J" in done.stdout
