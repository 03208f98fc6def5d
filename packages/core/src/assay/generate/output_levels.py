"""The level outputs: hidden states, embeddings, class scores and other tensors that a model returns.

Logits over the vocabulary have their own level. An output has a row for each token, (B, T, ...), or for each text,
(B, ...). Both runs' errors are relative to the yardstick.
Shapes: B texts, T tokens, R rows, C values of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from assay.generate.golden import LOGITS, NOISE_PREFIX, GenerateEvidence
from assay.inputs import Batch
from assay.judge.levels import (
    LevelResult,
    describe_judged_level,
    failed,
    level_of,
    not_run,
)
from assay.kernel import FEWEST_IN_ROW
from assay.metrics import RowErrors
from assay.noise import at_least
from assay.verdicts import Measurement, Outcome, Ratio, TokenPosition

# Half the logarithm of the ratio of two variances of n values each is normal with variance 1 / n (Fisher,
# Statistical Methods for Research Workers, 41). 3.7 standard deviations leave one of 10,000 clean outputs.
_CHANCE = 3.7


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of an output: of one batch, or of all."""

    errors: RowErrors
    num_values: int
    """Values of the shortest row, C."""
    texts: list[Tensor]
    """Of each batch, every text's row, or the mean of its tokens' rows, (B, C) in float64."""
    expected_texts: list[Tensor]
    """The same of the expected output."""


def compare_output(
    batches: Sequence[Batch], actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> OutputRows:
    """Compare an output of all batches, row by row. Padding is left out.

    Shapes: each pair alike, (B, T, ...), (B, ...) or (B,). An infinity that both hold is equal; any other is an
    infinite error.
    """
    compare = _compare_tokens if _is_of_tokens(batches, expected) else _compare_texts
    parts = [compare(*one) for one in zip(batches, actual, expected, strict=True)]
    return OutputRows(
        RowErrors.concatenate([part.errors for part in parts]),
        min(part.num_values for part in parts),
        [text for part in parts for text in part.texts],
        [text for part in parts for text in part.expected_texts],
    )


def _compare_texts(batch: Batch, actual: Tensor, expected: Tensor) -> OutputRows:
    """Compare a row for each text, (B, ...) or (B,). Rows of another number have no prompt."""
    actual, expected = (
        value.flatten(1) if value.ndim > 1 else value[:, None] for value in (actual, expected)
    )
    change_RC, size_RC = _change(actual, expected)
    prompt_R = torch.tensor(batch.prompts)
    if len(prompt_R) != len(change_RC):
        prompt_R = torch.full((len(change_RC),), -1)
    errors = _row_errors(change_RC, size_RC, prompt_R, torch.full_like(prompt_R, -1))
    return OutputRows(errors, change_RC.shape[1], [size_RC + change_RC], [size_RC])


def _compare_tokens(batch: Batch, actual: Tensor, expected: Tensor) -> OutputRows:
    """Compare a row for each token, (B, T, ...); of one number for each token, a row for each text."""
    mask_BT = batch.attention_mask.bool()
    if expected.ndim == 2:
        kept = [value.masked_fill(~mask_BT, 0.0) for value in (actual, expected)]
        return _compare_texts(batch, *kept)
    kept = [value.flatten(2).masked_fill(~mask_BT[..., None], 0.0) for value in (actual, expected)]
    change_BTC, size_BTC = _change(*kept)
    positions_BT = mask_BT.long().cumsum(1) - 1
    prompts_BT = torch.tensor(batch.prompts)[:, None].expand_as(mask_BT)
    errors = _row_errors(
        change_BTC[mask_BT], size_BTC[mask_BT], prompts_BT[mask_BT], positions_BT[mask_BT]
    )
    lengths_B1 = mask_BT.sum(1, keepdim=True)
    mean_BC, change_BC = (value.sum(1) / lengths_B1 for value in (size_BTC, change_BTC))
    return OutputRows(errors, change_BTC.shape[2], [mean_BC + change_BC], [mean_BC])


def _change(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the difference, and the expected values without NaN and infinities, in float64."""
    wide = expected.double()
    change = torch.where(actual == expected, 0.0, actual.double() - wide)
    return change, wide.nan_to_num(0.0, 0.0, 0.0)


def _is_of_tokens(batches: Sequence[Batch], tensors: Sequence[Tensor]) -> bool:
    """Return True if the second dim of the tensors is the position in the text.

    A table (B, C) has rows of tokens only if its second dim follows the length of different batches.
    """
    follows = all(
        tensor.ndim > 1 and tensor.shape[:2] == (len(batch.rows), batch.length)
        for batch, tensor in zip(batches, tensors, strict=True)
    )
    lengths = {batch.length for batch in batches}
    return follows and (tensors[0].ndim > 2 or len(lengths) > 1)


def _row_errors(
    change_RC: Tensor, expected_RC: Tensor, prompt_R: Tensor, position_R: Tensor
) -> RowErrors:
    expected_R = expected_RC.norm(dim=1)
    scale_R = expected_R.pow(2).mean().sqrt().expand_as(expected_R)
    return RowErrors(prompt_R, position_R, change_RC.norm(dim=1), expected_R, scale_R)


def _whole_error(rows: RowErrors) -> float:
    """Return the norm of the error over that of the expected values."""
    error, expected = float(rows.error.pow(2).sum()), float(rows.expected.pow(2).sum())
    if error == 0:
        return 0.0
    return math.sqrt(error / expected) if expected else math.inf


def output_ratios(actual: OutputRows, noise: OutputRows, unit_roundoff: float) -> list[Ratio]:
    """Compare the errors of the whole output, and of the worst row unless rows are short."""
    floor = unit_roundoff / 2
    chance = math.exp(_CHANCE / math.sqrt(len(noise.errors.error)))
    expected = at_least(floor, _whole_error(noise.errors)) * chance
    ratios = [Ratio("output-error", _whole_error(actual.errors), expected)]
    if actual.num_values >= FEWEST_IN_ROW:
        worst, of_noise = (float(one.errors.relative().amax()) for one in (actual, noise))
        ratios.append(Ratio("output-worst", worst, at_least(floor, of_noise)))
    return ratios


def judge_outputs_level(evidence: GenerateEvidence) -> LevelResult | None:
    """Compare the outputs that are not logits over the vocabulary; None for a model without."""
    section = evidence.section
    names = [name for name in section.outputs if name != LOGITS]
    if not names:
        return None
    if evidence.check.level == "tokens":
        return not_run("checked at level tokens")
    if problem := evidence.problem("logits"):
        return problem
    limit_of, unit = evidence.limits.of, evidence.unit_roundoff
    judged: list[Ratio] = []
    measurements: list[Measurement] = []
    first_bad: TokenPosition | None = None
    texts: dict[str, Any] = {}
    changed: list[str] = []
    num_rows = 0
    for name in names:
        expected, actual = evidence.expected(name), evidence.actual(name)
        of_noise = evidence.expected(NOISE_PREFIX + name)
        port = name.removeprefix("output-")
        by_rounding = _find_other_sizes(of_noise, expected)
        by_candidate = _find_other_sizes(actual, expected)
        if wrong := by_candidate.keys() - by_rounding:
            a, e = by_candidate[min(wrong)]
            return failed(0, f"{port} of shape {a}, the reference's has {e}")
        if by_rounding:
            a, e = by_rounding[min(by_rounding)]
            changed.append(f"rounding changes the shape of {port}: {a} and {e}")
            continue
        rows = compare_output(section.batches, actual, expected)
        noise = compare_output(section.batches, of_noise, expected)
        ratios = [one.judged(limit_of(one.statistic)) for one in output_ratios(rows, noise, unit)]
        judged += ratios
        num_rows += len(rows.errors.error)
        measurements += [one.measurement("outputs", port) for one in ratios]
        texts[port] = describe_texts(rows, noise)
        if first_bad is None and ratios[-1].failed:
            first_bad = _first_bad(evidence, rows.errors, ratios[-1])
    facts = {"limits_origin": evidence.limits.origin, "outputs": texts}
    num_failed = sum(one.failed for one in judged)
    level = level_of(num_rows, num_failed, describe_judged_level(judged) | facts)
    if changed and not num_failed:
        reason = {"verdict": Outcome.NOT_COMPARED, "reason": "; ".join(changed)}
        level, changed = level.model_copy(update=reason), []
    return LevelResult(level, measurements, changed, judged=judged, first_bad=first_bad)


def _find_other_sizes(
    actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Map each dim whose size differs to the first such shapes; a model may choose its rows by their values."""
    pairs = [(tuple(a.shape), tuple(e.shape)) for a, e in zip(actual, expected, strict=True)]
    return {
        dim: (a, e)
        for a, e in reversed(pairs)
        for dim, (size, other) in enumerate(zip_longest(a, e))
        if size != other
    }


def _first_bad(evidence: GenerateEvidence, rows: RowErrors, worst: Ratio) -> TokenPosition | None:
    """Return the first token whose error is over the limit of the worst row; None without tokens."""
    bad = ~(rows.relative() <= worst.resolution) & (rows.position >= 0)
    numbers = bad.nonzero()[:, 0].tolist()
    if not numbers:
        return None
    first = min(numbers, key=lambda i: (int(rows.position[i]), int(rows.prompt[i])))
    return evidence.token(int(rows.prompt[first]), int(rows.position[first]))


def describe_texts(actual: OutputRows, noise: OutputRows) -> dict[str, float | None]:
    """Compare the embeddings of texts as their users do: by cosine, and by the order of neighbors.

    Returns: the smallest cosine of a text with its expected embedding, and `rank_agreement`, the share of pairs of
        neighbors of a text that are ordered alike, None for fewer than 3 texts; both also for the noise run.
        Empty if the sizes of texts differ.
    """
    if len({text.shape[1] for text in actual.expected_texts}) > 1:
        return {}
    actual_BC, noise_BC, expected_BC = (
        torch.cat(texts) for texts in (actual.texts, noise.texts, actual.expected_texts)
    )
    return {
        "cosine": _least_cosine(actual_BC, expected_BC),
        "noise_cosine": _least_cosine(noise_BC, expected_BC),
        "rank_agreement": rank_agreement(actual_BC, expected_BC),
        "noise_rank_agreement": rank_agreement(noise_BC, expected_BC),
    }


def _least_cosine(actual_BC: Tensor, expected_BC: Tensor) -> float:
    return float(functional.cosine_similarity(actual_BC, expected_BC, dim=1).amin())


# More texts take memory for all triples of them.
_MOST_TEXTS = 64


def rank_agreement(actual_BC: Tensor, expected_BC: Tensor) -> float | None:
    """Return the share of triples of texts whose nearer neighbor is the same; None for fewer than 3 texts.

    Of more than 64 texts, the first 64 are compared.
    """
    num_texts = min(len(expected_BC), _MOST_TEXTS)
    if num_texts < 3:
        return None
    orders = []
    for texts_BC in (actual_BC[:num_texts], expected_BC[:num_texts]):
        unit_BC = functional.normalize(texts_BC, dim=1)
        similarity_BB = unit_BC @ unit_BC.T
        orders.append((similarity_BB[:, :, None] - similarity_BB[:, None, :]).sign())
    actual_BBB, expected_BBB = orders
    text = torch.arange(num_texts)
    first, second, third = text[:, None, None], text[None, :, None], text[None, None, :]
    triples = (first != second) & (first != third) & (second < third)
    return float((actual_BBB == expected_BBB)[triples].double().mean())
