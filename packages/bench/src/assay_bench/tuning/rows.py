"""Rows of text for each step. They depend only on seed and step, so a resumed run draws the same rows.

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

# Common tokenizers have about 4 characters of English per token, and more for spaces.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Source:
    """A text of the recipe."""

    name: str
    text: Text
    share: float
    """Share of the rows; all shares add up to 1."""


def read_sources(recipe: TuningRecipe, folder: Path) -> list[Source]:
    """Read the texts of a recipe. folder: folder of its relative paths. Raises: UsageError."""
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
    """Draw the micro-batches of a step, one per rank. All together have the same rows for any `ranks`."""
    rng = random.Random(f"{seed}/{step}")  # noqa: S311 - reproducible
    chosen = _choose_sources(sources, recipe.batch_size)
    rows = [_draw(one.text.training, coder, recipe.sequence_length, rng) for one in chosen]
    return [_pad(rows[rank::ranks], coder.pad_token_id) for rank in range(ranks)]


def held_out_rows(
    source: Source, recipe: TuningRecipe, coder: TextCoder, num_rows: int
) -> list[MicroBatch]:
    """Draw held-out rows, one per micro-batch, the same for all seeds."""
    rng = random.Random("held out")  # noqa: S311 - reproducible
    rows = [
        _draw(source.text.held_out, coder, recipe.sequence_length, rng) for _ in range(num_rows)
    ]
    return [_pad([row], coder.pad_token_id) for row in rows]


def _choose_sources(sources: Sequence[Source], num_rows: int) -> list[Source]:
    """Return the source of each row, in proportion to the shares.

    Rows of one source are adjacent, so that every rank's stride gets its part of each source.
    """
    counts = [0] * len(sources)
    for row in range(1, num_rows + 1):
        behind = max(range(len(sources)), key=lambda key: sources[key].share * row - counts[key])
        counts[behind] += 1
    return [source for source, count in zip(sources, counts, strict=True) for _ in range(count)]


def _draw(text: str, coder: TextCoder, length: int, rng: random.Random) -> list[int]:
    """Return `length` token ids from the start of a line; fewer if the text is too short."""
    start = text.find("\n", rng.randrange(len(text))) + 1
    wanted = length * _CHARACTERS_PER_TOKEN
    piece = text[start : start + wanted]
    if len(piece) < wanted:
        piece += text[: wanted - len(piece)]
    return coder.encode(piece)[:length]


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> MicroBatch:
    """Make tensors (B, T), padded on the right."""
    width = max(map(len, rows))

    def fill(values: Sequence[int], value: int) -> list[int]:
        return [*values, *[value] * (width - len(values))]

    return {
        "input_ids": torch.tensor([fill(row, pad_token_id) for row in rows]),
        "attention_mask": torch.tensor([fill([1] * len(row), 0) for row in rows]),
        "labels": torch.tensor([fill(row, IGNORED) for row in rows]),
    }
