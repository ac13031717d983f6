"""The command line as a user meets it: exit codes, and what is printed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_support import PROGRAM, flightrec, flightrec_process
from incident_support import write_incident

from flightrec import __version__ as flightrec_version


def test_help_names_all_commands() -> None:
    done = flightrec("--help")
    assert done.returncode == 0
    for command in ("demo", "check", "bench", "inspect", "diff", "export", "pack"):
        assert command in done.stdout


def test_unknown_command_is_a_usage_error() -> None:
    assert flightrec("frobnicate").returncode == 2


def test_inspect_tells_where_it_began(incident_folder: Path) -> None:
    done = flightrec_process("inspect", incident_folder)
    assert done.returncode == 0, done.stderr
    began = done.stdout.split("Where it began")[1].splitlines()
    assert began[1].strip() == "1. blocks.0.fc2 activation"
    assert done.stderr == ""


def test_inspect_fits_80_columns_without_colour(incident_folder: Path) -> None:
    done = flightrec("inspect", incident_folder, COLUMNS="200")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("pattern", ["", "*.index.h5", "*.facts.h5", "*.tensors.h5"])
def test_inspect_takes_folder_index_and_files(incident_folder: Path, pattern: str) -> None:
    path = next(incident_folder.glob(pattern)) if pattern else incident_folder
    done = flightrec("inspect", path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["blame"][0]["key"]["layer"] == "blocks.0.fc2"


def test_inspect_without_tensors_file_says_so(incident_folder: Path) -> None:
    next(incident_folder.glob("*.tensors.h5")).unlink()
    done = flightrec("inspect", incident_folder)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("Not recorded")[1]
    assert "tensors.h5:nosuchfile" in "".join(told.split())  # wrapped somewhere, as long as the folder's name


def test_inspect_of_nothing(tmp_path: Path) -> None:
    done = flightrec_process("inspect", tmp_path / "nowhere")
    assert done.returncode == 3
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_of_a_directory_of_incidents_names_them(incident_folder: Path) -> None:
    done = flightrec("inspect", incident_folder.parent)
    assert done.returncode == 3
    assert incident_folder.name in done.stderr


def test_inspect_of_a_truncated_file(incident_folder: Path) -> None:
    facts = next(incident_folder.glob("*.facts.h5"))
    facts.write_bytes(facts.read_bytes()[:3000])
    done = flightrec("inspect", incident_folder)
    assert done.returncode == 3
    assert facts.name in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_survives_mutations(incident_folder: Path, tmp_path: Path) -> None:
    """Whatever a few changed bytes do to libhdf5, the command ends with 0 or 3 and without a traceback."""
    facts = next(incident_folder.glob("*.facts.h5"))
    content = facts.read_bytes()
    for number in range(4):
        folder = tmp_path / f"mutation{number}"
        shutil.copytree(incident_folder, folder)
        changed = bytearray(content)
        for place in range(100 + number * 37, len(changed), 997):
            changed[place] ^= 0xFF
        (folder / facts.name).write_bytes(changed)
        done = flightrec("inspect", folder)
        assert done.returncode in (0, 3), done.stderr
        assert "Traceback" not in done.stderr


def test_inspect_never_obeys_escapes_of_a_file(tmp_path: Path) -> None:
    folder = write_incident(tmp_path, layer="evil\x1b[2J\u202e[bold]", message="\x1b]0;title\x07 and [red]markup")
    done = flightrec("inspect", folder)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "[red]markup" in done.stdout
    assert "[bold]" in done.stdout


def test_check_of_a_sound_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("ring: {iterations: 7, memory: 5%}\n")
    done = flightrec("check", file)
    assert done.returncode == 0, done.stderr
    assert "7 iterations" in done.stdout
    assert "5%" in done.stdout


def test_check_of_a_refused_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("budget: none\nring: {iteration: 7}\n")
    done = flightrec("check", file)
    assert done.returncode == 1
    assert f"{file}:2:" in done.stderr
    assert "iterations" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_of_nothing(tmp_path: Path) -> None:
    done = flightrec("check", tmp_path / "c.yaml")
    assert done.returncode == 3
    assert "c.yaml" in done.stderr


def test_version() -> None:
    done = flightrec("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout in (f"flightrec {flightrec_version}\n", "flightrec (a checkout that is not installed)\n")


def test_reader_that_goes_away_is_no_finding(incident_folder: Path) -> None:
    child = subprocess.Popen(
        [*PROGRAM, "inspect", str(incident_folder), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    _, error = child.communicate()
    assert b"Traceback" not in error
    assert child.returncode in (0, 1)


def test_pack_tells_the_sizes_and_replaces_nothing(incident_folder: Path, tmp_path: Path) -> None:
    done = flightrec_process("pack", incident_folder, "--output", tmp_path / "small", "--level", "6")
    assert done.returncode == 0, done.stderr
    assert "bit by bit" in done.stdout
    assert "(gzip 6)" in done.stdout
    one, two = (flightrec("inspect", path, "--json") for path in (incident_folder, tmp_path / "small"))
    assert json.loads(one.stdout)["blame"] == json.loads(two.stdout)["blame"]
    for options in (["--output", tmp_path / "small"], ["--filter", "lzma"], ["--level", "12"]):
        assert flightrec("pack", incident_folder, *options).returncode == 2
    assert flightrec("pack", tmp_path / "nowhere", "--output", tmp_path / "x").returncode == 3
