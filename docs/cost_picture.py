"""Makes the cost pages of measured results: tables, bar chart, curves, and the README's section.

    python docs/cost_picture.py side.json [--scaling scaling.json] [--prediction prediction.json]

The files are what ``tests/benchmarks/{side_by_side,scaling,prediction}.py --output`` wrote. Writes
``docs/benchmarks/cost-h200.md``, ``docs/cost.svg``, ``docs/cost_scaling.svg``, and in ``README.md`` the section
``## What it costs``, before ``## Install``. Every number comes from the files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flightrec.bench import tables
from flightrec.bench.results import Comparison, Study, studies_of

WIDTH, LABEL, BAR, TOP = 760, 300, 20, 34
LEAST_PERCENT = 0.1
"""Where the bars begin: what adds less has none."""

HEADING = "## What it costs"
NOTES = "\n## What missed, and why\n"
"""Written by hand; kept when the page is made anew."""

HEAD = """How it is measured, and what each column means: [bench.md](../bench.md). This page is made of the results by
`python docs/cost_picture.py`."""
STYLE = """<style>
text { font: 12px sans-serif; fill: #808890 } .name { text-anchor: end } .title { font-weight: bold }
.middle { text-anchor: middle } .ours { fill: #2e86c1 } .other { fill: #a6acaf } .grid { stroke: #80889044 }
.axis { stroke: #808890; fill: none } .value { stroke: #2e86c1; stroke-width: 1.5; fill: none }
.bound { stroke: #1e8449; stroke-dasharray: 4 3; fill: none }
.host { stroke: #d68910; stroke-dasharray: 1 3; fill: none }
</style>"""


def is_ours(found: Comparison) -> bool:
    """Whether a row is a recorder of ours."""
    return found.recorded is not None


def measured(study: Study) -> list[Comparison]:
    """Rows that have figures."""
    return [found for found in study.comparisons if not found.missing]


def share_of_axis(percent: float, decades: int) -> float:
    """Length of a bar, 0 to 1, on a logarithmic axis of so many decades from ``LEAST_PERCENT``."""
    if percent <= LEAST_PERCENT:
        return 0.0
    return min(math.log10(percent / LEAST_PERCENT) / decades, 1.0)


def decades_of(rows: Sequence[Comparison]) -> int:
    """Decades from ``LEAST_PERCENT`` that hold all rows."""
    most = max((100 * found.overhead.median for found in rows), default=1.0)
    return max(1, math.ceil(math.log10(max(most, 10 * LEAST_PERCENT) / LEAST_PERCENT) - 1e-9))


def bar_chart(study: Study) -> str:
    """What each way adds to a step, in percent, on a logarithmic axis; as SVG."""
    rows = measured(study)
    decades, room = decades_of(rows), WIDTH - LABEL - 160
    height = TOP + len(rows) * (BAR + 8) + 34
    parts = ['<text x="8" y="18" class="title">added to a step, % (logarithmic)</text>']
    for decade in range(decades + 1):
        x = LABEL + room * decade / decades
        number = LEAST_PERCENT * 10**decade
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{height - 30}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 14}" class="middle">{number:,.10g}</text>')
    for place, found in enumerate(rows):
        y = TOP + place * (BAR + 8)
        percent = 100 * found.overhead.median
        length = room * share_of_axis(percent, decades)
        kind = "ours" if is_ours(found) else "other"
        parts.append(f'<text x="{LABEL - 8}" y="{y + 14}" class="name">{escape(shortened(found.name))}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" class="{kind}"/>')
        told = f"{signed(percent)}% ({tables.rounded(1e3 * found.added_s)} ms)"
        parts.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + 14}">{told}</text>')
    return svg(WIDTH, height, parts)


def signed(percent: float) -> str:
    """``+1.23``; ``+46700``."""
    return f"{'' if percent < 0 else '+'}{tables.rounded(percent)}"


def shortened(name: str) -> str:
    """A name that fits beside its bar."""
    name = name.replace("Transformer Engine", "TE").replace("torch.autograd.", "")
    return name if len(name) <= 46 else name[:45] + "…"


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    """A picture that loads nothing."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *parts, "</svg>"]) + "\n"


# -- curves ------------------------------------------------------------------------------------------------------------


def curves(studies: Sequence[Study]) -> str:
    """One plot for each number that grows: what is added, the byte bound and the host's time; both axes logarithmic."""
    width, height, margin = WIDTH // 2, 190, 44
    parts: list[str] = []
    for place, study in enumerate(studies):
        left, top = (place % 2) * width, (place // 2) * height
        parts += panel(study, left, top, width, height, margin)
    rows = -(-len(studies) // 2)
    legend = "solid: added to a step, ms; dashed: byte bound; dotted: added on the host"
    parts.append(f'<text x="{margin}" y="{rows * height + 14}">{legend}</text>')
    return svg(WIDTH, rows * height + 24, parts)


def panel(study: Study, left: int, top: int, width: int, height: int, margin: int) -> list[str]:
    """One plot."""
    rows = measured(study)
    lines = {
        "value": [1e3 * found.added_s for found in rows],
        "bound": [1e3 * (found.recorded.bound_s or 0.0) if found.recorded else 0.0 for found in rows],
        "host": [1e3 * (found.added_host_s or 0.0) for found in rows],
    }
    across = [math.log10(float(found.name)) for found in rows]
    up = [math.log10(value) for values in lines.values() for value in values if value > 0] or [0.0]
    low, high = math.floor(min(up)), math.ceil(max(up))
    high += high == low

    def place(x: float, y: float) -> tuple[float, float]:
        run = (across[-1] - across[0]) or 1.0
        return (
            left + margin + (x - across[0]) / run * (width - 1.5 * margin),
            top + height - margin - (y - low) / (high - low) * (height - 1.8 * margin),
        )

    corner = place(across[0], high), place(across[-1], low)
    parts = [
        f'<text x="{left + margin}" y="{top + 20}" class="title">{escape(study.workload)}</text>',
        f'<path d="M{corner[0][0]:.1f} {corner[0][1]:.1f}V{corner[1][1]:.1f}H{corner[1][0]:.1f}" class="axis"/>',
    ]
    for decade in range(low, high + 1):
        x, y = place(across[0], decade)
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" class="name">{10.0**decade:.10g}</text>')
    for x_value, found in zip(across, rows, strict=True):
        x, y = place(x_value, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" class="middle">{count(float(found.name))}</text>')
    for name, values in lines.items():
        points = [place(x, math.log10(value)) for x, value in zip(across, values, strict=True) if value > 0]
        parts.append(f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    return parts


def count(value: float) -> str:
    """``65536`` -> ``64Ki``; ``320`` -> ``320``."""
    for power, letter in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if value >= 2**power and value % 2 ** (power - 4) == 0:
            return f"{value / 2**power:.3g}{letter}"
    return f"{value:.4g}"


def line_through(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the least squares line.

    Raises:
        ValueError: fewer than two different places.
    """
    n = len(pairs)
    mean_x, mean_y = sum(x for x, _ in pairs) / max(n, 1), sum(y for _, y in pairs) / max(n, 1)
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    if not spread:
        raise ValueError("expected two different places at least")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
    return mean_y - slope * mean_x, slope


def explained(studies: Sequence[Study]) -> list[str]:
    """What the curves say, in sentences whose numbers come from the points."""
    found = []
    for study in studies:
        rows = measured(study)
        if len(rows) < 2:
            continue
        first, last = rows[0], rows[-1]
        if study.workload == "records":
            pairs = [(row.recorded.num_records, row.added_s) for row in rows if row.recorded]
            at_zero, slope = line_through(pairs)
            each, always = tables.rounded(1e6 * slope), tables.rounded(1e3 * max(at_zero, 0.0))
            found.append(
                f"- **records**: {each} us a record and {always} ms an iteration, whatever is recorded (a line through "
                f"{len(pairs)} points, from {pairs[0][0]:.0f} to {pairs[-1][0]:.0f} records)."
            )
        elif study.workload == "bytes":
            pairs = [(row.recorded.num_bytes, row.added_s) for row in rows if row.recorded]
            _, slope = line_through(pairs)
            rate = f"{1e-12 / slope:.3g} TB/s" if slope > 0 else "no time that could be seen"
            found.append(
                f"- **bytes**: beyond what a record costs anyway, bytes are kept at {rate}; at the largest point "
                f"recording takes {ratio(last)} the byte bound."
            )
        else:
            found.append(
                f"- **{study.workload}**: from {first.name} to {last.name} what is added goes from "
                f"{100 * first.overhead.median:.3g}% to {100 * last.overhead.median:.3g}% of a step."
            )
    return found


def ratio(found: Comparison) -> str:
    """How many times the byte bound."""
    return "an unknown number of times" if found.added_over_bound is None else f"{found.added_over_bound:.2f} times"


# -- pages -------------------------------------------------------------------------------------------------------------


def short_table(study: Study) -> str:
    """For the README: what each way adds."""
    lines = ["| | added to a step | | 95% |", "|---|---|---|---|"]
    for found in study.comparisons:
        if found.missing:
            lines.append(f"| {found.name} | {found.missing} | | |")
            continue
        interval, name = found.overhead, f"**{found.name}**" if is_ours(found) else found.name
        alone = math.isnan(interval.low)
        ends = "one pair" if alone else f"{signed(100 * interval.low)}% to {signed(100 * interval.high)}%"
        lines.append(
            f"| {name} | {signed(100 * interval.median)}% | {tables.rounded(1e3 * found.added_s)} ms | {ends} |"
        )
    return "\n".join(lines)


def prediction_table(study: Study) -> str:
    """What was predicted beside what was measured."""
    lines = ["| | records | MiB | predicted, ms | measured, ms | off by |", "|---|---|---|---|---|---|"]
    for found in measured(study):
        recorded, error = found.recorded, found.prediction_error
        if recorded is None or recorded.predicted_s is None:
            continue
        off_by = "" if error is None else f"{100 * error:+.0f}%"
        lines.append(
            f"| {found.name} | {recorded.num_records:.4g} | {recorded.num_bytes / 2**20:.4g} | "
            f"{1e3 * recorded.predicted_s:.3g} | {1e3 * found.added_s:.3g} | {off_by} |"
        )
    return "\n".join(lines)


def readme_section(study: Study, device: str) -> str:
    """The section, heading included."""
    return (
        f"{HEADING}\n\n{device}: {tables.head(study)}. Recorder on and off in pairs, alternating in one process, "
        "medians with a 95% interval; the alternatives on the same model in the same run.\n\n"
        "![what each way adds to a step](docs/cost.svg)\n\n"
        f"{short_table(study)}\n\n"
        "More, and how the cost grows: [docs/benchmarks/cost-h200.md](docs/benchmarks/cost-h200.md). On your machine "
        "and your model: `flightrec bench --model package.module:factory` ([docs/bench.md](docs/bench.md)).\n"
    )


def with_section(text: str, section: str) -> str:
    """A page with its section replaced, or put before ``## Install``.

    Raises:
        ValueError: there is no place for it.
    """
    known = re.compile(rf"^{re.escape(HEADING)}\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
    if known.search(text):
        return known.sub(lambda _: section + "\n", text, count=1)
    before, found, after = text.partition("\n## Install\n")
    if not found:
        raise ValueError("expected a section `## Install` in the page, before which the costs belong")
    return f"{before}\n{section}{found}{after}"


def page(
    studies: Sequence[Study], machine: Mapping[str, str], scaling: Sequence[Study], prediction: Sequence[Study]
) -> str:
    """``docs/benchmarks/cost-h200.md``."""
    parts = [
        f"# What recording costs on an {machine['device'].removeprefix('NVIDIA ')}",
        HEAD,
        "## Beside the alternatives\n\n    python tests/benchmarks/side_by_side.py --output side.json",
        "![what each way adds to a step](../cost.svg)",
        tables.markdown(studies, machine).strip(),
    ]
    told = [line for found in studies[0].comparisons if found.recorded for line in said(found)]
    if told:
        parts.append("What the recorders say of themselves:\n\n" + "\n".join(told))
    if scaling:
        parts += [
            "## How the cost grows\n\n    python tests/benchmarks/scaling.py --output scaling.json",
            "Everything that is selected, in every iteration, with all default rules.",
            "![cost over records, bytes, tokens and layers](../cost_scaling.svg)",
            "\n".join(explained(scaling)),
            tables.markdown(scaling, machine).partition("\n")[2].strip(),
        ]
    for study in prediction:
        worst = max((abs(found.prediction_error or 0.0) for found in measured(study)), default=0.0)
        parts += [
            "## What is predicted\n\n    python tests/benchmarks/prediction.py --output prediction.json",
            f"The start-up line's prediction beside the measured cost, off by {100 * worst:.0f}% at most.",
            tables.head(study) + ".",
            prediction_table(study),
        ]
    return "\n\n".join(parts) + "\n"


def said(found: Comparison) -> list[str]:
    """A recorder's sentences as a list."""
    assert found.recorded is not None
    return [f"- {found.name}: {line}" for line in found.recorded.told]


def read(path: Path) -> tuple[list[Study], dict[str, str]]:
    """Studies and machine of a file."""
    data: dict[str, Any] = json.loads(path.read_text())
    return studies_of(data), data["machine"]


def notes_of(text: str) -> str:
    """What a person wrote at the end of the page."""
    at = text.find(NOTES)
    return "" if at < 0 else text[at:]


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--scaling", type=Path)
    parser.add_argument("--prediction", type=Path)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="of the checkout")
    options = parser.parse_args()
    studies, machine = read(options.results)
    scaling = read(options.scaling)[0] if options.scaling else []
    prediction = read(options.prediction)[0] if options.prediction else []
    docs = options.root / "docs"
    (docs / "cost.svg").write_text(bar_chart(studies[0]))
    if scaling:
        (docs / "cost_scaling.svg").write_text(curves(scaling))
    written = docs / "benchmarks" / "cost-h200.md"
    notes = notes_of(written.read_text()) if written.exists() else ""
    written.write_text(page(studies, machine, scaling, prediction) + notes)
    readme = options.root / "README.md"
    readme.write_text(with_section(readme.read_text(), readme_section(studies[0], machine["device"])))


if __name__ == "__main__":
    main()
