"""What the demonstration tells when the training is over: incidents, the recorder's answer, and plain h5py.

Offline: reads the incidents that the demo itself wrote, in this process.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flightrec.analysis.blame import Finding, blame
from flightrec.errors import IncidentError
from flightrec.reports import text
from flightrec.reports.summary import summarize
from flightrec.storage.read import Incident, open_incident

_READING = """\
import glob, h5py, ml_dtypes, numpy

with h5py.File(glob.glob("*.tensors.h5")[0], "r", locking=False) as file:
    group = file["{group}"]
    x, codes = group["high_precision"][()], group["data"][()]
    scale = group["scale"][()]

decoded = codes.view(ml_dtypes.float8_e4m3fn).astype("float32") / scale
lost, median = numpy.mean(decoded[x != 0] == 0), numpy.median(abs(x))
print(f"{{x.shape}}, largest {{abs(x).max():.3g}}, median {{median:.3g}}")
print(f"{{lost:.1%}} of the values that were not zero are zero in FP8")
"""


def compare_losses(losses: Sequence[float], num_healthy: int, console: Console) -> None:
    """Print what the loss alone would have told.

    Args:
        losses: one an iteration.
        num_healthy: iterations before the fault.
        console: where to.
    """
    last = losses[max(0, num_healthy - 10) : num_healthy]
    spoiled = [loss for loss in losses[num_healthy:] if math.isfinite(loss)]
    if spoiled:
        console.print(
            f"The loss told nothing: {sum(last) / len(last):.2f} before, "
            f"{min(spoiled):.2f} to {max(spoiled):.2f} while the channel grew, then NaN."
        )


def list_incidents(incidents: Sequence[Path], console: Console) -> None:
    """Print one line an incident: its folder, its trigger, its size.

    Raises:
        IncidentError: one of them cannot be read.
    """
    for folder in incidents:
        with open_incident(folder) as incident:
            trigger = incident.trigger
            megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            console.print(f"  iteration {trigger.iteration}  {trigger.kind:<10}  {megabytes:4.0f} MB  {folder.name}")


def is_blamed(incidents: Sequence[Path], layer: str) -> bool:
    """Tell whether each incident's first finding names the layer.

    Args:
        incidents: folders; False if there are none.
        layer: the one that was spoiled.

    Raises:
        IncidentError: one of them cannot be read.
    """
    return bool(incidents) and all(_blamed_layer(folder) == layer for folder in incidents)


def _blamed_layer(folder: Path) -> str | None:
    with open_incident(folder) as incident:
        findings: list[Finding] = blame(incident)
    key = findings[0].key if findings else None
    return key.layer if key else None


def nonfinite_incident(incidents: Sequence[Path]) -> Path | None:
    """Give the incident whose trigger is ``nonfinite``, None if there is none."""
    for folder in incidents:
        with open_incident(folder) as incident:
            if incident.trigger.kind == "nonfinite":
                return folder
    return None


def tell(folder: Path, console: Console) -> None:
    """Print the report that ``flightrec inspect`` prints.

    Raises:
        IncidentError: the incident cannot be read.
    """
    with open_incident(folder) as incident:
        document = summarize(incident)
    text.render(document, console)


def reading_program(folder: Path, layer: str) -> str:
    """Give a few lines of Python that read a layer's last finite activation with h5py, without flightrec.

    Args:
        folder: an incident.
        layer: whose activation.

    Raises:
        IncidentError: the incident has no such tensor with its bytes.
    """
    with open_incident(folder) as incident:
        return _reading_program(incident, layer)


def _reading_program(incident: Incident, layer: str) -> str:
    for record in reversed(incident.records(layer=layer, tensor="activation")):
        counts = record.statistics
        finite = not (counts["nan_count"] or counts["positive_inf_count"] or counts["negative_inf_count"])
        if finite and not record.why_absent and incident.ranks[0].tensors_path:
            return _READING.format(group=record.path)
    raise IncidentError(f"{incident.path}: holds no finite activation of {layer}")


def run_program(program: str, folder: Path) -> str:
    """Run lines of Python in an interpreter of their own and give what they print.

    Args:
        program: what to run.
        folder: the folder it stands in.

    Raises:
        IncidentError: they failed; the message is their last line.
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IncidentError(f"reading with plain h5py failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout
