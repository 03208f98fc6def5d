"""The logits level: next-token distributions of two runs, token by token.

Shape legend: B prompts, N generated tokens, T tokens, V vocabulary, k largest reference logits. P is the
reference's distribution, Q the candidate's; d = actual - expected are differences of logits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.kernel import find_largest, sum_tokens
from assay.metrics import ShapeMismatchError
from assay.noise import at_least
from assay.verdicts import Ratio

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
