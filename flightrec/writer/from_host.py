"""Takes from the host tier what of an incident's iterations did not come through the staging memory.

Runs in the writer when an incident ends: the iterations that are in no slot of the ring any more, and all of them when
the device, or the trainer, died before they were staged. Owns no state.
"""

from __future__ import annotations

from flightrec.errors import FormatError
from flightrec.storage.facts import Blind
from flightrec.writer.host_memory import HostMemory, Range, buffers_of
from flightrec.writer.incident import Incident
from flightrec.writer.iteration import Iteration


def write_missing(incident: Incident, memory: HostMemory) -> None:
    """Write the records of ``incident`` that are missing and that the tier holds. Errors end its tensors file only."""
    for iteration in incident.iterations.values():
        missing = [n for n, path in enumerate(iteration.paths) if path and n not in iteration.written]
        ranges = memory.find(iteration.header["tick"]) if missing and incident.tensors is not None else None
        if ranges is None:
            continue
        try:
            _write(incident, iteration, missing, ranges, memory.data)
        except Exception as error:
            incident.fail_tensors(error)


def _write(
    incident: Incident, iteration: Iteration, sequences: list[int], ranges: list[Range], data: memoryview
) -> None:
    tensors = incident.tensors
    assert tensors is not None
    for sequence in sequences:
        layout = iteration.layouts[sequence]
        buffers = buffers_of(layout, ranges, data)
        if buffers is None:
            continue
        try:
            tensors.add(iteration.first_record + sequence, iteration.paths[sequence], layout, buffers)
        except FormatError as error:  # this record only
            blind = Blind(*iteration.place, layout.key.layer, layout.key.tensor, str(error))
            incident.blind.append(blind)
        else:
            iteration.written.add(sequence)
    tensors.flush()  # the trainer may give the place away once it is told that the incident is done
