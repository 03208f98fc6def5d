"""Plans training batches of real text, with unequal token counts that expose faults in losses.

Shapes: B rows, T positions.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import torch

from assay.errors import UsageError
from assay.inputs import built_in_texts
from assay.models.config_files import find_tokenizing, load_config
from assay.models.sources import RemoteCode, resolve_model, weightless_folder
from assay.training.losses import IGNORED, LOSSES
from assay.training.protocol import EQUAL_IN_A_STEP, NEXT_TOKEN, MicroBatch, Shapes
from assay.training.reports import TrainOptions

# One of so many parts of each row is a prompt with masked labels, as in fine-tuning.
PROMPT_SHARE = 4

# Rows of the micro-batches of a run, in turn: kernels have other code paths for a single row.
ROWS = (2, 1, 3)

# Tokens of the longest row of a micro-batch, long and short in turn. They are near multiples of powers
# of two, the tile sizes of kernels.
_LONG, _SHORT = (64, 96), (16, 32)
# Added to them in turn, so that the last tile is nearly full, full, or has a single token.
_OFFSETS = (-1, 0, 1)
_SHORTEST = 8

# Draws of a row until its beginning is new: texts repeat, and a tokenizer may map all to one token.
_DRAWS = 10

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class TextCoder:
    """Encodes the text of a batch."""

    encode: Callable[[str], list[int]]
    pad_token_id: int


def coder_of(model: str, remote_code: RemoteCode = "refuse") -> TextCoder:
    """Return the coder of MODEL, without loading its weights."""
    source = resolve_model(model)
    with weightless_folder(source, remote_code) as folder:
        config = load_config(folder, remote_code).get_text_config()
        tokenizing = find_tokenizing(
            folder,
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
    longest: int | None = None,
) -> list[list[MicroBatch]]:
    """Plan the micro-batches of each step, all with different numbers of label tokens in a step.

    Rows start at different places of the text. Rows of a micro-batch differ in length and in their
    first tokens, so that mixed-up rows change values. Padding is on the right and on the left in
    turn. Micro-batches are long and short in turn, so that a loss that averages means of
    micro-batches is wrong by a large factor.

    rows: numbers of rows of the micro-batches, in turn; one for all micro-batches of equal shape.
    longest: tokens of the longest row that the model can read; None without a limit.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible choice, no secret
    text = _rows_of_text(coder, rng)
    offsets = rng.sample(_OFFSETS, len(_OFFSETS))
    lengths: list[list[list[int]]] = []
    for step in range(steps):
        drawn: list[list[int]] = []
        for number in range(micro_batches):
            count = rows[_turn(shapes, step, number) % len(rows)]
            offset = offsets[(step + number) % len(offsets)]
            tokens = (_LONG, _SHORT)[number % 2][step % 2] + offset
            drawn.append(_draw_lengths(rng, count, tokens, drawn))
        lengths.append([[min(one, longest or one) for one in row] for row in drawn])
    sides: Iterator[Side] = cycle(("right", "left"))
    return [
        [_pad(_draw_rows(text, n), max(width, *n), sides, coder.pad_token_id) for n in drawn]
        for width, drawn in zip(_widths(lengths, shapes), lengths, strict=True)
    ]


def _turn(shapes: Shapes, step: int, number: int) -> int:
    """Return the index into the numbers of rows for micro-batch `number` of a step."""
    if shapes == "equal-in-all-steps":
        return 0
    return step if _is_equal(shapes, step) else step + number


def _widths(lengths: Sequence[Sequence[Sequence[int]]], shapes: Shapes) -> list[int]:
    """Return the least padded length of the micro-batches of each step."""
    widths = [
        max(map(max, step)) if _is_equal(shapes, number) else 0
        for number, step in enumerate(lengths)
    ]
    return [max(widths)] * len(widths) if shapes == "equal-in-all-steps" else widths


def _is_equal(shapes: Shapes, step: int) -> bool:
    return shapes in EQUAL_IN_A_STEP or (shapes == "equal-first-step" and step == 0)


def count_label_tokens(micro_batch: MicroBatch, loss: str = NEXT_TOKEN) -> int:
    """Count the labels that the loss of a plan counts.

    Of a causal model these are the unmasked labels except the first of each row.
    """
    return LOSSES[loss].count(micro_batch["labels"])


def copied(batch: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Copy the micro-batches, because a trainer may change them in place."""
    return [{name: tensor.clone() for name, tensor in one.items()} for one in batch]


def check_batch(batch: Sequence[MicroBatch], loss: str = NEXT_TOKEN) -> int:
    """Count the label tokens of a whole step. Raises: UsageError if there are none."""
    count = sum(count_label_tokens(one, loss) for one in batch)
    if not count:
        raise UsageError(
            "a training step has no unmasked label token: its loss is a mean of nothing"
        )
    return count


def with_first_labels(micro_batch: MicroBatch) -> MicroBatch:
    """Return `micro_batch` with a label for the first token of each row, as in text without prompt.

    Only a faulty packing, which predicts it from the previous row, uses that label.
    """
    begins = micro_batch["attention_mask"][:, 0] != 0  # without padding on the left
    labels = micro_batch["labels"].clone()
    labels[begins, 0] = micro_batch["input_ids"][begins, 0]
    return {**micro_batch, "labels": labels}


def pack_rows(batch: Sequence[MicroBatch]) -> MicroBatch:
    """Pack all rows of `batch` into one, without padding and attention mask.

    Returns: `input_ids`, `labels` and `position_ids`, (1, T). Positions restart at each row, whose first
        label is masked.
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
    """Return a function that returns the next COUNT ids of the text at each call."""
    texts = rng.sample(built_in_texts(), len(built_in_texts()))
    ids = cycle(coder.encode("\n\n".join(texts)))
    return lambda count: list(islice(ids, count))


def _draw_rows(text: Callable[[int], list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Draw rows of these lengths with different beginnings, if the text allows."""
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
    """Draw different lengths for the rows of a micro-batch, the longest at least `longest`.

    others: lengths in the step's other micro-batches, whose longest rows and numbers of label tokens
        must differ.
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
    return length - length // PROMPT_SHARE


def _pad(
    rows: Sequence[Sequence[int]], width: int, sides: Iterator[Side], pad_token_id: int
) -> MicroBatch:
    """Pad the rows to `width`, on the next of `sides` if any row needs padding."""
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


Batches = Sequence[Sequence[MicroBatch]]


def plan_batches(options: TrainOptions) -> Batches:
    """Plan the batches of both sides. Raises: UsageError if a step has no label token."""
    batches = training_batches(
        coder_of(options.model, options.remote_code),
        steps=options.steps,
        micro_batches=options.micro_batches,
        shapes=options.shapes,
        seed=options.seed,
    )
    for batch in batches:
        check_batch(batch)
    return batches
