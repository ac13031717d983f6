"""An incident that is open: what fired, which iterations it is to hold, and what of them is still on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

from flightrec.flush.staging import Range
from flightrec.records import Firing
from flightrec.writer import messages


@dataclass(slots=True)
class OpenIncident:
    """See the module.

    Attributes:
        number: the writer's name for it.
        primary: the gravest firing.
        trigger_tick: the tick of the firing that opened it.
        end_tick: the last tick that it records.
        ticks: ticks told to the writer, in order.
        to_stage: ticks whose slots are held and not yet copied, most suspect first.
        firings: all that it tells of.
        suspect: where the records that fired lie in a slot; they are copied first.
        facts_ended: the facts are with the writer; what comes later goes to the tensors.
        extensions: how often a graver firing lengthened it.
        blind: what was not recorded, and not yet told.
    """

    number: int
    primary: Firing
    trigger_tick: int
    end_tick: int
    ticks: list[int] = field(default_factory=list)
    to_stage: list[int] = field(default_factory=list)
    firings: list[Firing] = field(default_factory=list)
    suspect: list[Range] = field(default_factory=list)
    facts_ended: bool = False
    extensions: int = 0
    blind: list[messages.Blind] = field(default_factory=list)

    @property
    def urgency(self) -> tuple[int, int]:
        """The larger, the sooner it is copied: a later fault goes before a warning that is still being staged."""
        return self.primary.severity.order, -self.number
