"""Simple changes of a tensor that explain a difference: a factor, a transposition, another order.

A change is named only if it leaves no more than the noise of a difference beyond the noise.

Shape legend: R rows of a weight, or tokens; C columns, or channels; K selected rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Fewer rows or distinct values may agree by chance.
FEWEST = 8
# Without a noise run, the expected relative error of a value is this many unit roundoffs.
ROUNDOFFS = 4.0
# Larger tensors are not described: float32 copies of both sides take 1 GB.
MOST_VALUES = 1 << 27
# Rows that moved are searched by their distances in as many random directions.
_NUM_DIRECTIONS = 64
_MOST_MOVED, _ROWS_AT_ONCE = 1 << 14, 1 << 10
# Values that show how many are distinct.
NUM_SAMPLED = 1 << 12
# Random directions of unrelated values reduce a difference of 8 values by a third once in 20,000 cases, and
# to a tenth once in 10 million.
_REDUCED, _LARGELY_REDUCED = 1 / 3, 1 / 10

# Names of rows and columns.
OF_WEIGHT, OF_RESULT = ("rows", "columns"), ("tokens", "channels")


@dataclass(frozen=True, slots=True)
class Proof:
    """The condition under which a change explains a difference."""

    noise: float
    """Relative error within which two tensors are equal."""
    unit_roundoff: float

    def explains(self, actual: Tensor, changed: Tensor, expected: Tensor) -> bool:
        """Return True if `actual` equals `changed` within noise, and not `expected`. Shapes: alike."""
        size = float(changed.norm()) or float(expected.norm())
        left, before = float((actual - changed).norm()), float((actual - expected).norm())
        enough = max(ROUNDOFFS * self.unit_roundoff * size, _LARGELY_REDUCED * before)
        return before > self.noise * size and left <= min(
            self.noise * size, _REDUCED * before, enough
        )

    def find_different(self, actual: Tensor, expected: Tensor) -> Tensor:
        """Return the numbers of the rows that differ by more than noise, (K,)."""
        norms, errors = expected.norm(dim=1), (actual - expected).norm(dim=1)
        different: Tensor = errors > self.noise * norms.clamp(min=norms.square().mean().sqrt())
        return different.nonzero().flatten()


def describe_values(actual: Tensor, expected: Tensor, proof: Proof, nouns: tuple[str, str]) -> str:
    """Describe a factor, a transposition or another order that turns `expected` into `actual`.

    Shapes: (R, C) both, float.
    nouns: names of rows and columns; weights may be transposed.
    Returns: a sentence; "" if none of them explains the difference.
    """
    if len(expected) < FEWEST or not bool((actual + expected).isfinite().all()):
        return ""
    is_square = nouns == OF_WEIGHT and actual.shape[0] == actual.shape[1]
    if is_square and proof.explains(actual, expected.T, expected):
        return "It is the transpose of the expected one."
    sides = (actual, expected), (actual.T, expected.T)
    rows, columns = (proof.find_different(*one) for one in sides)
    some_rows, some_columns = (
        f"{len(one):,} of {size:,} {noun}"
        for one, size, noun in zip((rows, columns), expected.shape, nouns, strict=True)
    )
    every = slice(None)
    for of_rows, of_columns, place in (
        (every, every, ""),
        (rows, every, f" in {some_rows}"),
        (every, columns, f" in {some_columns}"),
        (rows, columns, f" in {some_rows} and {some_columns}"),
    ):
        part = [one[of_rows][:, of_columns] for one in (actual, expected)]
        if (factor := _find_factor(part[0], part[1], proof)) is not None:
            return f"It is {_describe_factor(factor)}{place}."
    for noun, one in zip(nouns, sides, strict=True):
        moved = _find_moved(*one, proof)
        if len(moved) == 2 and noun != "tokens":
            return f"Its {noun} {int(moved[0])} and {int(moved[1])} are swapped."
        if len(moved):
            return f"Its {noun} are in another order: {len(moved):,} of {len(one[0]):,} moved."
    return ""


def _find_factor(actual: Tensor, expected: Tensor, proof: Proof) -> float | None:
    """Return the factor by which `actual` is a multiple of `expected`, (R, C); None if it is not."""
    if int(expected.count_nonzero()) < FEWEST:
        return None
    factor = float((actual * expected).sum() / expected.square().sum())
    return factor if proof.explains(actual, factor * expected, expected) else None


def _describe_factor(factor: float) -> str:
    """Show a factor with two digits of its difference from 1.

    >>> [_describe_factor(value) for value in (1.1, 1.00012, 0.0)]
    ['1.1 times the expected one', '1.00012 times the expected one', 'zero']
    """
    change = abs(factor - 1)
    digits = max(3, 2 - math.floor(math.log10(change))) if change else 3
    return f"{factor:,.{digits}g} times the expected one" if factor else "zero"


def _find_moved(actual: Tensor, expected: Tensor, proof: Proof) -> Tensor:
    """Return the numbers of the rows that other rows of `expected` replace one to one, (K,); or none."""
    moved = proof.find_different(actual, expected)
    value, reference = actual[moved], expected[moved]
    none = moved[:0]
    is_narrow = actual.shape[1] < FEWEST
    if not 2 <= len(moved) <= _MOST_MOVED or (is_narrow and actual.shape[1] > 1):
        return none
    if len(reference.flatten()[:NUM_SAMPLED].unique()) < FEWEST:
        return none
    if is_narrow:
        return moved if torch.equal(value.sort(0).values, reference.sort(0).values) else none
    points = torch.stack([value, reference]).double()
    if value.shape[1] > _NUM_DIRECTIONS:
        seeded = torch.Generator().manual_seed(0)
        points @= torch.randn(value.shape[1], _NUM_DIRECTIONS, generator=seeded).double()
    order = torch.cat(
        [torch.cdist(part, points[1]).argmin(1) for part in points[0].split(_ROWS_AT_ONCE)]
    )
    is_whole = len(order.unique()) == len(moved)
    return moved if is_whole and proof.explains(value, reference[order], reference) else none
