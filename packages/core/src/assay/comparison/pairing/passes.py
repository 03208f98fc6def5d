"""The forward passes of two dumps: prompt and position of every row, pairs of passes, and their token ids.

Shape legend: B batch rows, T tokens of a pass, R selected tokens, H heads, C channels.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod

import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.errors import name_some
from assay.hooks.row_positions import RowLayout, find_columns
from assay.sites import CallSite, RowMap

# More ids than any vocabulary has.
_MOST_IDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a dump."""

    batch: int
    """Number of the batch of prompts; in training, of the micro-batch."""
    step: int
    rows: RowMap | None
    """Prompt and position of every row; None if unknown."""
    ids: Tensor | None = None
    """Token ids, (B, T); None if unknown."""
    is_declared: bool = False
    """True if `rows` holds request names from the script, which are the same in both dumps."""
    others: Mapping[tuple[str, int], RowMap | None] = field(default_factory=dict, hash=False)
    """By module and call, the rows of other sequences, such as those of an encoder; None if unknown."""
    sequences: Mapping[int, RowMap] = field(default_factory=dict, hash=False)
    """By length, the rows of other sequences of these prompts, such as those that an encoder has read."""

    def of_sequence(self, shape: Sequence[int]) -> "Pass | None":
        """Return this pass with the rows of another sequence, if a tensor of this shape holds them."""
        layout = RowLayout.of_shape(tuple(shape), self.rows)
        is_own = layout.flattened or (layout.token_dim is not None and not layout.tail)
        if self.rows is None or is_own or len(shape) < 3 or shape[0] != self.rows.num_rows:
            return None
        dim = 2 if len(shape) == 4 else 1  # after the heads
        rows = self.sequences.get(shape[dim])
        return None if rows is None else replace(self, rows=rows, others={}, sequences={})

    def rows_at(self, site: CallSite) -> RowMap | None:
        """Return the rows of a call in this pass."""
        rows = self.others.get((site.module, site.call), self.rows)
        if self.is_declared or self.rows is None or rows is None or rows is self.rows:
            return self.rows if self.is_declared else rows
        # Prompts have the same numbers in all sequences of a pass.
        is_alike = rows.num_rows == self.rows.num_rows
        return RowMap(self.rows.prompts, rows.positions) if is_alike else rows

    @property
    def tokens(self) -> Tensor | None:
        """Return comparable tokens, (B, T): ids, combined with the request if the script named it."""
        if not self.is_declared or self.rows is None:
            return self.ids
        requests = torch.tensor(self.rows.prompts)[:, None] * _MOST_IDS
        return requests.repeat(1, self.rows.length) + (0 if self.ids is None else self.ids)

    @property
    def number(self) -> tuple[int, int]:
        """Return batch and step."""
        return self.batch, self.step

    @property
    def shape(self) -> tuple[int, int] | None:
        """Return (B, T)."""
        return (self.rows.num_rows, self.rows.length) if self.rows else None

    def __str__(self) -> str:
        """Return the name of the pass for messages."""
        batch = f"batch {self.batch}, " if self.batch else ""
        if self.rows is None:
            return f"{batch}step {self.step}"
        return f"{batch}step {self.step} (rows x tokens: {self.rows.num_rows} x {self.rows.length})"


@dataclass(frozen=True)
class PassPair:
    """Two passes that share tokens."""

    expected: Pass
    actual: Pass
    expected_rows: Tensor | None = None
    """Flat numbers (b * T + t) of the shared tokens; None if all rows correspond."""
    actual_rows: Tensor | None = None
    """Numbers of these tokens in the actual pass, in the same order."""

    def by_row(self) -> "PassPair":
        """Return the same pair with the number of every token."""
        if self.expected.shape is None or self.expected_rows is not None:
            return self
        numbers = torch.arange(self.expected.shape[0] * self.expected.shape[1])
        return replace(self, expected_rows=numbers, actual_rows=numbers)

    def of_sequences(self, expected: Sequence[int], actual: Sequence[int]) -> "PassPair":
        """Return the pair of the sequences that tensors of these shapes hold, if others than the passes'."""
        one, other = self.expected.of_sequence(expected), self.actual.of_sequence(actual)
        if one is None or other is None or not self._is_of_same_rows:
            return self
        if one.rows is None or other.rows is None or one.rows.positions == other.rows.positions:
            return PassPair(one, other)
        numbers, others = (
            {
                (row, at): row * rows.length + column
                for row, positions in enumerate(rows.positions)
                for column, at in enumerate(positions)
                if at >= 0
            }
            for rows in (one.rows, other.rows)
        )
        shared = [key for key in numbers if key in others]
        return PassPair(
            one,
            other,
            torch.tensor([numbers[key] for key in shared]),
            torch.tensor([others[key] for key in shared]),
        )

    @property
    def _is_of_same_rows(self) -> bool:
        """Return True if row n of one pass corresponds to row n of the other, with all tokens."""
        numbers = self.expected_rows, self.actual_rows
        if numbers[0] is None or numbers[1] is None or self.expected.shape is None:
            return True
        every = torch.arange(prod(self.expected.shape))
        return torch.equal(numbers[0], every) and torch.equal(numbers[1], every)

    @property
    def is_of_as_many_tokens(self) -> bool:
        """Return False if the passes are known to hold different numbers of tokens."""
        shapes = self.expected.shape, self.actual.shape
        return None in shapes or prod(shapes[0] or ()) == prod(shapes[1] or ())

    def rows_at(self, site: CallSite) -> RowMap | None:
        """Return the expected rows of a call; those of the paired tokens if the pair has some only."""
        return self.rows if self.expected_rows is not None else self.expected.rows_at(site)

    @cached_property
    def rows(self) -> RowMap | None:
        """Return the expected prompt and position of the paired tokens."""
        rows = self.expected.rows
        if rows is None or self.expected_rows is None:
            return rows
        places = [divmod(number, rows.length) for number in self.expected_rows.tolist()]
        return RowMap(
            tuple(rows.prompts[row] for row, _ in places),
            tuple((rows.positions[row][column],) for row, column in places),
        )


@dataclass(slots=True)
class _Request:
    """One prompt with its generated tokens."""

    first_length: int
    ids: dict[int, int]
    """Token id by position."""
    places: dict[int, tuple[int, int]]
    """Pass and flat row by position."""

    def agrees_with(self, other: "_Request") -> bool:
        """Return True if both have the same prompt."""
        length = min(self.first_length, other.first_length)
        return all(self.ids.get(at) == other.ids.get(at) for at in range(length))


def match_rows(expected: Sequence[Pass], actual: Sequence[Pass]) -> list[PassPair]:
    """Pair the tokens of two dumps by prompt and position across passes."""
    free = list(_split_requests(actual))
    paired: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for request in _split_requests(expected):
        partner = next((one for one in free if request.agrees_with(one)), None)
        if partner is None:
            continue
        free.remove(partner)
        for at, (number, row) in request.places.items():
            if at in partner.places:
                other, other_row = partner.places[at]
                rows, other_rows = paired.setdefault((number, other), ([], []))
                rows.append(row)
                other_rows.append(other_row)
    return [
        PassPair(expected[number], actual[other], torch.tensor(rows), torch.tensor(other_rows))
        for (number, other), (rows, other_rows) in paired.items()
    ]


def _split_requests(passes: Sequence[Pass]) -> Iterator[_Request]:
    open_requests: dict[tuple[int, int], _Request] = {}
    done: list[_Request] = []
    for number, one in enumerate(passes):
        if (tokens := one.tokens) is None or one.rows is None:
            continue
        found: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        for row, positions in enumerate(one.rows.positions):
            key = one.batch, one.rows.prompts[row] if one.is_declared else row
            found.setdefault(key, {}).update(
                (at, (row * one.rows.length + column, int(tokens[row, column])))
                for column, at in enumerate(positions)
                if at >= 0
            )
        for key, places in found.items():
            if 0 in places or key not in open_requests:
                open_requests[key] = _Request(len(places), {}, {})
                done.append(open_requests[key])
            request = open_requests[key]
            for at, (place, token) in places.items():
                request.ids[at] = token
                request.places[at] = number, place
    yield from done


def take_rows(value: Tensor, of_pass: Pass, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the rows of some tokens, (R, 1, C), and which of them the tensor holds, (R,) bool.

    value: (B, T, ...), (T, B, ...), (B, H, T, C), (B * T, ...), (1, T, ...); with the last tokens only (B, 1, ...) or, in
        caches of sliding windows, (B, H, S, C).
    rows: flat numbers b * T + t of the tokens, (R,).
    Returns: None for a tensor without tokens, or if the tokens are unknown.
    """
    if rows is None or of_pass.shape is None:
        return None
    batch, length = of_pass.shape
    held = torch.ones(len(rows), dtype=torch.bool)
    if value.shape[:2] == (batch, length):
        flat = value.flatten(0, 1)
    elif value.shape[:2] == (length, batch):
        flat = value.transpose(0, 1).flatten(0, 1)
    elif value.ndim == 4 and value.shape[0] == batch and value.shape[2] == length:
        flat = value.transpose(1, 2).flatten(0, 1)
    elif value.shape[:1] == (batch * length,):
        flat = value
    elif value.shape[:2] == (1, length):
        flat, rows = value[0], rows % length
    elif value.shape[:2] == (batch, 1):
        held = rows % length == length - 1
        flat, rows = value[:, 0], rows // length
    elif value.ndim == 4 and value.shape[0] == batch and 0 < value.shape[2] < length:
        num_last = value.shape[2]
        place = rows % length - (length - num_last)
        held = place >= 0
        flat = value.transpose(1, 2).flatten(0, 1)
        rows = rows // length * num_last + place.clamp(min=0)
    else:
        return None
    return flat[rows].reshape(len(rows), 1, -1), held


# Those of a decoder come first: a pass that holds both computes them.
_ID_PORTS = ("input.decoder_input_ids", "input.input_ids", "input.tokens")
_POSITION_PORTS = ("position_ids", "positions")
# Words in the names of other integer inputs, and of the embeddings that take them.
_NO_IDS = re.compile(
    r"posit|_pos\b|\bpos|mask|type|segment|rotary|rope|lens\b|length|label|cache|\bwpe\b"
)
_MASK_PORT = "input.attention_mask"
# With fewer tensors of one length, that length is not the number of tokens.
_FEWEST_ACTIVATIONS = 3


def find_passes(dump: Dump, rank: int | None = None) -> list[Pass]:
    """Return the forward passes of a dump, in order.

    rank: the rank to read; None for the lowest one.
    """
    groups: dict[tuple[int, int], list[DumpedTensor]] = {}
    chosen = min(dump.ranks, default=0) if rank is None else rank
    for tensor in dump.tensors:
        at = tensor.site.at
        is_parameter = tensor.site.port.startswith("parameter.")
        if at.phase == "forward" and at.rank == chosen and not is_parameter:
            groups.setdefault((at.micro_batch, at.step), []).append(tensor)
    passes: list[Pass] = []
    for (batch, step), tensors in sorted(groups.items()):
        previous = passes[-1] if passes and passes[-1].batch == batch else None
        passes.append(_read_pass(batch, step, tensors, previous))
    if any(one.is_declared for one in passes):
        return [replace(one, is_declared=one.rows is not None) for one in passes]
    return list(_add_sequences(_number_prompts(passes)))


def _add_sequences(passes: Iterable[Pass]) -> Iterator[Pass]:
    """Add the sequences of other modules, and of earlier passes over other prompts, such as an encoder's."""
    earlier: dict[int, dict[int, RowMap]] = {}
    for one in passes:
        known = earlier.setdefault(one.batch, {})
        others = [rows for rows in one.others.values() if rows is not None]
        known |= {rows.length: rows for rows in others}
        if one.rows is not None:
            sequences = {
                length: RowMap(one.rows.prompts, rows.positions)
                for length, rows in known.items()
                if rows.num_rows == one.rows.num_rows
                and (rows in others or rows.prompts != one.rows.prompts)
            }
            known[one.rows.length] = one.rows
            yield replace(one, sequences=sequences)
        else:
            yield one


def _number_prompts(passes: Iterable[Pass]) -> list[Pass]:
    """Assign a number to every prompt. Tools number prompts by batch row, and repeat for each request."""
    found = []
    used: set[int] = set()
    number_of: dict[tuple[int, int], int] = {}
    for one in passes:
        rows = one.rows
        if rows is None or one.is_declared:
            found.append(one)
            continue
        keys = [(one.batch, prompt) for prompt in rows.prompts]
        begins = any(0 in positions for positions in rows.positions)
        if begins or any(key not in number_of for key in keys):
            taken = any(prompt in used for prompt in rows.prompts)
            first = max(used, default=-1) + 1
            numbers = [first + row for row in range(len(keys))] if taken else rows.prompts
            number_of.update(zip(keys, numbers, strict=True))
            used.update(numbers)
        prompts = tuple(number_of[key] for key in keys)
        found.append(replace(one, rows=RowMap(prompts, rows.positions)))
    return found


def _read_pass(batch: int, step: int, tensors: list[DumpedTensor], previous: Pass | None) -> Pass:
    sites = {one.site.at: None for one in tensors}
    recorded = {one.site.at: one.rows for one in tensors if one.rows is not None}
    if recorded:
        # The call of the model has the tokens that the pass computes.
        known = next((rows for at, rows in recorded.items() if not at.module), None)
        known = known or next(iter(recorded.values()))
        ids = read_ids(tensors, known)
        is_flat = len(set(known.prompts)) < known.num_rows
        if is_flat and ids is not None:
            ids = ids.reshape(known.num_rows, known.length)
        is_named = ids is None and known.prompts != tuple(range(known.num_rows))
        others = {
            (at.module, at.call): recorded.get(at) for at in sites if recorded.get(at) != known
        }
        return Pass(batch, step, known, ids, is_flat or is_named, others)
    ids = read_ids(tensors)
    shape = (ids.shape[0], ids.shape[1]) if ids is not None else _common_shape(tensors)
    if shape is None:
        return Pass(batch, step, None)
    positions = read_positions(tensors, shape)
    if positions is None:
        start = _first_position(ids, shape, previous)
        positions = [list(range(start, start + shape[1]))] * shape[0]
    prompts = tuple(batch * shape[0] + row for row in range(shape[0]))
    return Pass(batch, step, RowMap(prompts, tuple(map(tuple, positions))), ids)


def read_ids(tensors: Iterable[DumpedTensor], rows: RowMap | None = None) -> Tensor | None:
    """Return the token ids of a pass.

    They are a named argument, the input of an embedding, or the only other integer argument of the model.
    rows: the rows of the tokens; None if unknown.
    """
    integer = [
        tensor
        for tensor in tensors
        if "int" in tensor.dtype
        and tensor.shape
        and len(tensor.shape) <= 2
        and tensor.site.port.startswith("input.")
    ]
    named = [one for port in _ID_PORTS for one in integer if one.site.port == port]
    others = [
        (one, f"{one.class_name} {one.site.at.module}".lower())
        for one in integer
        if not _NO_IDS.search(f"{one.class_name} {one.site.at.module} {one.site.port}".lower())
    ]
    embedded = [one for one, name in others if "embed" in name]
    of_model = [one for one, _ in others if not one.site.at.module]
    for tensor in (*named, *embedded, *(of_model if len(of_model) == 1 else [])):
        if rows is not None and prod(tensor.shape or ()) != rows.num_rows * rows.length:
            continue
        value = tensor.read_intact()
        if value is None:
            continue
        value = value.long()
        return value if value.ndim == 2 else value.reshape(1, -1)
    return None


def read_positions(
    tensors: Iterable[DumpedTensor], shape: tuple[int, int]
) -> list[list[int]] | None:
    """Return the positions of a pass, -1 for padding, (B, T); None if unknown.

    Without recorded positions, the mask is counted.
    """
    length = shape[1]
    mask = _read_mask(tensors, shape)
    for tensor in tensors:
        is_named = tensor.site.port.endswith(_POSITION_PORTS)
        value = tensor.read_intact() if is_named else None
        if value is None:
            continue
        value = value.long()
        if value.numel() == shape[0] * length:
            positions = value.reshape(shape)
        elif value.numel() == length:
            positions = value.reshape(1, -1).expand(shape)
        else:
            continue
        if mask is not None:
            positions = positions.masked_fill(mask[:, -length:] == 0, -1)
        return positions.tolist()
    if mask is None:
        return None
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)[:, -length:].tolist()


def _read_mask(tensors: Iterable[DumpedTensor], shape: tuple[int, int]) -> Tensor | None:
    """Return the padding mask of earlier tokens and those of this pass, 0 for padding, (B, S).

    An encoder and its decoder have masks of their own. With both in one pass, none is read.
    """
    tensors = list(tensors)
    ids = {(one.site.port, one.shape) for one in tensors if one.site.port in _ID_PORTS}
    if len(ids) > 1 or any(one.site.port == _ID_PORTS[0] for one in tensors):
        return None
    for tensor in tensors:
        dims = tensor.shape or ()
        fits = len(dims) == 2 and dims[0] == shape[0]
        if fits and tensor.site.port == _MASK_PORT:
            mask = tensor.read_intact()
            if mask is not None and find_columns(mask, shape[1], None) is not None:
                return (mask != 0).long()
    return None


def _common_shape(tensors: Iterable[DumpedTensor]) -> tuple[int, int] | None:
    """Return (B, T) of most activations of a pass."""
    activations = [one.shape for one in tensors if one.shape and "float" in one.dtype]
    for shape, _ in Counter(one[:2] for one in activations if len(one) == 3).most_common(1):
        return shape[0], shape[1]
    # One dim holds the tokens of all prompts.
    for length, count in Counter(one[0] for one in activations if len(one) == 2).most_common(1):
        return (1, length) if count >= _FEWEST_ACTIVATIONS else None
    return None


def _first_position(ids: Tensor | None, shape: tuple[int, int], previous: Pass | None) -> int:
    if previous is None or previous.rows is None or previous.rows.num_rows != shape[0]:
        return 0
    length = previous.rows.length
    is_repeat = (
        ids is not None and previous.ids is not None
        and ids.shape == previous.ids.shape and bool((ids == previous.ids).all())
    )  # fmt: skip
    if shape[1] > 1 and (length == 1 or is_repeat):
        return 0  # another prompt, or a repeated one
    return previous.rows.positions[0][-1] + 1


@dataclass(frozen=True)
class TokenAlignment:
    """The passes of two dumps, paired by tokens."""

    pairs: tuple[PassPair, ...]
    missing: tuple[Pass, ...] = ()
    """Expected passes whose tokens ACTUAL lacks."""
    extra: tuple[Pass, ...] = ()
    """Actual passes without a partner, such as warm-up runs."""
    missing_tokens: int = 0
    """Number of expected tokens that ACTUAL lacks, in passes with a partner."""
    is_unrelated: bool = False
    """True if both dumps hold token ids, and share no prompt."""
    notes: tuple[str, ...] = ()

    @cached_property
    def pairs_of(self) -> Mapping[tuple[int, int], list[PassPair]]:
        """Return the pairs of each expected pass, by its number."""
        found: dict[tuple[int, int], list[PassPair]] = {}
        for one in self.pairs:
            found.setdefault(one.expected.number, []).append(one)
        return found


def align_passes(
    expected: Sequence[Pass], actual: Sequence[Pass], token_shift: int | None = None
) -> TokenAlignment:
    """Pair the passes of two dumps.

    token_shift: number of an actual pass minus the number of its expected pass; None to find it.
    """
    if token_shift is not None:
        by_step = {(one.batch, one.step): one for one in actual}
        pairs = [
            PassPair(one, by_step[one.batch, one.step + token_shift])
            for one in expected
            if (one.batch, one.step + token_shift) in by_step
        ]
        note = f"the passes are shifted by {token_shift}" if token_shift else ""
        return _alignment(pairs, expected, actual, note)
    same_shapes = [one.shape for one in expected] == [one.shape for one in actual]
    if same_shapes and not _is_reordered(expected, actual):
        return TokenAlignment(tuple(map(PassPair, expected, actual)))
    known = all(one.tokens is not None and one.rows is not None for one in (*expected, *actual))
    pairs = match_rows(expected, actual) if known else []
    is_unrelated = known and not pairs and bool(expected) and bool(actual)
    if is_unrelated and _is_warm_up(actual):
        note = "ACTUAL holds only a warm-up: all of its tokens are equal"
        return TokenAlignment((), tuple(expected), tuple(actual), notes=(note,))
    pairs = pairs or _match_whole(expected, actual)
    return replace(_alignment(pairs, expected, actual), is_unrelated=is_unrelated and not pairs)


def _is_warm_up(passes: Sequence[Pass]) -> bool:
    """Return True if all tokens are equal, as in warm-up passes of engines."""
    tokens = [
        token for one in passes if one.ids is not None for token in one.ids.flatten().tolist()
    ]
    return len(tokens) > 1 and len(set(tokens)) == 1


def _is_reordered(expected: Sequence[Pass], actual: Sequence[Pass]) -> bool:
    """Return True if the passes hold the same prompts in another order, or the first ones other tokens."""
    if not expected or not actual:
        return False
    first, second = expected[0], actual[0]
    tokens, other_tokens = first.tokens, second.tokens
    if tokens is None or other_tokens is None or first.rows is None or second.rows is None:
        return False
    if tokens.tolist() != other_tokens.tolist() and first.rows.positions != second.rows.positions:
        return True
    prompts = [
        [
            row
            for one in passes
            if one.tokens is not None and one.rows is not None
            for row, positions in zip(one.tokens.tolist(), one.rows.positions, strict=True)
            if 0 in positions
        ]
        for passes in (expected, actual)
    ]
    return prompts[0] != prompts[1] and sorted(prompts[0]) == sorted(prompts[1])


def _match_whole(expected: Sequence[Pass], actual: Sequence[Pass]) -> list[PassPair]:
    """Pair passes in order. The last match wins, because warm-up runs come first."""
    for start in range(len(actual) - len(expected), -1, -1):
        part = actual[start : start + len(expected)]
        if all(map(_hold_same_tokens, expected, part)):
            return list(map(PassPair, expected, part))
    pairs = []
    start = 0
    for one in expected:
        for number in range(start, len(actual)):
            if _hold_same_tokens(one, actual[number]):
                pairs.append(PassPair(one, actual[number]))
                start = number + 1
                break
    return pairs


def _hold_same_tokens(expected: Pass, actual: Pass) -> bool:
    if expected.shape is None or actual.shape is None:
        return False
    if expected.shape != actual.shape:
        # One side has the tokens of all prompts in one dim.
        return 1 in (expected.shape[0], actual.shape[0]) and (
            prod(expected.shape) == prod(actual.shape)
        )
    tokens, others = expected.tokens, actual.tokens
    if tokens is None or others is None:
        return True
    if expected.shape[1] == 1:
        return expected.rows == actual.rows  # a generated token may differ
    return expected.rows == actual.rows and bool((tokens == others).all())


def _alignment(
    pairs: Sequence[PassPair], expected: Sequence[Pass], actual: Sequence[Pass], note: str = ""
) -> TokenAlignment:
    used = {id(one) for pair in pairs for one in (pair.expected, pair.actual)}
    missing, extra = (
        tuple(one for one in side if id(one) not in used) for side in (expected, actual)
    )
    notes = [note] if note else []
    shifts = {pair.actual.step - pair.expected.step for pair in pairs}
    whole = all(pair.expected_rows is None for pair in pairs)
    if whole and len(shifts) == 1 and shifts != {0} and not note:
        notes.append(
            f"pass n of EXPECTED is pass n{shifts.pop():+} of ACTUAL: same shapes and tokens"
        )
    if extra:
        names = name_some([str(one) for one in extra])
        notes.append(f"ACTUAL holds passes that EXPECTED lacks (warm-up or repeats): {names}")
    return TokenAlignment(tuple(pairs), missing, extra, _count_missing(pairs), notes=tuple(notes))


def _count_missing(pairs: Sequence[PassPair]) -> int:
    """Return the number of expected tokens without a partner, in passes that have one."""
    held: dict[tuple[int, int], tuple[Pass, set[int]]] = {}
    for pair in pairs:
        if pair.expected_rows is not None:
            _, known = held.setdefault(pair.expected.number, (pair.expected, set()))
            known.update(pair.expected_rows.tolist())
    return sum(
        at >= 0 and number not in known
        for one, known in held.values()
        for number, at in enumerate(chain(*one.rows.positions) if one.rows else ())
    )


# Returns expected and actual logits at a prompt and position, (V,); None if unknown.
LogitsOf = Callable[[int, int], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, slots=True)
class DifferentToken:
    """The first token of a prompt that differs."""

    prompt: int
    position: int
    expected: int
    actual: int
    is_prompt: bool
    """True for a token of the prompt, False for a generated token."""
    is_near_tie: bool | None = None
    """True if each side chose its largest logit; None unless both dumps hold the logits."""

    def __str__(self) -> str:
        """Return the position and both ids."""
        return (
            f"prompt {self.prompt}, position {self.position}:"
            f" token {self.actual}, expected {self.expected}"
        )


@dataclass(slots=True)
class TokenComparison:
    """The comparison of the ids of all paired tokens."""

    num_prompt_tokens: int = 0
    num_generated: int = 0
    different: list[DifferentToken] = field(default_factory=list)

    @property
    def first_different(self) -> dict[int, int]:
        """Return by prompt the position of the first different token."""
        return {one.prompt: one.position for one in self.different}

    @property
    def different_prompts(self) -> list[DifferentToken]:
        """Return the differences in prompts."""
        return [one for one in self.different if one.is_prompt]

    @property
    def different_generated(self) -> list[DifferentToken]:
        """Return the differences in generated tokens."""
        return [one for one in self.different if not one.is_prompt]


def compare_ids(alignment: TokenAlignment, logits_of: LogitsOf) -> TokenComparison:
    """Compare the ids of all paired tokens. Only the first difference of each prompt counts."""
    found = TokenComparison()
    seen: set[int] = set()
    begun: set[int] = set()
    for pair in alignment.pairs:
        expected, actual, rows = pair.expected.ids, pair.actual.ids, pair.rows
        if expected is None or actual is None or rows is None or pair.expected.rows is None:
            continue
        if pair.expected_rows is not None and pair.actual_rows is not None:
            expected = expected.flatten()[pair.expected_rows][:, None]
            actual = actual.flatten()[pair.actual_rows][:, None]
        if expected.shape != actual.shape:
            continue
        is_first = not begun & set(rows.prompts)
        is_prompt = is_first or pair.expected.rows.length > 1
        begun |= set(rows.prompts)
        is_token = torch.tensor(rows.positions) >= 0
        count = int(is_token.sum())
        found.num_prompt_tokens += count if is_prompt else 0
        found.num_generated += 0 if is_prompt else count
        for row, column in ((expected != actual) & is_token).nonzero().tolist():
            prompt, position = rows.prompts[row], rows.positions[row][column]
            if prompt in seen:
                continue
            seen.add(prompt)
            ids = int(expected[row, column]), int(actual[row, column])
            logits = None if is_prompt else logits_of(prompt, position - 1)
            tie = None if logits is None else [int(one.argmax()) for one in logits] == [*ids]
            found.different.append(DifferentToken(prompt, position, *ids, is_prompt, tie))
    return found
