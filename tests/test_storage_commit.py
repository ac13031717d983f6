from __future__ import annotations

import errno
import os

import pytest

from flightrec.errors import WriterError
from flightrec.storage import commit


def prepare(folder, content: bytes = b"new"):
    final = folder / "x.h5"
    partial = commit.partial_path(final)
    partial.write_bytes(content)
    return partial, final


def test_publish_gives_the_final_name(tmp_path) -> None:
    partial, final = prepare(tmp_path)
    assert partial.name == ".x.h5.partial"
    commit.publish(partial, final)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    assert final.read_bytes() == b"new"


@pytest.mark.parametrize("hard_links", [True, False])
def test_publish_never_replaces(tmp_path, monkeypatch, hard_links: bool) -> None:
    partial, final = prepare(tmp_path)
    final.write_bytes(b"old")
    if not hard_links:
        monkeypatch.setattr(os, "link", refuse_links)
    with pytest.raises(WriterError, match="never replaced"):
        commit.publish(partial, final)
    assert final.read_bytes() == b"old"
    assert partial.read_bytes() == b"new"


def test_publish_without_hard_links(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "link", refuse_links)
    partial, final = prepare(tmp_path)
    commit.publish(partial, final)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_other_errors_are_not_hidden(tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "link", full)
    partial, final = prepare(tmp_path)
    with pytest.raises(OSError, match="full"):
        commit.publish(partial, final)
    assert not final.exists()


def test_write_all_continues_after_short_writes(tmp_path, monkeypatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda where, data, offset: pwrite(where, data[:3], offset))
    path = tmp_path / "bytes"
    with path.open("w+b") as file:
        commit.write_all(file.fileno(), b"0123456789", 5)
    assert path.read_bytes() == b"\0\0\0\0\x000123456789"


def test_discard_is_quiet(tmp_path) -> None:
    partial, _ = prepare(tmp_path)
    commit.discard(partial)
    commit.discard(partial)
    commit.discard(tmp_path)
    assert tmp_path.is_dir()


def refuse_links(*_: object) -> None:
    raise OSError(errno.EPERM, "no hard links")
