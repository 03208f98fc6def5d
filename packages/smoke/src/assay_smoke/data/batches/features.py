"""Samples to collate, without repeated ids in a batch, so that every token is recognizable."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from assay_smoke.data.properties import Subject, Violation
from assay_smoke.data.protocols import IGNORED, Collate, Feature, Tokenizer
from assay_smoke.data.tokens import show_row, show_token, show_tokens

# `masked`: the first half of a sample has no labels, as in fine-tuning. `plain`: samples have no key
# `labels`, and every token counts.
FeatureKind = Literal["masked", "plain"]

Lengths = tuple[int, ...]

_WANTED = "a mapping with input_ids and labels, each a tensor (B, T)"

# Ids that every model has. They are bytes in byte-level vocabularies. Letters come first, for display.
_NUM_IDS = 256
_LETTERS = (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))
_IDS = (*_LETTERS, *(id_ for id_ in range(_NUM_IDS) if id_ not in _LETTERS))


@dataclass(frozen=True, slots=True)
class PaddedTokenizer:
    """A tokenizer prepared for one case."""

    tokenizer: Tokenizer
    described: str
    """Description of its padding."""


def padding_variants(tokenizers: Sequence[Tokenizer]) -> Iterator[PaddedTokenizer]:
    """Yield each tokenizer padding on the right, then on the left. A missing pad token becomes EOS."""
    for given in tokenizers:
        for side in ("right", "left"):
            tokenizer = copy.deepcopy(given)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            tokenizer.padding_side = side
            with_eos = "with EOS " if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
            yield PaddedTokenizer(tokenizer, f"pads {with_eos}on the {side}")


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


def expected_labels(feature: Feature) -> list[int]:
    """Return the labels that the tokens of a sample must have."""
    return feature.get("labels", feature["input_ids"])


def describe_label(tokenizer: Tokenizer, id_: int, actual: int, expected: int) -> str:
    """Describe a label of the token `id_` that differs from its sample's."""
    token = show_token(tokenizer, id_)
    if actual == IGNORED:
        return f"{token} has no label, but its sample has one"
    if expected == IGNORED:
        return f"{token} has a label, but its sample has none"
    return f"the label of {token} is {show_token(tokenizer, actual)}"


@dataclass(frozen=True)
class CollatedBatch:
    """A batch with its samples."""

    tokenizer: Tokenizer
    features: Sequence[Feature]
    tensors: Mapping[str, Tensor]
    case: str
    """Description of samples and tokenizer."""

    @cached_property
    def ids(self) -> list[list[int]]:
        """Return the ids of each row."""
        rows: list[list[int]] = self.tensors["input_ids"].tolist()
        return rows

    @cached_property
    def labels(self) -> list[list[int]]:
        """Return the labels of each row."""
        rows: list[list[int]] = self.tensors["labels"].tolist()
        return rows

    def rows_of(self, key: str) -> list[list[int]] | None:
        """Return another entry of the batch by row, or None if it has no such key."""
        return self.tensors[key].tolist() if key in self.tensors else None

    def show_rows(self) -> list[str]:
        """Show the ids of the first rows, one row per line."""
        rows = enumerate(self.ids[:4])
        return [f"row {number}: {show_row(self.tokenizer, row)}" for number, row in rows]

    def violation_at(self, row: int, at: int, reason: str) -> Violation:
        """Return the violation `reason`, shown at the position `at` of a row."""
        shown = show_tokens(self.tokenizer, self.ids[row], self.labels[row], at)
        return Violation(reason, (f"{self.case}; row {row}", *shown))


def describe_lengths(features: Sequence[Feature]) -> str:
    """Describe samples by their lengths."""
    lengths = ", ".join(str(len(feature["input_ids"])) for feature in features)
    return f"samples of {lengths} tokens"


def collate(subject: Subject, collator: Collate, features: list[Feature]) -> Mapping[str, Tensor]:
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
