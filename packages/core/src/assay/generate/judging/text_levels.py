"""The levels tokens, logits and sampler, which judge the model's output."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.comparing.levels import (
    LevelResult,
    describe_judged_level,
    level_of,
    not_run,
)
from assay.comparing.wording.numerals import format_count
from assay.generate.judging.evidence import GenerateEvidence
from assay.generate.judging.logits import TokenMetrics, compare_logits, failure_rate, judge_logits
from assay.generate.passes.sampler import compare_scores
from assay.inputs import Batch
from assay.statistics import worst_error
from assay.verdicts import Level, Measurement, Outcome

# Two tokens are nearly tied within this many times the noise of their gap, which is twice the noise
# of a logit: eight times a logit's noise, as for the choices of a router (expert_routing.py).
NEAR_TIE = 4.0


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first token of a text that differs from the reference's."""

    row: int
    step: int
    """Index of the generated token."""
    expected: int
    actual: int
    gap: float
    """Reference logit of the expected token minus that of the actual one, nats."""
    noise: float
    """Change of this gap in the noise run."""
    limit: float

    @property
    def is_near_tie(self) -> bool:
        """Return True if noise alone can decide between the two tokens; False for a NaN."""
        return self.gap <= self.limit * self.noise


def first_differences(
    actual_BN: Tensor,
    expected_BN: Tensor,
    expected_logits_BNV: Tensor,
    noise_logits_BNV: Tensor,
    limit: float,
) -> list[FirstDifference]:
    """Find the first difference of every row that has one. Lengths must agree.

    Both runs saw the same tokens until then, so the reference's logits show how close the choice was.
    The noise is the larger change of the two logits between reference and noise run, and at least
    the root mean square over all tokens; twice that for the gap.
    """
    if actual_BN.shape != expected_BN.shape:
        raise ValueError(f"{tuple(actual_BN.shape)} tokens, expected {tuple(expected_BN.shape)}")
    change_BNV = noise_logits_BNV.double() - expected_logits_BNV.double()
    change_BNV = change_BNV - change_BNV.mean(-1, keepdim=True)
    typical = float(change_BNV.pow(2).mean().sqrt())
    found = []
    for row in range(actual_BN.shape[0]):
        steps = (actual_BN[row] != expected_BN[row]).nonzero()
        if not len(steps):
            continue
        step = int(steps[0])
        expected, actual = int(expected_BN[row, step]), int(actual_BN[row, step])
        logits = expected_logits_BNV[row, step].double()
        change = change_BNV[row, step]
        local = max(abs(float(change[expected])), abs(float(change[actual])))
        found.append(
            FirstDifference(
                row, step, expected, actual, float(logits[expected] - logits[actual]),
                2 * max(local, typical), limit,
            )
        )  # fmt: skip
    return found


def count_equal(actual_BN: Tensor, expected_BN: Tensor) -> int:
    """Count the equal tokens up to the first difference of each row."""
    same = torch.cummin((actual_BN == expected_BN).long(), dim=1).values
    return int(same.sum())


# Column of the measurements -> field of TokenMetrics.
_COLUMNS = {
    "kl": "kl", "top1-agreement": "top1", "max-abs": "max_difference",
    "cross_entropy": "cross_entropy", "prob_mean": "prob_mean", "prob_std": "prob_std",
    "diff_mean": "diff_mean",
}  # fmt: skip


def judge_logits_level(evidence: GenerateEvidence) -> LevelResult:
    """Compare the distributions for the same tokens."""
    if evidence.depth == "tokens":
        return not_run("checked at level tokens")
    if problem := evidence.problem("logits"):
        return problem
    expected, noise = evidence.expected("logits"), evidence.expected("noise-logits")
    actual = evidence.actual("logits")
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape:
            reason = f"logits of shape {tuple(a.shape)}, the reference's have {tuple(e.shape)}"
            return LevelResult(Level(verdict=Outcome.FAIL, reason=reason))
    valid = [
        _valid_tokens(evidence, batch, logits)
        for batch, logits in zip(evidence.section.batches, expected, strict=True)
    ]
    metrics = _metrics(actual, expected, valid)
    noise_metrics = _metrics(noise, expected, valid)
    ratios = judge_logits(metrics, noise_metrics, evidence.unit_roundoff)
    limit_of = evidence.limits.of
    judged = [ratio.judged(limit_of(ratio.statistic)) for ratio in ratios]
    num_failed = sum(item.failed for item in judged)
    kl_limit = limit_of("logits-kl-worst") * ratios[-1].expected
    count = metrics.kl.numel()
    facts = (
        describe_judged_level(judged)
        | {
            "limits_origin": evidence.limits.origin,
            "kl_mean": float(metrics.kl.mean()),
            "kl_max": float(metrics.kl.amax()),
            "failure_rate": failure_rate(metrics.kl, kl_limit),
            "cosine": float(metrics.cosine.amin()),
            "max_difference": float(metrics.max_difference.amax()),
        }
        | {
            name: float(getattr(metrics, name).mean())
            for name in ("top1", "top_k", "cross_entropy", "prob_mean", "prob_std", "diff_mean")
        }
    )
    addresses = _addresses(evidence, valid)
    result = LevelResult(
        level_of(count, num_failed, facts),
        [item.measurement("logits", "logits") for item in judged]
        + _token_rows(evidence, metrics, noise_metrics, addresses, ratios[2].expected),
        judged=judged,
    )
    bad = (~(metrics.kl <= kl_limit)).nonzero()[:, 0].tolist() if num_failed else []
    if bad:
        first = min(bad, key=lambda index: addresses[index][::-1])
        result.first_bad = evidence.token(*addresses[first])
    return result


def judge_tokens_level(evidence: GenerateEvidence, *, logits_agree: bool) -> LevelResult:
    """Compare the chosen tokens; near ties may differ if the logits agree within noise."""
    if not evidence.golden.model.can_generate:
        return not_run("the model does not generate")
    if evidence.golden.inputs.sampling.get("do_sample"):
        return not_run("tokens are drawn at random: see the sampler level")
    if problem := evidence.problem("tokens"):
        return problem
    compared = equal = 0
    ties: list[FirstDifference] = []
    wrong: list[tuple[Batch, FirstDifference]] = []
    rows = []
    for batch, actual, expected, logits, noise in zip(
        evidence.section.batches,
        evidence.actual("tokens"),
        evidence.expected("tokens"),
        evidence.expected("logits"),
        evidence.expected("noise-logits"),
        strict=True,
    ):
        if reason := _describe_wrong_ids(actual, expected, logits.shape[-1]):
            reason = f"batch {batch.number}: {reason}"
            last = len(batch.rows[0]) + min(actual.shape[1], expected.shape[1])
            first_bad = evidence.token(batch.prompts[0], last)
            level = Level(verdict=Outcome.FAIL, reason=reason)
            return LevelResult(level, first_bad=first_bad)
        differences = first_differences(actual, expected, logits, noise, NEAR_TIE)
        # After its first difference a text has another history, so nothing there is compared.
        behind = sum(expected.shape[1] - 1 - difference.step for difference in differences)
        compared += expected.numel() - behind
        equal += count_equal(actual, expected)
        for difference in differences:
            rows.append(_difference_row(batch, difference))
            if difference.is_near_tie and logits_agree:
                ties.append(difference)
            else:
                wrong.append((batch, difference))
    facts: dict[str, Any] = {"equal": equal, "near_ties": len(ties)}
    level = level_of(compared, len(wrong), facts)
    result = LevelResult(level, rows)
    if ties:
        result.notes.append(
            f"near-tie: {format_count(len(ties), 'text')} with another token than the reference's, where"
            " the gap between the two is within the noise"
        )
    if wrong:
        batch, difference = min(wrong, key=lambda pair: pair[1].step)
        position = len(batch.rows[difference.row]) + difference.step
        result.first_bad = evidence.token(batch.prompts[difference.row], position)
    return result


def _describe_wrong_ids(actual: Tensor, expected: Tensor, vocabulary: int) -> str | None:
    if actual.shape != expected.shape:
        return f"{tuple(actual.shape)} tokens instead of {tuple(expected.shape)}"
    if bool((actual >= vocabulary).any()):
        return f"id {int(actual.max())}, the reference has {vocabulary}"
    return None


def judge_sampler_level(evidence: GenerateEvidence) -> LevelResult:
    """Compare the scores for the same logits."""
    if evidence.depth == "tokens":
        return not_run("checked at level tokens")
    if not evidence.golden.model.can_generate:
        return not_run("the model does not generate")
    if problem := evidence.problem("sampler"):
        return problem
    differences = [
        compare_scores(actual, expected)
        for actual, expected in zip(
            evidence.actual("scores"), evidence.expected("scores"), strict=True
        )
    ]
    compared = sum(item.num_tokens for item in differences)
    facts: dict[str, Any] = {
        "masked_differently": sum(item.num_masked_differently for item in differences),
        "largest_difference": worst_error(item.largest for item in differences),
    }
    num_wrong = sum(not item.agrees for item in differences)
    return LevelResult(level_of(compared, num_wrong, facts))


def _valid_tokens(evidence: GenerateEvidence, batch: Batch, logits: Tensor) -> Tensor:
    """Return the mask of compared logits, (B, T): all generated ones, or all but padding."""
    if evidence.golden.model.can_generate:
        return torch.ones(logits.shape[:2], dtype=torch.bool)
    return batch.attention_mask.bool()


def _addresses(evidence: GenerateEvidence, valid: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return prompt and position of every valid token, in the order of the flattened metrics."""
    addresses = []
    for batch, mask in zip(evidence.section.batches, valid, strict=True):
        for row, prompt in enumerate(batch.prompts):
            start = len(batch.rows[row]) if evidence.golden.model.can_generate else 0
            addresses += [(prompt, start + step) for step in range(int(mask[row].sum()))]
    return addresses


def _metrics(
    actual: Sequence[Tensor], expected: Sequence[Tensor], valid: Sequence[Tensor]
) -> TokenMetrics:
    parts = [compare_logits(a, e) for a, e in zip(actual, expected, strict=True)]
    return TokenMetrics(
        **{
            name: torch.cat(
                [vars(part)[name][mask] for part, mask in zip(parts, valid, strict=True)]
            )
            for name in vars(parts[0])
        }
    )


def _token_rows(
    evidence: GenerateEvidence,
    metrics: TokenMetrics,
    noise: TokenMetrics,
    addresses: list[tuple[int, int]],
    kl_floor: float,
) -> list[Measurement]:
    # The logits of a token come from the call before it, whose input is the token at position - 1.
    shift = 1 if evidence.golden.model.can_generate else 0
    steps = [
        evidence.call_of(evidence.token(prompt, position - shift))[1]
        for prompt, position in addresses
    ]
    rows = []
    for statistic, name in _COLUMNS.items():
        values = zip(
            addresses, steps, getattr(metrics, name).tolist(), getattr(noise, name).tolist(),
            strict=True,
        )  # fmt: skip
        for (prompt, position), step, actual, expected in values:
            ratio = actual / max(expected, kl_floor) if statistic == "kl" else math.nan
            rows.append(
                Measurement(
                    level="logits", module="", port="logits", statistic=statistic, actual=actual,
                    expected=expected, ratio=ratio, prompt=prompt, position=position, step=step,
                )
            )  # fmt: skip
    return rows


def _difference_row(batch: Batch, difference: FirstDifference) -> Measurement:
    return Measurement(
        level="tokens", module="", port="tokens", statistic="first-difference",
        actual=difference.gap, expected=difference.noise,
        ratio=difference.gap / max(difference.noise, 1e-300), limit=difference.limit,
        prompt=batch.prompts[difference.row],
        position=len(batch.rows[difference.row]) + difference.step,
    )  # fmt: skip
