"""Checks that a step over micro-batches and ranks has the gradient of one big batch.

The loss is the mean over all label tokens of the step. A mean of the micro-batches' means would give
tokens of short micro-batches too much weight.

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.models import load_model
from assay_smoke.data.properties import PropertyLog, Subject, SubjectReport, Violation
from assay_smoke.data.protocols import IGNORED, BackwardStep

SAME_GRADIENT = "a step's gradient is that of one big batch"

MicroBatch = Mapping[str, Tensor]

# Numbers of label tokens by rank, micro-batch and row.
Step = Sequence[Sequence[Sequence[int]]]

# Smallest first: one micro-batch, equal ones, unequal ones, unequal ones over ranks and rows. The last
# step has a micro-batch without labels.
STEPS: tuple[Step, ...] = (
    (((4,),),),
    (((4,), (4,)),),
    (((2,), (11,)),),
    (((2,),), ((11,),)),
    (((3, 1), (9,)), ((2,), (6, 5))),
    (((1,), (7,), (2, 12)), ((5,), (1, 1), (3,))),
    (((5,), (0,)),),
)

# Tokens of each row before the predicted ones. A prompt of three tokens without labels leaves as many
# labels as predicted tokens. A single labeled token, which nothing predicts, adds one label per row.
_PROMPTS = {"masked": 3, "plain": 1}
Kind = Literal["masked", "plain"]

# Limit of the gradient's relative error in float32. 120 clean steps of up to six micro-batches reach
# 5e-8. A mean of means changes the gradients of the unequal steps above by at least 0.59.
LIMIT = 1e-3


def check_accumulation(
    subject: Subject,
    backward_step: BackwardStep,
    steps: Sequence[Step] = STEPS,
    model_name: str = "micro:llama",
) -> SubjectReport:
    """Compare the gradient of each step, averaged over ranks, with that of one big batch."""
    log = PropertyLog(subject.name, (SAME_GRADIENT,))
    model = load_model(model_name, dtype="float32").model
    for step, kind in product(steps, get_args(Kind)):
        ranks = [[_micro_batch(rows, kind, _seed(step)) for rows in rank] for rank in step]
        num_step_tokens = sum(rows for rank in step for micro in rank for rows in micro)
        case = describe_step(step, kind)
        parts = []
        for micro_batches in ranks:
            model.zero_grad(set_to_none=True)
            with subject.called_for(case):
                backward_step(model, micro_batches, num_step_tokens, len(ranks))
            parts.append(_vector_of_gradients(model))
        actual = torch.stack(parts).mean(0)
        log.judge(SAME_GRADIENT, _find_difference(model, ranks, actual, case))
    return log.report()


def describe_step(step: Step, kind: Kind) -> str:
    """Describe the label tokens of a step's micro-batches."""
    by_rank = [" and ".join(str(sum(rows)) for rows in rank) for rank in step]
    where = f"one rank, micro-batches of {by_rank[0]} predicted tokens"
    if len(step) > 1:
        where = "micro-batches of " + ", ".join(
            f"{tokens} predicted tokens on rank {rank}" for rank, tokens in enumerate(by_rank)
        )
    prompt = "a prompt without labels" if kind == "masked" else "one token with a label"
    return f"{where}, each row after {prompt}"


def _seed(step: Step) -> int:
    return sum(tokens for rank in step for micro in rank for tokens in micro)


def _micro_batch(num_labels: Sequence[int], kind: Kind, seed: int) -> MicroBatch:
    """Make rows of random letters, each a prompt and `num_labels` predicted tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed + sum(num_labels) * 101)
    prompt = _PROMPTS[kind]
    width = prompt + max(num_labels)
    shape = (len(num_labels), width)
    ids_BT = torch.randint(ord("a"), ord("z") + 1, shape, generator=generator)
    mask_BT = torch.zeros(shape, dtype=torch.int64)
    labels_BT = torch.full(shape, IGNORED)
    for row, count in enumerate(num_labels):
        stop = prompt + count
        first_label = prompt if kind == "masked" else 0
        mask_BT[row, :stop] = 1
        labels_BT[row, first_label:stop] = ids_BT[row, first_label:stop]
    ids_BT = ids_BT * mask_BT
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}


def _find_difference(
    model: Any,  # noqa: ANN401 - transformers
    ranks: Sequence[Sequence[MicroBatch]],
    actual: Tensor,
    case: str,
) -> Violation | None:
    everything = [micro for rank in ranks for micro in rank]
    expected = _gradient(model, [(micro, _count(everything)) for micro in everything])
    error = _error(actual, expected)
    if error <= LIMIT:
        return None
    if not torch.isfinite(actual).all():
        return Violation("the gradient is not finite", (case,))
    # The factor by which the expected gradient comes nearest.
    factor = float(actual @ expected / (expected @ expected))
    reason = f"the gradient has relative error {error:.3g} against one big batch (limit {LIMIT:g})"
    for meaning, weighted in _mistakes(ranks):
        if not all(divisor for _, divisor in weighted):
            continue
        if _error(actual, _gradient(model, weighted)) <= LIMIT:
            return Violation(f"{reason}: it is {meaning}", (case,))
    if _error(actual, expected * factor) <= LIMIT:
        reason += f": it is {factor:.4g} times that"
    return Violation(reason, (case,))


def _mistakes(
    ranks: Sequence[Sequence[MicroBatch]],
) -> Iterator[tuple[str, list[tuple[MicroBatch, float]]]]:
    """Yield known wrong normalizations, each with the divisor of every micro-batch's sum."""
    num_ranks = len(ranks)
    yield (
        "the mean of the micro-batches' own means",
        [(one, _count([one]) * len(rank) * num_ranks) for rank in ranks for one in rank],
    )
    yield (
        "the mean of the ranks' own means",
        [(one, _count(rank) * num_ranks) for rank in ranks for one in rank],
    )
    yield (
        "the sum of the micro-batches' means, not divided by their number",
        [(one, _count([one]) * num_ranks) for rank in ranks for one in rank],
    )
    labels = sum(int((one["labels"] != IGNORED).sum()) for rank in ranks for one in rank)
    yield (
        "divided by all labels, although no token predicts the first label of a row",
        [(one, labels) for rank in ranks for one in rank],
    )
    yield (
        "the gradient of each rank's last micro-batch alone",
        [(rank[-1], _count([rank[-1]]) * num_ranks) for rank in ranks],
    )


def _count(micro_batches: Sequence[MicroBatch]) -> int:
    return sum(int((micro["labels"][:, 1:] != IGNORED).sum()) for micro in micro_batches)


def _gradient(model: Any, weighted: Sequence[tuple[MicroBatch, float]]) -> Tensor:  # noqa: ANN401
    """Compute the gradient of the micro-batches' summed token losses, each over its divisor."""
    model.zero_grad(set_to_none=True)
    for micro, divisor in weighted:
        inputs = {key: micro[key] for key in ("input_ids", "attention_mask")}
        logits_BTV = model(**inputs, use_cache=False).logits
        total = functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            micro["labels"][:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (total / divisor).backward()
    gradients = _vector_of_gradients(model)
    model.zero_grad(set_to_none=True)
    return gradients


def _vector_of_gradients(model: nn.Module) -> Tensor:
    """Return the gradients of a model's parameters as one float64 vector."""
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in model.parameters()
    ]
    return torch.cat([part.detach().double().flatten() for part in parts])


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())
