"""A trace presented in the calls of the running model, which are not those that were recorded.

A trainer may concatenate the micro-batches of a step and pad them to the longest, or join their rows end to
end without padding: `PackedTrace` assembles the recorded tensors row by row.

The reference computes the values of all tokens of a text in one call. A candidate generates the text with
a prefill and one call for each new token: for `StepwiseTrace`, the values of a call are columns of the
recorded ones.

Both index the recorded tensors by the roles of their dims, see `Dims`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import Call, CallSite, RowMap
from assay.trace import TensorEntry, Trace

Role = Literal["rows", "tokens", "keys"]


class Dims(NamedTuple):
    """The roles of the dims of a tensor: batch rows, tokens, keys of a mask; None for others."""

    roles: tuple[Role | None, ...]
    flattened: bool = False
    """True if rows and tokens are one dim, dim 0 of the tensor; `roles` has them apart."""
    tail: bool = False
    """True if only the last tokens of the call are in the tensor."""

    @classmethod
    def of(cls, port: str, shape: tuple[int, ...], rows: RowMap | None) -> Self:
        """Return the dims of a tensor of `shape` at `port` of a call over `rows`."""
        layout = RowLayout.of_shape(shape, rows)
        roles: list[Role | None] = [None] * len(shape)
        if layout.batch_dim is not None:
            roles[0] = "rows"
        is_mask = any(part.endswith("mask") for part in port.split(".")[-2:])
        if is_mask and rows is not None and shape[-1:] == (rows.length,):
            roles[-1] = "keys"
            if len(shape) == 4:  # (B, 1, T, S), or one for all rows
                roles[0], roles[2] = "rows", "tokens"
            return cls(tuple(roles))
        if layout.flattened:
            return cls(("rows", "tokens", *roles[1:]), flattened=True)
        if layout.token_dim is not None:
            roles[layout.token_dim] = "tokens"
        return cls(tuple(roles), tail=layout.tail)

    @property
    def has_columns(self) -> bool:
        """Return True if a dim counts tokens or keys."""
        return "tokens" in self.roles or "keys" in self.roles

    def split(self, tensor: Tensor, rows: RowMap | None) -> Tensor:
        """Return a tensor with rows and tokens apart."""
        if not self.flattened or rows is None:
            return tensor
        apart: Tensor = tensor.unflatten(0, (rows.num_rows, rows.length))
        return apart

    def join(self, tensor: Tensor) -> Tensor:
        """Return the inverse of `split`."""
        return tensor.flatten(0, 1) if self.flattened else tensor

    def place(self, rows: int | slice, tokens: slice, keys: slice) -> tuple[int | slice, ...]:
        """Return the index of a part of a tensor whose rows and tokens are apart."""
        places = {"rows": rows, "tokens": tokens, "keys": keys}
        return tuple(slice(None) if role is None else places[role] for role in self.roles)


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
    _parts: dict[CallSite, list[Call]] = field(default_factory=dict)
    """The recorded calls of the packed micro-batches, by the site of the call that they make up."""
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
        parts = self._parts.get(call.site)
        if parts is None:
            return self.trace.stored(call, port)
        entries = [self.trace.stored(part, port) for part in parts]
        digest = " ".join(one.digest for one in entries)
        return entries[0]._replace(digest=digest, shape=tuple(self.tensor(call, port).shape))

    def tensor(self, call: Call, port: str) -> Tensor:
        """Return the tensor at a port of a call."""
        parts = self._parts.get(call.site)
        if parts is None:
            return self.trace.tensor(call, port)
        if self._last is None or self._last[:2] != (call.site, port):
            tensors = {part.site.micro_batch: self.trace.tensor(part, port) for part in parts}
            recorded = Recorded(port, tensors, {part.site.micro_batch: part.rows for part in parts})
            packing = self.packings[call.site.step, call.site.micro_batch]
            self._last = call.site, port, recorded.pack(packing)
        return self._last[2].clone()

    def _assemble(self, site: CallSite, packing: PackedBatch) -> Call | None:
        found = [self.trace.find(replace(site, micro_batch=n)) for n in packing.micro_batches]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        self._parts[site], first = parts, parts[0]
        rows = {part.site.micro_batch: part.rows for part in parts}
        for port in first.ports:
            if any(port not in part.ports for part in parts):
                return None
            stored = {part.site.micro_batch: self.trace.stored(part, port) for part in parts}
            shapes = {n: torch.empty(one.shape, device="meta") for n, one in stored.items()}
            dims = Recorded(port, shapes, rows).find_dims(packing)
            alike = len({one.digest for one in stored.values()}) == 1
            if dims is None or not (any(dims.roles) or alike):
                return None
        return replace(first, rows=_row_map(rows, packing))


_ONE_ROW = RowMap((-1,), ((),))


@dataclass(frozen=True, slots=True)
class Recorded:
    """The tensors and rows of several micro-batches at one port, by number of the micro-batch."""

    port: str
    tensors: Mapping[int, Tensor]
    rows: Mapping[int, RowMap | None]

    def find_dims(self, packing: PackedBatch) -> Dims | None:
        """Return the dims that all tensors have; None if they cannot be assembled into one."""
        dims = {n: Dims.of(self.port, one.shape, self.rows[n]) for n, one in self.tensors.items()}
        # In a micro-batch of one row, a shared tensor looks like the tensor of that row.
        several = {one for n, one in dims.items() if (self.rows[n] or _ONE_ROW).num_rows > 1}
        found = several or {*dims.values()}
        if len(found) > 1 or len({one.roles[1:] for one in dims.values()}) > 1:
            return None
        common = found.pop()
        of_rows = "rows" in common.roles and not common.has_columns
        return None if common.tail or (of_rows and not packing.has_single_rows) else common

    def pack(self, packing: PackedBatch) -> Tensor:
        """Assemble the tensors into one of the running batch.

        Padding is 0, and in a mask it is masked out: no token sees another recorded row. Values that all
        rows share, such as positions, are those of the longest row, or start again for each row.
        Raises: ValueError if `find_dims` returns None.
        """
        dims, first = self.find_dims(packing), next(iter(self.tensors.values()))
        if dims is None:
            raise ValueError(f"the layout of rows at {self.port} is unknown")
        if not any(dims.roles):
            return first
        segments, num_rows, length = packing.segments, packing.num_rows, packing.length
        if "rows" not in dims.roles:
            dim = next(dim for dim, role in enumerate(dims.roles) if role is not None)
            number = max(self.tensors, key=lambda n: self.tensors[n].shape[dim])
            longest = min(length, self.tensors[number].shape[dim])
            dims = dims._replace(roles=("rows", *dims.roles[1:]))
            if packing.has_single_rows:
                segments, num_rows = (Segment(number, 0, longest, 0, 0),), 1
            else:
                segments = tuple(replace(segment, start=0) for segment in segments)
        sources = {n: dims.split(one, self.rows[n]) for n, one in self.tensors.items()}
        sizes = {"rows": num_rows, "tokens": length, "keys": length}
        shape = [*sources[segments[0].micro_batch].shape]
        shape = [
            size if role is None else sizes[role]
            for role, size in zip(dims.roles, shape, strict=True)
        ]
        is_additive = {"tokens", "keys"} <= {*dims.roles} and first.is_floating_point()
        made = first.new_full(shape, torch.finfo(first.dtype).min if is_additive else 0)
        for segment in segments:
            source = sources[segment.micro_batch]
            row, there = segment.row if len(source) > 1 else 0, segment.recorded_columns
            here = dims.place(segment.at_row, segment.columns, segment.columns)
            made[here] = source[dims.place(row, there, there)]
        return dims.join(made)


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


class _Recorded(NamedTuple):
    """A recorded tensor, and its dims; without tokens it is the same in all steps."""

    call: Call
    entry: TensorEntry
    dims: Dims


@dataclass
class StepwiseTrace:
    """A `ReplayedTrace` of generated texts. Batches that were recorded step by step are unchanged."""

    trace: Trace
    whole: Mapping[int, int] = field(default_factory=dict)
    """By batch, the step number of the call over the whole text. Earlier steps have the inputs of the
    root calls that generated the text."""
    _columns: dict[tuple[int, int], slice] = field(default_factory=dict)
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
                self._columns[batch, step] = slice(start, stop)

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
        if not recorded.dims.has_columns:
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
            dims = Dims(()) if is_own_input else _find_columns(port, entry, call.rows, num_new)
            known = self._recorded[key] = _Recorded(call, entry, dims)
        return known


def _find_columns(port: str, entry: TensorEntry, rows: RowMap | None, num_new: int) -> Dims:
    """Return the dims of a recorded tensor of a text.

    num_new: number of columns of which a new token's logits are computed.
    """
    shape, dims = entry.shape, Dims.of(port, entry.shape, rows)
    if dims.has_columns and not (dims.tail and shape[dims.roles.index("tokens")] != num_new):
        return dims
    is_index = not entry.dtype.startswith(("float", "bfloat", "complex"))
    if rows is not None and shape[-1:] == (rows.length,) and is_index:
        # positions: one row for all, or several rows of them
        return Dims((*[None] * (len(shape) - 1), "tokens"))
    return Dims(())


def _cut(values: Tensor, recorded: _Recorded, columns: slice) -> Tensor:
    """Return the values of `columns`; of a tensor with only the last columns, those that it has."""
    dims, rows, tokens = recorded.dims, recorded.call.rows, columns
    if not dims.has_columns:
        return values
    if dims.tail and rows is not None:
        first = rows.length - values.shape[dims.roles.index("tokens")]
        tokens = slice(max(0, columns.start - first), columns.stop - first)
    index = dims.place(slice(None), tokens, slice(0, columns.stop))
    return dims.join(dims.split(values, rows)[index])
