"""Batches to train on: real text, with the unequal token counts that faults in losses need.

Shapes: B rows, T positions.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.inputs import built_in_texts
from assay.models.folders import local_folder
from assay.models.loading.configs import load_config
from assay.models.loading.tokenizing import find_tokenizing
from assay.models.remote_code import RemoteCode
from assay.models.sources import resolve_model
from assay.training.shapes import EQUAL_IN_A_STEP, Shapes

# `input_ids`, `attention_mask` and `labels`, each (B, T) in int64.
MicroBatch = Mapping[str, Tensor]

# The label of a token that counts for no loss. Source: torch.nn.functional.cross_entropy.
IGNORED = -100

# Of each row, the first part is a prompt: its labels are masked, as in fine-tuning.
_PROMPT_SHARE = 4

# Rows of the micro-batches of a run, in turn: kernels take other ways for a single row.
ROWS = (2, 1, 3)

# Tokens of the longest row of a micro-batch, long and short in turn, those of a step one after the
# other: about powers of two, and multiples of one, as kernels divide tokens into tiles of such sizes.
_LONG, _SHORT = (64, 96), (16, 32)
# Added to them in turn: the last tile is nearly full, full, or has a single token.
_BESIDE = (-1, 0, 1)
_SHORTEST = 8

# A text repeats itself here and there; a vocabulary that knows none of its words has nothing else.
_DRAWS = 10

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class TextCoder:
    """How the text of a batch becomes ids."""

    encode: Callable[[str], list[int]]
    pad_token_id: int


def coder_of(model: str, remote_code: RemoteCode = "refuse") -> TextCoder:
    """The coder of MODEL, without loading its weights."""
    source = resolve_model(model)
    with local_folder(source, remote_code) as folder:
        config = load_config(folder, remote_code).get_text_config()
        tokenizing = find_tokenizing(
            folder,
            model,
            vocab_size=config.vocab_size,
            bos_token_id=getattr(config, "bos_token_id", None),
            remote_code=remote_code,
        )
    pads = (tokenizing.pad_token_id, getattr(config, "pad_token_id", None), 0)
    return TextCoder(tokenizing.encode, next(pad for pad in pads if pad is not None))


def training_batches(
    coder: TextCoder,
    *,
    steps: int,
    micro_batches: int,
    rows: Sequence[int] = ROWS,
    shapes: Shapes = "unequal",
    seed: int = 0,
) -> list[list[MicroBatch]]:
    """For each step its micro-batches, no two of a step with equally many label tokens.

    No two rows begin at the same place of the text, and those of a micro-batch differ in length and
    begin with other tokens: a value of another row is then another value. They are padded on the right and on the left in
    turn. Micro-batches are long and short in turn: a loss that averages means of micro-batches is
    then wrong by a factor, not by a hair.

    rows: how many a micro-batch has, in turn; where a step or a run has equal shapes, all of it.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible choice, no secret
    text = _rows_of_text(coder, rng)
    beside = rng.sample(_BESIDE, len(_BESIDE))
    lengths: list[list[list[int]]] = []
    for step in range(steps):
        drawn: list[list[int]] = []
        for number in range(micro_batches):
            count = rows[_turn(shapes, step, number) % len(rows)]
            longest = (_LONG, _SHORT)[number % 2][step % 2] + beside[(step + number) % len(beside)]
            drawn.append(_draw_lengths(rng, count, longest, drawn))
        lengths.append(drawn)
    sides: Iterator[Side] = cycle(("right", "left"))
    return [
        [_pad(_draw_rows(text, n), max(width, *n), sides, coder.pad_token_id) for n in drawn]
        for width, drawn in zip(_widths(lengths, shapes), lengths, strict=True)
    ]


def _turn(shapes: Shapes, step: int, number: int) -> int:
    """Whose turn it is of the numbers of rows, for micro-batch `number` of a step."""
    if shapes == "equal-in-all-steps":
        return 0
    return step if _is_equal(shapes, step) else step + number


def _widths(lengths: Sequence[Sequence[Sequence[int]]], shapes: Shapes) -> list[int]:
    """Tokens to which the micro-batches of each step are padded at least."""
    widths = [
        max(map(max, step)) if _is_equal(shapes, number) else 0
        for number, step in enumerate(lengths)
    ]
    return [max(widths)] * len(widths) if shapes == "equal-in-all-steps" else widths


def _is_equal(shapes: Shapes, step: int) -> bool:
    """Whether the micro-batches of a step have one shape."""
    return shapes in EQUAL_IN_A_STEP or (shapes == "equal-first-step" and step == 0)


def count_label_tokens(micro_batch: MicroBatch) -> int:
    """Tokens that a causal model is judged by: unmasked labels, but for the first of each row."""
    return int((micro_batch["labels"][:, 1:] != IGNORED).sum())


def copied(batch: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches in memory of their own: a trainer may change what it is given."""
    return [{name: tensor.clone() for name, tensor in one.items()} for one in batch]


def check_batch(batch: Sequence[MicroBatch]) -> int:
    """The label tokens of a whole step. Raises: UsageError if there are none."""
    count = sum(map(count_label_tokens, batch))
    if not count:
        raise UsageError(
            "a training step has no unmasked label token: its loss is a mean of nothing"
        )
    return count


def with_first_labels(micro_batch: MicroBatch) -> MicroBatch:
    """`micro_batch` with the first token of each row among its labels, as text without a prompt has it.

    It counts for no loss, unless rows that are laid end to end take it for what follows the row before.
    """
    begins = micro_batch["attention_mask"][:, 0] != 0  # not padded on the left
    labels = micro_batch["labels"].clone()
    labels[begins, 0] = micro_batch["input_ids"][begins, 0]
    return {**micro_batch, "labels": labels}


def pack_rows(batch: Sequence[MicroBatch]) -> MicroBatch:
    """All rows of `batch` laid end to end in one, without padding: a batch without a mask.

    Returns: `input_ids`, `labels` and `position_ids`, (1, T); positions begin anew with each row, whose
        first token is no label: the row before it says nothing of it.
    """
    rows = [
        {name: one[name][row][one["attention_mask"][row] != 0] for name in ("input_ids", "labels")}
        for one in batch
        for row in range(len(one["input_ids"]))
    ]
    for row in rows:
        row["position_ids"] = torch.arange(len(row["labels"]))
        row["labels"][0] = IGNORED
    return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def _rows_of_text(coder: TextCoder, rng: random.Random) -> Callable[[int], list[int]]:
    """A function whose every call returns as many ids as asked for, from where the last one ended."""
    texts = rng.sample(built_in_texts(), len(built_in_texts()))
    ids = cycle(coder.encode("\n\n".join(texts)))
    return lambda count: list(islice(ids, count))


def _draw_rows(text: Callable[[int], list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Rows of these lengths, no two with one beginning, if the text is not a single token."""
    rows: list[list[int]] = []
    for length in lengths:
        draws = [text(length)]
        while len(draws) < _DRAWS and any(
            draws[-1][:_SHORTEST] == other[:_SHORTEST] for other in rows
        ):
            draws.append(text(length))
        rows.append(draws[-1])
    return rows


def _draw_lengths(
    rng: random.Random, rows: int, longest: int, others: Sequence[Sequence[int]]
) -> list[int]:
    """The lengths of the rows of a micro-batch, no two alike; one has `longest`, or just more.

    others: those of the step's other micro-batches, of which none has as many tokens in its longest
        row, or as many label tokens.
    """
    shorter = rng.sample(range(_SHORTEST, longest), rows - 1)
    place = rng.randrange(rows)
    lengths = [*shorter[:place], longest, *shorter[place:]]
    while any(
        max(lengths) == max(other) or _count_labels(lengths) == _count_labels(other)
        for other in others
    ):
        lengths[place] += 1
    return lengths


def _count_labels(lengths: Sequence[int]) -> int:
    return sum(map(_num_labels, lengths))


def _num_labels(length: int) -> int:
    return length - length // _PROMPT_SHARE


def _pad(
    rows: Sequence[Sequence[int]], width: int, sides: Iterator[Side], pad_token_id: int
) -> MicroBatch:
    """The rows padded to `width`; a side is taken from `sides` if any row needs padding."""
    padded = any(len(row) < width for row in rows)
    left = padded and next(sides) == "left"

    def fill(row: Sequence[int], value: int) -> list[int]:
        padding = [value] * (width - len(row))
        return [*padding, *row] if left else [*row, *padding]

    prompts = [len(row) - _num_labels(len(row)) for row in rows]
    return {
        "input_ids": torch.tensor([fill(row, pad_token_id) for row in rows]),
        "attention_mask": torch.tensor([fill([1] * len(row), 0) for row in rows]),
        "labels": torch.tensor(
            [
                fill([IGNORED] * prompt + list(row[prompt:]), IGNORED)
                for row, prompt in zip(rows, prompts, strict=True)
            ]
        ),
    }
