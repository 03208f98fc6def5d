"""The forward passes of a dump, and pairs of passes with the same tokens.

Shape legend: B batch rows, T tokens of a pass, R selected tokens, H heads, C channels.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from assay.hooks.row_positions import RowLayout
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
        return f"{batch}step {self.step} ({self.rows.length} tokens of {self.rows.num_rows} rows)"


@dataclass(frozen=True, slots=True)
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
        every = torch.arange(math.prod(self.expected.shape))
        return torch.equal(numbers[0], every) and torch.equal(numbers[1], every)

    @property
    def is_of_as_many_tokens(self) -> bool:
        """Return False if the passes are known to hold different numbers of tokens."""
        shapes = self.expected.shape, self.actual.shape
        return None in shapes or math.prod(shapes[0] or ()) == math.prod(shapes[1] or ())

    def rows_at(self, site: CallSite) -> RowMap | None:
        """Return the expected rows of a call; those of the paired tokens if the pair has some only."""
        return self.rows if self.expected_rows is not None else self.expected.rows_at(site)

    @property
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
                request = _Request(len(places), {}, {})
                open_requests[key] = request
                done.append(request)
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
