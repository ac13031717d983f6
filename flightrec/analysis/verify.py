"""Do the recorded numbers agree with each other? Codes with the tensors they were made from, products with operands.

``verify`` is what ``flightrec verify`` and Python programs use; ``verify_path`` runs in the command's child process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flightrec.analysis.verify_codes import verify_codes
from flightrec.analysis.verify_facts import Mismatch, Outcome, counted
from flightrec.analysis.verify_pairs import Product, products_of, size_of
from flightrec.analysis.verify_products import MAX_TERMS, verify_product
from flightrec.codecs import quantized
from flightrec.storage import read
from flightrec.storage.record import Record

Progress = Callable[[int, int, str], None]
"""Told bytes done, bytes in all, and what is compared next."""

AGREES = "The recorded numbers agree: what went wrong was in the model's own numbers, not in quantizing or multiplying."
CODES_AGREE = (
    "The recorded codes agree: quantizing did as it should. Whether multiplying did, no compared product tells."
)
PRODUCTS_AGREE = (
    "The recorded products agree: multiplying did as it should. Whether quantizing did, no compared codes tell."
)
DIFFERS = (
    "Recorded numbers do not agree: a kernel, the hardware, or a scale that does not belong to its tensor is at fault."
)
NOTHING = "Nothing could be compared; the reasons are below."


@dataclass(frozen=True)
class Verified:
    """What was compared.

    Attributes:
        outcomes: one a side of a quantized record and one a product, in the order of the records.
    """

    outcomes: tuple[Outcome, ...]

    @property
    def mismatches(self) -> list[Mismatch]:
        """All that differs."""
        return [mismatch for outcome in self.outcomes for mismatch in outcome.mismatches]

    @property
    def compared(self) -> list[Outcome]:
        """Those that could be compared."""
        return [outcome for outcome in self.outcomes if not outcome.why_not]

    @property
    def sentence(self) -> str:
        """What it means."""
        if self.mismatches:
            return DIFFERS
        kinds = {outcome.what for outcome in self.compared}
        if not kinds:
            return NOTHING
        if len(kinds) > 1:
            return AGREES
        return CODES_AGREE if "codes" in kinds else PRODUCTS_AGREE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, as ``docs/verify.md`` has it."""
        summary: dict[str, Any] = {}
        for what in ("codes", "product"):
            of = [outcome for outcome in self.outcomes if outcome.what == what]
            reasons: dict[str, int] = {}
            notes: dict[str, int] = {}
            for outcome in of:
                if outcome.why_not:
                    reasons[outcome.why_not] = reasons.get(outcome.why_not, 0) + 1
                for note in outcome.notes:
                    notes[note] = notes.get(note, 0) + 1
            done = [outcome for outcome in of if not outcome.why_not]
            summary[what] = {
                "num_compared": len(done),
                "num_agreeing": sum(not outcome.mismatches for outcome in done),
                "num_elements": sum(outcome.num_compared for outcome in done),
                "num_free_elements": sum(outcome.num_free for outcome in done),
                "num_not_compared": len(of) - len(done),
                "not_compared": counted(reasons),
                "notes": counted(notes),
            }
        return {
            "agrees": not self.mismatches,
            "sentence": self.sentence,
            "summary": summary,
            "mismatches": [mismatch.to_json() for mismatch in self.mismatches],
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }


def verify(
    incident: read.Incident,
    *,
    layer: str | Iterable[str] | None = None,
    tensor: str | Iterable[str] | None = None,
    iteration: int | Iterable[int] | None = None,
    rank: int | Iterable[int] | None = None,
    max_terms: int = MAX_TERMS,
    progress: Progress | None = None,
) -> Verified:
    """Compare codes with tensors and products with operands.

    Args:
        incident: opened.
        layer: as ``Incident.records``; all by default.
        tensor: whose codes, and which products by what they make (``output``, ``dgrad``, ``wgrad``).
        iteration: number or numbers.
        rank: number or numbers.
        max_terms: products of more multiplications are compared by rows: ``verify_products.MAX_TERMS``.
        progress: called before each comparison.

    Raises:
        IncidentError: a file is damaged.
    """
    wanted = incident.records(layer=layer, tensor=tensor, iteration=iteration, rank=rank)
    chosen = {(record.rank, record.index) for record in wanted}
    everything = incident.records(layer=layer, iteration=iteration, rank=rank)
    products: list[Product] = []
    for source in incident.ranks:
        mine = [record for record in everything if record.rank == source.rank]
        products += products_of(mine, source.environment) if mine else []
    products = [product for product in products if (product.out.rank, product.out.index) in chosen]
    with_codes = [record for record in wanted if _sides(record)]
    total = sum(record.num_bytes for record in with_codes) + sum(map(size_of, products))
    done = 0
    outcomes: list[Outcome] = []
    for record in with_codes:
        if progress is not None:
            progress(done, total, f"{record.key.layer} {record.key.tensor}")
        for side in _sides(record):
            others = _Others(incident, record)
            outcomes.append(verify_codes(record, side, is_distributed=incident.world_size > 1, others=others))
        done += record.num_bytes
    for product in products:
        if progress is not None:
            progress(done, total, f"{product.out.key.layer} {product.direction}")
        outcomes.append(verify_product(product, max_terms=max_terms))
        done += size_of(product)
    return Verified(tuple(outcomes))


def verify_path(path: Path, *, progress_file: str | None = None, **options: Any) -> dict[str, Any]:
    """Verify an incident on disk; ``options`` as ``verify`` takes them.

    Args:
        path: as ``open_incident``.
        progress_file: where one line of JSON tells how far it is: bytes done, bytes in all, what is next.
        options: further ones.
    """
    tell: Progress | None = None
    if progress_file is not None:
        target = Path(progress_file)

        def tell(done: int, total: int, what: str) -> None:
            target.write_text(json.dumps([done, total, what]), encoding="utf-8")

    with read.open_incident(path) as incident:
        found = verify(incident, progress=tell, **options).to_json()
        return {"incident_id": incident.incident_id, "path": str(path), **found}


def _sides(record: Record) -> list[str]:
    return quantized.sides_of(part.name for part in record.components)


class _Others:
    """Scales of the same tensor at other times, read only if asked for."""

    def __init__(self, incident: read.Incident, record: Record) -> None:
        self._incident, self._record = incident, record

    def __call__(self) -> Iterator[tuple[int, int, float]]:
        """Attempt, iteration and scale, in the direction in which it is recorded."""
        mine = self._record.key
        for other in self._incident.records(layer=mine.layer, tensor=mine.tensor, rank=self._record.rank):
            whole = other.quantized
            if whole is None or other.index == self._record.index or other.key.part != mine.part:
                continue
            name = next((name for name in ("scale_inv", "scale") if name in whole.formats), None)
            word = None if name is None else whole.components[name]
            if word is not None and np.size(word) == 1:
                yield other.attempt, other.iteration, float(np.asarray(word).reshape(()))
