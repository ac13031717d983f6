"""Where records lie: what a caller hands in, components and their alignment, segments and the places in them.

Host bookkeeping and the segments' buffers; called under the ring's lock. Only committing the ring copies bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flightrec.kernels.driver import allocate
from flightrec.kernels.formats import CODE_FORMATS, copy_dtype, dtype_name
from flightrec.kernels.plan import CapturePlan
from flightrec.kernels.scales import tiled_numel
from flightrec.records import Component, Key, QuantizerInfo

RECORD_ALIGNMENT_BYTES = 256
COMPONENT_ALIGNMENT_BYTES = 16
SMALLEST_AREA_BYTES = 1 << 20
LARGEST_AREA_BYTES = 64 << 20
_GROWTH = 1.5  # headroom of a place that replaces one that was too small


_SWIZZLED = "swizzled_scale_inv"
_SCALES_OF = {"mxfp8": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class QuantizedParts:
    """A quantized tensor as plain arrays.

    Attributes:
        info: the quantizer's metadata (deduplicated by the ring).
        components: name -> tensor, any strides, on the ring's device; names as in ``records.Component``. Names that
            contain ``scale`` count as scales, ``data`` and ``*_data`` as codes.
        formats: element format by component name where the dtype does not tell (``uint8`` that holds FP8 codes or
            packed FP4). A uint8 ``data`` or ``*_data`` takes ``info.format`` when it is not named here.
        pair_codes: the code component that the high-precision tensor was quantized to, element by element, or None.
        is_understood: False for arrays of unknown meaning: they are kept, and no rule sees them.
        has_rows: False where dimension 0 of the high-precision tensor is not what ``valid_rows`` counts (the values of
            a sparse tensor).
        template: the very same object only for parts that differ in nothing but their tensors' values and strides;
            None if that is not known.
    """

    info: QuantizerInfo
    components: Mapping[str, torch.Tensor]
    formats: Mapping[str, str] = field(default_factory=dict)
    pair_codes: str | None = None
    is_understood: bool = True
    has_rows: bool = True
    template: object | None = None

    def format(self, name: str) -> str:
        """Element format of a component."""
        if name in self.formats:
            return self.formats[name]
        dtype = self.components[name].dtype
        if dtype == torch.uint8 and is_codes(name) and self.info.format in CODE_FORMATS:
            return self.info.format
        return dtype_name(dtype)


def is_codes(name: str) -> bool:
    """Whether a component of this name holds the quantized elements."""
    return name == "data" or name.endswith("_data")


def align(num_bytes: int, alignment: int) -> int:
    """``num_bytes`` rounded up."""
    return -(-num_bytes // alignment) * alignment


def build_components(
    high_precision: torch.Tensor | None, quantized: QuantizedParts | None
) -> tuple[tuple[Component, ...], int]:
    """Components of a record that keeps what is given here, and the length of its area."""
    tensors: list[tuple[str, torch.Tensor, str]] = []
    if high_precision is not None:
        tensors.append(("high_precision", high_precision, dtype_name(high_precision.dtype)))
    if quantized is not None:
        tensors += [(name, tensor, quantized.format(name)) for name, tensor in quantized.components.items()]
    components, offset = [], 0
    for name, tensor, format_name in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        components.append(Component(name, tuple(tensor.shape), format_name, offset, num_bytes))
        offset += align(num_bytes, COMPONENT_ALIGNMENT_BYTES)
    return tuple(components), align(max(offset, 1), RECORD_ALIGNMENT_BYTES)


def build_plan(high_precision: torch.Tensor | None, quantized: QuantizedParts | None) -> CapturePlan:
    """What the kernels are to know of a record's parts."""
    if quantized is None or not quantized.is_understood:
        return CapturePlan()
    names = list(quantized.components)
    candidates = [quantized.pair_codes or "data", "data", *(name for name in names if is_codes(name))]
    codes = next((name for name in candidates if name in names), None)
    scale = _scale_of(codes, quantized) if codes is not None else None
    inverse = _inverse_of(scale, quantized) if scale is not None else None
    amax = _beside(codes, "amax", names)
    tensor_scale = _beside(codes, "tensor_scale_inv", names)
    scale_shape, scale_transposed = _swizzled_shape(codes, scale, quantized)
    if scale_shape is None or (scale is None and tensor_scale is not None):
        scale = inverse = tensor_scale = None  # words in an order that is not known, or no first scale
    unscaled = quantized.info.scale_direction == "none" and _beside(codes, "tensor_scale_inv", names) is None
    return CapturePlan(
        codes=-1 if codes is None else names.index(codes),
        format="" if codes is None else quantized.format(codes),
        pairs=codes is not None and codes == quantized.pair_codes and _can_pair(high_precision, quantized, codes),
        scale=-1 if scale is None else names.index(scale),
        unscaled=unscaled,
        multiply_to_decode=quantized.info.scale_direction != "multiply_to_encode",
        block_shape=quantized.info.block_shape,
        scales=tuple(
            (at, _scale_format(name, quantized) if name == scale else quantized.format(name))
            for at, name in enumerate(names)
            if "scale" in name
        ),
        inverse=-1 if inverse is None else names.index(inverse),
        history=names.index("amax_history") if "amax_history" in names else -1,
        tensor_scale=-1 if tensor_scale is None else names.index(tensor_scale),
        amax=-1 if amax is None else names.index(amax),
        scale_shape=scale_shape or (),
        scale_transposed=scale_transposed,
    )


def _beside(codes: str | None, word: str, names: Sequence[str]) -> str | None:
    """The component of this name that belongs to these codes: the columnwise ones have their own."""
    name = None if codes is None else codes.removesuffix("data") + word
    return name if name in names else None


def _swizzled_shape(
    codes: str | None, scale: str | None, quantized: QuantizedParts
) -> tuple[tuple[int, ...] | None, bool]:
    """Rows and columns of scales that lie in the tensor cores' order, and whether those are of their transpose.

    Empty for scales in their own order; None if it is not known how they lie.
    """
    if codes is None or scale is None:
        return (), False
    if not scale.endswith(_SWIZZLED) and not quantized.info.metadata.get("swizzled"):
        return (), False
    tensor, blocks = quantized.components[codes], quantized.info.block_shape
    if tensor.dim() < 2 or len(blocks) < 2 or (codes != "data" and "data" in quantized.components):
        return None, False
    code_format = CODE_FORMATS.get(quantized.format(codes))
    columns = tensor.shape[-1] * (2 if code_format is not None and code_format.packed else 1)
    shape = -(-math.prod(tensor.shape[:-1]) // blocks[-2]), -(-columns // blocks[-1])
    is_transposed = blocks[-1] == 1  # blocks down the columns: the tiles are those of the transposed scales
    shape = shape[::-1] if is_transposed else shape
    return (shape if quantized.components[scale].numel() == tiled_numel(shape) else None), is_transposed


def _scale_format(name: str, quantized: QuantizedParts) -> str:
    """Element format of a scale; where it is kept as bytes, the family tells."""
    found = quantized.format(name)
    family = str(quantized.info.metadata.get("scheme", ""))
    return _SCALES_OF.get(family, found) if found == "uint8" and name.endswith(_SWIZZLED) else found


def _scale_of(codes: str, quantized: QuantizedParts) -> str | None:
    words = {"multiply_to_encode": "scale", "multiply_to_decode": "scale_inv"}
    word = words.get(quantized.info.scale_direction)
    if word is None:
        return None
    prefix = codes.removesuffix("data")
    own = (prefix + word, *([prefix + _SWIZZLED] if word == "scale_inv" else []), word)
    return next((name for name in own if name in quantized.components), None)


def _inverse_of(scale: str, quantized: QuantizedParts) -> str | None:
    """The component that should hold one over each word of ``scale``; none where a word is rounded to a code."""
    other = scale.removesuffix("_inv") if scale.endswith("_inv") else f"{scale}_inv"
    if other in quantized.info.metadata.get("live", ()):  # of the next quantizing call, perhaps
        return None
    if other not in quantized.components or {quantized.format(scale), quantized.format(other)} & CODE_FORMATS.keys():
        return None
    one, two = quantized.components[scale], quantized.components[other]
    same = one.shape == two.shape or one.numel() == two.numel() == 1  # a scale of no dimension, its inverse of one
    return other if same and one.is_floating_point() and two.is_floating_point() else None


def _can_pair(high_precision: torch.Tensor | None, quantized: QuantizedParts, codes: str) -> bool:
    code_format = CODE_FORMATS.get(quantized.format(codes))
    if high_precision is None or code_format is None or not high_precision.is_floating_point():
        return False
    tensor, per_byte = quantized.components[codes], 2 if code_format.packed else 1
    if tensor.numel() * per_byte != high_precision.numel() or tensor.dtype.itemsize != 1:
        return False
    if not tensor.dim():
        return not code_format.packed
    return high_precision.dim() > 0 and tensor.shape[-1] * per_byte == high_precision.shape[-1]


@dataclass(frozen=True, slots=True)
class Place:
    """An area for one key's records in every slot of a segment; never moves once the ring is committed."""

    segment: int
    offset_bytes: int
    capacity_bytes: int


class Segment:
    """A buffer with one area a slot.

    Attributes:
        index: number of the segment.
        buffer: uint8 ``[num_slots + 1, area_bytes]`` on the ring's device; the last area is scrap.
        used_bytes: how much of an area is given to keys.
    """

    def __init__(self, index: int, device: torch.device, num_slots: int, area_bytes: int) -> None:
        self.index, self.used_bytes = index, 0
        with torch.inference_mode(False):
            shape = (num_slots + 1, area_bytes)
            self.buffer = allocate(device, lambda: torch.empty(shape, dtype=torch.uint8, device=device))

    @property
    def area_bytes(self) -> int:
        """Length of a slot's area."""
        return self.buffer.shape[1]

    def resized(self, num_slots: int) -> Segment:
        """A segment with ``num_slots`` slots, no larger than what is used, that keeps slot 0."""
        new = Segment(self.index, self.buffer.device, num_slots, self.used_bytes)
        new.used_bytes = self.used_bytes
        new.buffer[0].copy_(self.buffer[0, : self.used_bytes])
        return new

    def copy_from(self, place: Place, source: Segment, source_place: Place) -> None:
        """Take over a place's slot 0 from another segment."""
        length = source_place.capacity_bytes
        target = self.buffer[0, place.offset_bytes : place.offset_bytes + length]
        target.copy_(source.buffer[0, source_place.offset_bytes : source_place.offset_bytes + length])

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """``[num_slots + 1, *shape]`` of ``copy_dtype(dtype)`` at an offset in every area."""
        wanted = copy_dtype(dtype)
        numel = torch.Size(shape).numel()
        with torch.inference_mode(False):
            start = offset_bytes // wanted.itemsize
            return self.buffer.view(wanted)[:, start : start + numel].view(self.buffer.shape[0], *shape)


class Segments:
    """All segments, and the memory that they may take."""

    def __init__(self, device: torch.device, num_slots: int, memory_bytes: int) -> None:
        self._device = device
        self.num_slots, self.memory_bytes = num_slots, memory_bytes
        self.items: list[Segment] = []
        self._num_opened = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(segment.buffer.nbytes for segment in self.items)

    @property
    def used_bytes(self) -> int:
        """Bytes given to keys, a slot."""
        return sum(segment.used_bytes for segment in self.items)

    def find(self, places: Sequence[Place], num_bytes: int) -> Place | None:
        """The newest of a key's own places that is large enough, or a new one; None when memory does not reach.

        Raises:
            RuntimeError, MemoryError: the device refused the memory (``torch.OutOfMemoryError`` is a RuntimeError).
        """
        for place in reversed(places):
            if place.capacity_bytes >= num_bytes:
                return place
        if not places:
            return self._take(num_bytes)
        roomy = align(int(num_bytes * _GROWTH), RECORD_ALIGNMENT_BYTES)
        return self._take(roomy) or self._take(num_bytes)

    def _take(self, num_bytes: int) -> Place | None:
        segment = self.items[-1] if self.items else None
        if segment is None or segment.area_bytes - segment.used_bytes < num_bytes:
            segment = self._open(num_bytes)
            if segment is None:
                return None
        place = Place(segment.index, segment.used_bytes, num_bytes)
        segment.used_bytes += num_bytes
        return place

    def _open(self, num_bytes: int) -> Segment | None:
        room = (self.memory_bytes - self.num_bytes) // (self.num_slots + 1)
        room -= room % RECORD_ALIGNMENT_BYTES
        if room < num_bytes:
            return None
        wished = min(SMALLEST_AREA_BYTES << self._num_opened, LARGEST_AREA_BYTES)
        segment = Segment(len(self.items), self._device, self.num_slots, min(max(wished, num_bytes), room))
        self.items.append(segment)
        self._num_opened += 1
        return segment

    def fill(self, capacities: Mapping[Key, int]) -> dict[Key, Place]:
        """Places for many keys at once in new segments that are exactly as large as they must be.

        Raises:
            RuntimeError, MemoryError: as ``find``.
        """
        places: dict[Key, Place] = {}
        areas = [0]
        for key, num_bytes in capacities.items():
            if areas[-1] and areas[-1] + num_bytes > LARGEST_AREA_BYTES:
                areas.append(0)
            places[key] = Place(len(areas) - 1, areas[-1], num_bytes)
            areas[-1] += num_bytes
        for index, area_bytes in enumerate(areas if areas[0] else ()):
            segment = Segment(index, self._device, self.num_slots, area_bytes)
            segment.used_bytes = area_bytes
            self.items.append(segment)
        return places

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots in every segment, one segment after the other; slot 0 and all places stay.

        Raises:
            RuntimeError, MemoryError: as ``find``; calling again, or ``clear``, is safe.
        """
        self.num_slots, self._num_opened = num_slots, 0
        for at, segment in enumerate(self.items):
            self.items[at] = segment.resized(num_slots)
