"""A trace presented in the calls of the running model, which are not those that were recorded.

A trainer may concatenate the micro-batches of a step and pad them to the longest, or join their rows end to
end without padding: `PackedTrace` assembles the recorded tensors row by row.

The reference computes the values of all tokens of a text in one call. A candidate generates the text with
a prefill and one call for each new token: for `StepwiseTrace`, the values of a call are columns of the
recorded ones.

Shape legend: B rows, T tokens of one call, S columns of a mask, or tokens of a whole text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import Call, CallSite, RowMap
from assay.trace import TensorEntry, Trace


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one recorded row, and their place in the running batch."""

    micro_batch: int
    row: int
    length: int
    at_row: int
    at_column: int
    start: int = 0
    """Column of the first token in the recorded batch, after padding."""

    @property
    def recorded_columns(self) -> slice:
        """Return the columns of the tokens in the recorded batch."""
        return slice(self.start, self.start + self.length)

    @property
    def columns(self) -> slice:
        """Return the columns of the tokens in the running batch."""
        return slice(self.at_column, self.at_column + self.length)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A running batch of shape (num_rows, length) that consists of whole recorded micro-batches."""

    segments: tuple[Segment, ...]
    """All rows of each micro-batch, in the order of rows and columns of the running batch."""
    num_rows: int
    length: int

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Return the numbers of the recorded micro-batches, each once."""
        return tuple(sorted({segment.micro_batch for segment in self.segments}))

    @property
    def number(self) -> int:
        """Return the number of the first micro-batch, by which the batch is found."""
        return self.micro_batches[0]

    @property
    def has_single_rows(self) -> bool:
        """Return True if every row is one recorded row."""
        return len(self.segments) == self.num_rows


class ReplayedTrace(Protocol):
    """The part of `Trace` that a replay reads."""

    @property
    def calls(self) -> Sequence[Call]:
        """Return all calls, in order of their start."""

    def find(self, site: CallSite) -> Call | None:
        """Return the call at `site`; None without one."""

    def stored(self, call: Call, port: str) -> TensorEntry:
        """Return shape and content hash of a tensor."""

    def tensor(self, call: Call, port: str) -> Tensor:
        """Return the tensor at a port of a call."""


@dataclass
class PackedTrace:
    """A trace with packed micro-batches, each found under the number of its first micro-batch."""

    trace: Trace
    packings: dict[tuple[int, int], PackedBatch] = field(default_factory=dict)
    """Packings by step and number."""
    _found: dict[CallSite, Call | None] = field(default_factory=dict)
    _last: tuple[CallSite, str, Tensor] | None = None
    """The last assembled tensor: callers read its shape before its values."""

    def pack(self, step: int, packing: PackedBatch) -> None:
        """Present the micro-batches of `packing` as one, in `step`."""
        self.packings[step, packing.number] = packing
        self._found.clear()
        self._last = None

    @property
    def calls(self) -> list[Call]:
        """Return all calls; those of packed micro-batches once."""
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
        """Return the call at `site`; None if a micro-batch lacks it, or it cannot be assembled."""
        packing = self.packings.get((site.step, site.micro_batch))
        if packing is None:
            return self.trace.find(site)
        if site not in self._found:
            self._found[site] = self._assemble(site, packing)
        return self._found[site]

    def stored(self, call: Call, port: str) -> TensorEntry:
        """Return shape and content hash of a tensor."""
        packing = self._packing_of(call)
        if packing is None:
            return self.trace.stored(call, port)
        entries = [self.trace.stored(part, port) for part in self._parts(call.site, packing)]
        digest = " ".join(one.digest for one in entries)
        return entries[0]._replace(digest=digest, shape=tuple(self.tensor(call, port).shape))

    def tensor(self, call: Call, port: str) -> Tensor:
        """Return the tensor at a port of a call."""
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

    def _packing_of(self, call: Call) -> PackedBatch | None:
        return self.packings.get((call.site.step, call.site.micro_batch))

    def _parts(self, site: CallSite, packing: PackedBatch) -> list[Call]:
        found = (
            self.trace.find(replace(site, micro_batch=number)) for number in packing.micro_batches
        )
        return [call for call in found if call is not None]

    def _assemble(self, site: CallSite, packing: PackedBatch) -> Call | None:
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
    """The tensors and rows of several micro-batches at one port, by number of the micro-batch."""

    port: str
    tensors: Mapping[int, Tensor]
    rows: Mapping[int, RowMap | None]

    @property
    def first(self) -> Tensor:
        """Return the tensor of the first micro-batch."""
        return next(iter(self.tensors.values()))

    @property
    def layouts(self) -> list[RowLayout]:
        """Return the layout of rows and tokens in each tensor."""
        return [
            RowLayout.of_shape(tensor.shape, self.rows[number])
            for number, tensor in self.tensors.items()
        ]

    @property
    def token_dim(self) -> int:
        """Return the dim of the tokens, after that of the batch rows; of flattened tensors, once split."""
        return self.layouts[0].token_dim or 1

    def row_of(self, segment: Segment) -> Tensor:
        """Return the row of a segment, with tokens in dim `token_dim` - 1; a shared row is the first."""
        tensor, rows = self.tensors[segment.micro_batch], self.rows[segment.micro_batch]
        if rows is not None and RowLayout.of_shape(tensor.shape, rows).flattened:
            tensor = tensor.unflatten(0, (rows.num_rows, rows.length))
        return tensor[segment.row if len(tensor) > 1 else 0]


# Ways to assemble tensors: row by row and token by token; the same with both in one dim; one row shared
# by a micro-batch; attention masks; one value for each row; one value for all micro-batches.
Form = Literal["tokens", "flattened", "shared", "mask", "rows", "alike"]

_ONE_ROW = RowMap((-1,), ((),))


def form_of(recorded: Recorded, packing: PackedBatch) -> Form | None:
    """Return how to assemble tensors of these shapes; None if no rule fits all of them."""
    ranks = {tensor.ndim for tensor in recorded.tensors.values()}
    if ranks == {4} and recorded.port.endswith("mask"):
        return "mask"
    # In a micro-batch of one row, a shared tensor looks like the tensor of that row.
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


def pack_tensors(recorded: Recorded, packing: PackedBatch) -> Tensor:
    """Assemble the tensors of several micro-batches at a port into one of the running batch.

    Padding is 0, and in a mask it is masked out. Raises: ValueError if `form_of` returns None.
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
            raise ValueError(f"the layout of rows at {recorded.port} is unknown")


def _pack_tokens(recorded: Recorded, packing: PackedBatch) -> Tensor:
    dim = recorded.token_dim
    shape = list(recorded.row_of(packing.segments[0]).shape)
    shape[dim - 1] = packing.length
    made = recorded.first.new_zeros((packing.num_rows, *shape))
    for segment in packing.segments:
        values = recorded.row_of(segment).narrow(dim - 1, segment.start, segment.length)
        made[segment.at_row].narrow(dim - 1, segment.at_column, segment.length).copy_(values)
    return made


def _pack_shared(recorded: Recorded, packing: PackedBatch) -> Tensor:
    """Assemble values by column, such as positions: the longest row, or starting again for each row."""
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


def _pack_masks(recorded: Recorded, packing: PackedBatch) -> Tensor:
    """Assemble masks (B, 1, T, S), or one for all rows: no token sees another recorded row."""
    first = recorded.first
    closed = torch.finfo(first.dtype).min if first.is_floating_point() else 0
    shape = (packing.num_rows, first.shape[1], packing.length, packing.length)
    made = torch.full(shape, closed, dtype=first.dtype)
    for segment in packing.segments:
        own, here, there = recorded.row_of(segment), segment.columns, segment.recorded_columns
        made[segment.at_row, :, here, here] = own[:, there, there]
    return made


def _row_map(rows: Mapping[int, RowMap | None], packing: PackedBatch) -> RowMap | None:
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


# Name of the attachment with the step number of the call over the whole text, by batch.
WHOLE_TEXTS = "whole-texts"

# Where a tensor holds the tokens of a text.
# tokens: along one dim. tail: along one dim, the last tokens only. flattened: along dim 0, joined with the
# rows. pairs: queries and keys of a mask. keys: keys of a mask. shared: it has no dim of tokens.
_Form = Literal["tokens", "tail", "flattened", "pairs", "keys", "shared"]


class _Columns(NamedTuple):
    """Columns of a text, start to stop."""

    start: int
    stop: int


class _Recorded(NamedTuple):
    """A recorded tensor, and the place of the columns in it."""

    call: Call
    entry: TensorEntry
    form: _Form
    dim: int


@dataclass
class StepwiseTrace:
    """A `ReplayedTrace` of generated texts. Batches that were recorded step by step are unchanged."""

    trace: Trace
    whole: Mapping[int, int] = field(default_factory=dict)
    """By batch, the step number of the call over the whole text. Earlier steps have the inputs of the
    root calls that generated the text."""
    _columns: dict[tuple[int, int], _Columns] = field(default_factory=dict)
    """Columns of each root call, by batch and step."""
    _found: dict[CallSite, Call | None] = field(default_factory=dict)
    _recorded: dict[tuple[int, int, str, int, str], _Recorded] = field(default_factory=dict)
    """Recorded tensors by batch, step, module, call and port."""
    _mapped: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Tensors of one batch, by shard and key."""
    _batch: int = -1
    _last_call: Call | None = None
    _last_entries: dict[str, TensorEntry] = field(default_factory=dict)
    """Entries of the last call: callers read a shape before the values."""

    @classmethod
    def open(cls, trace: Trace) -> "StepwiseTrace":
        """Read which texts of `trace` are whole."""
        stored: Any = trace.attachment_json(WHOLE_TEXTS) if WHOLE_TEXTS in trace.attachments else {}
        return cls(trace, {int(batch): step for batch, step in stored.items()})

    def __post_init__(self) -> None:
        for batch, last in self.whole.items():
            stop = 0
            for step in range(last):
                root = self.trace.find(CallSite(step, "", micro_batch=batch))
                length = root.rows.length if root is not None and root.rows is not None else 0
                # Without a cache, a call reads all tokens so far and the new one.
                start = 0 if length == stop + 1 else stop
                stop = start + length
                self._columns[batch, step] = _Columns(start, stop)

    @property
    def calls(self) -> list[Call]:
        """Return the calls of every step."""
        found = []
        for call in self.trace.calls:
            last = self.whole.get(call.site.micro_batch)
            if last is None:
                found.append(call)
            elif call.site.step == last:
                steps = (self.find(call.site.at_step(step)) for step in range(last))
                found += [one for one in steps if one is not None]
        return found

    def find(self, site: CallSite) -> Call | None:
        """Return the call at `site`; None if the reference did not make it."""
        if site.micro_batch not in self.whole:
            return self.trace.find(site)
        try:
            return self._found[site]
        except KeyError:
            found = self._found[site] = self._cut_call(site)
            return found

    def stored(self, call: Call, port: str) -> TensorEntry:
        """Return shape and content hash of the values of one step."""
        site = call.site
        if site.micro_batch not in self.whole:
            return self.trace.stored(call, port)
        if call is not self._last_call:
            self._last_call = call
            self._last_entries.clear()
        entry = self._last_entries.get(port)
        if entry is None:
            entry = self._last_entries[port] = self._cut_entry(site, port)
        return entry

    def tensor(self, call: Call, port: str) -> Tensor:
        """Return the values of one step at a port of a call."""
        site = call.site
        if site.micro_batch not in self.whole:
            return self.trace.tensor(call, port)
        recorded = self._at(site, port)
        if self._batch != site.micro_batch:
            self._mapped.clear()
            self._batch = site.micro_batch
        key = recorded.entry.shard, recorded.entry.key
        if key not in self._mapped:
            self._mapped[key] = self.trace.tensor(recorded.call, port)
        return _cut(self._mapped[key], recorded, self._columns[site.micro_batch, site.step])

    def _cut_entry(self, site: CallSite, port: str) -> TensorEntry:
        recorded, columns = self._at(site, port), self._columns[site.micro_batch, site.step]
        if recorded.form == "shared":
            return recorded.entry
        shard, key, digest, dtype, _ = recorded.entry
        digest = f"{digest}[{columns.start}:{columns.stop}]"
        shape = _cut(torch.empty(recorded.entry.shape, device="meta"), recorded, columns).shape
        return TensorEntry(shard, key, digest, dtype, tuple(shape))

    def _cut_call(self, site: CallSite) -> Call | None:
        """Return the call of one step: the root call's own inputs, and columns of all other values."""
        last = self.whole[site.micro_batch]
        text = self.trace.find(site.at_step(last))
        root = self.trace.find(CallSite(site.step, "", micro_batch=site.micro_batch))
        if text is None or root is None or site.step >= last:
            return None
        ports = text.ports
        if not site.module:
            ports = root.ports + tuple(one for one in ports if not one.startswith("input."))
        return replace(text, site=site, ports=ports, rows=root.rows)

    def _at(self, site: CallSite, port: str) -> _Recorded:
        is_own_input = not site.module and port.startswith("input.")
        step = site.step if is_own_input else self.whole[site.micro_batch]
        key = site.micro_batch, step, site.module, site.call, port
        known = self._recorded.get(key)
        if known is None:
            call = self.trace.find(site.at_step(step))
            if call is None:
                raise KeyError(str(site))
            entry = self.trace.stored(call, port)
            # The recorded call reads every token but the last. Its last columns produce the new tokens.
            num_new = self.whole[site.micro_batch]
            form, dim = _find_columns(port, entry, call.rows, num_new)
            known = _Recorded(call, entry, "shared" if is_own_input else form, dim)
            self._recorded[key] = known
        return known


def _find_columns(
    port: str, entry: TensorEntry, rows: RowMap | None, num_new: int
) -> tuple[_Form, int]:
    """Return where the columns of a text lie in a recorded tensor, and the dim.

    num_new: number of columns of which a new token's logits are computed.
    """
    shape = entry.shape
    length = rows.length if rows is not None else -1
    if any(part.endswith("mask") for part in port.split(".")[-2:]) and shape[-1:] == (length,):
        return ("pairs" if len(shape) == 4 else "keys"), len(shape) - 1
    layout = RowLayout.of_shape(shape, rows)
    if layout.flattened:
        return "flattened", 1
    if layout.token_dim is not None and not layout.tail:
        return "tokens", layout.token_dim
    if layout.token_dim is not None and shape[layout.token_dim] == num_new:
        return "tail", layout.token_dim
    is_index = not entry.dtype.startswith(("float", "bfloat", "complex"))
    if shape[-1:] == (length,) and is_index:  # positions: one row for all, or several rows of them
        return "tokens", len(shape) - 1
    return "shared", 0


def _cut(values: Tensor, recorded: _Recorded, columns: _Columns) -> Tensor:
    """Return the values of `columns`; of a tensor with only the last columns, those that it has."""
    rows, dim = recorded.call.rows, recorded.dim
    start, size = columns.start, columns.stop - columns.start
    match recorded.form:
        case "tokens":
            return values.narrow(dim, start, size)
        case "tail" if rows is not None:
            first = rows.length - values.shape[dim]
            return values.narrow(dim, max(0, start - first), columns.stop - max(start, first))
        case "flattened" if rows is not None:
            text: Tensor = values.unflatten(0, (rows.num_rows, rows.length))
            return text.narrow(1, start, size).flatten(0, 1)
        case "pairs":
            return values[..., start : columns.stop, : columns.stop]
        case "keys":
            return values[..., : columns.stop]
        case _:
            return values
