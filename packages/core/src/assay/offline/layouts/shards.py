"""Detection of undeclared placements: how two dumps distribute one tensor over their ranks.

The shapes determine the candidates. The candidate that fits the most parts wins: a fault on one rank leaves
the other parts intact.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from assay.dtypes import FORMATS, float_format
from assay.offline.layouts.placements import LocalSlice, Placement, Shape, add

Kind = Literal["replicated", "sharded", "partial"]
# Returns comparable values of actual and expected, or None.
Comparable = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]

# Values fit if they differ by at most this many unit roundoffs, and by less than this relative error.
_ROUNDOFFS = 64
_LARGEST_ROUNDING = 0.1
# Models have at most 16 query heads for each key head.
_MOST_QUERIES = 16


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """A way to distribute a tensor over ranks, for any number of tokens."""

    kind: Kind
    dim: int = 0
    """The sharded dim, counted from the end."""
    copies: int = 1
    """Number of consecutive ranks that hold the same shard."""
    sections: tuple[int, ...] = (1,)
    """Relative widths of fused projections. A rank holds a shard of each."""

    def place(self, shapes: Sequence[Shape]) -> Placement | None:
        """Return the placement of parts of these shapes; None if they do not fit."""
        one = shapes[0]
        if self.kind != "sharded":
            slices = [
                LocalSlice(summand=holder * (self.kind == "partial"))
                for holder in range(len(shapes))
            ]
            return Placement(tuple(slices), one) if {*shapes} == {one} else None
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
        slices = []
        for shape, start in zip(shards, starts, strict=True):
            ranges, before = [], 0
            for share in self.sections:
                width = shape[self.dim] * share // sum(self.sections)
                first = before * len(shards) + start * share // sum(self.sections)
                ranges.append(range(first, first + width))
                before += width
            slices += [LocalSlice(((self.dim, tuple(ranges)),))] * self.copies
        whole = list(one)
        whole[self.dim] = sum(shape[self.dim] for shape in shards)
        return Placement(tuple(slices), tuple(whole))


def list_rules(shapes: Sequence[Shape]) -> list[PlacementRule]:
    """Return the rules that fit the shapes of one pass, the most likely one first."""
    num = len(shapes)
    if num == 1:
        return [PlacementRule("replicated")]
    is_same = len({*shapes}) == 1
    rules = [PlacementRule("replicated")] if is_same else []
    # Channels first: they are the sharded dim of a square tensor.
    for dim in range(-1, -len(shapes[0]) - 1, -1):
        if all(_without(shape, dim) == _without(shapes[0], dim) for shape in shapes):
            copies = [count for count in range(2, num) if num % count == 0] if is_same else []
            rules += [PlacementRule("sharded", dim, count) for count in (1, *copies)]
    return [*rules, PlacementRule("partial")] if is_same else rules


def list_fused_rules(shapes: Sequence[Shape]) -> list[PlacementRule]:
    """Return the rules of fused projections: two equal sections, or queries, keys and values."""
    if len(shapes) == 1:
        return [PlacementRule("replicated")]
    sections = [(1, 1), *((count, 1, 1) for count in range(1, _MOST_QUERIES + 1))]
    return [
        PlacementRule("sharded", dim, 1, one)
        for dim in range(-1, -min(2, len(shapes[0])) - 1, -1)
        for one in sections
        if len({*shapes}) == 1 and shapes[0][dim] % sum(one) == 0
    ]


@dataclass(slots=True)
class RuleCandidate:
    """The rules of both sides, and how well they fit."""

    rules: tuple[PlacementRule | None, PlacementRule | None]
    """None stands for a declared placement."""
    num_checks: int = 0
    num_misfits: int = 0
    error: float = 0.0
    is_impossible: bool = False

    @property
    def misfit_share(self) -> float:
        """Return the share of parts that do not fit."""
        return self.num_misfits / max(1, self.num_checks)

    @property
    def key(self) -> tuple[float, float]:
        """Return the sorting key. Rounding errors do not count: the more likely candidate is first."""
        mean_error = self.error / max(1, self.num_checks)
        return self.misfit_share, mean_error if self.num_misfits else 0.0


@dataclass(slots=True)
class PlacementFinder:
    """Finds the rules of both sides of one port from the values of some passes."""

    declared: tuple[bool, bool]
    list_candidates: Callable[[Sequence[Shape]], list[PlacementRule]] = list_rules
    _candidates: list[RuleCandidate] | None = None
    _silent: list[set[int] | None] = field(default_factory=lambda: [None, None])

    def add_pass(
        self,
        sides: tuple[Sequence[Tensor], Sequence[Tensor]],
        placements: tuple[Placement | None, Placement | None],
        compare: Comparable,
    ) -> None:
        """Try all candidates on one pass. placements: the declared placements."""
        shapes = [[tuple(one.shape) for one in side] for side in sides]
        if self._candidates is None:
            rules: list[list[PlacementRule | None]] = [
                [None] if is_declared else [*self.list_candidates(of_side)]
                for is_declared, of_side in zip(self.declared, shapes, strict=True)
            ]
            self._candidates = [RuleCandidate(pair) for pair in product(rules[0], rules[1])]
        for side, values in enumerate(sides):
            silent = {n for n, one in enumerate(values) if not bool(one.count_nonzero())}
            known = self._silent[side]
            self._silent[side] = silent if known is None else known & silent
        found = [self._try(candidate, sides, placements, compare) for candidate in self._candidates]
        if all(errors is None for errors in found):
            return  # the sides share no tokens
        tolerance = _tolerance(sides)
        for candidate, errors in zip(self._candidates, found, strict=True):
            if errors is None:
                candidate.is_impossible = True
                continue
            candidate.num_checks += len(errors)
            candidate.num_misfits += sum(not one <= tolerance for one in errors)
            candidate.error += sum(errors)

    def _try(
        self,
        candidate: RuleCandidate,
        sides: tuple[Sequence[Tensor], Sequence[Tensor]],
        declared: tuple[Placement | None, Placement | None],
        compare: Comparable,
    ) -> list[float] | None:
        """Return the errors of all parts; None if a part cannot be compared."""
        expected, actual = (
            placement if rule is None else rule.place([tuple(one.shape) for one in side])
            for rule, placement, side in zip(candidate.rules, declared, sides, strict=True)
        )
        if expected is None or actual is None:
            return None
        errors = list(list_errors(sides, expected, actual, compare))
        known = [one for one in errors if one is not None]
        return known if len(known) == len(errors) else None

    def find(self) -> RuleCandidate | None:
        """Return the candidate that fits best; None if none is possible."""
        for best in sorted(self._candidates or (), key=lambda one: one.key):
            if not best.num_checks or best.is_impossible:
                continue
            # A rank of zeros may have lost its copy, rather than hold a summand.
            if best.num_misfits or not any(
                rule is not None and rule.kind == "partial" and silent
                for rule, silent in zip(best.rules, self._silent, strict=True)
            ):
                return best
        return None


def list_errors(
    sides: tuple[Sequence[Tensor], Sequence[Tensor]],
    expected: Placement,
    actual: Placement,
    compare: Comparable,
) -> Iterator[float | None]:
    """Yield the relative error of every replica of EXPECTED, and of every part of ACTUAL.

    An incomparable part yields None.
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

    If the shards divide other tokens than `whole` has, yield the assembled tensor.
    """
    if not placement.fits(whole):
        yield tuple(range(len(values))), placement.assemble(values), whole
        return
    for holders in placement.parts:
        value = add([values[holder] for holder in holders])
        yield holders, value, placement.slices[holders[0]].cut(whole)


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||, at most 1; for integers the share that differs."""
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
    """Return the holder whose summand explains the error of a sum: scaled or lost."""
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
