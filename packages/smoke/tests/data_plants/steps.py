"""Backward passes of one step by users: a correct one, and known mistakes."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MicroBatches = Sequence[Mapping[str, Tensor]]


def right(model: Any, micro_batches: MicroBatches, num_step_tokens: int, num_ranks: int) -> None:
    for micro in micro_batches:
        logits_BTV = model(
            input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]
        ).logits
        total = functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), micro["labels"][:, 1:].flatten(), reduction="sum"
        )
        (total / num_step_tokens * num_ranks).backward()


def mean_of_means(model: Any, micro_batches: MicroBatches, _: int, __: int) -> None:
    for micro in micro_batches:
        (model(**micro).loss / len(micro_batches)).backward()


def mean_of_ranks(model: Any, micro_batches: MicroBatches, _: int, __: int) -> None:
    """Count label tokens on this rank alone."""
    count = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in micro_batches)
    for micro in micro_batches:
        model(**micro, num_items_in_batch=max(count, 1)).loss.backward()


def summed_means(model: Any, micro_batches: MicroBatches, _: int, __: int) -> None:
    for micro in micro_batches:
        model(**micro).loss.backward()


def first_labels_counted(model: Any, micro_batches: MicroBatches, _: int, num_ranks: int) -> None:
    """Count the first label of a row, which no token predicts."""
    count = sum(int((micro["labels"] != -100).sum()) for micro in micro_batches)
    for micro in micro_batches:
        (model(**micro, num_items_in_batch=count).loss * num_ranks).backward()


def averaged_once_more(
    model: Any, micro_batches: MicroBatches, num_step_tokens: int, _: int
) -> None:
    """Divide the sum over all ranks, although the reduction averages too."""
    for micro in micro_batches:
        model(**micro, num_items_in_batch=num_step_tokens).loss.backward()


def last_only(model: Any, micro_batches: MicroBatches, _: int, __: int) -> None:
    for micro in micro_batches:
        model.zero_grad()
        model(**micro).loss.backward()


def divided_by_the_full_number(model: Any, micro_batches: MicroBatches, _: int, __: int) -> None:
    """Divide by the configured number of micro-batches, although the last step of an epoch has fewer."""
    configured = 4
    for micro in micro_batches:
        (model(**micro).loss / configured).backward()


def first_lost(
    model: Any, micro_batches: MicroBatches, num_step_tokens: int, num_ranks: int
) -> None:
    """Leave out the first of several micro-batches."""
    right(model, micro_batches[1:] or micro_batches, num_step_tokens, num_ranks)


def _autocast(dtype: torch.dtype, step: Any) -> Any:
    def backward(model: Any, micro_batches: MicroBatches, *numbers: int) -> None:
        with torch.autocast("cpu", dtype=dtype):
            step(model, micro_batches, *numbers)

    return backward


right_in_bfloat16 = _autocast(torch.bfloat16, right)
right_in_float16 = _autocast(torch.float16, right)
mean_of_means_in_bfloat16 = _autocast(torch.bfloat16, mean_of_means)
first_labels_counted_in_bfloat16 = _autocast(torch.bfloat16, first_labels_counted)
last_only_in_bfloat16 = _autocast(torch.bfloat16, last_only)


def right_on_a_narrow_copy(model: Any, micro_batches: MicroBatches, *numbers: int) -> None:
    """Compute with a bfloat16 copy of the weights."""
    narrow = copy.deepcopy(model).bfloat16()
    narrow.zero_grad()
    right(narrow, micro_batches, *numbers)
    for wide, one in zip(model.parameters(), narrow.parameters(), strict=True):
        wide.grad = None if one.grad is None else one.grad.float()


def without_the_head(model: Any, micro_batches: MicroBatches, *numbers: int) -> None:
    """Lose the gradient of one parameter."""
    right(model, micro_batches, *numbers)
    model.lm_head.weight.grad = None


def clipped(model: Any, micro_batches: MicroBatches, *numbers: int) -> None:
    """Clip before the average over ranks."""
    right(model, micro_batches, *numbers)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
