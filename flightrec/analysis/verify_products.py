"""Computes recorded products again from their operands, in float64, and compares with what the kernel returned.

How far ``out = round(sum_k a_k b_k)`` of a correct kernel may lie from the exact sum, element by element:

    |out - exact| <= u_out |exact| + (8 sqrt(n) u + 2^-23) sum_k |a_k b_k| + tiny

- ``u_out``: unit roundoff of the output's type (2^-8 bfloat16, 2^-11 float16, 2^-24 float32), twice where a bias was
  added; ``tiny`` its smallest normal number.
- ``8 sqrt(n) u``: sums of n terms in an arithmetic of unit roundoff u (Higham and Mary, "A new approach to
  probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019; the constant 8 leaves
  less than 1e-10 a sum). Accumulated in float32: n terms, u = 2^-24. FP8 on compute capability 8.9 and 9.0 keeps about
  14 bits inside the tensor core, so
  u = 2^-13; with Transformer Engine's split accumulator that holds for 128 terms, which are then added in float32,
  else for all (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
- 2^-23: dequantizing rounds both operands to float32.

That bound grows with n as the magnitudes do, the sum itself only as its root, so that a row is wrong too if its error
is above half its own norm and 2^-10 of its magnitudes' norm. Products of more than ``MAX_TERMS`` terms are compared by
rows: 16 projections of each row on random signs (Freivalds), the errors of the elements adding up as their root sum
square.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flightrec.analysis.verify_facts import NUM_SHOWN, Element, Mismatch, Outcome, Where
from flightrec.analysis.verify_pairs import Product
from flightrec.storage.record import HIGH_PRECISION

MAX_TERMS = 1 << 35
"""Multiplications of a product up to which every element is computed; about ten seconds of a core."""
NUM_PROJECTIONS = 16
_TILE_ELEMENTS = 1 << 22
_INNER = 2048
_VOTES = 9
_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
_TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}
_LARGEST = {"bfloat16": 3.38e38, "float16": 65504.0, "float32": 3.4e38}
_MEANING = (
    "The product of the recorded operands is not what the kernel returned: the kernel, the hardware under it or its "
    "configuration is at fault, or the operands were changed between the product and the copy."
)
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass
class _Tile:
    """Some columns of a product: what was found, the exact sums, and what they may differ by."""

    out: Doubles
    exact: Doubles
    magnitude: Doubles
    rounding: Doubles
    bound: Doubles

    def wrong(self, bias: tuple[Doubles, Doubles] | None = None) -> Mask:
        """Elements beyond the bound; with a bias, one a column, and how well it is known."""
        exact, bound = self.exact, self.bound
        if bias is not None:
            exact = exact + bias[0]
            bound = bound + self.rounding * (np.abs(exact) + np.abs(bias[0])) + bias[1]
        error = np.abs(self.out - exact)
        found = ~(error <= bound)
        norm, scale = (np.sqrt(np.mean(np.square(some), axis=1, keepdims=True)) for some in (exact, self.magnitude))
        deviation = np.sqrt(np.mean(np.square(error), axis=1, keepdims=True))
        found |= (deviation > 0.5 * norm) & (deviation > 2.0**-10 * scale) & (error > 0.5 * norm) & (error > bound / 8)
        both = ~np.isfinite(self.out) & ~np.isfinite(exact)
        return np.asarray(found & ~both)

    def bias(self) -> tuple[Doubles, Doubles]:
        """What the columns of ``out`` have beyond the product, and how well the rows that tell it best know it.

        The median of the ``_VOTES`` rows of each column whose rounding is finest: four wrong ones do not matter.
        """
        difference = self.out - self.exact
        doubt = self.bound + 2 * self.rounding * np.abs(self.out)
        doubt = np.where(np.isfinite(difference) & np.isfinite(doubt), doubt, np.inf)
        best = np.argsort(doubt, axis=0, kind="stable")[:_VOTES]
        votes, known = np.take_along_axis(difference, best, axis=0), np.take_along_axis(doubt, best, axis=0)
        lost = np.isinf(known).any(axis=0)
        return np.where(lost, 0, np.median(votes, axis=0)), np.where(lost, np.inf, known.max(axis=0))


def verify_product(product: Product, *, max_terms: int = MAX_TERMS) -> Outcome:
    """Compute a product again.

    Args:
        product: operands and result, as ``verify_pairs`` found them.
        max_terms: beyond so many multiplications rows are compared by projections.
    """
    where, direction = Where.of(product.out), product.direction
    if product.why_not:
        return Outcome("product", where, direction, why_not=product.why_not)
    dtype = next((part.format for part in product.out.components if part.name == HIGH_PRECISION), "")
    if dtype not in _UNIT:
        why = "the kernel quantized its result" if not dtype else f"results of {dtype} are not understood"
        return Outcome("product", where, direction, why_not=why)
    left, right, out = product.left(), product.right(), product.result()
    if left.shape[1] != right.shape[1] or out.shape != (left.shape[0], right.shape[0]):
        why = f"operands {left.shape} and {right.shape} (transposed) do not make the recorded {out.shape}"
        return Outcome("product", where, direction, why_not=why)
    if not out.size or not left.shape[1]:
        return Outcome("product", where, direction)
    with np.errstate(all="ignore"):
        return _compare(product, left, right, out, dtype, max_terms)


def _compare(
    product: Product,
    left: npt.NDArray[np.float32],
    right: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    dtype: str,
    max_terms: int,
) -> Outcome:
    rows, terms, columns = left.shape[0], left.shape[1], right.shape[0]
    by_row = rows * terms * columns > max_terms
    gamma = 8 * np.sqrt(min(terms, product.chain or terms)) * product.unit + 2.0**-23
    notes = list(product.notes)
    if by_row:
        tiles = [(0, _projected(left, right, out, dtype, gamma))]
        notes.append(f"large: every row compared by {NUM_PROJECTIONS} random projections, not every element")
    num_wrong, wrong_rows, elements, has_bias = 0, set[int](), list[Element](), False
    width = columns if by_row else max(_TILE_ELEMENTS // rows, 1)
    for start in range(0, columns, width):
        stop = min(start + width, columns)
        tile = tiles[0][1] if by_row else _tile(left, right[start:stop], out[:, start:stop], dtype, gamma)
        wrong, with_bias = _judge(tile, product)
        has_bias |= with_bias
        num_wrong += int(wrong.sum())
        places = np.argwhere(wrong)
        wrong_rows.update(map(int, np.unique(places[:, 0])))
        for row, column in places[: NUM_SHOWN - len(elements)]:
            index = (int(row),) if by_row else product.index(int(row), int(column) + start)
            elements.append(Element(index, f"{tile.exact[row, column]:.9g}", f"{tile.out[row, column]:.9g}"))
    if has_bias:
        notes.append("agrees with a bias, one number a column, that no record holds: the bias itself is not verified")
    where = Where.of(product.out)
    if num_wrong and product.doubt:
        return Outcome("product", where, product.direction, why_not=f"differs, but {product.doubt}")
    mismatches: tuple[Mismatch, ...] = ()
    if num_wrong:
        listed = sorted(wrong_rows)
        mismatches = (
            Mismatch(
                "product",
                where,
                product.direction,
                num_wrong,
                rows * (NUM_PROJECTIONS if by_row else columns),
                len(listed),
                tuple(listed[:NUM_SHOWN]),
                tuple(elements),
                _MEANING,
            ),
        )
    return Outcome("product", where, product.direction, out.size, notes=tuple(notes), mismatches=mismatches)


def _judge(tile: _Tile, product: Product) -> tuple[Mask, bool]:
    """Wrong elements, and whether a bias explains the rest."""
    wrong = tile.wrong()
    if not wrong.any() or product.direction != "forward" or len(tile.out) < 4:
        return wrong, False
    with_bias = tile.wrong(tile.bias())
    return (with_bias, True) if with_bias.sum() < wrong.sum() / 2 else (wrong, False)


def _tile(
    left: npt.NDArray[np.float32],
    right: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    dtype: str,
    gamma: float,
) -> _Tile:
    """Exact sums of all rows and some columns, and the sums of magnitudes."""
    exact = np.zeros(out.shape)
    magnitude = np.zeros(out.shape)
    for start in range(0, left.shape[1], _INNER):
        a, b = (some[:, start : start + _INNER].astype(np.float64) for some in (left, right))
        exact += a @ b.T
        magnitude += np.abs(a) @ np.abs(b).T
    exact = np.where(np.abs(exact) > _LARGEST[dtype], np.copysign(np.inf, exact), exact)
    rounding = np.full((1, 1), _UNIT[dtype])
    bound = rounding * np.abs(exact) + gamma * magnitude + _TINY[dtype]
    return _Tile(out.astype(np.float64), exact, magnitude, rounding, np.where(np.isfinite(bound), bound, np.inf))


def _projected(
    left: npt.NDArray[np.float32],
    right: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    dtype: str,
    gamma: float,
) -> _Tile:
    """Rows projected on random signs: a row's error becomes a number of its norm's size, whatever its columns."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(len(right), NUM_PROJECTIONS))
    inner, lengths = np.empty((left.shape[1], NUM_PROJECTIONS)), np.empty(len(right))
    for start in range(0, left.shape[1], _INNER):
        inner[start : start + _INNER] = right[:, start : start + _INNER].astype(np.float64).T @ signs
    found, exact, bound = (np.empty((len(left), NUM_PROJECTIONS)) for _ in range(3))
    step = max(_TILE_ELEMENTS // max(left.shape[1], len(right)), 1)
    for start in range(0, len(right), step):
        lengths[start : start + step] = np.linalg.norm(right[start : start + step].astype(np.float64), axis=1)
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        a, y = left[part].astype(np.float64), out[part].astype(np.float64)
        exact[part], found[part] = a @ inner, y @ signs
        sums = np.linalg.norm(a, axis=1, keepdims=True) * lengths
        errors = _UNIT[dtype] * np.abs(y) + gamma * sums + _TINY[dtype]
        bound[part] = 8 * np.linalg.norm(errors, axis=1, keepdims=True)
    finite = np.where(np.isfinite(bound), bound, np.inf)
    return _Tile(found, exact, np.full_like(finite, np.inf), np.zeros((1, 1)), finite)
