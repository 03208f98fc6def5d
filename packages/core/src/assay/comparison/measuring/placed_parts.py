"""The parts of a tensor that ranks hold: declared, or detected from shapes and values.

A dump may declare them as a layout: `b s[cp:zigzag] (h*d)[tp] # ep:replicated`. It has one word for each
dim, with the mesh axes that divide the dim in brackets. An axis may be `zigzag` (each rank holds one chunk
from each end) or `partial` (ranks hold summands). Ranks that differ only in other axes hold replicas.
`dp:=moe_dp` makes `dp` an alias of `moe_dp`.

Without a declaration, the shapes determine the candidates. The candidate that fits the most parts wins: a
fault on one rank leaves the other parts intact.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from assay.comparison.measuring.pair_values import (
    IncomparableError,
    give_comparable,
    relative_difference,
)
from assay.comparison.pairing.passes import PassPair
from assay.comparison.pairing.port_series import SeriesPair
from assay.dtypes import FORMATS, float_format
from assay.dumps.protocol import DumpedTensor
from assay.files import UnreadableFileError

Shape = tuple[int, ...]
# The index ranges that a rank holds, by divided dim (counted from the end).
Ranges = tuple[tuple[int, tuple[range, ...]], ...]


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """The part of a tensor that one rank holds. Slices with equal ranges and other summands add up."""

    ranges: Ranges = ()
    summand: int = 0

    def cut(self, whole: Tensor) -> Tensor:
        """Cut this part out of a whole tensor."""
        for dim, ranges in self.ranges:
            whole = torch.cat([whole.narrow(dim, one.start, len(one)) for one in ranges], dim)
        return whole


@dataclass(frozen=True, slots=True)
class Placement:
    """The distribution of a tensor over ranks."""

    slices: tuple[LocalSlice, ...]
    shape: Shape
    """Shape of the whole tensor."""

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Return the holders of each part: one rank, or the ranks whose summands add up to it."""
        found: dict[Ranges, dict[int, list[int]]] = {}
        for holder, one_slice in enumerate(self.slices):
            found.setdefault(one_slice.ranges, {}).setdefault(one_slice.summand, []).append(holder)
        return sorted(
            part for summands in found.values() for part in zip(*summands.values(), strict=False)
        )

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """Return each holder of a copy, with the first holder of the same values."""
        first: dict[LocalSlice, int] = {}
        return [
            (holder, first[one_slice])
            for holder, one_slice in enumerate(self.slices)
            if first.setdefault(one_slice, holder) != holder
        ]

    def fits(self, whole: Tensor) -> bool:
        """Return True if this placement divides dims of the size that `whole` has."""
        return all(
            -dim <= whole.ndim and whole.shape[dim] == self.shape[dim]
            for one_slice in self.slices
            for dim, _ in one_slice.ranges
        )

    def assemble(self, values: Sequence[Tensor]) -> Tensor:
        """Assemble the whole tensor. Of replicas, the first one counts."""
        found: dict[Ranges, Tensor] = {}
        for holders in self.parts:
            ranges = self.slices[holders[0]].ranges
            if ranges not in found:
                found[ranges] = add([values[holder] for holder in holders])
        while () not in found:
            found = _join_last_dim(found)
        return found[()]


def add(summands: Sequence[Tensor]) -> Tensor:
    """Add in float64. Returns: the sum, in the dtype of the summands."""
    if len(summands) == 1:
        return summands[0]
    return torch.stack([one.double() for one in summands]).sum(0).to(summands[0].dtype)


def _join_last_dim(parts: dict[Ranges, Tensor]) -> dict[Ranges, Tensor]:
    """Join the parts that differ only in their last divided dim."""
    chunks: dict[Ranges, list[tuple[int, Tensor]]] = {}
    dims: dict[Ranges, int] = {}
    for ranges, value in parts.items():
        *outer, (dim, own) = ranges
        start = 0
        for one in own:
            chunk = value.narrow(dim, start, len(one))
            chunks.setdefault(tuple(outer), []).append((one.start, chunk))
            start += len(one)
        dims[tuple(outer)] = dim
    return {
        outer: torch.cat(
            [chunk for _, chunk in sorted(of_dim, key=lambda one: one[0])], dims[outer]
        )
        for outer, of_dim in chunks.items()
    }


_WORD = re.compile(r"([^\s\[\]]+)(?:\[([^\[\]]*)\])?")
_QUALIFIERS = ("natural", "zigzag", "partial", "sharded", "replicated")
# Sequence parallelism divides tokens over the ranks of tensor parallelism.
_SAME_RANKS = {"sp": "tp"}


class LayoutError(IncomparableError):
    """A declared layout that is invalid, or that contradicts the tensors."""


@dataclass(frozen=True, slots=True)
class _DividedDim:
    """A dim and the axes that divide it, outermost first, each with its qualifiers."""

    dim: int
    axes: tuple[tuple[str, frozenset[str]], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed layout."""

    num_dims: int
    divided: tuple[_DividedDim, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def axes(self) -> list[str]:
        """Return the names of all axes in the layout."""
        return [name for one in self.divided for name, _ in one.axes]


def parse_layout(text: str) -> Layout:
    """Parse a declared layout.

    Raises: LayoutError for an invalid layout.
    """
    dims, _, notes = text.partition("#")
    words = [_WORD.fullmatch(word) for word in re.sub(r",\s+", ",", dims).split()]
    divided = []
    for number, word in enumerate(words):
        if word is None:
            raise LayoutError(f"its layout {text!r} is invalid")
        axes = [one.strip().split(":") for one in (word[2] or "").split(",") if one.strip()]
        for _, *qualifiers in axes:
            if unknown := [one for one in qualifiers if one not in _QUALIFIERS]:
                raise LayoutError(f"its layout {text!r} is invalid: {unknown[0]}")
        if axes:
            named = tuple((name, frozenset(rest)) for name, *rest in axes)
            divided.append(_DividedDim(number - len(words), named))
    aliases = dict(one.split(":=") for one in notes.split() if one.count(":=") == 1)
    return Layout(len(words), tuple(divided), aliases)


def place_declared(tensors: Sequence[DumpedTensor], shapes: Sequence[Shape]) -> Placement | None:
    """Return the declared placement of a tensor; None without a declaration.

    Raises: LayoutError if the declared layout contradicts the shapes or the ranks.
    """
    text = tensors[0].layout
    if not text:
        return None
    layout = parse_layout(text)
    if any(one.layout != text for one in tensors):
        raise LayoutError("its ranks declare different layouts")
    if any(len(shape) != layout.num_dims for shape in shapes):
        raise LayoutError(f"its layout {text!r} contradicts its shape {list(shapes[0])}")
    places = [
        _places(layout, tensor, number, len(tensors)) for number, tensor in enumerate(tensors)
    ]
    ranges: list[list[tuple[int, tuple[range, ...]]]] = [[] for _ in tensors]
    whole = list(shapes[0])
    for divided in layout.divided:
        sharding = [name for name, own in divided.axes if not own & {"partial", "replicated"}]
        is_zigzag = any("zigzag" in own for _, own in divided.axes)
        chunks, total = _number(sharding, places)
        if total > 1:
            lengths = dict(zip(chunks, (shape[divided.dim] for shape in shapes), strict=True))
            _require_all(text, lengths, total)
            whole[divided.dim] = sum(lengths.values())
            for own, chunk in zip(ranges, chunks, strict=True):
                own.append((divided.dim, _ranges(chunk, lengths, is_zigzag=is_zigzag)))
    added = [name for one in layout.divided for name, rest in one.axes if "partial" in rest]
    summands, total = _number(added, places)
    _require_all(text, summands, total)
    slices = tuple(LocalSlice(tuple(own), one) for own, one in zip(ranges, summands, strict=True))
    _require_shapes(text, slices, whole, shapes)
    return Placement(slices, tuple(whole))


def _number(
    names: Sequence[str], places: Sequence[Mapping[str, tuple[int, int]]]
) -> tuple[list[int], int]:
    """Return the index of each holder along several axes, outermost first, and their total size."""
    numbers, total = [0] * len(places), 1
    for name in names:
        size = places[0][name][1]
        numbers = [one * size + place[name][0] for one, place in zip(numbers, places, strict=True)]
        total *= size
    return numbers, total


def _require_all(text: str, numbers: Iterable[int], total: int) -> None:
    missing = total - len({*numbers})
    if missing:
        raise LayoutError(f"{missing} of {total} parts of its layout {text!r} are missing")


def _places(
    layout: Layout, tensor: DumpedTensor, number: int, num_holders: int
) -> dict[str, tuple[int, int]]:
    """Return the index of a holder along each axis of the layout, and the size of the axis."""
    found = {}
    for name in layout.axes:
        axis = layout.aliases.get(name, name)
        place = tensor.axes.get(axis) or tensor.axes.get(_SAME_RANKS.get(axis, ""))
        if place is None and len(layout.axes) == 1:
            place = number, num_holders
        if place is None:
            raise LayoutError(f"the dump does not record the ranks along the axis {axis}")
        found[name] = place
    return found


def _ranges(chunk: int, lengths: Mapping[int, int], *, is_zigzag: bool) -> tuple[range, ...]:
    if not is_zigzag:
        start = sum(length for other, length in lengths.items() if other < chunk)
        return (range(start, start + lengths[chunk]),)
    half = lengths[chunk] // 2
    last = 2 * len(lengths) - 1 - chunk
    return range(chunk * half, (chunk + 1) * half), range(last * half, (last + 1) * half)


def _require_shapes(
    text: str, slices: Sequence[LocalSlice], whole: Sequence[int], shapes: Sequence[Shape]
) -> None:
    sizes: dict[Ranges, int] = {}
    for one_slice, shape in zip(slices, shapes, strict=True):
        wanted = list(whole)
        for dim, ranges in one_slice.ranges:
            wanted[dim] = sum(map(len, ranges))
        if wanted != list(shape):
            raise LayoutError(f"its layout {text!r} contradicts its shapes {list(shapes)}")
        sizes[one_slice.ranges] = sizes.get(one_slice.ranges, 0) + 1
    if len({*sizes.values()}) > 1:
        raise LayoutError(f"some ranks of its layout {text!r} are missing")


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


# The rule of each side; None where the dump declares the placement, or if no rule fits.
PlacementRules = tuple[PlacementRule | None, PlacementRule | None]


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

    rules: PlacementRules
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
        expected, actual = _place(candidate.rules, declared, sides)
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


def _place(
    rules: PlacementRules,
    declared: tuple[Placement | None, Placement | None],
    sides: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> tuple[Placement | None, Placement | None]:
    """Return the placement of both sides, declared or by a rule; None where a rule does not fit."""
    expected, actual = (
        placement or (rule.place([tuple(one.shape) for one in side]) if rule is not None else None)
        for rule, placement, side in zip(rules, declared, sides, strict=True)
    )
    return expected, actual


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


# Number of passes that determine the placement. In one pass, a summand may be zero.
_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class HeldCall:
    """The tensors of one call on all ranks of both sides."""

    expected: list[DumpedTensor]
    actual: list[DumpedTensor]
    tokens: PassPair | None
    """The passes; None for a parameter."""


def find_rules(matched: SeriesPair, calls: Sequence[HeldCall]) -> PlacementRules | None:
    """Return the placement rules of a port; None if no rule fits."""
    calls = [one for one in calls if all(t.has_values for t in (*one.expected, *one.actual))]
    if not calls or all(len(one.expected) == len(one.actual) == 1 for one in calls):
        return PlacementRule("replicated"), PlacementRule("replicated")
    calls.sort(key=lambda one: -len(one.expected) - len(one.actual))
    first = calls[0]
    is_declared = bool(first.expected[0].layout), bool(first.actual[0].layout)
    if all(is_declared):
        return None, None
    best: RuleCandidate | None = None
    for list_candidates in (list_rules, list_fused_rules):
        finder = PlacementFinder(is_declared, list_candidates)
        for call in calls[:_NUM_SAMPLES]:
            try:
                sides = _read_both(matched, call)
                placed = _place_declared(call, sides)
            except (UnreadableFileError, LayoutError):
                continue
            finder.add_pass(sides, placed, partial(give_comparable, call.tokens))
        found = finder.find()
        if found is not None and (best is None or found.misfit_share < best.misfit_share):
            best = found
        if best is not None and not best.num_misfits:
            break
    return best.rules if best is not None else None


def read_parts(
    matched: SeriesPair, call: HeldCall, rules: PlacementRules | None
) -> tuple[list[tuple[int, Tensor, Tensor]], dict[int, float]]:
    """Return the parts of one call: holder, values and expected values.

    Returns: also the difference of every expected replica by holder.
    Raises: UnreadableFileError; LayoutError if no rule fits, or if a declared layout contradicts the tensors.
    """
    sides = _read_both(matched, call)
    declared = _place_declared(call, sides)
    single = [PlacementRule("replicated") if len(side) == 1 else None for side in sides]
    placed = _place(rules or (single[0], single[1]), declared, sides)
    if placed[0] is None or placed[1] is None:
        wanted, shapes = (", ".join(str(list(one.shape)) for one in side) for side in sides)
        raise LayoutError(f"its shape is {shapes}, expected {wanted}")
    references, values = sides
    replica_errors = {
        holder: relative_difference(references[holder], references[first])
        for holder, first in placed[0].replicas
    }
    whole = placed[0].assemble(references)
    # The last dim of ids counts tokens, which may lie in other passes.
    is_width = declared[1] is not None and whole.is_floating_point()
    if is_width and placed[1].shape[-1:] != tuple(whole.shape[-1:]):
        raise LayoutError(
            f"its layout {call.actual[0].layout!r} assembles {len(values)} parts to shape"
            f" {list(placed[1].shape)}, expected {list(whole.shape)}"
        )
    parts = [
        (find_wrong_summand(holders, values, value, reference), value, reference)
        for holders, value, reference in pair_parts(whole, values, placed[1])
    ]
    return parts, replica_errors


def _read_both(matched: SeriesPair, call: HeldCall) -> tuple[list[Tensor], list[Tensor]]:
    is_parameter = matched.port.direction == "parameter"
    found = []
    for tensors, span in (
        (call.expected, matched.expected_span),
        (call.actual, matched.actual_span),
    ):
        values = [one.read() for one in tensors]
        if span is not None:
            values = [span.of(one, is_parameter=is_parameter) for one in values]
        found.append(values)
    return found[0], found[1]


def _place_declared(
    call: HeldCall, sides: tuple[Sequence[Tensor], Sequence[Tensor]]
) -> tuple[Placement | None, Placement | None]:
    expected, actual = (
        place_declared(tensors, [tuple(one.shape) for one in side])
        for tensors, side in zip((call.expected, call.actual), sides, strict=True)
    )
    return expected, actual
