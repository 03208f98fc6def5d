"""Batches of samples without repeated ids, so that every token is found again in the rows of a batch."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from assay_smoke.data.properties import Fault, Subject
from assay_smoke.data.protocols import (
    IGNORED,
    Collate,
    Feature,
    FeatureKind,
    MakeCollator,
    Tokenizer,
)
from assay_smoke.data.tokens import show_row, show_token, show_tokens

Lengths = tuple[int, ...]

_WANTED = "a mapping with input_ids and labels, each a tensor (B, T)"

# Ids that every model has. They are bytes in byte-level vocabularies. Letters come first, for display.
_LETTERS = (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))
_IDS = tuple(dict.fromkeys((*_LETTERS, *range(256))))


def make_features(tokenizer: Tokenizer, lengths: Lengths, kind: FeatureKind) -> list[Feature]:
    """Make samples of these lengths from distinct ids. Samples of two tokens or more end with EOS.

    kind: the first half of masked samples has no labels.
    """
    special = set(tokenizer.all_special_ids)
    free = iter([id_ for id_ in _IDS if id_ not in special])
    eos = tokenizer.eos_token_id
    features: list[Feature] = []
    for length in lengths:
        ends = length > 1 and eos is not None
        ids = [next(free) for _ in range(length - ends)] + ([eos] if ends else [])
        feature = Feature(input_ids=ids, attention_mask=[1] * length)
        if kind == "masked":
            prompt = length // 2
            feature["labels"] = [IGNORED] * prompt + ids[prompt:]
        features.append(feature)
    return features


def describe_lengths(features: Sequence[Feature]) -> str:
    """Describe samples by their lengths."""
    lengths = ", ".join(str(len(feature["input_ids"])) for feature in features)
    return f"samples of {lengths} tokens"


def describe_label(tokenizer: Tokenizer, id_: int, actual: int, expected: int) -> str:
    """Describe a label of the token `id_` that differs from its sample's."""
    token = show_token(tokenizer, id_)
    if actual == IGNORED:
        return f"{token} has no label, but its sample has one"
    if expected == IGNORED:
        return f"{token} has a label, but its sample has none"
    return f"the label of {token} is {show_token(tokenizer, actual)}"


def make_collators(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    sides: Sequence[str],
) -> Iterator[tuple[Collate, Tokenizer, str]]:
    """Yield a collator for each tokenizer and side of padding, with the tokenizer and its description.

    A missing pad token becomes EOS.
    """
    for given in tokenizers:
        for side in sides:
            tokenizer = copy.deepcopy(given)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            tokenizer.padding_side = side
            with_eos = "with EOS " if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
            described = f"tokenizer pads {with_eos}on the {side}"
            with subject.called_for(f"a {described.replace(' ', ' that ', 1)}"):
                collator = make_collator(copy.deepcopy(tokenizer))
            yield collator, tokenizer, described


def collate(subject: Subject, collator: Collate, features: list[Feature]) -> dict[str, Tensor]:
    """Collate `features`. Raises: RaisedError for a malformed batch."""
    with subject.called_for(describe_lengths(features)):
        batch: Any = collator(features)
        if not hasattr(batch, "keys"):
            raise subject.returned(f"a {type(batch).__name__}", _WANTED)
        tensors = {
            key: value if isinstance(value, Tensor) else torch.as_tensor(value)
            for key, value in dict(batch).items()
        }
    for key in ("input_ids", "labels"):
        if key not in tensors:
            raise subject.returned(f"a batch without {key}", _WANTED)
        if tensors[key].dim() != 2 or tensors[key].shape != tensors["input_ids"].shape:
            raise subject.returned(f"{key} of the shape {list(tensors[key].shape)}", _WANTED)
    return tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent tokens of one sample in one row. An uncut sample is one piece."""

    row: int
    start: int
    sample: int
    offset: int
    """Position of its first token in the sample."""
    ids: list[int]
    labels: list[int]
    """Labels that the sample gives its tokens."""

    @property
    def stop(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Batch:
    """A batch with its samples."""

    tokenizer: Tokenizer
    features: Sequence[Feature]
    tensors: Mapping[str, Tensor]
    case: str
    """Description of samples and tokenizer."""

    @cached_property
    def rows(self) -> Mapping[str, list[list[int]]]:
        """Return the rows of each entry."""
        return {key: tensor.tolist() for key, tensor in self.tensors.items()}

    def row_of(self, key: str, number: int) -> list[int]:
        """Return a row of an entry. A single row is that of all samples."""
        rows = self.rows[key]
        return rows[number if number < len(rows) else 0]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Find the samples in the rows by their ids. The mask may be wrong, so it is not used."""
        samples = [feature["input_ids"] for feature in self.features]
        labels = [feature.get("labels", feature["input_ids"]) for feature in self.features]
        begins = {  # EOS is in all samples, and begins none
            id_: (sample, offset)
            for sample, ids in enumerate(samples)
            for offset, id_ in enumerate(ids)
            if id_ != self.tokenizer.eos_token_id
        }
        found: list[Piece] = []
        for row, ids in enumerate(self.rows["input_ids"]):
            piece, following = None, 0
            for at, id_ in enumerate(ids):
                if piece is None or samples[piece.sample][following : following + 1] != [id_]:
                    piece = None
                    if id_ not in begins:
                        continue
                    sample, following = begins[id_]
                    piece = Piece(row, at, sample, following, [], [])
                    found.append(piece)
                piece.ids.append(id_)
                piece.labels.append(labels[piece.sample][following])
                following += 1
        return found

    def show_rows(self) -> list[str]:
        """Show the ids of the first rows, one row per line."""
        rows = enumerate(self.rows["input_ids"][:4])
        return [f"row {number}: {show_row(self.tokenizer, row)}" for number, row in rows]

    def fault_at(self, name: str, row: int, at: int, reason: str) -> Fault:
        """Return the fault `reason` of the property `name`, shown at the position `at` of a row."""
        ids, labels = (self.rows[key][row] for key in ("input_ids", "labels"))
        shown = show_tokens(self.tokenizer, ids, labels, at)
        return Fault(name, reason, (f"{self.case}; row {row}", *shown))

    def differing_labels(
        self, rows: Iterable[int], pieces: Sequence[Piece]
    ) -> Iterator[tuple[int, int, Piece | None, int, int]]:
        """Compare the labels of these rows with those of the pieces. Other tokens must have none.

        Yields: row, position, piece (None for a token of none), actual and expected label.
        """
        expected = {
            (piece.row, at): (piece, label)
            for piece in pieces
            for at, label in enumerate(piece.labels, piece.start)
        }
        for row in rows:
            for at, actual in enumerate(self.rows["labels"][row]):
                piece, label = expected.get((row, at), (None, IGNORED))
                if actual != label:
                    yield row, at, piece, actual, label
