"""Reads incidents with an old h5py (2.10, HDF5 1.10) and an old h5dump; needs Python 3.8 or later, numpy and h5py only.

Usage: python old_hdf5.py FOLDER... Every .h5 file below the folders is read: attributes, all tables, all payload with
its checksums, all links. Ends with 1 if anything is wrong, or if there was nothing to read.
"""

import os
import shutil
import subprocess
import sys
import zlib

try:
    import h5py
    import numpy as np
except ImportError:  # h5dump alone is worth running too
    h5py = None


def files_below(folders):
    for folder in folders:
        for root, _, names in sorted(os.walk(folder)):
            for name in sorted(names):
                if name.endswith(".h5") and not name.startswith("."):
                    yield os.path.join(root, name)


def text(value):
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def expect(condition, message):
    if not condition:
        raise ValueError(message)


def read_facts(file):
    names = [text(name) for name in file["names"][()]]
    records = file["records"][()]
    for column in ("layer", "tensor", "part", "shape", "path"):
        expect(len(records) == 0 or records[column].max() < len(names), "a column points beyond /names")
    iterations = file["iterations"][()]
    expect(iterations["num_records"].sum() == len(records), "/iterations does not add up to /records")
    expect(len(file["firings"][()]) > 0, "no firing")
    expect(text(file["config"][()]) != "", "no configuration")
    read_histories(file, names)


def read_histories(file, names):
    """Every history whole; what is as wide as /series has one column a row of it."""
    for name in file.get("history", ()):
        entry = file["history"][name]
        iterations, values = entry["iterations"][()], entry["values"][()]
        expect(len(iterations) == len(values), f"history {name}: axes differ")
        expect("attempts" not in entry or len(entry["attempts"][()]) == len(values), f"history {name}: attempts")
        expect(entry["values"].dims[0][0][()].tolist() == iterations.tolist(), f"history {name}: dimension scale")
        if "series" in entry:  # since 1.4: every axis has a scale, and every column a label
            expect(entry["values"].dims[1][0].shape == values.shape[1:], f"history {name}: scale of the columns")
            expect(entry["labels"].shape == values.shape[1:], f"history {name}: labels")
        axes = [text(axis) for axis in entry.attrs["axes"]]
        expect(all(axis == "." or axis in entry for axis in axes), f"history {name}: NXdata names {axes}")
        if values.ndim == 2 and "series" in file:
            series = file["series"][()]
            expect(values.shape[1] == len(series), f"history {name}: columns")
            expect(len(series) == 0 or series["layer"].max() < len(names), "/series points beyond /names")
    for iteration in file.get("rng", ()):
        for name in file["rng"][iteration]:
            expect(file["rng"][iteration][name].dtype == np.uint8, f"state of {name}")


def read_tensors(file):
    """Every array, through h5py and through the file offsets of /components; give the number of arrays."""
    names = [text(name) for name in file["names"][()]]
    arrays = {}

    def visit(path, item):
        if isinstance(item, h5py.Dataset) and "/" in path:
            arrays.setdefault(path.rsplit("/", 1)[1], []).append(item)

    file.visititems(visit)
    crcs = {}
    for name, found in arrays.items():
        for dataset in found:
            content = np.ascontiguousarray(dataset[()]).tobytes()
            crcs.setdefault(name, []).append(zlib.crc32(content) & 0xFFFFFFFF)
    table = file["components"][()]
    for row in table:
        name = names[row["component"]]
        expect(int(row["crc32"]) in crcs.get(name, []), f"no array {name} has the checksum of /components")
    with open(file.filename, "rb") as raw:
        for row in table[:200]:
            if row["bytes"] and row["offset"] >= 0:
                raw.seek(int(row["offset"]))
                content = raw.read(int(row["bytes"]))
                expect(zlib.crc32(content) & 0xFFFFFFFF == int(row["crc32"]), "bytes at an offset differ")
    return sum(map(len, arrays.values()))


def read_index(file):
    for row in file["ranks"][()]:
        group = file[f"rank{row['rank']:05d}"]
        for link in group:
            expect(group[link].attrs["incident_id"] == file.attrs["incident_id"], "a link leads to another incident")


def read(path):
    """Read one file; give what it is, in words."""
    with h5py.File(path, "r") as file:
        expect(text(file.attrs["format"]) == "flightrec-incident", "attribute format")
        expect(text(file.attrs["format_version"]).split(".")[0] == "1", "attribute format_version")
        expect(int(file.attrs["complete"]) == 1, "not complete")
        kind = text(file.attrs["kind"])
        if kind == "facts":
            read_facts(file)
        elif kind == "index":
            read_index(file)
        elif kind == "tensors":
            return f"tensors, {read_tensors(file)} arrays"
        return kind


def dump(program, path):
    """Run h5dump over the headers of one file."""
    done = subprocess.Popen([program, "-H", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = done.communicate()
    expect(done.returncode == 0, "h5dump: " + error.decode("utf-8", "replace").strip()[-300:])
    expect(b"HDF5" in out, "h5dump printed nothing")


def main(folders):
    program = shutil.which("h5dump")
    version = "no h5dump"
    if program:
        version = subprocess.check_output([program, "--version"]).decode().strip()
    print(f"HDF5 of h5py: {h5py.version.hdf5_version if h5py else 'none'}; {version}")
    paths = list(files_below(folders))
    failed = 0
    for path in paths:
        try:
            told = read(path) if h5py else "headers"
            if program:
                dump(program, path)
            print(f"{path}: {told}")
        except Exception as error:  # one bad file must not hide the others
            failed += 1
            print(f"{path}: FAILED: {type(error).__name__}: {error}")
    if not paths:
        print(f"no .h5 file below {', '.join(folders)}")
    print(f"{len(paths) - failed} passed, {failed} failed")
    return 1 if failed or not paths or not (h5py or program) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
