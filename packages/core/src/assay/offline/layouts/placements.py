"""The parts of a tensor that ranks hold, and their assembly.

A dump may declare them as a layout: `b s[cp:zigzag] (h*d)[tp] # ep:replicated`. It has one word for each
dim, with the mesh axes that divide the dim in brackets. An axis may be `zigzag` (each rank holds one chunk
from each end) or `partial` (ranks hold summands). Ranks that differ only in other axes hold replicas.
`dp:=moe_dp` makes `dp` an alias of `moe_dp`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.dumps.protocol import DumpedTensor

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


class LayoutError(Exception):
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
