"""Quantizes recorded high-precision tensors again and compares scales and codes with the recorded ones.

Reads one record's arrays at a time and works through them in pieces of rows, so that beyond the stored bytes of a
record only a piece is in memory. Pure but for reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flightrec.analysis.verify_facts import NUM_SHOWN, Element, Mismatch, Outcome, Where
from flightrec.codecs import base, encode, encode_scales, quantized, scale_rules, te_layout
from flightrec.codecs.encode import Plan
from flightrec.codecs.rounding import Floats
from flightrec.errors import FormatError
from flightrec.storage.record import HIGH_PRECISION, Record

PIECE_ELEMENTS = 1 << 21
_FLOATS = ("bfloat16", "float16", "float32")
_AGREES_NOT = "These codes are not what the recorded scale makes of the recorded values: "
_FAULT = "the kernel that quantized, or the hardware under it, is at fault, or a copy was damaged."
_SCALE = "the scale does not belong to them; it is stale, from another iteration, or damaged."
_MANY = 0.02
"""Share of wrong codes beyond which the scale is suspected rather than single codes."""

Others = Callable[[], Iterator[tuple[int, int, float]]]


@dataclass
class _Count:
    """Wrong codes under one hypothesis of the scale."""

    wrong: int = 0
    rows: set[int] = field(default_factory=set)
    elements: list[Element] = field(default_factory=list)


class _Values:
    """A record's high-precision tensor in a plan's rows, decoded piece by piece."""

    def __init__(self, record: Record, plan: Plan, element_format: str) -> None:
        self._stored = plan.lay(record.raw(HIGH_PRECISION))
        self._plan, self._format = plan, element_format
        if self._stored.shape != (plan.rows, plan.columns):
            raise FormatError(f"values of shape {self._stored.shape}, codes of {plan.rows} x {plan.columns}")

    def pieces(self) -> Iterator[tuple[int, int, Floats]]:
        """First row, last row + 1, and their values as the quantizer saw them."""
        step = self._plan.row_step
        rows = max(PIECE_ELEMENTS // max(self._plan.columns, 1) // step, 1) * step
        for start in range(0, self._plan.rows, rows):
            stop = min(start + rows, self._plan.rows)
            values = base.decode(np.ascontiguousarray(self._stored[start:stop]), self._format)
            yield start, stop, self._plan.transform(values.astype(np.float32, copy=False))


def verify_codes(record: Record, side: str, *, is_distributed: bool = False, others: Others | None = None) -> Outcome:
    """Compare one side of a record.

    Args:
        record: with a quantized tensor.
        side: ``rowwise`` or ``columnwise``.
        is_distributed: whether the run had more than one rank.
        others: gives (attempt, iteration, scale) of the same tensor at other times, to name a scale's own iteration.
    """
    where = Where.of(record)
    whole = record.quantized
    parts = {part.name: part.format for part in record.components}
    if whole is None:
        return Outcome("codes", where, side, why_not=record.why_absent or "there are no codes")
    if HIGH_PRECISION not in parts:
        reason = whole.metadata.get("metadata", {}).get(HIGH_PRECISION)
        why = f"the tensor that was quantized is not recorded ({reason})" if reason else "only codes were recorded"
        return Outcome("codes", where, side, why_not=why)
    if parts[HIGH_PRECISION] not in _FLOATS:
        return Outcome("codes", where, side, why_not=f"quantizing {parts[HIGH_PRECISION]} again is not understood")
    names = quantized.component_names(whole.formats, side)
    if "scale" in whole.formats and "scale" not in names:
        names = [*names, "scale"]
    try:
        components = {name: whole.components[name] for name in names}
        plan = encode.plan_of(components, whole.metadata, formats=whole.formats, shape=record.shape, side=side)
        if not plan.rows * plan.columns:
            return Outcome("codes", where, side)
        return _Comparison(record, plan, side, parts[HIGH_PRECISION], is_distributed, others).outcome()
    except FormatError as error:
        return Outcome("codes", where, side, why_not=str(error))


class _Comparison:
    """One side of one record."""

    def __init__(
        self, record: Record, plan: Plan, side: str, dtype: str, is_distributed: bool, others: Others | None
    ) -> None:
        self._record, self._plan, self._side, self._dtype = record, plan, side, dtype
        self._is_distributed, self._others = is_distributed, others
        self._values = _Values(record, plan, dtype)
        self._where = Where.of(record)
        self._notes: list[str] = []
        self._mismatches: list[Mismatch] = []

    def outcome(self) -> Outcome:
        """Scales first, then codes under them."""
        exact = self._scales()
        num_free, best = self._codes(exact)
        plan = self._plan
        if best.wrong:
            share = best.wrong / (plan.rows * plan.columns)
            meaning = self._meaning(share)
            rows = sorted(best.rows)
            self._mismatches.append(
                Mismatch(
                    "codes",
                    self._where,
                    self._side,
                    best.wrong,
                    plan.rows * plan.columns - num_free,
                    len(rows),
                    tuple(rows[:NUM_SHOWN]),
                    tuple(best.elements[:NUM_SHOWN]),
                    meaning,
                )
            )
        if plan.is_stochastic:
            self._notes.append("stochastic rounding: each code is compared with both neighbours")
        compared = plan.rows * plan.columns - num_free
        return Outcome(
            "codes",
            self._where,
            self._side,
            compared,
            num_free,
            notes=tuple(self._notes),
            mismatches=tuple(self._mismatches),
        )

    # -- scales

    def _scales(self) -> list[Floats | None]:
        """Compare scales that the tensor tells; the exact scales for the codes, by hypothesis."""
        plan = self._plan
        self._compare_inverse()
        reason = encode_scales.is_function(plan)
        if reason:
            self._notes.append(f"scales not computed again: {reason}")
            return list(encode.candidates(plan)) if plan.family == "float8" else [None]
        amax, has_nan, over_all = self._amax()
        if plan.family == "nvfp4":
            self._compare_amax(over_all)
        computed = encode_scales.expected(
            plan,
            amax,
            has_nan,
            dtype=self._dtype,
            second=plan.second(0, plan.rows),
            is_distributed=self._is_distributed,
        )
        wrong = encode_scales.differ(plan, plan.scales, computed)
        way = min(wrong, key=lambda name: int(wrong[name].sum()))
        if computed.at_least:
            self._notes.append(
                "the amax may have been reduced over the ranks: scales are held to this rank's as a bound"
            )
        if wrong[way].any():
            self._report_scales(
                wrong[way],
                np.broadcast_to(computed.words.get(way, next(iter(computed.words.values()))), plan.scales.shape),
            )
        if not computed.encode or plan.side.scale_direction == "multiply_to_encode":
            return [None]
        if plan.scales.size == 1:
            return [*self._matching(computed), *encode.candidates(plan)]
        return [self._exact(computed)]

    def _compare_inverse(self) -> None:
        """The scale and its inverse, where both are those of the call that quantized."""
        plan = self._plan
        scale = plan.side.components.get("scale")
        if plan.family != "float8" or scale is None or "scale" in (plan.side.metadata.get("live") or ()):
            return
        if np.size(scale) != 1 or plan.scales.size != 1:
            return
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / np.asarray(scale, np.float32).reshape(1, 1)
        if not np.isclose(inverse, plan.scales, rtol=2.0**-20, atol=0, equal_nan=True).all():
            self._report_scales(np.ones((1, 1), dtype=bool), inverse)

    def _matching(self, computed: encode_scales.Expected) -> list[Floats]:
        return [computed.encode[way] for way, words in computed.words.items() if (words == self._plan.scales).all()]

    def _exact(self, computed: encode_scales.Expected) -> Floats:
        """For each block the scale that the tensor tells, where its inverse is what is recorded."""
        with np.errstate(all="ignore"):
            chosen = (np.float32(1) / self._plan.scales).astype(np.float32)
            for way, words in computed.words.items():
                chosen = np.where(words == self._plan.scales, computed.encode[way], chosen)
        return chosen

    def _amax(self) -> tuple[Floats, npt.NDArray[np.bool_], Floats]:
        """Of the blocks; where they hold NaN; and of all (or of each row, where NVFP4 has an amax for each)."""
        plan = self._plan
        across = plan.scales.shape[1]
        amax: Floats = np.zeros(plan.scales.shape, np.float32)
        has_nan: npt.NDArray[np.bool_] = np.zeros(plan.scales.shape, dtype=bool)
        second = plan.second(0, plan.rows)
        is_by_row = second is not None and second.size > 1
        over_all = np.zeros((plan.rows if is_by_row else 1, 1), np.float32)
        size = te_layout.NVFP4_BLOCK
        is_2d = plan.family == "nvfp4" and _is_2d(plan)
        block = (size, size) if is_2d else plan.block
        for start, stop, values in self._values.pieces():
            part, nan = scale_rules.amax_of(values, (min(block[0], stop - start), block[1]))
            if is_2d:
                part = np.repeat(part, size, axis=0)[: stop - start]
                nan = np.repeat(nan, size, axis=0)[: stop - start]
            first = 0 if len(amax) == 1 else start // plan.block[0]
            place = slice(first, first + part.shape[0])
            amax[place] = np.fmax(amax[place], part[:, :across])
            has_nan[place] |= nan[:, :across]
            largest = np.fmax.reduce(np.abs(values), axis=1, keepdims=True, initial=np.float32(0))
            if is_by_row:
                over_all[start:stop] = largest
            else:
                over_all = np.fmax(over_all, largest.max(initial=np.float32(0)))
        return amax, has_nan, over_all

    def _compare_amax(self, over_all: Floats) -> None:
        """NVFP4's own amax, which its second scale comes from."""
        plan = self._plan
        recorded = plan.second(0, plan.rows)
        assert recorded is not None
        slack = np.float32(encode.HADAMARD_TOLERANCE if plan.is_hadamard else 0)
        with np.errstate(all="ignore"):
            wrong = ~(np.abs(recorded - over_all) <= slack * over_all) & np.isfinite(recorded)
            if plan.quantizer.get("with_amax_reduction"):
                wrong &= recorded < over_all * (1 - slack)
        for row in np.flatnonzero(wrong)[:1]:
            self._mismatches.append(
                Mismatch(
                    "amax",
                    self._where,
                    self._side,
                    int(wrong.sum()),
                    int(wrong.size),
                    -1,
                    (),
                    (Element((int(row),), _text(over_all.flat[row]), _text(recorded.flat[row])),),
                    "The recorded amax is not the tensor's: it is stale, from another iteration, or damaged.",
                )
            )

    def _report_scales(self, wrong: npt.NDArray[np.bool_], words: Floats) -> None:
        places = np.argwhere(wrong)
        plan = self._plan
        elements = tuple(
            Element(tuple(map(int, place)), _text(words[tuple(place)]), _text(plan.scales[tuple(place)]))
            for place in places[:NUM_SHOWN]
        )
        rows = np.unique(places[:, 0])
        what = "scale is" if wrong.size == 1 else "scales of these blocks (numbered by row and column) are"
        meaning = (
            f"The recorded {what} not what the recorded values give under the recorded recipe: stale, from another "
            "iteration, or damaged; or the kernel that looked for the largest value is at fault."
        )
        self._mismatches.append(
            Mismatch(
                "scales",
                self._where,
                self._side,
                len(places),
                int(wrong.size),
                len(rows),
                tuple(map(int, rows[:NUM_SHOWN])),
                elements,
                meaning,
            )
        )

    # -- codes

    def _codes(self, exact: list[Floats | None]) -> tuple[int, _Count]:
        """Compare all codes under each hypothesis; the one under which fewest differ."""
        plan = self._plan
        counts = [_Count() for _ in exact]
        num_free = 0
        for start, stop, values in self._values.pieces():
            codes = plan.codes(start, stop)
            for number, (scale, count) in enumerate(zip(exact, counts, strict=True)):
                may = encode.admissible(plan, values, start, stop, encode=scale)
                num_free += int(may.free.sum()) if not number else 0
                wrong = may.differ(codes, plan.grid)
                if wrong.any():
                    self._note(count, wrong, may, codes, start)
        return num_free, min(counts, key=lambda count: count.wrong)

    def _note(
        self,
        count: _Count,
        wrong: npt.NDArray[np.bool_],
        may: encode.Admissible,
        codes: npt.NDArray[np.uint8],
        start: int,
    ) -> None:
        of = self._plan.grid
        count.wrong += int(wrong.sum())
        places = np.argwhere(wrong)
        moved = self._plan.moved
        count.rows.update(map(int, np.unique(places[:, 1]) if moved else np.unique(places[:, 0]) + start))
        for row, column in places[: NUM_SHOWN - len(count.elements)]:
            at = (row, column)
            ends = of.value(np.array([may.low[at], may.high[at]], np.int16))
            wanted = "NaN" if may.nan[at] else _text(ends[0])
            if not may.nan[at] and ends[0] != ends[1]:
                wanted = f"{wanted} or {_text(ends[1])}"
            found = _text(of.value(of.rank(codes[at].reshape(1)))[0])
            index = self._index(int(row) + start, int(column))
            count.elements.append(Element(index, wanted, f"{found} (code 0x{int(codes[at]):0{of.bits // 4}x})"))

    def _index(self, row: int, column: int) -> tuple[int, ...]:
        flat = column * self._plan.rows + row if self._plan.moved else row * self._plan.columns + column
        return tuple(int(i) for i in np.unravel_index(flat, self._record.shape)) if self._record.shape else ()

    def _meaning(self, share: float) -> str:
        if any(mismatch.kind == "scales" for mismatch in self._mismatches) or share >= _MANY:
            return _AGREES_NOT + _SCALE + self._explanation()
        return _AGREES_NOT + _FAULT

    def _explanation(self) -> str:
        """Name the iteration whose scale makes these codes, if one does."""
        if self._others is None or self._plan.family != "float8":
            return ""
        for attempt, iteration, word in self._others():
            plan = replace(self._plan, scales=np.full((1, 1), word, np.float32))
            if not self._wrong_under(plan):
                return f" They are what the scale of iteration {iteration} (attempt {attempt}) makes, {_text(word)}."
        return ""

    def _wrong_under(self, plan: Plan) -> bool:
        start, stop, values = next(self._values.pieces())
        codes = plan.codes(start, stop)
        return all(
            encode.admissible(plan, values, start, stop, encode=scale).differ(codes, plan.grid).any()
            for scale in encode.candidates(plan)
        )


def _is_2d(plan: Plan) -> bool:
    words = plan.quantizer
    tile = words.get("quant_tile_shape")
    return bool(words.get("with_2d_quantization")) or (isinstance(tile, (list, tuple)) and list(tile) == [16, 16])


def _text(value: Any) -> str:
    return f"{float(value):.9g}"
