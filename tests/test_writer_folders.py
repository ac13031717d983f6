from __future__ import annotations

import json
import os
import subprocess
import time

import pytest
from writer_support import make_firing

from flightrec.writer import folders


def finished_incident(directory, name, num_bytes=100, age_s=0, other=""):
    folder = directory / name
    folder.mkdir(parents=True)
    for kind in ("facts", "tensors"):
        (folder / f"rank00000.{name}.{kind}.h5").write_bytes(bytes(num_bytes // 2))
    if other:
        (folder / other).write_text("mine")
    moment = time.time() - age_s
    os.utime(folder, (moment, moment))
    return folder


def make_room(directory, needed, quota, rank=0, rule="nan"):
    return folders.make_room(directory, "run", rank, rule, needed, quota)


@pytest.mark.parametrize(
    ("run_id", "rule"), [("run", "nan"), ("a/b", "c.d"), ("", ""), ("..", "."), ("ü\0", "x" * 300), ("run.7", "r0")]
)
def test_any_words_give_a_file_name_that_can_be_read_back(tmp_path, run_id, rule):
    name = folders.incident_name(run_id, 3, make_firing(rule=rule))
    folder = folders.make_folder(tmp_path, name, set())
    assert folder.parent == tmp_path
    assert folder.is_dir()
    (found,) = folders.finished(tmp_path, run_id)
    assert (found.path, found.rank) == (folder, 3)


def test_different_words_give_different_names():
    names = {folders.incident_name(run, 0, make_firing(rule=rule)) for run in ("a.b", "a-b") for rule in ("x/y", "x_y")}
    assert len(names) == 4


def test_a_taken_name_gets_a_number_and_no_name_comes_back(tmp_path):
    used: set[str] = set()
    (tmp_path / "name").write_text("a file of that name")
    assert folders.make_folder(tmp_path, "name", used).name == "name.2"
    (tmp_path / "name.2").rmdir()
    assert folders.make_folder(tmp_path, "name", used).name == "name.3"
    assert folders.make_folder(tmp_path, "name", set()).name == "name.2"


def test_the_oldest_of_the_rule_goes_first(tmp_path):
    for number in range(4):
        finished_incident(tmp_path, f"run.0.000000{number}.nan.r0", 100, age_s=100 - number)
    assert make_room(tmp_path, 100, 400)
    assert sorted(path.name[12] for path in tmp_path.iterdir()) == ["0", "2", "3"]
    assert not make_room(tmp_path, 300, 350)
    assert [path.name for path in tmp_path.iterdir()] == ["run.0.0000000.nan.r0"]


def test_nothing_is_deleted_while_it_fits(tmp_path):
    for number in range(3):
        finished_incident(tmp_path, f"run.0.000000{number}.nan.r0", 100)
    assert make_room(tmp_path, 100, 400)
    assert len(list(tmp_path.iterdir())) == 3


def test_only_our_own_finished_files_are_deleted(tmp_path):
    """Not other ranks', rules' or runs', nor a folder with somebody's notes or a writer at work."""
    keep = [
        finished_incident(tmp_path, "run.0.0000000.nan.r0", age_s=99),
        finished_incident(tmp_path, "run.0.0000001.nan.r1", age_s=98),
        finished_incident(tmp_path, "run.0.0000002.amax.r0", age_s=97),
        finished_incident(tmp_path, "other.0.0000003.nan.r0", age_s=96),
        finished_incident(tmp_path, "run.0.0000004.nan.r0", age_s=95, other="notes.txt"),
        finished_incident(tmp_path, "run.0.0000005.nan.r0", age_s=94, other=".x.h5.partial"),
        finished_incident(tmp_path, "run.0.0000006.nan.r0", age_s=93, other=".rank00000.writer.json"),
    ]
    gone = finished_incident(tmp_path, "run.0.0000007.nan.r0", age_s=1)
    assert not make_room(tmp_path, 100, 50)
    assert all(len(list(folder.iterdir())) >= 2 for folder in keep)
    assert not gone.exists()


def test_free_bytes_of_a_directory_that_is_not_there_yet(tmp_path):
    status = os.statvfs(tmp_path)
    free = folders.free_bytes(tmp_path / "a" / "b")
    assert free is not None
    assert abs(free - status.f_bavail * status.f_frsize) < 1 << 30


def test_a_marker_of_a_living_writer_is_not_abandoned(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    folders.write_marker(folder, 0)
    assert list(folders.abandoned(tmp_path)) == []
    folders.remove_marker(folder, 0)
    assert not folder.exists()  # nothing was written


def test_markers_of_the_dead_are_found(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    for name in ("dead", "reused", "elsewhere", "long silent", "nonsense"):
        (tmp_path / name).mkdir()
        folders.write_marker(tmp_path / name, 0)

    def change(name, **values):
        path = folders.marker_path(tmp_path / name, 0)
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return path

    change("dead", pid=process.pid)
    change("reused", started="another boot.12345")
    change("elsewhere", host="another host", pid=process.pid)
    silent = change("long silent", host="another host")
    old = time.time() - 2 * folders.FOREIGN_IDLE_S
    os.utime(silent, (old, old))
    folders.marker_path(tmp_path / "nonsense", 0).write_text("{")
    assert [marker.parent.name for marker in folders.abandoned(tmp_path)] == ["dead", "long silent", "reused"]
