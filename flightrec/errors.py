"""Every error that flightrec raises to a user.

Raised only before training starts (the constructor, ``attach``) and by the offline half; once training runs nothing
of ours raises into the loop. Owns no state; imports nothing.
"""

from __future__ import annotations


class FlightrecError(Exception):
    """Base of all errors of this package: says what, where, what was expected, what to do."""


class ConfigError(FlightrecError):
    """A configuration was refused. The message names file, line, key, expectation and the nearest known key."""


class AttachError(FlightrecError):
    """``attach`` (or the constructor) met a model, optimizer or machine that it cannot serve."""


class RingMemoryError(FlightrecError):
    """The selection does not fit into ``ring.memory`` and ``ring.on_out_of_memory`` is ``error``."""


class WriterError(FlightrecError):
    """The writer could not be started, or died, or could not write: the message names file and reason."""


class IncidentError(FlightrecError):
    """An incident cannot be read: missing, incomplete, damaged, of another version, or not one of ours."""


class FormatError(FlightrecError):
    """A quantized format, dtype or component is unknown or contradicts itself."""


class MissingExtraError(FlightrecError):
    """An optional package is needed; the message names the extra to install."""
