"""Damages incidents on purpose, and runs commands on them: mutations of bytes, of structure and of cells, by seed.

A command runs as it does for users, ``flightrec.cli.main`` and the child in which it reads, but both are forks of one
process that has imported everything: some 20 times as many mutations in a minute. The child's limits are smaller.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
from typer.testing import CliRunner

from flightrec.analysis.incident import open_incident
from flightrec.codecs.quantized import sides_of
from flightrec.commands import reading
from flightrec.errors import FormatError, IncidentError

MEMORY_BYTES = 3 << 30
CPU_S = 10
WALL_S = 30.0
HANG_S = 60.0
CANARY = "CANARY-of-another-folder"

COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "{incident}"],
    "inspect --json": ["inspect", "{incident}", "--json"],
    "inspect --quantizer": ["inspect", "{incident}", "--quantizer", "*"],
    "decode-all": ["decode-all", "{incident}"],
    "pack": ["pack", "{incident}", "--output", "{work}/packed"],
}
"""Arguments of every command that reads; ``{work}`` is an empty folder of its own. ``decode-all`` stands below."""

SELDOM = {"pack": 0.4}
"""Commands that take long, and the share of the mutations that they see."""

HOSTILE_TEXTS = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "[bold red]markup[/] [link=file:///etc/passwd]x[/link]",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "line\nflightrec: all is well\r\x08\x08",
    "\u202egnp.exe \u2066\u2069\u200f",
    "../../../../etc/passwd",
    "/etc/passwd",
    "a" * 100_000,
    "%s%n{0}{self}",
    "[" * 5000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    "[1,2,{}]",
    '{"$array": [1], "dtype": "S2000000000"}',
    '{"$float": "x"}',
    "[-1, 9223372036854775807]",
    '[{"name": "high_precision", "shape": [4611686018427387904], "format": "float32", "bytes": 18446744073709551616}]',
    '{"scheme": "grouped", "num_tensors": 1000000000000, "group_shape": [-1, 0], "member": "float8"}',
    "1e999",
    "9" * 5000,
    "\udcff\ud800",
    "",
)

NUMBERS = (0, 1, -1, 127, 255, 256, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 63) - 1, -(1 << 63), 1 << 40)
FLOATS = (0.0, -0.0, -1.0, 1e300, -1e300, float("inf"), float("-inf"), float("nan"), 5e-324, 0.5)
UNSAFE_OUTPUT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


# -- mutations --------------------------------------------------------------------------------------------------------


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage a copy of an incident in one to three ways; gives their names."""
    kinds = rng.choices(MUTATIONS, [weight for _, weight in WEIGHTS], k=rng.choice((1, 1, 1, 2, 3)))
    told = []
    for kind in kinds:
        try:
            kind(folder, rng)
            told.append(kind.__name__)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError, OverflowError):
            told.append(f"({kind.__name__} refused)")  # h5py refuses some; the file is damaged already
    return ", ".join(told)


def flip_bits(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 4, 16, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng)
    data = bytearray(path.read_bytes())
    length = rng.choice((1, 2, 4, 8, 64, 512))
    start = rng.randrange(len(data))
    words = (
        b"\0" * length,
        b"\xff" * length,
        rng.randbytes(length),
        rng.choice(NUMBERS).to_bytes(9, "little", signed=True)[:8],
    )
    data[start : start + length] = rng.choice(words)[: len(data) - start]
    path.write_bytes(data)


def truncate(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng)
    os.truncate(path, rng.randrange(path.stat().st_size))


def move_bytes(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng)
    data = path.read_bytes()
    start, length = rng.randrange(len(data)), rng.choice((1, 8, 100, 2048))
    at = rng.randrange(len(data))
    path.write_bytes(data[:at] + data[start : start + length] + data[at + rng.choice((0, length)) :])


def set_cell(folder: Path, rng: random.Random) -> None:
    with h5py.File(_file(folder, rng), "r+") as file:
        tables = [item for item in _items(file) if isinstance(item, h5py.Dataset) and item.dtype.names and item.size]
        table = rng.choice(tables)
        rows = table[()]
        for _ in range(rng.choice((1, 1, 3))):
            name, row = rng.choice(rows.dtype.names), rng.randrange(len(rows))
            kind, size = rows.dtype[name].kind, rows.dtype[name].itemsize
            if kind == "S":
                rows[name][row] = rng.choice((b"", b"\xff\xfe", b"train", b"x" * size, b"\x1b[31m"))
            elif kind == "f":
                rows[name][row] = rng.choice(FLOATS)
            else:
                number = rng.choice((*NUMBERS, rng.randrange(len(rows))))
                rows[name][row] = np.frombuffer(number.to_bytes(9, "little", signed=True)[:size], rows.dtype[name])[0]
        table[...] = rows


def set_text(folder: Path, rng: random.Random) -> None:
    with h5py.File(_file(folder, rng), "r+") as file:
        texts = file["names"][()]
        for _ in range(rng.choice((1, 2, len(texts)))):
            word = rng.choice(HOSTILE_TEXTS).encode("utf-8", "surrogatepass").replace(b"\0", b"")
            texts[rng.randrange(len(texts))] = rng.choice((word, word, b"\xff\xfe bad utf-8 \x80"))
        file["names"][...] = texts


def set_attribute(folder: Path, rng: random.Random) -> None:
    with h5py.File(_file(folder, rng), "r+") as file:
        item = rng.choice([file, file, *_items(file)])
        known = list(item.attrs)
        name = rng.choice(known or ["format"])
        values: tuple[Any, ...] = (
            *(np.int64(number) for number in NUMBERS if -(1 << 63) <= number < 1 << 63),
            *FLOATS,
            *(text for text in HOSTILE_TEXTS if "\ud800" not in text and len(text) < 60_000),
            np.arange(5),
            np.zeros((2, 2), "S3"),
            h5py.Empty("f8"),
            np.bytes_(b"\xff\xfe"),
            np.uint8(1),
        )
        if rng.random() < 0.2:
            del item.attrs[name]
        else:
            item.attrs[name] = rng.choice(values)


def set_dataset(folder: Path, rng: random.Random) -> None:
    """Another array, link or nothing in the place of what stood there."""
    with h5py.File(_file(folder, rng), "r+") as file:
        name = rng.choice(_names(file))
        attributes = dict(file[name].attrs)
        is_dataset = isinstance(file[name], h5py.Dataset)
        old = file[name][()] if is_dataset else None
        del file[name]
        choice = rng.randrange(14)
        outside = str(folder.parent / "outside.h5")
        if choice == 0:
            return
        if choice == 1:
            file[name] = h5py.SoftLink(rng.choice(("/", name, "/nowhere", "/names", f"{name}/x")))
        elif choice == 2:
            file[name] = h5py.ExternalLink(rng.choice((outside, "../outside.h5", "/dev/zero", str(folder))), name)
        elif choice == 3:
            file[name] = file["/"]
        elif choice == 4:
            file.create_group(name)
        elif choice == 5:
            file.create_dataset(name, shape=(1 << 40,), dtype="f8")
        elif choice == 6:
            file.create_dataset(name, shape=(1 << 34,), dtype="u1", chunks=(1 << 22,), compression="gzip")
        elif choice == 7:
            file.create_dataset(name, shape=(64,), dtype="u1", external=[(outside, 0, 64)])
        elif choice == 8:
            layout = h5py.VirtualLayout(shape=(8,), dtype="i8")
            layout[:] = h5py.VirtualSource(outside, "names", shape=(8,))
            file.create_virtual_dataset(name, layout)
        elif choice == 9:
            file.create_dataset(name, data=np.array([b"x" * 1000] * 3, dtype=object), dtype=h5py.string_dtype())
        elif choice == 10 and old is not None and np.size(old) and not h5py.check_string_dtype(np.asarray(old).dtype):
            shape = tuple(rng.choice((size, size + 1, max(size - 1, 0), 0)) for size in np.shape(old))
            file.create_dataset(name, data=np.resize(old, shape))
        elif choice == 11 and old is not None and np.asarray(old).dtype.names:
            types = [(n, rng.choice((old.dtype[n], np.dtype("f4"), np.dtype("S3")))) for n in old.dtype.names]
            file.create_dataset(name, data=np.zeros(np.shape(old), rng.sample(types, rng.randrange(1, len(types) + 1))))
        elif choice == 12:
            file[name] = np.dtype("i4")
        else:
            file.create_dataset(name, data=rng.choice((np.arange(3.0), np.zeros((2, 3)), np.int8(3), "text")))
        if name in file and isinstance(file[name], h5py.Dataset):
            for attribute, value in attributes.items():
                file[name].attrs[attribute] = value


def add_objects(folder: Path, rng: random.Random) -> None:
    """Many or deep groups, cycles, odd link names."""
    with h5py.File(_file(folder, rng), "r+") as file:
        parent = rng.choice([item for item in [file, *_items(file)] if isinstance(item, h5py.Group)])
        choice = rng.randrange(5)
        if choice == 0:
            for number in range(200):
                parent.create_group(f"g{number}")
        elif choice == 1:
            parent.create_group("/".join("d" * 200))
        elif choice == 2:
            parent["cycle"] = parent
            parent["up"] = file["/"]
        elif choice == 3:
            h5py.h5g.create(parent.id, rng.choice((b"\xff\xfe", b"\x1b[2J", b"a\nb", "\u202e".encode())))
        else:
            for number in range(300):
                parent.attrs[f"a{number}"] = "x" * 200


def swap_file(folder: Path, rng: random.Random) -> None:
    """A file becomes a folder, a FIFO, a link, another file, or disappears."""
    path = _file(folder, rng)
    choice = rng.randrange(9)
    others = [other for other in folder.glob("*.h5") if other != path]
    data = path.read_bytes()
    path.unlink()
    if choice == 0:
        path.mkdir()
    elif choice == 1:
        os.mkfifo(path)
    elif choice == 2:
        path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", path.name, "../outside.h5", "/dev/tty")))
    elif choice == 3 and others:
        shutil.copyfile(rng.choice(others), path)
    elif choice == 4:
        path.write_bytes(b"")
    elif choice == 5:
        path.write_bytes(rng.randbytes(5000))
    elif choice == 6:
        moved = folder.parent / "outside" / path.name
        moved.parent.mkdir(exist_ok=True)
        moved.write_bytes(data)
        path.symlink_to(moved)
    elif choice == 7:
        path.with_name(rng.choice(("\x1b[31m", "[bold]", "x\ny")) + path.name).write_bytes(data)


WEIGHTS: tuple[tuple[Callable[[Path, random.Random], None], int], ...] = (
    (flip_bits, 6),
    (overwrite, 6),
    (truncate, 1),
    (move_bytes, 2),
    (set_cell, 5),
    (set_text, 4),
    (set_attribute, 4),
    (set_dataset, 6),
    (add_objects, 1),
    (swap_file, 1),
)
MUTATIONS = [kind for kind, _ in WEIGHTS]


def _file(folder: Path, rng: random.Random) -> Path:
    files = sorted(path for path in folder.glob("*.h5") if path.is_file() and not path.is_symlink())
    facts = [path for path in files if ".facts." in path.name]
    return rng.choice(facts if facts and rng.random() < 0.5 else files)


def _names(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visit(found.append)
    return found


def _items(file: h5py.File) -> list[Any]:
    return [file[name] for name in _names(file)]


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a command did."""

    outcome: str
    detail: str = ""


@dataclass
class Tally:
    """Outcomes of many runs."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    untidy: Counter[str] = field(default_factory=Counter)
    mutations: int = 0

    def add(self, command: str, result: Result, what: str) -> None:
        self.outcomes[command, result.outcome] += 1
        if result.outcome in BAD:
            self.bad.append(f"{what}: {command}: {result.outcome}: {result.detail[-1500:]}")
        named = re.search(r"cannot be read, (\w+): (.{0,90})", result.detail)
        if named:
            self.untidy[f"{command}: {named.group(0)}"] += 1

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.outcomes + other.outcomes,
            self.bad + other.bad,
            self.untidy + other.untidy,
            self.mutations + other.mutations,
        )


BAD = ("traceback", "hang", "crash of the command", "unsafe output", "leak", "other exit code", "left something")
FINE = ("read safely", "refused", "crash contained", "limit reached")


def run_command(arguments: Sequence[str], work: Path) -> Result:
    """Run ``flightrec`` with arguments in a fork; classify how it ended."""
    streams = [work / "stdout", work / "stderr"]
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_command(arguments, streams)
    code = _wait(child, HANG_S)
    told, error = (stream.read_bytes().decode(errors="surrogateescape") for stream in streams)
    if code is None:
        return Result("hang", f"{time.monotonic() - started:.0f} s")
    if CANARY in told or CANARY in error:
        return Result("leak", told + error)
    if "Traceback" in error or code == 70:
        return Result("traceback", error)
    if UNSAFE_OUTPUT.search(told) or UNSAFE_OUTPUT.search(error):
        return Result("unsafe output", repr(told + error))
    if code < 0:
        return Result("crash of the command", f"signal {-code}")
    if code in (0, 1):
        return Result("read safely")
    if code != 3:
        return Result("other exit code", f"{code}: {error}")
    if "was killed by SIG" in error:
        return Result("crash contained", error)
    limit = any(word in error for word in ("CPU time and was stopped", "did not end within", "MiB of memory"))
    return Result("limit reached" if limit else "refused", error)


def _be_command(arguments: Sequence[str], streams: Sequence[Path]) -> None:
    code = 70
    try:
        for number, stream in enumerate(streams):
            os.dup2(os.open(stream, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number + 1)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        reading.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
            run=_run_forked,
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
            CompletedProcess=subprocess.CompletedProcess,
        )
        sys.argv = ["flightrec", *arguments]
        from flightrec.cli import main

        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_forked(command: Sequence[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[bytes]:
    """What ``subprocess.run`` does for ``read_in_child``, without starting Python anew."""
    paths, task, path, memory, cpu, options = command[4:]
    ends = [os.memfd_create(name) for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, end in enumerate(ends):
                os.dup2(end, number + 1)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            limits = (min(int(memory), MEMORY_BYTES), min(int(cpu), CPU_S))
            sys.argv = ["-c", paths, task, path, *map(str, limits), options]
            reading.main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = _wait(child, min(timeout, WALL_S))
    if code is None:
        raise subprocess.TimeoutExpired(list(command), WALL_S)
    out, err = (os.pread(end, os.fstat(end).st_size, 0) for end in ends)
    return subprocess.CompletedProcess(list(command), code, out, err)


def _wait(child: int, seconds: float) -> int | None:
    """Exit code, minus the signal, or None after so many seconds: then it is killed."""
    end = time.monotonic() + seconds
    pause = 0.001
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def prepare(work: Path) -> None:
    """Import what the forks need, and lay a file beside the incident that nobody may read."""
    import flightrec.cli
    import flightrec.config.load
    import flightrec.reports.quantizers
    import flightrec.reports.summary
    import flightrec.storage.pack

    if all(entry.name != "decode-all" for entry in flightrec.cli.app.registered_commands):
        flightrec.cli.app.command("decode-all")(_decode_all)
    for command in COMMANDS.values():  # typer imports more when it parses
        CliRunner().invoke(flightrec.cli.app, [command[0], "/nowhere"])
    work.mkdir(parents=True, exist_ok=True)
    with h5py.File(work / "outside.h5", "w") as file:
        file["names"] = np.array([CANARY.encode()] * 20, dtype=object)
        file["config"] = CANARY


def decode_all(path: Path) -> dict[str, int]:
    """What reports may ask of every record: its key, statistics, bytes and numbers. Each may be refused by itself."""
    read = refused = 0
    with open_incident(path) as incident:
        incident.blame()
        for record in incident.records()[:200]:
            try:
                assert record.key and record.statistics and record.shape is not None and record.representation
                values, coded = record.high_precision, record.quantized
                if coded is not None:
                    for side in sides_of(coded.formats):
                        coded.dequantize(side=side)
                read += values is not None or coded is not None
                assert isinstance(record.why_absent, str)
            except (IncidentError, FormatError):
                refused += 1
    return {"read": read, "refused": refused}


def _decode_all(path: Path) -> None:
    print(json.dumps(reading.read_in_child("hostile_support:decode_all", path)))


def fuzz(bases: Sequence[Path], work: Path, seed: int, until: Callable[[Tally], bool]) -> Tally:
    """Mutate and run until told to end.

    Args:
        bases: folders of whole incidents.
        work: a folder of its own.
        seed: the same seed gives the same mutations.
        until: is asked before each mutation.
    """
    prepare(work)
    tally = Tally()
    while not until(tally):
        rng = random.Random(f"{seed}.{tally.mutations}")
        incident = work / "incident"
        _remove(incident)
        _remove(work / "outside")
        base = rng.choice(list(bases))
        shutil.copytree(base, incident)
        what = f"seed {seed}.{tally.mutations} of {base.name}: {mutate_apart(incident, rng)}"
        tally.mutations += 1
        for command, arguments in COMMANDS.items():
            if rng.random() >= SELDOM.get(command, 1.0):
                continue
            filled = [word.format(incident=incident, work=work) for word in arguments]
            tally.add(command, run_command(filled, work), what)
            _remove(work / "packed")
        left = {entry.name for entry in work.iterdir()} - {"incident", "outside", "outside.h5", "stdout", "stderr"}
        if left:
            tally.add("all", Result("left something", str(left)), what)
            for name in left:
                _remove(work / name)
    return tally


def mutate_apart(incident: Path, rng: random.Random) -> str:
    """``mutate`` in a fork: libhdf5 may crash while it writes into what was damaged before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, mutate(incident, rng).encode())
        finally:
            os._exit(0)
    os.close(writer)
    if _wait(child, 20.0) is None:
        os.close(reader)
        return "(mutation hangs)"
    with os.fdopen(reader, "rb") as stream:
        return stream.read().decode() or "(mutation crashed)"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def bases(folder: Path) -> Iterator[Path]:
    """Incidents of every version and format: the golden ones, fresh ones, a packed one."""
    from incident_support import write_incident
    from storage_samples import write_golden

    from flightrec.storage.pack import pack_folder

    golden = Path(__file__).parent / "golden"
    for version in ("1.0", "1.1", "1.2", "1.3"):
        target = folder / f"golden-{version}"
        target.mkdir(parents=True)
        for path in golden.glob(f"incident-{version}.*.h5"):
            shutil.copyfile(path, target / path.name)
        yield target
    yield write_incident(folder / "small", amax_grows=True)
    (folder / "samples").mkdir()
    yield write_golden(folder / "samples")
    yield _large(folder / "formats")
    pack_folder(folder / "formats", str(folder / "packed"), "gzip", 4)
    yield folder / "packed"


def _large(folder: Path) -> Path:
    from benchmarks.large_incident import make

    return make(folder, 100, 500_000, 20)


def figures(tally: Tally) -> str:
    """A table of outcomes in Markdown, and what should not have been."""
    shown = [outcome for outcome in (*FINE, *BAD) if any(name == outcome for _, name in tally.outcomes)]
    lines = [f"| command | {' | '.join(shown)} |", f"|---|{'---|' * len(shown)}"]
    for command in (*COMMANDS, "all"):
        counts = [tally.outcomes[command, outcome] for outcome in shown]
        if any(counts):
            lines.append(f"| `{command}` | {' | '.join(map(str, counts))} |")
    return "\n".join([f"{tally.mutations} mutations", "", *lines])


def told(tally: Tally) -> str:
    return json.dumps({"bad": tally.bad, "untidy": tally.untidy.most_common(40)}, indent=1)
