"""The levels tokens, logits and sampler, which judge the model's output.

The distributions of two runs are compared token by token.
Shape legend: B prompts, N generated tokens, T tokens, V vocabulary, k largest reference logits. P is the
reference's distribution, Q the candidate's; d = actual - expected are differences of logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.generate.golden import LOGITS, GenerateEvidence, GoldenSection
from assay.inputs import Batch
from assay.judge.levels import LevelResult, describe_judged_level, level_of, not_run
from assay.judge.wording import format_count
from assay.kernel import find_largest, sum_tokens
from assay.metrics import ShapeMismatchError
from assay.noise import at_least
from assay.statistics import worst_error
from assay.verdicts import Level, Measurement, Outcome, Ratio

# From here e**c may overflow; the logarithm of the sum is taken instead.
_LARGE_CHANGE = 50.0


@dataclass(frozen=True)
class WholeMetrics:
    """Metrics of every token over the whole vocabulary, each (T,) in float64."""

    kl: Tensor
    """KL(P, Q), nats."""
    error: Tensor
    """Root mean square of the difference of the centered logits."""
    scale: Tensor
    """Root mean square of the centered reference logits."""
    max_difference: Tensor
    cosine: Tensor


@dataclass(frozen=True)
class TopMetrics:
    """The four published metrics over the k largest reference logits, each (T,) in float64."""

    cross_entropy: Tensor
    prob_mean: Tensor
    prob_std: Tensor
    diff_mean: Tensor


def compare_whole(actual_TV: Tensor, expected_TV: Tensor, largest_T: Tensor) -> WholeMetrics:
    """Measure the distance of the distributions; nan where `actual` has a NaN or an infinity.

    largest_T: the largest reference logit of each token.
    """
    sums = sum_tokens(actual_TV, expected_TV, largest_T)
    vocabulary = actual_TV.shape[-1]
    # KL = ln E[e**d] - E[d] under P. With c = d - E[d] this is ln(1 + E[e**c - 1 - c]). No term of the
    # sum is negative, so nothing cancels: a divergence of 1e-30 is as exact as one of 1. The rounding
    # error of E[c] is subtracted at the end.
    kl = (sums.rest + sums.excess).log1p() - sums.rest
    far = sums.excess.isnan() & sums.d.isfinite()
    if bool(far.any()):
        kl[far] = _large_divergence(actual_TV[far], expected_TV[far])
    variance = sums.ee / vocabulary - (sums.e / vocabulary).square()
    return WholeMetrics(
        kl,
        (sums.spread / vocabulary).sqrt(),
        variance.clamp(min=0).sqrt(),
        torch.maximum(sums.high, -sums.low),
        _cosine(sums.ee, sums.de, sums.dd),
    )


def _large_divergence(actual_TV: Tensor, expected_TV: Tensor) -> Tensor:
    log_p = expected_TV.double().log_softmax(-1)
    p, d = log_p.exp(), actual_TV.double() - expected_TV.double()
    c = d - (p * d).sum(-1, keepdim=True)
    kl = (p * (c.expm1() - c)).sum(-1).log1p()
    return torch.where(c.amax(-1) < _LARGE_CHANGE, kl, (log_p + c).logsumexp(-1))


def _cosine(pp: Tensor, pd: Tensor, dd: Tensor) -> Tensor:
    """Compute the cosine between p and p + d from the products of p and d."""
    # A zero vector and another vector have cosine 0.
    qq = pp + 2 * pd + dd
    longer = (2 * pd + dd) / (qq.sqrt() + pp.sqrt())  # ||q|| - ||p||
    turned = (dd - longer * longer) / (2 * (pp * qq).sqrt())
    return 1.0 - torch.where(dd == 0, 0.0, torch.where(pp * qq == 0, 1.0, turned))


def compare_largest(actual_TV: Tensor, expected_TV: Tensor, top_Tk: Tensor) -> TopMetrics:
    """Compute the four published metrics.

    top_Tk: ids of the k largest reference logits; both softmaxes cover only these.
    """
    log_p = expected_TV.gather(-1, top_Tk).double().log_softmax(-1)
    p, q = log_p.exp(), actual_TV.gather(-1, top_Tk).double().log_softmax(-1).exp()
    ratio = p / q
    std = ratio.std(-1) if top_Tk.shape[-1] > 1 else torch.zeros(len(p), dtype=p.dtype)
    return TopMetrics(-(q * log_p).sum(-1), ratio.mean(-1) - 1, std, (p - q).abs().mean(-1))


TOP_K = 20


@dataclass(frozen=True)
class TokenMetrics(TopMetrics, WholeMetrics):
    """All metrics of every token, each (B, N) in float64."""

    top1: Tensor
    """1 where the largest logits agree."""
    top_k: Tensor
    """Share of the k largest in common."""

    @property
    def relative_error(self) -> Tensor:
        """Return error over scale of each token."""
        return self.error / self.scale.clamp(min=1e-300)


def compare_logits(actual_BNV: Tensor, expected_BNV: Tensor, k: int = TOP_K) -> TokenMetrics:
    """Compute all metrics of every token.

    Shapes: both (B, N, V).
    A NaN or infinity in `actual` makes every metric of its token NaN, which passes no limit.
    Raises: ShapeMismatchError if the shapes differ.
    """
    if actual_BNV.shape != expected_BNV.shape:
        raise ShapeMismatchError.of(actual_BNV, expected_BNV)
    batch, length, vocabulary = expected_BNV.shape
    actual, expected = actual_BNV.reshape(-1, vocabulary), expected_BNV.reshape(-1, vocabulary)
    chosen_Tk, _ = find_largest(actual, min(k, vocabulary))
    top_Tk, values_Tk = find_largest(expected, min(k, vocabulary))
    columns = vars(compare_whole(actual, expected, values_Tk[:, 0]))
    columns |= vars(compare_largest(actual, expected, top_Tk))
    columns["top1"] = (chosen_Tk[:, 0] == top_Tk[:, 0]).double()
    columns["top_k"] = (chosen_Tk[:, :, None] == top_Tk[:, None, :]).any(-1).double().mean(-1)
    finite = columns["error"].isfinite()
    return TokenMetrics(
        **{
            name: torch.where(finite, column, math.nan).reshape(batch, length)
            for name, column in columns.items()
        }
    )


def failure_rate(values: Tensor, threshold: float) -> float:
    """Share of tokens at or over `threshold`; a NaN is over every threshold."""
    if values.numel() == 0:
        return math.nan
    return float((~(values < threshold)).double().mean())


def judge_logits(candidate: TokenMetrics, noise: TokenMetrics, unit_roundoff: float) -> list[Ratio]:
    """Compute the ratios that decide the level: pooled, and worst token against worst token."""
    relative, floor = candidate.relative_error, unit_roundoff / 2
    noise_relative = noise.relative_error
    # A relative error r of logits of spread s gives a KL of about (r s)**2 / 2.
    spread = float(noise.scale.pow(2).mean().sqrt())
    kl_floor = (floor * spread) ** 2 / 2
    return [
        Ratio("logits-error", _rms(relative), at_least(floor, _rms(noise_relative))),
        Ratio("logits-worst", _worst(relative), at_least(floor, _worst(noise_relative))),
        Ratio("logits-kl", float(candidate.kl.mean()), at_least(kl_floor, float(noise.kl.mean()))),
        Ratio("logits-kl-worst", _worst(candidate.kl), at_least(kl_floor, _worst(noise.kl))),
    ]


def _rms(values: Tensor) -> float:
    return float(values.pow(2).mean().sqrt())


def _worst(values: Tensor) -> float:
    # amax propagates NaN, which is worse than any number
    return float(values.amax())


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
    if LOGITS not in evidence.section.outputs:
        return not_run("the model returns no logits over its vocabulary")
    if evidence.check.level == "tokens":
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
        valid_tokens(evidence.section, batch, logits)
        for batch, logits in zip(evidence.section.batches, expected, strict=True)
    ]
    metrics = pool_metrics(actual, expected, valid)
    noise_metrics = pool_metrics(noise, expected, valid)
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
            last = batch.first_new_position(0) + min(actual.shape[1], expected.shape[1])
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
            f"near-tie: {format_count(len(ties), 'text')} chose a token whose score differs from the"
            " reference's choice by less than the noise"
        )
    if wrong:
        batch, difference = min(wrong, key=lambda pair: pair[1].step)
        position = batch.first_new_position(difference.row) + difference.step
        result.first_bad = evidence.token(batch.prompts[difference.row], position)
    return result


def _describe_wrong_ids(actual: Tensor, expected: Tensor, vocabulary: int) -> str | None:
    if actual.shape != expected.shape:
        return f"{tuple(actual.shape)} tokens instead of {tuple(expected.shape)}"
    if bool((actual >= vocabulary).any()):
        return f"id {int(actual.max())}, the reference has {vocabulary}"
    return None


# Scores are float32 in the generation loop, with a few rounded operations on each.
# Source: Higham, Accuracy and Stability, 3.1: n operations give at most n u / (1 - n u).
SCORE_TOLERANCE = 16 * 2.0**-24


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """The difference of two sets of scores."""

    num_tokens: int
    num_masked_differently: int
    """Pairs (token, id) that only one side excludes."""
    largest: float
    """Largest relative difference among scores that both keep; nan if a score is NaN."""

    @property
    def agrees(self) -> bool:
        """Return True if both sides draw the same ids with the same probabilities."""
        return self.num_masked_differently == 0 and self.largest <= SCORE_TOLERANCE


def compare_scores(actual_BNV: Tensor, expected_BNV: Tensor) -> ScoreDifference:
    """Compare processed scores, (B, N, V) each; ids that both exclude (-inf) agree."""
    excluded, actual_excluded = expected_BNV.isneginf(), actual_BNV.isneginf()
    kept = ~excluded & ~actual_excluded
    scale = expected_BNV.masked_fill(excluded, 0.0).abs().amax(-1, keepdim=True).clamp(min=1e-30)
    relative = ((actual_BNV - expected_BNV).abs() / scale)[kept]
    return ScoreDifference(
        actual_BNV.shape[0] * actual_BNV.shape[1],
        int((excluded != actual_excluded).sum()),
        float(relative.max()) if relative.numel() else 0.0,
    )


def judge_sampler_level(evidence: GenerateEvidence) -> LevelResult:
    """Compare the scores for the same logits."""
    if evidence.check.level == "tokens":
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


def valid_tokens(section: GoldenSection, batch: Batch, logits: Tensor) -> Tensor:
    """Return the mask of compared logits, (B, T): all generated ones and those of a decoder, or all but padding."""
    if section.golden.model.can_generate or batch.decoder_start:
        return torch.ones(logits.shape[:2], dtype=torch.bool)
    return batch.attention_mask.bool()


def _addresses(evidence: GenerateEvidence, valid: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return prompt and position of every valid token, in the order of the flattened metrics."""
    addresses = []
    for batch, mask in zip(evidence.section.batches, valid, strict=True):
        for row, prompt in enumerate(batch.prompts):
            start = batch.first_new_position(row) if evidence.golden.model.can_generate else 0
            addresses += [(prompt, start + step) for step in range(int(mask[row].sum()))]
    return addresses


def pool_metrics(
    actual: Sequence[Tensor], expected: Sequence[Tensor], valid: Sequence[Tensor]
) -> TokenMetrics:
    """Compare the logits of all batches at the `valid` tokens, (B, T)."""
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
        position=batch.first_new_position(difference.row) + difference.step,
    )  # fmt: skip
