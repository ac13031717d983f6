"""``flightrec inspect --quantizer``: the document and its picture in the terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_support import flightrec
from storage_samples import FP8, Sample, firing, statistics, write_incident
from test_storage_scale_age import piece

from flightrec.errors import IncidentError
from flightrec.records import Key, QuantizerInfo
from flightrec.reports.quantizer_text import render_quantizers, words
from flightrec.reports.quantizers import DOCUMENT, quantizers_of_path
from flightrec.reports.text import WIDTH, report_console

KEY = Key("fc1", "activation", microbatch=0)
EVIL = "x\x1b[31m" + "y" * 200
RECIPE = {"recipe": {"margin": 0, "amax_history_len": 2, "note": EVIL, "nothing": None}, "usages": ["rowwise"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Iterations 29 and 30 of a frozen scale whose tensor grew in the last; a history of 29 iterations before."""

    def sample(amax: float, bad: float) -> Sample:
        arrays = {
            "data": (np.zeros((2, 4), np.uint8), "float8_e4m3fn"),
            "scale": (np.array([64.0], "<f4"), "float32"),
            "amax_history": (np.array([1.25, 0.5], "<f4"), "float32"),
        }
        counts = {"numel": 8, "nan_count": 0, "positive_inf_count": 0, "negative_inf_count": 0, "zero_count": 4}
        more = {"clipped_count": bad, "underflow_count": 1, "squared_error": 4, "sum_of_squares": 16}
        scale = {"scale_min": 64, "scale_max": 64, "range_ratio": amax * 64 / 448, "quantizer_amax": 1.5}
        return Sample(KEY, arrays, statistics(**counts, **more, **scale, amax=amax, quantized_numel=8), 1)

    past = {(0, n): (64.0, 64.0) for n in range(29)}
    plain = Sample(Key("fc2", "output", microbatch=0), {}, statistics(numel=1))
    write_incident(
        tmp_path,
        {29: [sample(1.25, 0), plain], 30: [sample(37.0, 2), plain]},
        [firing(KEY, 30, kind="stale_scale", message="stale")],
        quantizers=[
            FP8.to_json(),
            QuantizerInfo("te.Float8Tensor", "float8_e4m3fn", "multiply_to_encode", (), RECIPE).to_json(),
        ],
        statistics=[piece(past, dict.fromkeys(past, 1.25))],
    )
    return tmp_path


def test_the_document(folder: Path) -> None:
    document = json.loads(json.dumps(quantizers_of_path(folder, "fc*"), allow_nan=False))
    assert (document["document"], document["version"]) == (DOCUMENT, 1)
    (entry,) = document["quantizers"]
    assert (entry["class_name"], entry["format"]) == ("te.Float8Tensor", "float8_e4m3fn")
    assert (entry["scale_direction"], entry["block_shape"]) == ("multiply_to_encode", [])
    assert entry["metadata"]["recipe"]["amax_history_len"] == 2
    assert entry["amax_history"] == [1.25, 0.5]
    assert entry["since"] == {"iteration": 0, "amax": 1.25}
    first, last = entry["uses"]
    assert (first["scale_unchanged_iterations"], last["scale_unchanged_iterations"]) == (29, 30)
    assert last["scale_differed_iterations"] == -1
    assert (last["amax"], last["quantizer_amax"], last["scale_min"]) == (37, 1.5, 64)
    assert (last["clipped_share"], last["underflow_share"], last["quantization_error"]) == (0.25, 0.25, 0.5)
    assert entry["history"]["amax"] == [1.25] * 29
    assert entry["history"]["quantizer_amax"] == ["NaN"] * 29


def test_the_picture(folder: Path) -> None:
    file = io.StringIO()
    render_quantizers(quantizers_of_path(folder, "fc1", "activation"), report_console(file))
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "\x1b" not in shown
    together = " ".join(shown.split())
    assert "Quantizer of fc1 activation" in together
    story = "scale 64 in iteration 30, unchanged for at least 30 iterations, while amax rose from 1.25 to 37"
    assert story in together
    assert "recipe.amax_history_len: 2" in together
    assert "amax history: 1.25 0.5" in together
    last = next(line for line in shown.splitlines() if line.startswith(" 30 mb 0"))
    assert last.split() == ["30", "mb", "0", "37", "1.5", "64", "5.29", "25%", "30+"]


def test_without_the_tensors_file_the_tables_tell_it(folder: Path) -> None:
    next(folder.glob("*.tensors.h5")).unlink()
    (entry,) = quantizers_of_path(folder, "fc1")["quantizers"]
    assert entry["amax_history"] is None
    assert entry["uses"][-1]["scale_unchanged_iterations"] == 30


def test_without_a_history_the_incident_tells_it(tmp_path: Path) -> None:
    def sample(amax: float) -> Sample:
        counts = {"nan_count": 0, "numel": 1, "scale_min": 2, "scale_max": 3, "quantized_numel": 1}
        return Sample(KEY, {}, statistics(**counts, quantizer_amax=amax), 0)

    write_incident(tmp_path, {1: [sample(4)], 2: [sample(3)]}, [firing(KEY, 2)])
    document = quantizers_of_path(tmp_path, "fc1")
    assert document["quantizers"][0]["since"] == {"iteration": 1, "amax": 4}
    assert document["quantizers"][0]["history"] is None
    file = io.StringIO()
    render_quantizers(document, report_console(file))
    assert "scale 2 to 3 in iteration 2, unchanged for at least 1 iteration, while amax fell from 4 to 3" in " ".join(
        file.getvalue().split()
    )


def test_what_is_not_quantized_is_refused_with_what_is(folder: Path) -> None:
    with pytest.raises(IncidentError, match="2 records are selected, none of them quantized; quantized are fc1 activ"):
        quantizers_of_path(folder, "fc2")
    with pytest.raises(IncidentError, match="layer 'fc1', tensor 'weight': no record is selected"):
        quantizers_of_path(folder, "fc1", "weight")


def test_on_the_command_line(folder: Path) -> None:
    done = flightrec("inspect", folder, "--quantizer", "fc1")
    assert done.returncode == 0, done.stderr
    assert "unchanged for at least 30 iterations" in " ".join(done.stdout.split())
    done = flightrec("inspect", folder, "--quantizer", "re:fc[0-9]", "--tensor", "activation", "--json")
    assert json.loads(done.stdout)["quantizers"][0]["key"]["layer"] == "fc1"
    assert flightrec("inspect", folder, "--quantizer", "nothing").returncode == 3
    both = flightrec("inspect", folder, "--quantizer", "fc1", "--tensor", "activation", "--tensor", "w*", "--json")
    assert both.returncode == 0, both.stderr


def test_words() -> None:
    nested = {"a": {"b": 1, "c": {"d": [2]}}, "e": None, "f": [], "g": ""}
    assert words(nested) == [("a.b", 1), ("a.c.d", [2])]


def test_reading_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from flightrec.reports.quantizers import quantizers_of_path\n"
        f"assert quantizers_of_path(Path({str(folder)!r}), 'fc1')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
