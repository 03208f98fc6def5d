"""Checks that a step over micro-batches and ranks has the gradient of one big batch.

The loss is the mean over all label tokens of the step. A mean of the micro-batches' means would give
tokens of short micro-batches too much weight.

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import floor, log10
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from assay.errors import name_some
from assay.models import load_model
from assay_smoke.data.protocols import IGNORED, BackwardStep, FeatureKind
from assay_smoke.data.verdict import DeclinedError, Fault, Subject, SubjectReport
from assay_smoke.judging import relative_error

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

# Limit of the gradient's relative error in float32. 120 clean steps of up to six micro-batches reach
# 5e-8. A mean of means changes the gradients of the unequal steps above by at least 0.37.
LIMIT = 1e-3

# Limit over the rounding of the dtype that a step computes in. Clean steps reach 1.15 under autocast and
# 1.8 in a model of bfloat16. The limit is then at most 0.075: the rounding of the steps above in bfloat16
# is at most 0.025, and in float16 0.003.
_LIMIT_OVER_ROUNDING = 3.0

MICRO_MODEL = "micro:llama"


@dataclass(frozen=True, slots=True)
class _Micro:
    """The oracle's view of a micro-batch."""

    tokens: int
    """Number of predicted tokens with labels."""
    labels: int
    gradient: Tensor
    """Gradient of the sum of its token losses."""


# Known wrong normalizations, each as the divisor of a micro-batch's summed losses.
_MISTAKES: dict[str, Callable[[_Micro, Sequence[_Micro], Sequence[Sequence[_Micro]]], float]] = {
    "the mean of the micro-batches' own means": (
        lambda micro, rank, ranks: micro.tokens * len(rank) * len(ranks)
    ),
    "the mean of the ranks' own means": (
        lambda _, rank, ranks: sum(micro.tokens for micro in rank) * len(ranks)
    ),
    "the sum of the micro-batches' means, not divided by their number": (
        lambda micro, _, ranks: micro.tokens * len(ranks)
    ),
    "divided by all labels, although no token predicts the first label of a row": (
        lambda _, __, ranks: sum(micro.labels for rank in ranks for micro in rank)
    ),
}


def check_accumulation(
    subject: Subject, backward_step: BackwardStep, steps: Sequence[Step] = STEPS
) -> SubjectReport:
    """Compare the gradient of each step, averaged over ranks, with that of one big batch.

    A step that raises NotImplementedError is skipped and noted.
    """
    report = SubjectReport.promising(subject.name, (SAME_GRADIENT,))
    declined: list[DeclinedError] = []
    model = load_model(MICRO_MODEL, dtype="float32").model
    for step, kind in product(steps, get_args(FeatureKind)):
        num_step_tokens = sum(rows for rank in step for micro in rank for rows in micro)
        drawn = torch.Generator().manual_seed(num_step_tokens)
        ranks = [[_micro_batch(rows, kind, drawn) for rows in rank] for rank in step]
        case = describe_step(step, kind)
        try:
            with subject.called_for(case), _record_dtypes() as dtypes:
                parts = [
                    _gradient(
                        model, partial(backward_step, model, rank, num_step_tokens, len(ranks))
                    )
                    for rank in ranks
                ]
        except DeclinedError as error:
            declined.append(error)
            continue
        wrong = _find_difference(model, torch.stack(parts).mean(0), ranks, dtypes)
        report.judge([SAME_GRADIENT], [Fault(SAME_GRADIENT, wrong, (case,))] if wrong else [])
    report.waive_untried(declined)
    return report


def describe_step(step: Step, kind: FeatureKind) -> str:
    """Describe the label tokens of a step's micro-batches."""
    by_rank = [f"{' and '.join(str(sum(rows)) for rows in rank)} predicted tokens" for rank in step]
    where = f"one rank, micro-batches of {by_rank[0]}"
    if len(step) > 1:
        ranks = [f"{tokens} on rank {rank}" for rank, tokens in enumerate(by_rank)]
        where = f"micro-batches of {', '.join(ranks)}"
    prompt = "a prompt without labels" if kind == "masked" else "one token with a label"
    return f"{where}, each row after {prompt}"


def _micro_batch(
    num_labels: Sequence[int], kind: FeatureKind, generator: torch.Generator
) -> MicroBatch:
    """Make rows of random letters, each a prompt and `num_labels` predicted tokens, padded on the right."""
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


def _measure(model: nn.Module, micro: MicroBatch) -> _Micro:
    def backward() -> None:
        inputs = {key: micro[key] for key in ("input_ids", "attention_mask")}
        logits_BTV = model(**inputs, use_cache=False).logits
        functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            micro["labels"][:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        ).backward()

    with_label = micro["labels"] != IGNORED
    tokens, labels = int(with_label[:, 1:].sum()), int(with_label.sum())
    return _Micro(tokens, labels, _gradient(model, backward))


def _gradient(model: nn.Module, backward: Callable[[], None]) -> Tensor:
    """Return the gradients that `backward` leaves in the model, as one float64 vector."""
    model.zero_grad(set_to_none=True)
    backward()
    pairs = [(parameter, parameter.grad) for parameter in model.parameters()]
    parts = [torch.zeros_like(one) if grad is None else grad for one, grad in pairs]
    return torch.cat([part.detach().double().flatten() for part in parts])


@contextmanager
def _record_dtypes() -> Iterator[set[torch.dtype]]:
    """Collect the dtypes narrower than float32 that modules compute in, also those of a copied model."""
    found: set[torch.dtype] = set()

    def record(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16):
            found.add(output.dtype)

    hook = register_module_forward_hook(record)
    try:
        yield found
    finally:
        hook.remove()


def _find_difference(
    model: nn.Module,
    actual: Tensor,
    given: Sequence[Sequence[MicroBatch]],
    dtypes: Iterable[torch.dtype],
) -> str | None:
    """Describe the difference from the gradient of one big batch, by a known mistake if one fits.

    given: micro-batches by rank. dtypes: the 16-bit dtypes of the step; rounding to them is not an error.
    """
    ranks = [[_measure(model, micro) for micro in rank] for rank in given]
    tokens = sum(micro.tokens for rank in ranks for micro in rank)
    expected = _combine((micro, tokens) for rank in ranks for micro in rank)
    limit, source = LIMIT, ""
    for dtype in dtypes:
        with torch.autocast("cpu", dtype=dtype):
            rounded = _combine((_measure(model, micro), tokens) for rank in given for micro in rank)
        rounding = relative_error(rounded, expected)
        limit = max(limit, _LIMIT_OVER_ROUNDING * rounding)
        source = f", {_LIMIT_OVER_ROUNDING:g}x the rounding of one big batch in {dtype}"
    error = relative_error(actual, expected)
    if error <= limit:
        return None
    if not torch.isfinite(actual).all():
        return "the gradient is not finite"
    reason = f"the gradient has relative error {error:.3g} against one big batch (limit {limit:.2g}{source})"
    for mistake, divide in _MISTAKES.items():
        weighted = [(micro, divide(micro, rank, ranks)) for rank in ranks for micro in rank]
        known = all(divisor for _, divisor in weighted)
        if known and relative_error(actual, _combine(weighted)) <= limit:
            return f"{reason}: it is {mistake}"
    evidence = _fit_weights(actual, expected, ranks, limit)
    evidence = evidence or _find_wrong_parameters(model, actual, expected, limit)
    return f"{reason}: {evidence}" if evidence else reason


def _fit_weights(
    actual: Tensor, expected: Tensor, ranks: Sequence[Sequence[_Micro]], limit: float
) -> str | None:
    """Describe the gradient as a sum of its micro-batches, if it is one within `limit`."""
    weight = float(actual @ expected / (expected @ expected))
    if relative_error(actual, expected * weight) <= limit:
        return f"it is {weight:.4g} times the right one, and its norm is {float(actual.norm()):.4g}"
    tokens = sum(micro.tokens for rank in ranks for micro in rank)
    parts = torch.stack([micro.gradient / tokens for rank in ranks for micro in rank], dim=1)
    weights = torch.linalg.lstsq(parts, actual[:, None], driver="gelsd").solution[:, 0]
    if relative_error(actual, parts @ weights) > limit:
        return None
    digits = floor(-log10(limit))
    rest = iter((weights.round(decimals=digits) + 0).tolist())
    by_rank = [
        f"{', '.join(f'{next(rest):g}' for _ in micros)} on rank {rank}"
        for rank, micros in enumerate(ranks)
    ]
    return f"weights of its micro-batches over the right ones: {'; '.join(by_rank)}"


def _find_wrong_parameters(
    model: nn.Module, actual: Tensor, expected: Tensor, limit: float
) -> str | None:
    """Name the parameters without which the gradient agrees, unless they are most of all."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    squares = torch.stack([part.square().sum() for part in (actual - expected).split(sizes)])
    order = squares.argsort(descending=True).tolist()
    allowed = float((limit * expected.norm()).square())
    left = float(squares.sum())
    wrong: list[int] = []
    while left > allowed:
        wrong.append(order[len(wrong)])
        left = float(squares[order[len(wrong) :]].sum())
    if 2 * len(wrong) > len(names):
        return None
    lost = not any(actual.split(sizes)[at].any() for at in wrong)
    what = "it is missing or zero for" if lost else "it differs only for"
    return f"{what} {name_some([names[at] for at in wrong])}"


def _combine(weighted: Iterable[tuple[_Micro, float]]) -> Tensor:
    """Sum gradients, each over its divisor."""
    return torch.stack([micro.gradient / divisor for micro, divisor in weighted]).sum(0)
