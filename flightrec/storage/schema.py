"""The tables of an incident's files: names, columns and fixed-width types. ``docs/format.md`` is the contract.

Enumerations are fixed-width ASCII, open text is a ``u4`` row number of ``/names`` (row 0 is the empty text), times are
int64 nanoseconds, booleans uint8, everything little-endian. Owns no state; imports numpy only.
"""

from __future__ import annotations

import numpy as np

from flightrec.records import Statistic

FORMAT = "flightrec-incident"
"""Attribute ``format`` of every file of an incident."""

FORMAT_VERSION = "1.4"
"""Attribute ``format_version``: a reader takes every file of its own major version; minor versions only add."""

LIBVER = ("earliest", "v110")
"""HDF5 versions between which files are written: opens after a killed writer, and in HDF5 1.10."""

FACTS = "facts"
TENSORS = "tensors"
INDEX = "index"
"""The three values of the root attribute ``kind``."""

TEXT_ID = "<u4"

STATISTIC_COLUMNS: tuple[str, ...] = tuple(statistic.name.lower() for statistic in Statistic)
"""Column names of the statistics in ``/records``, in the order of ``records.Statistic``."""

PLAIN_STATISTICS = ("numel", "nan_count", "inf_count", "zero_share", "amax", "rms", "mean")
"""Statistics that the history has of every series; ``docs/format.md`` has the formulas."""

QUANTIZED_STATISTICS = (
    "quantized_nan_count",
    "quantized_inf_count",
    "quantized_zero_share",
    "saturated_share",
    "clipped_share",
    "underflow_share",
    "quantization_error",
    "range_ratio",
    "history_ratio",
    "scale_min",
    "scale_max",
    "scale_inverse_error",
    "scale_nonfinite_count",
    "zero_scale_count",
    "quantizer_amax",
)
"""Those that it has of series with a quantized tensor beside."""

HISTORY_STATISTICS = PLAIN_STATISTICS + QUANTIZED_STATISTICS

_KEY_COLUMNS: list[tuple[str, str]] = [
    ("layer", TEXT_ID),
    ("tensor", TEXT_ID),
    ("part", TEXT_ID),
    ("microbatch", "<i4"),
    ("phase", "S12"),
    ("call", "<i4"),
    ("stage", "S12"),
]

RECORD = np.dtype(
    [
        ("attempt", "<i4"),
        ("iteration", "<i8"),
        ("sequence", "<i4"),
        *_KEY_COLUMNS,
        ("representation", "S16"),
        ("shape", TEXT_ID),  # JSON list
        ("dtype", TEXT_ID),
        ("quantizer", "<i4"),  # row of /quantizers, -1 for none
        ("components", TEXT_ID),  # JSON list of {name, shape, format, bytes}
        ("bytes", "<i8"),
        ("path", TEXT_ID),  # group in the tensors file, empty without bytes
        ("reason", TEXT_ID),  # why no bytes were kept although they were selected
        *[(name, "<f8") for name in STATISTIC_COLUMNS],  # NaN where absent
        # since 1.2, see ``scale_age.ScaleAge``:
        ("scale_unchanged_iterations", "<i4"),
        ("scale_differed_iterations", "<i4"),
    ]
)
"""One row a record. Rows of one iteration lie together, in the order in which the tensors were seen."""

ITERATION = np.dtype(
    [
        ("attempt", "<i4"),
        ("iteration", "<i8"),
        ("tick", "<i8"),
        ("num_microbatches", "<i4"),
        ("has_loss", "u1"),  # 0: no loss was given to step
        ("loss", "<f8"),
        ("partial", "u1"),  # 1: the iteration had not ended
        ("blind", TEXT_ID),  # why its tensors are not in the tensors file, or empty
        ("first_record", "<i8"),  # its rows of /records
        ("num_records", "<i8"),
        ("metrics", TEXT_ID),  # JSON object, empty for none
        # since 1.1:
        ("step_time_s", "<f8"),  # from the step before to this one; NaN where unknown, as the next two
        ("data_time_s", "<f8"),  # from the step before to the first forward
        ("loss_scale", "<f8"),  # the metric of this name
        ("optimizer", TEXT_ID),  # JSON object, empty for none
        ("data", TEXT_ID),  # JSON object, empty for none
        # since 1.3:
        ("tier", "S8"),  # ring, or host: from the host tier
        ("landmark", "<i4"),  # the age that it stands for, 0 for no landmark
    ]
)

FIRING = np.dtype(
    [
        ("rule", TEXT_ID),
        ("kind", TEXT_ID),
        ("severity", "S8"),
        ("attempt", "<i4"),
        ("iteration", "<i8"),
        ("has_key", "u1"),  # 0: a rule about the run, the key's columns are empty
        *_KEY_COLUMNS,
        ("sequence", "<i4"),
        ("value", "<f8"),
        ("threshold", "<f8"),
        ("message", TEXT_ID),
        ("record", "<i8"),  # row of /records, -1 for none
    ]
)

BLIND = np.dtype(
    [
        ("attempt", "<i4"),  # -1: all
        ("iteration", "<i8"),  # -1: all
        ("layer", TEXT_ID),
        ("tensor", TEXT_ID),
        ("reason", TEXT_ID),
    ]
)

SERIES = np.dtype([column for column in _KEY_COLUMNS if column[0] != "microbatch"])
"""One row a column of the statistics in ``/history``; since 1.1."""

QUANTIZER = np.dtype(
    [
        ("class_name", TEXT_ID),
        ("format", TEXT_ID),
        ("scale_direction", "S24"),
        ("block_shape", TEXT_ID),  # JSON list
        ("metadata", TEXT_ID),  # JSON object
    ]
)

COMPONENT = np.dtype(
    [
        ("record", "<i8"),  # row of /records in the facts file
        ("component", TEXT_ID),
        ("offset", "<i8"),  # in the file; -1 for an array without elements
        ("bytes", "<i8"),
        ("crc32", "<u4"),
    ]
)

RANK = np.dtype([("rank", "<i4"), ("facts", TEXT_ID), ("tensors", TEXT_ID)])
"""Rank table of the index: file names beside it; empty text for a file that was not there."""

LATER = frozenset(
    {
        *(name for name in STATISTIC_COLUMNS if Statistic[name.upper()] > Statistic.SCALE_NONFINITE_COUNT),
        *("scale_unchanged_iterations", "scale_differed_iterations"),
        *("step_time_s", "data_time_s", "loss_scale", "optimizer", "data", "tier", "landmark"),
    }
)
"""Columns that version 1.0 did not have."""
