"""Draws what fires each rule and what does not: ``python docs/rules_pictures.py docs/rules``.

Each picture is what the rule itself said of a made-up history: its value, its threshold, and where it fired.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from flightrec.config.rules import RULE_CLASSES
from flightrec.records import NO_MICROBATCH, NUM_STATISTICS, Key, RecordLayout, Representation, Stage, Statistic
from flightrec.rules.evaluate import Evaluator

Values = Mapping[str, float]

WIDTH, HEIGHT, MARGIN = 340, 130, 26
LARGEST = 448.0


@dataclass(frozen=True)
class Case:
    """One rule and two histories: statistics a tick, or None where the tensor was not recorded.

    Siblings are other experts, whose tensors are ordinary in every tick.
    """

    kind: str
    title: str
    fires: Sequence[Values | None]
    silent: Sequence[Values | None]
    fires_text: str
    silent_text: str
    settings: Mapping[str, object]
    tensor: str = "gradient"
    part: str = ""
    log: bool = False
    num_siblings: int = 0


@dataclass(frozen=True)
class Course:
    """What a rule said, tick by tick; NaN where it said nothing."""

    values: list[float]
    thresholds: list[float]
    fired: list[int]


def scalar(value: float) -> Values:
    """Statistics of a loss or metric."""
    return tensor(numel=1, sum=value, amax=abs(value))


def tensor(**values: float) -> Values:
    """Statistics of an ordinary tensor, some replaced."""
    ordinary = {"numel": 4096, "nan_count": 0, "positive_inf_count": 0, "negative_inf_count": 0, "zero_count": 0}
    return {**ordinary, "amax": 3.0, "sum": 1.0, "sum_of_squares": 4000.0, "quantized_largest": LARGEST, **values}


def cases() -> list[Case]:
    """All pictures."""
    noise = np.random.default_rng(0).standard_normal(2000)

    def noisy(levels: Sequence[float], share: float) -> list[float]:
        return [level * (1 + share * noise[number]) for number, level in enumerate(levels)]

    def each(make: Callable[[float], Values], values: Sequence[float]) -> list[Values]:
        return [make(float(value)) for value in values]

    flat = [0.03] * 60
    jump, steady = [*flat, *[0.3] * 20], [0.3] * 80
    climb = [2.5] * 200 + [2.5 + number / 100 for number in range(200)]
    fall = [2.5 + 2 * math.exp(-number / 80) for number in range(400)]
    norm = noisy([1.0] * 100, 0.1)
    return [
        Case(
            "nonfinite", "NaN and infinities",
            each(lambda n: tensor(nan_count=n), [0.0] * 20 + [1, 7, 40, 400] + [512.0] * 16),
            each(lambda n: tensor(negative_inf_count=n), [128.0] * 40),
            "the first one", "-inf of a mask, allowed", {"allow": ["-inf"]}, "activation",
        ),
        Case(
            "loss_jump", "loss", each(scalar, [*noisy([2.5] * 100, 0.02), 3.2, *noisy([2.5] * 19, 0.02)]),
            each(scalar, noisy([2.5] * 120, 0.05)), "six deviations above the mean", "its usual noise", {}, "loss",
        ),
        Case(
            "amax_spike", "amax", each(lambda a: tensor(amax=a), noisy([3.0] * 80 + [20.0] * 4 + [3.0] * 16, 0.1)),
            each(lambda a: tensor(amax=a), noisy([3.0] * 80 + [20.0] + [3.0] * 19, 0.1)),
            "two iterations in a row", "one alone is only noted", {},
        ),
        Case(
            "underflow", "share that became zero", each(lambda s: tensor(underflow_count=s * 4096), jump),
            each(lambda s: tensor(underflow_count=s * 4096), noisy([0.5] * 80, 0.1)),
            "one value sets the scale of all", "always high: normal for itself", {},
        ),
        Case(
            "quantization_error", "relative error", each(lambda e: tensor(squared_error=e * e * 4000), jump),
            each(lambda e: tensor(squared_error=e * e * 4000), noisy(steady, 0.1)),
            "codes made with another scale", "always high: normal for itself", {},
        ),
        Case(
            "saturation", "share of clipped values", each(lambda s: tensor(clipped_count=s * 4096), jump),
            each(lambda s: tensor(clipped_count=s * 4096), [abs(n) * 0.01 for n in noise[:80]]),
            "the tensor outgrew its scale", "a few outliers are clipped", {},
        ),
        Case(
            "inconsistent_scale", "|scale x scale_inv - 1|",
            each(lambda e: tensor(scale_inverse_error=e), [1e-7] * 30 + [999.0] * 10),
            each(lambda e: tensor(scale_inverse_error=e), [1e-7, 3e-7] * 20),
            "only one of the two was restored", "rounding", {}, "weight", log=True,
        ),
        Case(
            "stale_scale", "amax x scale / range", each(lambda r: tensor(range_ratio=r), [1.0] * 20 + [5.0] * 12),
            each(lambda r: tensor(range_ratio=r), [1, 1, 5, 3, 1, 1, 1, 4] * 4),
            "the scale does not follow", "the scale follows a little later", {}, log=True,
        ),
        Case(
            "loss_drift", "median of 64 losses", each(scalar, noisy(climb, 0.02)), each(scalar, noisy(fall, 0.08)),
            "no single value stands out", "noisy, but going down", {}, "loss",
        ),
        Case(
            "metric_jump", "grad_norm", each(scalar, [*norm, 3.0]), each(scalar, noisy([1.0] * 101, 0.1)),
            "six deviations above the mean", "its usual noise", {}, "metric", "grad_norm",
        ),
        Case(
            "metric_threshold", "grad_norm", each(scalar, [1.0] * 20 + [6.0] * 3),
            each(scalar, noisy([1.0] * 23, 0.2)), "above 5", "below 5", {"above": 5.0}, "metric", "grad_norm",
        ),
        Case(
            "loss_scale_collapse", "loss scale", each(scalar, [2.0 ** (6 - number) for number in range(12)]),
            each(scalar, [2.0 ** (40 - number) for number in range(24)] + [2.0**17] * 10),
            "still falling below 1", "a start that looks for its scale", {}, "metric", "loss_scale", log=True,
        ),
        Case(
            "zero_gradient", "zero samples in a row", each(lambda a: tensor(amax=a), [1.0] * 20 + [0.0] * 20),
            each(lambda a: tensor(amax=a), [1.0, 1.0, 0.0, 0.0, 1.0] * 8), "zero from some iteration on",
            "zero now and then", {},
        ),
        Case(
            "missing_record", "iterations without it", [tensor()] * 20 + [None] * 20,
            [tensor() if number % 10 == 0 else None for number in range(200)], "it no longer comes",
            "recorded in every tenth iteration", {},
        ),
        Case(
            "unchanged_parameters", "samples without a change",
            each(lambda s: tensor(sum=s), [*range(20), *[20.0] * 40]),
            each(lambda s: tensor(sum=s), [*range(20), *[20.0] * 24, *range(21, 36)]), "it stands still",
            "skipped steps", {}, "parameter",
        ),
        Case(
            "expert", "amax of one expert of four", each(lambda a: tensor(amax=a), noisy([3.0] * 80 + [30.0] * 4, 0.1)),
            [tensor(numel=0 if number % 3 else 4096, amax=math.nan if number % 3 else 3.0) for number in range(84)],
            "this one alone explodes", "often without a token", {}, part="expert.0", num_siblings=3,
        ),
    ]  # fmt: skip


def follow(case: Case, history: Sequence[Values | None]) -> Course:
    """Let the rule judge a history."""
    scalar_rule = case.tensor in ("loss", "metric")
    key = Key(
        "" if scalar_rule else "blocks.0.fc1", case.tensor, case.part, NO_MICROBATCH if scalar_rule else 0,
        stage=Stage.LOSS,
    )  # fmt: skip
    evaluator = Evaluator("cpu", [RULE_CLASSES[case.kind](**case.settings)])
    keys = [key, *(replace(key, part=f"expert.{number}") for number in range(1, case.num_siblings + 1))]
    for row, name in enumerate(keys):
        evaluator.register(RecordLayout(row, name, Representation.STATISTICS, (), "float32", -1, (), -1, 0, row))
    values, thresholds, fired = [], [], []
    for tick, statistics in enumerate(history):
        rows = torch.full((len(keys), NUM_STATISTICS), math.nan, dtype=torch.float64)
        for row, found in enumerate([statistics or {}, *[tensor()] * case.num_siblings]):
            for name, value in found.items():
                rows[row, Statistic[name.upper()]] = value
        verdict = evaluator.evaluate(tick, rows, torch.tensor([statistics is not None] + [True] * case.num_siblings))
        values.append(float(verdict.value[0, 0]))
        thresholds.append(float(verdict.threshold[0, 0]))
        if bool(verdict.fired[0, 0]):
            fired.append(tick)
    return Course(values, thresholds, fired)


def panel(course: Course, left: int, word: str, text: str, *, log: bool) -> list[str]:
    """One plot."""
    shown = [value for value in (*course.values, *course.thresholds) if math.isfinite(value)]
    low, high = min(shown), max(shown)
    if log:
        low, high = math.log10(max(low, 1e-8)), math.log10(max(high, 1e-8))
    else:
        low = min(low, 0.0)
    step = (WIDTH - 2 * MARGIN) / max(len(course.values) - 1, 1)

    def place(tick: int, value: float) -> tuple[float, float]:
        height = math.log10(max(value, 1e-8)) if log else value
        share = (height - low) / ((high - low) or 1)
        return left + MARGIN + tick * step, HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    def line(values: Sequence[float], style: str) -> str:
        points = [place(tick, value) for tick, value in enumerate(values) if math.isfinite(value)]
        return f'<polyline fill="none" {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'

    base = HEIGHT - MARGIN
    found = [
        f'<text x="{left + MARGIN}" y="16" class="{word}">{word}</text>',
        f'<text x="{left + MARGIN + 44}" y="16" class="note">{text}</text>',
        f'<path d="M{left + MARGIN} {MARGIN - 4}V{base}H{left + WIDTH - MARGIN}" class="axis"/>',
        line(course.thresholds, 'class="limit"'),
        line(course.values, 'class="value"'),
    ]
    for tick in course.fired:
        x, y = place(tick, course.values[tick])
        found.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="fired"/>')
    return found


STYLE = """<style>
text { font: 12px sans-serif } .fires { fill: #c0392b; font-weight: bold } .silent { fill: #1e8449; font-weight: bold }
.note { fill: #808890 } .axis { stroke: #808890; fill: none } .value { stroke: #2e86c1; stroke-width: 1.5 }
.limit { stroke: #d68910; stroke-dasharray: 4 3 } .fired { fill: none; stroke: #c0392b; stroke-width: 2 }
</style>"""


def draw(case: Case) -> str:
    """The picture of a rule, as SVG."""
    fires, silent = follow(case, case.fires), follow(case, case.silent)
    assert fires.fired, case.kind
    assert not silent.fired, case.kind
    body = panel(fires, 0, "fires", case.fires_text, log=case.log)
    body += panel(silent, WIDTH, "silent", case.silent_text, log=case.log)
    scale = " (logarithmic)" if case.log else ""
    legend = f"{case.title}{scale}, its limit dashed, over iterations"
    body.append(f'<text x="{MARGIN}" y="{HEIGHT - 8}" class="note">{legend}</text>')
    size = f'viewBox="0 0 {2 * WIDTH} {HEIGHT}" width="{2 * WIDTH}" height="{HEIGHT}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *body, "</svg>"]) + "\n"


def main(directory: str) -> None:
    """Write all pictures."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    for case in cases():
        (Path(directory) / f"{case.kind}.svg").write_text(draw(case))


if __name__ == "__main__":
    main(*sys.argv[1:])
