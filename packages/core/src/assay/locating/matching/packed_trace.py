"""A trace in which several recorded micro-batches are found as one, as a trainer runs them.

A trainer may concatenate the micro-batches of a step and pad them to the longest, or lay their rows
end to end without padding. What the reference recorded of each of them is put together row by row.

Shape legend: B rows, T tokens, S columns of a mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import Call, CallSite, RowMap
from assay.trace import Trace


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one recorded row, and where the running batch has them.

    start: the column of its first token in the recorded batch: before it is padding.
    """

    micro_batch: int
    row: int
    length: int
    at_row: int
    at_column: int
    start: int = 0

    @property
    def recorded_columns(self) -> slice:
        """Where they are in their row of the recorded batch."""
        return slice(self.start, self.start + self.length)

    @property
    def columns(self) -> slice:
        """Where they are in their row of the running batch."""
        return slice(self.at_column, self.at_column + self.length)


@dataclass(frozen=True, slots=True)
class Packing:
    """A running batch that consists of whole recorded micro-batches.

    segments: in the order of its rows and columns, all rows of each micro-batch.
    num_rows, length: its shape.
    """

    segments: tuple[Segment, ...]
    num_rows: int
    length: int

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Numbers of the recorded micro-batches, each once."""
        return tuple(sorted({segment.micro_batch for segment in self.segments}))

    @property
    def number(self) -> int:
        """The number by which it is found: that of its first micro-batch."""
        return self.micro_batches[0]

    @property
    def has_single_rows(self) -> bool:
        """Whether every row is one recorded row."""
        return len(self.segments) == self.num_rows


class _Stored(Protocol):
    """What an index knows of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def digest(self) -> str: ...


class ReplayedTrace(Protocol):
    """What a replay reads of a trace; each method as `Trace` has it."""

    @property
    def calls(self) -> Sequence[Call]:
        """All calls, in order of their start."""

    def find(self, site: CallSite) -> Call | None:
        """The call at `site`; None if there is none."""

    def stored(self, call: Call, port: str) -> _Stored:
        """Shape and content hash of a tensor."""

    def tensor(self, call: Call, port: str) -> Tensor:
        """The tensor at a port of a call."""


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    shape: tuple[int, ...]
    digest: str


@dataclass
class PackedTrace:
    """A trace; micro-batches that `pack` named are found as one, under the first one's number.

    packings: by step and number.
    """

    trace: Trace
    packings: dict[tuple[int, int], Packing] = field(default_factory=dict)
    _found: dict[CallSite, Call | None] = field(default_factory=dict)
    # The tensor that was put together last: its shape is asked for before its values.
    _last: tuple[CallSite, str, Tensor] | None = None

    def pack(self, step: int, packing: Packing) -> None:
        """From now on find the micro-batches of `packing` as one, in `step`."""
        self.packings[step, packing.number] = packing
        self._found.clear()
        self._last = None

    @property
    def calls(self) -> list[Call]:
        """All calls; those of packed micro-batches once."""
        packed = {
            (step, number): packing.number
            for (step, _), packing in self.packings.items()
            for number in packing.micro_batches
        }
        found = []
        for call in self.trace.calls:
            key = call.site.step, call.site.micro_batch
            if key not in packed:
                found.append(call)
            elif packed[key] == call.site.micro_batch:
                found.append(self.find(call.site) or call)
        return found

    def find(self, site: CallSite) -> Call | None:
        """The call at `site`; None if some micro-batch lacks it, or it cannot be put together."""
        packing = self.packings.get((site.step, site.micro_batch))
        if packing is None:
            return self.trace.find(site)
        if site not in self._found:
            self._found[site] = self._put_together(site, packing)
        return self._found[site]

    def stored(self, call: Call, port: str) -> _Stored:
        """Shape and content hash of a tensor."""
        packing = self._packing_of(call)
        if packing is None:
            return self.trace.stored(call, port)
        digests = [self.trace.stored(part, port).digest for part in self._parts(call.site, packing)]
        return _PackedTensor(tuple(self.tensor(call, port).shape), " ".join(digests))

    def tensor(self, call: Call, port: str) -> Tensor:
        """The tensor at a port of a call."""
        packing = self._packing_of(call)
        if packing is None:
            return self.trace.tensor(call, port)
        if self._last is None or self._last[:2] != (call.site, port):
            parts = self._parts(call.site, packing)
            recorded = Recorded(
                port,
                {part.site.micro_batch: self.trace.tensor(part, port) for part in parts},
                {part.site.micro_batch: part.rows for part in parts},
            )
            self._last = call.site, port, pack_tensors(recorded, packing)
        return self._last[2].clone()

    def _packing_of(self, call: Call) -> Packing | None:
        return self.packings.get((call.site.step, call.site.micro_batch))

    def _parts(self, site: CallSite, packing: Packing) -> list[Call]:
        found = (
            self.trace.find(replace(site, micro_batch=number)) for number in packing.micro_batches
        )
        return [call for call in found if call is not None]

    def _put_together(self, site: CallSite, packing: Packing) -> Call | None:
        parts = self._parts(site, packing)
        if len(parts) < len(packing.micro_batches):
            return None
        first = parts[0]
        rows = {part.site.micro_batch: part.rows for part in parts}
        for port in first.ports:
            if any(port not in part.ports for part in parts):
                return None
            stored = {part.site.micro_batch: self.trace.stored(part, port) for part in parts}
            shapes = {n: torch.empty(one.shape, device="meta") for n, one in stored.items()}
            form = form_of(Recorded(port, shapes, rows), packing)
            alike = len({one.digest for one in stored.values()}) == 1
            if form is None or (form == "alike" and not alike):
                return None
        return replace(first, rows=_row_map(rows, packing))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What each of several micro-batches has at one port; all by number of the micro-batch."""

    port: str
    tensors: Mapping[int, Tensor]
    rows: Mapping[int, RowMap | None]

    @property
    def first(self) -> Tensor:
        """That of the first micro-batch."""
        return next(iter(self.tensors.values()))

    @property
    def layouts(self) -> list[RowLayout]:
        """How rows and tokens lie in each."""
        return [
            RowLayout.of_shape(tensor.shape, self.rows[number])
            for number, tensor in self.tensors.items()
        ]

    @property
    def token_dim(self) -> int:
        """In which dim the tokens are, with batch rows before them; of flattened ones once apart."""
        return self.layouts[0].token_dim or 1

    def row_of(self, segment: Segment) -> Tensor:
        """The recorded row of a segment, its tokens in dim `token_dim` - 1; shared rows are the first."""
        tensor, rows = self.tensors[segment.micro_batch], self.rows[segment.micro_batch]
        if rows is not None and RowLayout.of_shape(tensor.shape, rows).flattened:
            tensor = tensor.unflatten(0, (rows.num_rows, rows.length))
        return tensor[segment.row if len(tensor) > 1 else 0]


# How tensors are put together: row by row and token by token; the same with both in one dim; a row for
# all of a micro-batch; attention masks; one value a row; one value alike for all micro-batches.
Form = Literal["tokens", "flattened", "shared", "mask", "rows", "alike"]

_ONE_ROW = RowMap((-1,), ((),))


def form_of(recorded: Recorded, packing: Packing) -> Form | None:
    """How tensors of these shapes are put together; None where no rule fits all of them."""
    ranks = {tensor.ndim for tensor in recorded.tensors.values()}
    if ranks == {4} and recorded.port.endswith("mask"):
        return "mask"
    # Of a micro-batch with one row nobody can tell whether it is that row's, or shared by all.
    several = [
        layout
        for number, layout in zip(recorded.tensors, recorded.layouts, strict=True)
        if (recorded.rows[number] or _ONE_ROW).num_rows > 1
    ]
    layouts = several or recorded.layouts
    forms = {_form_of_one(layout) for layout in layouts}
    token_dims = {layout.token_dim for layout in recorded.layouts}
    if len(forms) > 1 or len(ranks) > 1 or len(token_dims) > 1:
        return None
    form = forms.pop()
    if form == "rows" and not packing.has_single_rows:
        return None
    return form


def _form_of_one(layout: RowLayout) -> Form | None:
    if layout.tail:
        return None
    if layout.flattened:
        return "flattened"
    if layout.token_dim is not None:
        return "shared" if layout.batch_dim is None else "tokens"
    return "alike" if layout.batch_dim is None else "rows"


def pack_tensors(recorded: Recorded, packing: Packing) -> Tensor:
    """What several micro-batches have at a port, as one batch has it.

    What is padding in the batch is zero, or not allowed. Raises: ValueError where `form_of` is None.
    """
    first = recorded.first
    match form_of(recorded, packing):
        case "tokens":
            return _pack_tokens(recorded, packing)
        case "flattened":
            return _pack_tokens(recorded, packing).flatten(0, 1)
        case "shared":
            return _pack_shared(recorded, packing)
        case "mask":
            return _pack_masks(recorded, packing)
        case "rows":
            made = first.new_zeros((packing.num_rows, *first.shape[1:]))
            for segment in packing.segments:
                made[segment.at_row] = recorded.row_of(segment)
            return made
        case "alike":
            return first
        case None:
            raise ValueError(f"nothing tells how rows lie at {recorded.port}")


def _pack_tokens(recorded: Recorded, packing: Packing) -> Tensor:
    dim = recorded.token_dim
    shape = list(recorded.row_of(packing.segments[0]).shape)
    shape[dim - 1] = packing.length
    made = recorded.first.new_zeros((packing.num_rows, *shape))
    for segment in packing.segments:
        values = recorded.row_of(segment).narrow(dim - 1, segment.start, segment.length)
        made[segment.at_row].narrow(dim - 1, segment.at_column, segment.length).copy_(values)
    return made


def _pack_shared(recorded: Recorded, packing: Packing) -> Tensor:
    """Of what is counted by columns, such as positions: the longest, or for each row anew."""
    if not packing.has_single_rows:
        from_first = tuple(replace(segment, start=0) for segment in packing.segments)
        return _pack_tokens(recorded, replace(packing, segments=from_first))
    dim = recorded.token_dim
    longest = max(recorded.tensors.values(), key=lambda tensor: tensor.shape[dim])
    length = min(packing.length, longest.shape[dim])
    shape = list(longest.shape)
    shape[dim] = packing.length
    made = longest.new_zeros(shape)
    made.narrow(dim, 0, length).copy_(longest.narrow(dim, 0, length))
    return made


def _pack_masks(recorded: Recorded, packing: Packing) -> Tensor:
    """Masks (B, 1, T, S), or one of all rows: no token sees one of another recorded row."""
    first = recorded.first
    closed = torch.finfo(first.dtype).min if first.is_floating_point() else 0
    shape = (packing.num_rows, first.shape[1], packing.length, packing.length)
    made = torch.full(shape, closed, dtype=first.dtype)
    for segment in packing.segments:
        own, here, there = recorded.row_of(segment), segment.columns, segment.recorded_columns
        made[segment.at_row, :, here, here] = own[:, there, there]
    return made


def _row_map(rows: Mapping[int, RowMap | None], packing: Packing) -> RowMap | None:
    prompts = [-1] * packing.num_rows
    positions = [[-1] * packing.length for _ in range(packing.num_rows)]
    for segment in packing.segments:
        own = rows[segment.micro_batch]
        if own is None:
            return None
        if prompts[segment.at_row] < 0:
            prompts[segment.at_row] = own.prompts[segment.row]
        positions[segment.at_row][segment.columns] = range(segment.length)
    return RowMap(tuple(prompts), tuple(map(tuple, positions)))
