"""Rows of text for each step, drawn by seed and step alone: a resumed run draws the same.

Shapes: B rows, T tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from assay.training.batches import IGNORED, MicroBatch, TextCoder
from assay_bench.tuning.recipe import TuningRecipe
from assay_bench.tuning.texts import Text, read_training_text

# A token of the tokenizers in use has about 4 characters of English; of spaces it may have more.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Source:
    """A text by its name in the recipe; share: of the rows, of a total of 1."""

    name: str
    text: Text
    share: float


def read_sources(recipe: TuningRecipe, folder: Path) -> list[Source]:
    """The texts of a recipe; `folder`: at which its relative paths begin. Raises: TextError."""
    total = sum(one.share for one in recipe.data)
    return [
        Source(one.source, read_training_text(one.source, folder), one.share / total)
        for one in recipe.data
    ]


def draw_step(
    sources: Sequence[Source],
    recipe: TuningRecipe,
    coder: TextCoder,
    *,
    seed: int,
    step: int,
    ranks: int,
) -> list[MicroBatch]:
    """The micro-batches of a step, one for each rank; together they have the same rows for any ranks."""
    rng = random.Random(f"{seed}/{step}")  # noqa: S311 - reproducible draws, no secret
    chosen = _take_turns(sources, recipe.batch_size)
    rows = [_draw(one.text.training, coder, recipe.sequence_length, rng) for one in chosen]
    return [_pad(rows[rank::ranks], coder.pad_token_id) for rank in range(ranks)]


def held_out_rows(
    source: Source, recipe: TuningRecipe, coder: TextCoder, num_rows: int
) -> list[MicroBatch]:
    """Rows of the held-out part of `source`, one in each micro-batch; the same for all seeds."""
    rng = random.Random("held out")  # noqa: S311 - as above
    rows = [
        _draw(source.text.held_out, coder, recipe.sequence_length, rng) for _ in range(num_rows)
    ]
    return [_pad([row], coder.pad_token_id) for row in rows]


def _take_turns(sources: Sequence[Source], num_rows: int) -> list[Source]:
    """Of which source each row is: as many of each in every batch as its share says.

    Rows of one source follow each other, so that every stride of ranks has its part of each.
    """
    counts = [0] * len(sources)
    for row in range(1, num_rows + 1):
        behind = max(range(len(sources)), key=lambda key: sources[key].share * row - counts[key])
        counts[behind] += 1
    return [source for source, count in zip(sources, counts, strict=True) for _ in range(count)]


def _draw(text: str, coder: TextCoder, length: int, rng: random.Random) -> list[int]:
    """The ids of `length` tokens from the beginning of a line; fewer where the text has no more."""
    start = text.find("\n", rng.randrange(len(text))) + 1
    wanted = length * _CHARACTERS_PER_TOKEN
    piece = text[start : start + wanted]
    if len(piece) < wanted:
        piece += text[: wanted - len(piece)]
    return coder.encode(piece)[:length]


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> MicroBatch:
    """Tensors (B, T), padded on the right."""
    width = max(map(len, rows))

    def fill(values: Sequence[int], value: int) -> list[int]:
        return [*values, *[value] * (width - len(values))]

    return {
        "input_ids": torch.tensor([fill(row, pad_token_id) for row in rows]),
        "attention_mask": torch.tensor([fill([1] * len(row), 0) for row in rows]),
        "labels": torch.tensor([fill(row, IGNORED) for row in rows]),
    }
