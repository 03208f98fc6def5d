"""A trace of whole texts, presented as the forward calls that generate them.

The reference computes the values of all tokens of a text in one call. A candidate generates the text with
a prefill and one call for each new token. The values of a call are columns of the recorded ones.

Shape legend: B rows, S tokens of the whole text, T tokens of one call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import Call, CallSite, RowMap
from assay.trace import TensorEntry, Trace

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
        return TensorEntry(shard, key, digest, dtype, _cut_shape(recorded, columns))

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


def _cut_shape(recorded: _Recorded, columns: _Columns) -> tuple[int, ...]:
    """Return the shape of the result of `_cut`."""
    rows, shape = recorded.call.rows, list(recorded.entry.shape)
    size = columns.stop - columns.start
    match recorded.form:
        case "tokens":
            shape[recorded.dim] = size
        case "tail" if rows is not None:
            first = rows.length - shape[recorded.dim]
            shape[recorded.dim] = columns.stop - max(columns.start, first)
        case "flattened" if rows is not None:
            shape[0] = rows.num_rows * size
        case "pairs":
            shape[-2:] = [size, columns.stop]
        case "keys":
            shape[-1] = columns.stop
    return tuple(shape)


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
