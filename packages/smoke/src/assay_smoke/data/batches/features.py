"""Samples to collate: no id twice in a batch, so that every token can be told from all others."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from assay_smoke.data.protocols import IGNORED, Collate, Feature
from assay_smoke.data.running_code import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# `masked`: as in fine-tuning, the begin of a sample has no labels. `plain`: samples have no key
# `labels`, and every token counts.
FeatureKind = Literal["masked", "plain"]

Lengths = tuple[int, ...]

_WANTED = "a mapping with input_ids and labels, each a tensor (B, T)"

# Ids that every model has, and bytes in byte-level vocabularies; letters first, to read them well.
_NUM_IDS = 256
_LETTERS = (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))
_IDS = (*_LETTERS, *(id_ for id_ in range(_NUM_IDS) if id_ not in _LETTERS))


@dataclass(frozen=True, slots=True)
class PaddedTokenizer:
    """A tokenizer prepared for one case: `described` says how it pads."""

    tokenizer: "PreTrainedTokenizerBase"
    described: str


def padding_variants(tokenizers: Sequence["PreTrainedTokenizerBase"]) -> Iterator[PaddedTokenizer]:
    """Each tokenizer padding on the right, then on the left; without a pad token it pads with EOS."""
    for given in tokenizers:
        for side in ("right", "left"):
            tokenizer = copy.deepcopy(given)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            tokenizer.padding_side = side
            with_eos = "with EOS " if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
            yield PaddedTokenizer(tokenizer, f"pads {with_eos}on the {side}")


def make_features(
    tokenizer: "PreTrainedTokenizerBase", lengths: Lengths, kind: FeatureKind
) -> list[Feature]:
    """Samples of these lengths: distinct ids, then EOS; of masked ones, the first half has no labels.

    Every sample longer than one token ends with EOS, the one id that several of them have.
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
    """The labels that the tokens of a sample must have."""
    return feature.get("labels", feature["input_ids"])


def collate(subject: Subject, collator: Collate, features: list[Feature]) -> Mapping[str, Tensor]:
    """The batch of `features`. Raises: RaisedError if it is none."""
    lengths = [len(feature["input_ids"]) for feature in features]
    with subject.called_for(f"samples of {', '.join(map(str, lengths))} tokens"):
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
