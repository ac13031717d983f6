"""A writer that dies itself, and the next one that finds what it left."""

from __future__ import annotations

import os
import signal
import subprocess

import numpy as np
from writer_support import (
    area,
    incident_folders,
    introduce,
    make_firing,
    make_layouts,
    send_iteration,
    send_payload,
    until,
    wait_for,
)
from writer_support import identity as make_identity

from flightrec.storage import commit, names
from flightrec.storage.facts import Identity
from flightrec.storage.read import open_incident
from flightrec.storage.write import TensorsFile
from flightrec.writer import folders, launch, messages, salvage
from flightrec.writer.client import WriterClient

NUM_RECORDS = 4


def killed_writer(tmp_path) -> None:
    """SIGKILL for the writer after facts and some payload."""
    layouts = make_layouts(NUM_RECORDS)
    client = WriterClient.start(tmp_path, make_identity(), staging_bytes=1 << 20)
    introduce(client, layouts)
    assert client.send(*messages.open_incident(1, make_firing(101)))
    for tick in range(2):
        send_iteration(client, 1, tick, NUM_RECORDS)
    assert client.send(*messages.facts_end(1))
    send_payload(client, 1, 1, NUM_RECORDS)
    wait_for(client, "free")
    os.kill(client.pid, signal.SIGKILL)
    until(lambda: not client.alive, "the writer lives")
    assert not client.close(5)


def test_the_next_writer_salvages_and_deletes_nothing(tmp_path):
    killed_writer(tmp_path)
    (folder,) = incident_folders(tmp_path)
    before = {path.stat().st_ino for path in folder.iterdir() if not path.name.endswith(".json")}
    assert len(list(folder.glob(".*"))) == 2  # the uncommitted tensors and the marker
    client = WriterClient.start(tmp_path, make_identity(rank=1), staging_bytes=1 << 20)
    wait_for(client, "ready")
    told, _ = wait_for(client, "salvaged")
    assert client.close(30)
    after = {path.stat().st_ino for path in folder.iterdir()}
    assert after == before
    assert told.header["paths"] == [str(folder / f"rank00000.{folder.name}.tensors.salvaged.h5")]
    with open_incident(folder) as incident:
        assert incident.trigger.iteration == 101
        assert len(incident.records()) == 2 * NUM_RECORDS
        data = area(1, NUM_RECORDS)
        for number, record in enumerate(incident.records(iteration=101)):
            assert record.raw("data").tobytes() == data[number * 512 + 256 : number * 512 + 384]
        assert all(record.why_absent for record in incident.records(iteration=100))


def partial_tensors(folder, layouts):
    """An uncommitted tensors file that was flushed, as a writer leaves it behind."""
    folder.mkdir()
    identity = Identity(folder.name, "run", 0, 0, 1, "h", 0)
    path = folder / f"rank00000.{folder.name}.tensors.h5"
    tensors = TensorsFile.create(path, identity)
    data = memoryview(area(0, NUM_RECORDS))
    for number, layout in enumerate(layouts):
        start = number * 512
        buffers = [data[start : start + 256], data[start + 256 : start + 384], data[start + 384 : start + 388]]
        tensors.add(number, names.record_path(0, 100, layout.key, 2), layout, buffers)
    tensors.flush()
    return tensors, commit.partial_path(path)


def dead_marker(folder) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    folders.write_marker(folder, 0)
    marker = folders.marker_path(folder, 0)
    marker.write_text(marker.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {process.pid}'))


def test_a_readable_file_gets_its_name_and_an_unreadable_one_stays(tmp_path):
    import h5py

    layouts = make_layouts(NUM_RECORDS)
    folder = tmp_path / "incident"
    tensors, partial = partial_tensors(folder, layouts)
    image = partial.read_bytes()
    tensors.abort()
    partial.write_bytes(image)
    broken = folder / ".rank00001.incident.tensors.h5.partial"
    broken.write_bytes(image[:3000])
    dead_marker(folder)
    (saved,) = salvage.salvage(tmp_path)
    assert saved.name == "rank00000.incident.tensors.salvaged.h5"
    assert sorted(path.name for path in folder.iterdir()) == [broken.name, saved.name]
    assert broken.read_bytes() == image[:3000]
    with h5py.File(saved, locking=False) as file:
        assert file.attrs["complete"] == 0
        codes = file[names.record_path(0, 100, layouts[2].key, 2)]["data"][()]
        assert np.array_equal(codes.ravel(), np.frombuffer(area(0, NUM_RECORDS)[2 * 512 + 256 : 2 * 512 + 384], "u1"))
    assert salvage.salvage(tmp_path) == []


def test_files_of_a_living_writer_are_left_alone(tmp_path):
    folder = tmp_path / "incident"
    tensors, partial = partial_tensors(folder, make_layouts(NUM_RECORDS))
    folders.write_marker(folder, 0)
    assert salvage.salvage(tmp_path) == []
    assert partial.exists()
    tensors.abort()


def test_a_name_that_is_taken_is_never_replaced(tmp_path):
    folder = tmp_path / "incident"
    tensors, partial = partial_tensors(folder, make_layouts(NUM_RECORDS))
    image = partial.read_bytes()
    tensors.abort()
    partial.write_bytes(image)
    earlier = folder / "rank00000.incident.tensors.salvaged.h5"
    earlier.write_bytes(b"saved before")
    dead_marker(folder)
    assert salvage.salvage(tmp_path) == []
    assert earlier.read_bytes() == b"saved before"
    assert partial.read_bytes() == image


def test_as_a_program(tmp_path):
    command = launch.command("flightrec.writer.salvage", str(tmp_path))
    done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True, check=True)
    assert done.stdout == ""
