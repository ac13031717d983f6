"""The code in docs/format.md runs, without flightrec, and says what the reader says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from format_contract import described

from flightrec.codecs import base, grouped, nvfp4, quantized, scaled, sides
from flightrec.records import Statistic
from flightrec.storage import schema
from flightrec.storage.read import open_incident

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "format.md").read_text()
BLOCKS = re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE, re.DOTALL)
BARRIER = """
import sys
for name in ("flightrec", "torch", "ml_dtypes"):
    sys.modules[name] = None  # importing it fails
"""


def run(block: str, results: tuple[str, ...], folder: Path, target: Path) -> dict[str, np.ndarray]:
    save = f"\nnp.savez({str(target)!r}, {', '.join(f'{name}={name}' for name in results)})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", BARRIER + block + save],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(target) as found:
        return {name: found[name] for name in results}


def test_reading_tensors(tmp_path: Path) -> None:
    found = run(BLOCKS[0], ("bfloat16", "e4m3", "dequantized"), ROOT / "tests" / "golden", tmp_path / "x.npz")
    with open_incident(ROOT / "tests" / "golden" / "incident-1.0.index.h5") as incident:
        record = incident.records(layer="blocks.1.fc1", tensor="activation")[-1]
        assert found["bfloat16"].tobytes() == record.high_precision.tobytes()
        assert np.array_equal(found["dequantized"].astype("f4"), record.quantized.dequantize(), equal_nan=True)


def test_reading_a_history(tmp_path: Path) -> None:
    results = ("amax", "iterations", "attempts")
    found = run(BLOCKS[3], results, ROOT / "tests" / "golden", tmp_path / "x.npz")
    with open_incident(ROOT / "tests" / "golden" / "incident-1.1.index.h5") as incident:
        series = incident.history.series(layer="blocks.1.fc1")
        assert np.array_equal(found["amax"], series["amax"], equal_nan=True)
        assert found["iterations"].tolist() == series.iterations.tolist()
        assert found["attempts"].tolist() == series.attempts.tolist()


def test_reading_how_stale_a_scale_is(tmp_path: Path) -> None:
    found = run("import numpy as np\n" + BLOCKS[2], ("stale",), ROOT / "tests" / "golden", tmp_path / "x.npz")
    with open_incident(ROOT / "tests" / "golden" / "incident-1.2.index.h5") as incident:
        assert found["stale"] == incident.records(tensor="weight")[-1].scale_age.unchanged_iterations == 1


def test_every_e4m3_code(tmp_path: Path) -> None:
    lines = BLOCKS[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("codes ="))
    stop = next(number for number, line in enumerate(lines) if line.startswith("e4m3["))
    block = "import numpy as np\ngroup = {'data': np.arange(256, dtype='u1')}\n" + "\n".join(lines[start : stop + 1])
    found = run(block, ("e4m3",), tmp_path, tmp_path / "x.npz")["e4m3"].astype("f4")
    expected = base.decode(np.arange(256, dtype="u1"), "float8_e4m3fn")
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[[0, 128]]), [False, True])


def test_the_other_codes(tmp_path: Path) -> None:
    found = run(BLOCKS[1], ("e5m2", "e8m0", "e2m3", "e3m2", "e2m1"), tmp_path, tmp_path / "x.npz")
    codes = np.arange(256, dtype="u1")
    for name in ("e2m3", "e3m2"):
        assert np.array_equal(found[name][:64].astype("f4"), base.decode(codes[:64], f"float6_{name}fn"))
    for name, form in (("e5m2", "float8_e5m2"), ("e8m0", "float8_e8m0fnu"), ("e2m1", "float4_e2m1fn_x2")):
        assert np.array_equal(found[name].astype("f4"), base.decode(codes, form), equal_nan=True)


def quantized_samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "fp8": rng.integers(0, 0x7F, (160, 96)).astype("u1"),
        "block_scales": rng.random((2, 1)).astype("f4"),
        "powers": rng.integers(100, 150, (160, 3)).astype("u1"),
        "swizzled": rng.integers(100, 150, 1024).astype("u1"),
        "fp4": rng.integers(0, 256, (32, 24)).astype("u1"),
        "fp4_scales": rng.integers(1, 0x7F, (32, 3)).astype("u1"),
        "amax": rng.random(32).astype("f4"),
        "values": rng.standard_normal((32, 5)).astype("f4"),
    }


def test_the_quantized_formats(tmp_path: Path) -> None:
    samples = quantized_samples()
    e4m3, e8m0, e2m1 = "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"
    numbers = {
        "codes": base.decode(samples["fp8"], e4m3),
        "powers_of_two": base.decode(samples["powers"], e8m0),
        "swizzled_powers": base.decode(samples["swizzled"], e8m0),
        "small": base.decode(samples["fp4"], e2m1),
        "small_scales": base.decode(samples["fp4_scales"], e4m3),
    }
    np.savez(tmp_path / "samples.npz", **samples, **numbers)
    calls = """
s = np.load("samples.npz")
square = in_blocks(s["codes"], s["block_scales"], (128, 128))
plain = in_blocks(s["codes"], s["powers_of_two"], (1, 32))
ordered = in_blocks(s["codes"], unswizzle(s["swizzled_powers"], 160, 3), (1, 32))
four = nvfp4(s["small"], s["small_scales"], s["amax"])
few = nvfp4(s["small"], s["small_scales"], s["amax"][:1], 256)
undone = undo_hadamard(s["values"], 0b1101_0111_1110_1000)
"""
    results = ("square", "plain", "ordered", "four", "few", "undone")
    block = next(text for text in BLOCKS if "def unswizzle" in text)
    found = run(block + calls, results, tmp_path, tmp_path / "x.npz")
    square = described("float8_block", e4m3, "rowwise", block_shape=(128, 128))
    blocks = described("mxfp8", e4m3, "rowwise", block_shape=(1, 32))
    small = described("nvfp4", e2m1, "rowwise", block_shape=(1, 16))
    less = described("nvfp4", e2m1, "rowwise", block_shape=(1, 16), e4m3_max=256)
    fp4 = {"data": samples["fp4"], "scale_inv": samples["fp4_scales"]}
    expected = {
        "square": quantized.dequantize({"data": samples["fp8"], "scale_inv": samples["block_scales"]}, square),
        "plain": quantized.dequantize({"data": samples["fp8"], "scale_inv": samples["powers"]}, blocks),
        "ordered": quantized.dequantize({"data": samples["fp8"], "swizzled_scale_inv": samples["swizzled"]}, blocks),
        "four": quantized.dequantize({**fp4, "amax": samples["amax"]}, small),
        "few": quantized.dequantize({**fp4, "amax": samples["amax"][:1]}, less),
    }
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name
    assert np.allclose(found["undone"], nvfp4.undo_hadamard(samples["values"], 0b1101_0111_1110_1000), atol=1e-6)


def test_the_page_names_every_column_and_format() -> None:
    words = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    tables = (
        schema.RECORD,
        schema.ITERATION,
        schema.FIRING,
        schema.BLIND,
        schema.QUANTIZER,
        schema.COMPONENT,
        schema.SERIES,
    )
    for table in (*tables, schema.RANK):
        assert set(table.names or ()) <= words
    assert {statistic.name.lower() for statistic in Statistic} <= words
    assert set(schema.HISTORY_STATISTICS) <= words
    assert {name for name, form in base.FORMATS.items() if not form.is_native} <= words
    assert {*quantized.DECODERS, grouped.SCHEME, *sides.SHARED, *scaled.COMPONENTS} <= words
    assert f"version {schema.FORMAT_VERSION}" in PAGE
