"""The words of flightrec as frozen types: keys, phases, stages, statistics, record layouts.

Shared by the recorder, the writer process and the reader. No torch, no numpy, no state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NO_MICROBATCH = -1
"""``Key.microbatch`` of records that belong to a whole iteration (parameters, metrics, the loss given to ``step``)."""


LOSS_SCALE, SKIPPED_STEP = "loss_scale", "skipped_step"
"""Metrics that a gradient scaler given to ``attach`` makes: the iteration's scale; 1 if it skipped a step, else 0."""


class Phase(str, enum.Enum):
    """What the model was doing when a tensor was seen."""

    TRAIN = "train"
    RECOMPUTE = "recompute"
    EVAL = "eval"
    WARMUP = "warmup"

    __hash__ = str.__hash__  # as its text, which it equals; enum's own is a Python function, called at every record


class Stage(str, enum.Enum):
    """Where in an iteration a tensor was seen, in the order in which faults are blamed."""

    START = "start"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    REDUCED = "reduced"
    UNSCALED = "unscaled"
    CLIPPED = "clipped"
    AFTER_STEP = "after_step"

    __hash__ = str.__hash__

    @property
    def order(self) -> int:
        """Rank in blame order, 0 for ``start``."""
        return _STAGE_ORDER[self]


_STAGE_ORDER = {stage: index for index, stage in enumerate(Stage)}


class Severity(str, enum.Enum):
    """How much a firing matters: ``watch`` is noted only, ``warning`` and ``fault`` write an incident."""

    WATCH = "watch"
    WARNING = "warning"
    FAULT = "fault"

    @property
    def order(self) -> int:
        """0 for ``watch``, 2 for ``fault``."""
        return _SEVERITY_ORDER[self]


_SEVERITY_ORDER = {severity: index for index, severity in enumerate(Severity)}


class Representation(str, enum.Enum):
    """What a record holds: see ``RecordLayout.representation``."""

    HIGH_PRECISION = "high_precision"
    QUANTIZED = "quantized"
    BOTH = "both"
    STATISTICS = "statistics"


TENSORS = ("activation", "weight", "gradient", "output", "wgrad", "dgrad", "input", "loss", "parameter", "metric")
"""Names a record's ``tensor`` may have. The first six are Transformer Engine's."""


class Statistic(enum.IntEnum):
    """Columns of a statistics row, float64 each (counts below 2^53 and float32 amax are exact). NaN means absent.

    The first block describes the high-precision tensor, the ``QUANTIZED_`` block the codes, the last block the pair.
    Counts are of elements in the logical region (``valid_rows``).
    """

    NUMEL = 0
    NAN_COUNT = 1
    POSITIVE_INF_COUNT = 2
    NEGATIVE_INF_COUNT = 3
    ZERO_COUNT = 4
    AMAX = 5  # over finite values; absent when there are none
    SUM = 6  # over finite values
    SUM_OF_SQUARES = 7  # over finite values
    QUANTIZED_NUMEL = 8
    QUANTIZED_NAN_COUNT = 9
    QUANTIZED_INF_COUNT = 10
    QUANTIZED_ZERO_COUNT = 11
    QUANTIZED_SATURATED_COUNT = 12  # codes at the format's largest finite magnitude
    UNDERFLOW_COUNT = 13  # non-zero before, zero after
    SQUARED_ERROR = 14  # sum over elements finite on both sides of (dequantized - x)^2
    SCALE_NONFINITE_COUNT = 15  # NaN or Inf words in the scale components
    CLIPPED_COUNT = 16  # finite elements whose scaled magnitude is beyond the format's largest finite value
    RANGE_RATIO = 17  # largest scaled magnitude of a finite element, as a multiple of the format's largest value
    ZERO_SCALE_COUNT = 18  # non-zero finite elements whose scale is 0 (a scale that is a code itself may underflow)
    SCALE_MIN = 19  # smallest finite word of the scale that decodes, in its own direction; of two, of their product
    SCALE_MAX = 20  # largest
    SCALE_INVERSE_ERROR = 21  # largest |scale x scale_inv - 1| where both are recorded
    HISTORY_RATIO = 22  # largest recorded past amax, scaled, as a multiple of the format's largest value
    QUANTIZED_LARGEST = 23  # the codes' largest finite value: tells their format
    QUANTIZER_AMAX = 24  # largest finite word of the amax that the quantizer itself saw
    AMAX_HISTORY_MAX = 25  # largest finite recorded past amax


NUM_STATISTICS = len(Statistic)


class _Hashed:
    """Place for a hash beside the fields of a frozen dataclass: no field, so that it is never copied or pickled."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Key(_Hashed):
    """Names one tensor sighting within an iteration; constant from iteration to iteration."""

    layer: str
    tensor: str
    part: str = ""
    microbatch: int = NO_MICROBATCH
    phase: Phase = Phase.TRAIN
    call: int = 0
    stage: Stage = Stage.FORWARD

    def __hash__(self) -> int:
        """That of the fields, computed once: a key is looked up at every record."""
        try:
            return self._hash
        except AttributeError:
            fields = (self.layer, self.tensor, self.part, self.microbatch, self.phase, self.call, self.stage)
            object.__setattr__(self, "_hash", hash(fields))
            return self._hash

    @property
    def series(self) -> Key:
        """The key without its microbatch: what has one sample an iteration, and a column of its own in the history."""
        return replace(self, microbatch=NO_MICROBATCH)

    def blame_order(self, sequence: int, num_microbatches: int) -> tuple[int, int, int]:
        """Sort key within one (attempt, iteration): microbatch, stage, sequence."""
        return (self.microbatch_position(num_microbatches), self.stage.order, sequence)

    def microbatch_position(self, num_microbatches: int) -> int:
        """The microbatch. Without one, ``start`` counts as -1, a loss as the last, later stages as their number."""
        if self.microbatch != NO_MICROBATCH:
            return self.microbatch
        if self.stage is Stage.LOSS:  # of the whole iteration: there before the last microbatch's backward
            return num_microbatches - 1
        return -1 if self.stage is Stage.START else num_microbatches


@dataclass(frozen=True, slots=True)
class Component:
    """One raw array of a record, contiguous and in logical order.

    Attributes:
        name: ``high_precision``, ``data``, ``scale``, ``scale_inv``, ``amax``, ``amax_history``, ``columnwise_data``,
            ``columnwise_scale``, ``columnwise_scale_inv``, ... or another lower-case word.
        shape: shape of the stored array (for packed FP4 the packed bytes).
        format: element format: a torch/ml_dtypes dtype name (``bfloat16``, ``float8_e4m3fn``, ``float32``, ...), or
            ``float4_e2m1fn_x2`` for two FP4 codes a byte, the first in the low nibble.
        offset_bytes: from the start of the record's area in a slot.
        num_bytes: length.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where and how the records of one key lie, as long as shape, dtype and quantizer stay the same.

    Attributes:
        layout_id: dense number, given at first sight; a changed shape gets a new layout with the same row.
        key: whose.
        representation: what is stored as bytes; statistics are always kept.
        shape: logical shape of the tensor.
        dtype: dtype name of the high-precision tensor, empty when there is none.
        quantizer: id of the quantizer's metadata, -1 for none.
        components: stored arrays, empty for ``statistics``.
        segment: ring segment, -1 without bytes.
        offset_bytes: of the record's area inside the segment's area of a slot.
        row: row of the statistics matrix; one a key.
        reason: why no bytes are kept although they were selected, or empty.
    """

    layout_id: int
    key: Key
    representation: Representation
    shape: tuple[int, ...]
    dtype: str
    quantizer: int
    components: tuple[Component, ...]
    segment: int
    offset_bytes: int
    row: int
    reason: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all components, without padding."""
        return sum(component.num_bytes for component in self.components)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; ``from_json`` reverses it."""
        key = self.key
        return {
            "layout_id": self.layout_id,
            "key": [key.layer, key.tensor, key.part, key.microbatch, key.phase.value, key.call, key.stage.value],
            "representation": self.representation.value,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "quantizer": self.quantizer,
            "components": [[c.name, list(c.shape), c.format, c.offset_bytes, c.num_bytes] for c in self.components],
            "segment": self.segment,
            "offset_bytes": self.offset_bytes,
            "row": self.row,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordLayout:
        """Build a layout from what ``to_json`` gave."""
        layer, tensor, part, microbatch, phase, call, stage = data["key"]
        return cls(
            layout_id=data["layout_id"],
            key=Key(layer, tensor, part, microbatch, Phase(phase), call, Stage(stage)),
            representation=Representation(data["representation"]),
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            quantizer=data["quantizer"],
            components=tuple(Component(n, tuple(s), f, o, b) for n, s, f, o, b in data["components"]),
            segment=data["segment"],
            offset_bytes=data["offset_bytes"],
            row=data["row"],
            reason=data["reason"],
        )


@dataclass(frozen=True, slots=True)
class QuantizerInfo:
    """Plain metadata of one quantizer, deduplicated; stored as a row of ``/quantizers``.

    Attributes:
        class_name: qualified name of the producing class, or ``flightrec.Quantized``.
        format: element format of the codes (``float8_e4m3fn``, ...).
        scale_direction: ``multiply_to_encode`` (component ``scale``), ``multiply_to_decode`` (``scale_inv``),
            ``none``, or ``unknown`` for arrays of a class that is not understood.
        block_shape: elements that share a scale, one entry a dimension of ``shape``; empty for one scale a tensor.
        metadata: everything else, JSON-able.
    """

    class_name: str
    format: str
    scale_direction: str
    block_shape: tuple[int, ...]
    metadata: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "class_name": self.class_name,
            "format": self.format,
            "scale_direction": self.scale_direction,
            "block_shape": list(self.block_shape),
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class Firing:
    """One rule that fired on one tensor in one iteration.

    ``record`` is the row in ``/records`` (-1 when the tensor's iteration is not in the file or it is a host rule);
    ``message`` is one plain sentence with the numbers.
    """

    rule: str
    kind: str
    severity: Severity
    attempt: int
    iteration: int
    key: Key | None
    sequence: int
    value: float
    threshold: float
    message: str
    record: int = -1
