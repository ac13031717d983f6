"""A record of an incident, read lazily: its facts are at hand, its bytes are read when asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.codecs import base, quantized
from flightrec.errors import IncidentError
from flightrec.records import Key, Representation
from flightrec.storage import files, schema, text
from flightrec.storage.rank import Rank, StoredComponent
from flightrec.storage.scale_age import ScaleAge

HIGH_PRECISION = "high_precision"


class Components(Mapping[str, npt.NDArray[Any]]):
    """Raw arrays of a quantized tensor by component name, each read when it is looked up."""

    def __init__(self, record: Record, names: tuple[str, ...]) -> None:
        self._record = record
        self._names = names

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._record.raw(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Components({', '.join(self._names)})"


class Quantized:
    """The quantized side of a record.

    Attributes:
        components: raw arrays by name (``data``, ``scale_inv``, ...), bit patterns as stored; read when looked up.
        formats: element format of each component.
        metadata: ``class_name``, ``format``, ``scale_direction``, ``block_shape`` and the quantizer's ``metadata``.
    """

    def __init__(self, record: Record, formats: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
        self._record = record
        self.formats = formats
        self.metadata = metadata
        self.components = Components(record, tuple(formats))

    def dequantize(self, *, side: str | None = None) -> npt.NDArray[np.float32]:
        """Give the numbers that the codes and scales stand for.

        Args:
            side: ``rowwise`` (the component ``data``) or ``columnwise`` (``columnwise_data``); None for the first of
                them that was recorded.

        Returns:
            float32, in the record's logical shape; of a grouped tensor all members, see ``dequantize_members``. The
            column-wise side of NVFP4 with metadata ``rht`` gives Hadamard-transformed values:
            ``flightrec.codecs.nvfp4.undo_hadamard``.

        Raises:
            FormatError: a component that is needed is missing, or this combination cannot be decoded.
            IncidentError: the bytes are damaged.
        """
        components, side = self._side(side)
        shape = self._record.shape
        return quantized.dequantize(components, self.metadata, formats=self.formats, shape=shape, side=side)

    def dequantize_members(self, *, side: str | None = None) -> list[npt.NDArray[np.float32]]:
        """Give the numbers of each member of a grouped tensor; ``side`` and errors as ``dequantize``.

        Returns:
            float32 [rows, columns] each.
        """
        components, side = self._side(side)
        return quantized.dequantize_members(components, self.metadata, formats=self.formats, side=side)

    def _side(self, side: str | None) -> tuple[dict[str, npt.NDArray[Any]], str]:
        if side is None:
            side = next(iter(quantized.sides_of(self.formats)), "rowwise")
        return {name: self.components[name] for name in quantized.component_names(self.formats, side)}, side


class Record:
    """One tensor sighting in one iteration of one rank.

    Attributes:
        index: row of the rank's ``/records``.
        rank: number of the rank.
    """

    def __init__(self, source: Rank, index: int) -> None:
        self._source = source
        self._row = source.records[index]
        self.index = index
        self.rank = source.rank

    def __repr__(self) -> str:
        key = self.key
        return f"<Record {self.attempt}.{self.iteration} {key.layer} {key.tensor} {key.part} mb={key.microbatch}>"

    @property
    def key(self) -> Key:
        """Whose sighting it is."""
        return self._source.key(self._row)

    @property
    def attempt(self) -> int:
        """Attempt of the run."""
        return int(self._row["attempt"])

    @property
    def iteration(self) -> int:
        """Iteration of the attempt."""
        return int(self._row["iteration"])

    @property
    def sequence(self) -> int:
        """Position among the records of its iteration, in the order in which they were seen."""
        return int(self._row["sequence"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the tensor."""
        with files.reading(self._source.facts_path, "/records"):
            return text.sizes(text.from_json_text(self._name("shape")) or ())

    @property
    def dtype(self) -> str:
        """Name of the high-precision tensor's dtype (``bfloat16``, ...); empty when there was none."""
        return self._name("dtype")

    @property
    def representation(self) -> Representation:
        """What was selected and kept: high precision, quantized, both, or statistics only."""
        with files.reading(self._source.facts_path, "/records"):
            return Representation(self._row["representation"].decode("ascii"))

    @property
    def path(self) -> str:
        """Its group in the tensors file; empty without bytes."""
        return self._name("path")

    @property
    def num_bytes(self) -> int:
        """Bytes of all its components."""
        return int(self._row["bytes"])

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """Statistics by lower-case name (``nan_count``, ``amax``, ...): counts as int, None where absent."""
        there = self._row.dtype.names or ()  # a file of an earlier minor version lacks the later ones
        return {
            name: _statistic(name, float(self._row[name]) if name in there else math.nan)
            for name in schema.STATISTIC_COLUMNS
        }

    @property
    def scale_age(self) -> ScaleAge | None:
        """How long its scale has stood still; None without a scale, or where nothing earlier is known."""
        if "scale_unchanged_iterations" not in (self._row.dtype.names or ()):  # a file before 1.2
            return None
        age = ScaleAge(int(self._row["scale_unchanged_iterations"]), int(self._row["scale_differed_iterations"]))
        return age if age != ScaleAge() else None

    @property
    def components(self) -> tuple[StoredComponent, ...]:
        """The arrays that the record should have, as its facts describe them."""
        return self._source.components(self._row)

    @property
    def why_absent(self) -> str:
        """Why bytes that were selected are missing, or empty when nothing is missing."""
        reason = self._name("reason")
        if reason or not self.components:
            return reason
        names = [part.name for part in self.components]
        missing = [name for name in names if not self._source.has_payload(self.index, self.path, name)]
        if missing:
            lost = f"{', '.join(missing)} did not reach the tensors file"
            return self._source.tensors_problem or self._blindness() or lost
        return ""

    @property
    def high_precision(self) -> npt.NDArray[Any] | None:
        """The high-precision tensor in its logical shape, None when there is none (``why_absent`` may tell why).

        bfloat16 and 8-bit floats come as float32, exactly; other types as they are.

        Raises:
            IncidentError: its bytes are damaged.
        """
        part = self._component(HIGH_PRECISION)
        if part is None or not self._source.has_payload(self.index, self.path, HIGH_PRECISION):
            return None
        stored = self.raw(HIGH_PRECISION)
        element = base.element_format(part.format)
        is_value = element.is_native and part.format not in ("bool", "complex32")
        return stored if is_value else base.decode(stored, part.format)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What is known of the tensor's class: ``class_name``, ``format``, ..., ``metadata``; empty for a plain tensor.

        Of a distributed tensor ``metadata`` holds placements and global shape, of a sparse one layout and shape, of a
        quantized one what its quantizer said.
        """
        quantizer = int(self._row["quantizer"])
        with files.reading(self._source.facts_path, "/quantizers"):
            return self._source.quantizers[quantizer] if quantizer >= 0 else {}

    @property
    def quantized(self) -> Quantized | None:
        """The quantized side, None when there is none or its bytes are missing."""
        parts = [part for part in self.components if part.name != HIGH_PRECISION]
        here = [part for part in parts if self._source.has_payload(self.index, self.path, part.name)]
        if not here:
            return None
        quantizer = int(self._row["quantizer"])
        with files.reading(self._source.facts_path, "/quantizers"):
            metadata = self._source.quantizers[quantizer] if quantizer >= 0 else {}
        return Quantized(self, {part.name: part.format for part in here}, metadata)

    def crc32(self, component: str) -> int | None:
        """The checksum of a component's bytes as the file has it; None without bytes, and in a salvaged file."""
        return self._source.crc32(self.index, component)

    def chunks(self, component: str, *, max_elements: int = 1 << 20) -> Iterator[npt.NDArray[Any]]:
        """Read one stored array piece by piece, its checksum not compared.

        Args:
            component: one for which ``has_bytes`` is true.
            max_elements: of a piece.

        Yields:
            Flat arrays of stored elements, in C order.

        Raises:
            IncidentError: there is none, or it cannot be read.
        """
        part = self._component(component)
        if part is None:
            raise IncidentError(f"{self!r}: has no component {component!r}")
        return self._source.payload_chunks(self.path, part, max_elements)

    def raw(self, component: str, *, check: bool = True) -> npt.NDArray[Any]:
        """Read one stored array: bit patterns for bfloat16 (uint16), FP8, FP4 and E8M0 (uint8).

        Args:
            component: ``high_precision``, ``data``, ``scale_inv``, ...
            check: compare its checksum (a salvaged file has none).

        Raises:
            IncidentError: it does not exist, its bytes are missing, or they are damaged.
        """
        part = self._component(component)
        if part is None:
            names = ", ".join(part.name for part in self.components) or "none"
            raise IncidentError(f"{self!r}: has no component {component!r}; it has {names}")
        if not self._source.has_payload(self.index, self.path, component):
            raise IncidentError(f"{self!r}: bytes of {component} are missing: {self.why_absent}")
        array = self._source.read_payload(self.index, self.path, component, check=check, max_bytes=part.num_bytes)
        if part.format in base.FORMATS and (
            array.shape != part.shape or array.dtype != base.storage_dtype(part.format)
        ):
            raise IncidentError(
                f"{self._source.tensors_path}: {self.path}/{component} is {array.dtype} {array.shape}, "
                f"/records says {part.format} {part.shape}"
            )
        return array

    def has_bytes(self, component: str) -> bool:
        """Whether the bytes of a component are in the tensors file."""
        return self._component(component) is not None and self._source.has_payload(self.index, self.path, component)

    def pieces(self, component: str, *, piece_bytes: int = 64 << 20) -> Iterator[npt.NDArray[Any]]:
        """Read one stored array along its first dimension, as ``raw`` gives it, in pieces of about ``piece_bytes``.

        Raises:
            IncidentError: its bytes are missing; after the last piece, if they are damaged.
        """
        part = self._component(component)
        if part is None or not self.has_bytes(component):
            raise IncidentError(f"{self!r}: bytes of {component} are missing: {self.why_absent}")
        found = 0
        for _, piece in self._source.payload_in_pieces(self.index, self.path, component, piece_bytes=piece_bytes):
            found += piece.size
            if found > math.prod(part.shape) or piece.shape[1:] != part.shape[1:]:
                raise IncidentError(f"{self._source.tensors_path}: {self.path}/{component} is not {part.shape}")
            yield piece

    def _component(self, name: str) -> StoredComponent | None:
        return next((part for part in self.components if part.name == name), None)

    def _name(self, column: str) -> str:
        with files.reading(self._source.facts_path, "/records"):
            return self._source.names[int(self._row[column])]

    def _blindness(self) -> str:
        for entry in self._source.iterations:
            if (entry.attempt, entry.iteration) == (self.attempt, self.iteration) and entry.blind:
                return entry.blind
        key = self.key
        for blind in self._source.blind:
            if (
                blind.attempt in {-1, self.attempt}
                and blind.iteration in {-1, self.iteration}
                and blind.layer in {"", key.layer}
                and blind.tensor in {"", key.tensor}
            ):
                return blind.reason
        return ""


def _statistic(name: str, value: float) -> float | int | None:
    if math.isnan(value):
        return None
    counts = name.endswith(("numel", "_count"))
    return int(value) if counts and math.isfinite(value) else value
