"""Finding how two dumps spread one tensor over their ranks, where they do not declare it.

Shapes give the candidates. Of those, the one is taken that the values fit at the most places: a fault
on one rank leaves the others in their places.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from assay.dtypes import FORMATS, float_format
from assay.offline.layouts.placements import Piece, Placement, Shape, add

Kind = Literal["replicated", "sharded", "partial"]
# Returns the comparable values of actual and expected; None if there are none.
Comparable = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]

# Values fit if they differ by rounding: by so many unit roundoffs, and by less than so much.
_ROUNDOFFS = 64
_LARGEST_ROUNDING = 0.1
# Query heads for each key head: 16 in the models with the most.
_MOST_QUERIES = 16


@dataclass(frozen=True, slots=True)
class Rule:
    """Distribution of a tensor over ranks, for any number of tokens.

    dim: of shards, counted from the end. copies: consecutive ranks that hold the same shard.
    sections: relative widths of fused projections, of each of which a rank holds a shard.
    """

    kind: Kind
    dim: int = 0
    copies: int = 1
    sections: tuple[int, ...] = (1,)

    def place(self, shapes: Sequence[Shape]) -> Placement | None:
        """Return the placement of parts of these shapes; None if they do not fit."""
        one = shapes[0]
        if self.kind != "sharded":
            pieces = [
                Piece(summand=holder * (self.kind == "partial")) for holder in range(len(shapes))
            ]
            return Placement(tuple(pieces), one) if {*shapes} == {one} else None
        if len(shapes) % self.copies:
            return None
        if any(_without(shape, self.dim) != _without(one, self.dim) for shape in shapes):
            return None
        if len(self.sections) > 1 and len({*shapes}) > 1:
            return None
        shards = shapes[:: self.copies]
        starts = [
            sum(shape[self.dim] for shape in shards[:number]) for number in range(len(shards))
        ]
        pieces = []
        for shape, start in zip(shards, starts, strict=True):
            ranges, before = [], 0
            for share in self.sections:
                width = shape[self.dim] * share // sum(self.sections)
                first = before * len(shards) + start * share // sum(self.sections)
                ranges.append(range(first, first + width))
                before += width
            pieces += [Piece(((self.dim, tuple(ranges)),))] * self.copies
        whole = list(one)
        whole[self.dim] = sum(shape[self.dim] for shape in shards)
        return Placement(tuple(pieces), tuple(whole))


def list_rules(shapes: Sequence[Shape]) -> list[Rule]:
    """Return the rules that fit the shapes of one pass, the most likely first."""
    num = len(shapes)
    if num == 1:
        return [Rule("replicated")]
    is_same = len({*shapes}) == 1
    rules = [Rule("replicated")] if is_same else []
    # Channels first: of a square tensor, they are what is divided.
    for dim in range(-1, -len(shapes[0]) - 1, -1):
        if all(_without(shape, dim) == _without(shapes[0], dim) for shape in shapes):
            copies = [count for count in range(2, num) if num % count == 0] if is_same else []
            rules += [Rule("sharded", dim, count) for count in (1, *copies)]
    return [*rules, Rule("partial")] if is_same else rules


def list_fused_rules(shapes: Sequence[Shape]) -> list[Rule]:
    """Return the rules of fused projections: equal parts, or queries with their keys and values."""
    if len(shapes) == 1:
        return [Rule("replicated")]
    sections = [(1, 1), *((count, 1, 1) for count in range(1, _MOST_QUERIES + 1))]
    return [
        Rule("sharded", dim, 1, one)
        for dim in range(-1, -min(2, len(shapes[0])) - 1, -1)
        for one in sections
        if len({*shapes}) == 1 and shapes[0][dim] % sum(one) == 0
    ]


@dataclass(slots=True)
class _Candidate:
    rules: tuple[Rule | None, Rule | None]
    checks: int = 0
    misfits: int = 0
    error: float = 0.0
    is_impossible: bool = False

    @property
    def key(self) -> tuple[float, float]:
        share = self.misfits / max(1, self.checks)
        # Rounding alone decides nothing: the more likely candidate comes first.
        return share, self.error / max(1, self.checks) if self.misfits else 0.0


@dataclass(frozen=True, slots=True)
class FoundRules:
    """The rules of both sides, None for a declared one. misfits: share of parts that do not fit."""

    rules: tuple[Rule | None, Rule | None]
    misfits: float


@dataclass(slots=True)
class PlacementFinder:
    """Finds the rules of the two sides of one port, from the values of some passes."""

    declared: tuple[bool, bool]
    list_candidates: Callable[[Sequence[Shape]], list[Rule]] = list_rules
    _candidates: list[_Candidate] | None = None
    _silent: list[set[int] | None] = field(default_factory=lambda: [None, None])

    def add_pass(
        self,
        sides: tuple[Sequence[Tensor], Sequence[Tensor]],
        placements: tuple[Placement | None, Placement | None],
        compare: Comparable,
    ) -> None:
        """Try all candidates on one pass. placements: the declared ones."""
        shapes = [[tuple(one.shape) for one in side] for side in sides]
        if self._candidates is None:
            rules: list[list[Rule | None]] = [
                [None] if is_declared else [*self.list_candidates(of_side)]
                for is_declared, of_side in zip(self.declared, shapes, strict=True)
            ]
            self._candidates = [_Candidate(pair) for pair in product(rules[0], rules[1])]
        for side, values in enumerate(sides):
            silent = {n for n, one in enumerate(values) if not bool(one.count_nonzero())}
            known = self._silent[side]
            self._silent[side] = silent if known is None else known & silent
        found = [self._try(candidate, sides, placements, compare) for candidate in self._candidates]
        if all(errors is None for errors in found):
            return  # the two sides have no tokens in common
        tolerance = _tolerance(sides)
        for candidate, errors in zip(self._candidates, found, strict=True):
            if errors is None:
                candidate.is_impossible = True
                continue
            candidate.checks += len(errors)
            candidate.misfits += sum(not one <= tolerance for one in errors)
            candidate.error += sum(errors)

    def _try(
        self,
        candidate: _Candidate,
        sides: tuple[Sequence[Tensor], Sequence[Tensor]],
        declared: tuple[Placement | None, Placement | None],
        compare: Comparable,
    ) -> list[float] | None:
        """Return the errors of all parts; None if some cannot be compared."""
        expected, actual = (
            placement if rule is None else rule.place([tuple(one.shape) for one in side])
            for rule, placement, side in zip(candidate.rules, declared, sides, strict=True)
        )
        if expected is None or actual is None:
            return None
        errors = list(list_errors(sides, expected, actual, compare))
        known = [one for one in errors if one is not None]
        return known if len(known) == len(errors) else None

    def find(self) -> FoundRules | None:
        """Return the rules that fit best; None if none is possible."""
        possible = [one for one in self._candidates or () if one.checks and not one.is_impossible]
        for best in sorted(possible, key=lambda one: one.key):
            # A rank that adds nothing to a sum may be one that lost its copy.
            if best.misfits or not any(
                rule is not None and rule.kind == "partial" and silent
                for rule, silent in zip(best.rules, self._silent, strict=True)
            ):
                return FoundRules(best.rules, best.misfits / best.checks)
        return None


def list_errors(
    sides: tuple[Sequence[Tensor], Sequence[Tensor]],
    expected: Placement,
    actual: Placement,
    compare: Comparable,
) -> Iterator[float | None]:
    """Yield the relative error of every replica of EXPECTED, and of every part of ACTUAL.

    None stands for parts that cannot be compared.
    """
    references, values = sides
    for holder, first in expected.replicas:
        yield relative_difference(references[holder], references[first])
    whole = expected.assemble(references)
    for _, value, reference in pair_parts(whole, values, actual):
        both = compare(value, reference)
        same = both is not None and both[0].shape == both[1].shape
        yield relative_difference(*both) if same and both is not None else None


def pair_parts(
    whole: Tensor, values: Sequence[Tensor], placement: Placement
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Yield holders, values and reference of every part.

    A side with other tokens, whose shards divide these, is put together.
    """
    if not placement.fits(whole):
        yield tuple(range(len(values))), placement.assemble(values), whole
        return
    for holders in placement.parts:
        value = add([values[holder] for holder in holders])
        yield holders, value, placement.part(whole, holders)


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||, at most 1; of integers the share that differs."""
    if not (value.is_floating_point() and reference.is_floating_point()):
        return float((value != reference).double().mean()) if value.numel() else 0.0
    value, reference = value.double(), reference.double()
    error = float(torch.linalg.vector_norm(value - reference))
    size = float(torch.linalg.vector_norm(reference))
    if not error:
        return 0.0
    return min(1.0, error / size) if size and math.isfinite(error) else 1.0


def find_wrong_summand(
    holders: Sequence[int], values: Sequence[Tensor], sum_of: Tensor, reference: Tensor
) -> int:
    """Return the holder whose summand explains the error of a sum: its multiple, or a lost one."""
    if len(holders) == 1 or sum_of.shape != reference.shape:
        return holders[0]
    error = (sum_of.double() - reference.double()).flatten()
    if relative_difference(sum_of, reference) <= _tolerance(([sum_of], [reference])):
        return holders[0]

    def likeness(holder: int) -> float:
        summand = values[holder].double().flatten()
        size = float(torch.linalg.vector_norm(summand) * torch.linalg.vector_norm(error))
        return abs(float(summand @ error)) / size if size else 1.0

    return max(holders, key=likeness)


def _tolerance(sides: Sequence[Sequence[Tensor]]) -> float:
    names = [str(one.dtype).removeprefix("torch.") for side in sides for one in side]
    units = [float_format(name).unit_roundoff for name in names if name in FORMATS]
    return min(_LARGEST_ROUNDING, _ROUNDOFFS * max(units, default=0.0))


def _without(shape: Shape, dim: int) -> Shape:
    number = len(shape) + dim
    return shape[:number] + shape[number + 1 :]
