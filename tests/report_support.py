"""An incident with everything that the HTML report draws: pairs, codes, blocks, a history; names as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from storage_samples import FP8, Sample, firing, plain, statistics, write_incident

from flightrec.records import Key, QuantizerInfo, Stage
from flightrec.storage.facts import Blind, HistoryPiece
from flightrec.storage.schema import HISTORY_STATISTICS, PLAIN_STATISTICS

LAYERS = ("blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2")
HOSTILE = (
    "<script>window.hacked=1</script>",
    '</script><img src=x onerror="window.hacked=2">',
    '<a href="javascript:window.hacked=3">blocks</a> <b>bold</b> &lt;i&gt; %{y}',
    "\u202eevil\0\ud800\x1b[31m' onfocus='window.hacked=4' autofocus='",
)
FAULTY = 12
BLOCKS = QuantizerInfo("sample.Blocks", "float8_e4m3fn", "multiply_to_decode", (1, 4), {})
SCALE = 64.0
"""Multiplies to encode the activations."""

ROWS, COLUMNS = 8, 16


def values(iteration: int) -> np.ndarray:
    """An activation, float32; in the faulty iteration it holds 1 NaN, 1 Inf and an outlier."""
    found = np.random.default_rng(iteration).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    found[0, 0] = 0
    if iteration == FAULTY:
        found[3, 5], found[4, 6], found[5, 7] = np.nan, np.inf, -900
    return found


def codes(activation: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.clip(activation * SCALE, -448, 448).astype(ml_dtypes.float8_e4m3fn).view("u1")


def pair(layer: str, iteration: int) -> Sample:
    high = values(iteration)
    quantized = codes(high)
    finite = high[np.isfinite(high)]
    row = statistics(
        numel=high.size,
        nan_count=np.isnan(high).sum(),
        positive_inf_count=np.isposinf(high).sum(),
        negative_inf_count=0,
        zero_count=(high == 0).sum(),
        amax=np.abs(finite).max(),
        sum_of_squares=np.square(finite).sum(),
        quantized_numel=high.size,
        quantized_nan_count=np.isnan(high).sum(),
        quantized_saturated_count=np.count_nonzero((quantized & 0x7F) == 0x7E),
        underflow_count=0,
        squared_error=0.5,
        scale_min=SCALE,
        scale_max=SCALE,
    )
    arrays = {
        "high_precision": (high.view("<u4"), "float32"),
        "data": (quantized, "float8_e4m3fn"),
        "scale": (np.array(SCALE, "<f4"), "float32"),
    }
    arrays["high_precision"] = (high, "float32")
    return Sample(Key(layer, "activation", microbatch=0), arrays, row, 0)


def blocks(layer: str) -> Sample:
    scales = np.exp2(np.arange(ROWS * COLUMNS // 4, dtype="<f4").reshape(ROWS, -1) % 7 - 3)
    arrays = {
        "data": (np.full((ROWS, COLUMNS), 0x38, "u1"), "float8_e4m3fn"),
        "scale_inv": (scales, "float32"),
    }
    row = statistics(quantized_numel=ROWS * COLUMNS, scale_min=scales.min(), scale_max=scales.max())
    return Sample(Key(layer, "weight", microbatch=0), arrays, row, 1, shape=(ROWS, COLUMNS))


def history(layers: Sequence[str], samples: int = 40) -> HistoryPiece:
    rng = np.random.default_rng(0)
    count = len(layers)
    quantized = rng.random((samples, len(HISTORY_STATISTICS), count)).astype(np.float32)
    for name in ("nan_count", "inf_count", "quantized_nan_count", "quantized_inf_count", "scale_nonfinite_count"):
        quantized[:, HISTORY_STATISTICS.index(name)] = 0
    return HistoryPiece(
        last=samples,
        attempts=np.zeros(samples, np.int64),
        iterations=np.arange(FAULTY - samples, FAULTY),
        plain_series=[Key("head", "output")],
        plain=rng.random((samples, len(PLAIN_STATISTICS), 1)).astype(np.float32),
        quantized_series=[Key(layer, "activation") for layer in layers],
        quantized=quantized,
    )


def write_report_incident(folder: Path, layers: Sequence[str] = LAYERS) -> Path:
    """A NaN in the second layer's activation in iteration ``FAULTY``; gives the folder."""
    samples = {}
    for iteration in (FAULTY - 1, FAULTY):
        found = [
            pair(layer, FAULTY if iteration == FAULTY and place in (1, 2) else 0) for place, layer in enumerate(layers)
        ]
        found += [blocks(layer) for layer in layers]
        found.append(plain(Key(layers[1], "gradient", microbatch=0, stage=Stage.BACKWARD), [1.5, -0.0], amax=1.5))
        samples[iteration] = found
    key = samples[FAULTY][1].key
    steps = np.arange(FAULTY - 40, FAULTY + 1)
    loss = np.linspace(3, 2, len(steps))
    loss[-1] = np.nan
    text = layers[0].replace("\0", "").encode(errors="replace").decode()
    return write_incident(
        folder,
        samples,
        [
            firing(key, FAULTY, rule=layers[0], message=f"{layers[0]} holds 1 NaN."),
            firing(samples[FAULTY][-2].key, FAULTY, rule="scales", kind="inconsistent_scale"),
        ],
        quantizers=[FP8.to_json(), BLOCKS.to_json()],
        history={"loss": (steps, loss, steps * 0), f"metric.{text}": (steps, loss, steps * 0)},
        statistics=[history(layers)],
        environment={"argv": ["train.py", layers[0]], layers[1]: layers[0]},
        config_text=f"# {layers[0]}\ntriggers: [{{kind: nonfinite}}]\n",
        blind=[Blind(0, 10, layers[0], "", f"no slot for {layers[1]}")],
    )
