"""Batches to train on: real text, with the unequal token counts that faults in losses need.

Shapes: B rows, T positions.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.inputs import built_in_texts
from assay.models.folders import local_folder
from assay.models.loading.configs import load_config
from assay.models.loading.tokenizing import find_tokenizing
from assay.models.remote_code import RemoteCode
from assay.models.sources import resolve_model
from assay.parallel.pipeline_parallel.pipeline import pad_alike

# `input_ids`, `attention_mask` and `labels`, each (B, T) in int64.
MicroBatch = Mapping[str, Tensor]

# The label of a token that counts for no loss. Source: torch.nn.functional.cross_entropy.
IGNORED = -100

# Of each row, the first part is a prompt: its labels are masked, as in fine-tuning.
_PROMPT_SHARE = 4
_SHORTEST, _LONGEST = 8, 96


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
    coder: TextCoder, *, steps: int, micro_batches: int, rows: int = 2, seed: int = 0
) -> list[list[MicroBatch]]:
    """For each step its micro-batches, no two of a step with equally many label tokens.

    Rows are padded on the right; their lengths differ, and micro-batches are long and short in
    turn. A loss that averages means of micro-batches is then wrong by a factor, not by a hair.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible choice, no secret
    texts = rng.sample(built_in_texts(), len(built_in_texts()))
    ids = coder.encode("\n\n".join(texts))
    needed = steps * micro_batches * rows * _LONGEST
    ids *= -(-needed // len(ids))
    batches: list[list[MicroBatch]] = []
    for _ in range(steps):
        step: list[MicroBatch] = []
        counts: set[int] = set()
        for number in range(micro_batches):
            lengths = _draw_lengths(rng, rows, number)
            while sum(map(_num_labels, lengths)) in counts:
                lengths[0] += 1
            counts.add(sum(map(_num_labels, lengths)))
            chosen = [ids[: lengths[row]] for row in range(rows)]
            ids = ids[sum(lengths) :] + ids[: sum(lengths)]
            step.append(_pad(chosen, coder.pad_token_id))
        batches.append(step)
    return batches


def padded_alike(batch: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of a step, padded to one length."""
    rows = len(batch[0]["input_ids"])
    together = pad_alike(batch)
    return [
        {name: tensor[number * rows : (number + 1) * rows] for name, tensor in together.items()}
        for number in range(len(batch))
    ]


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


def _draw_lengths(rng: random.Random, rows: int, number: int) -> list[int]:
    middle = (_SHORTEST + _LONGEST) // 2
    low, high = (middle, _LONGEST) if number % 2 == 0 else (_SHORTEST, middle)
    lengths = [rng.randint(low, high) for _ in range(rows)]
    if rows > 1 and len(set(lengths)) == 1:
        lengths[-1] += 1
    return lengths


def _num_labels(length: int) -> int:
    return length - length // _PROMPT_SHARE


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> MicroBatch:
    length = max(map(len, rows))
    input_ids, mask, labels = [], [], []
    for row in rows:
        padding = length - len(row)
        num_prompt = len(row) - _num_labels(len(row))
        input_ids.append([*row, *[pad_token_id] * padding])
        mask.append([1] * len(row) + [0] * padding)
        labels.append([IGNORED] * num_prompt + list(row[num_prompt:]) + [IGNORED] * padding)
    return {
        "input_ids": torch.tensor(input_ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }
