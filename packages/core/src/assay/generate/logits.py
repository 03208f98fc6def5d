"""The logits level: next-token distributions of two runs, token by token.

Shape legend: B prompts, N generated tokens, V vocabulary, k largest reference logits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.metrics import ShapeMismatchError
from assay.noise import Ratio

TOP_K = 20
# Tokens handled at a time, so that no copy of all logits is made.
_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """Metrics of every token, each (B, N) in float64; P is the reference, Q the candidate.

    kl: KL(P, Q) over the whole vocabulary, nats.
    error: root mean square of the difference of the centred logits; scale: of the reference's.
    cross_entropy, prob_mean, prob_std, diff_mean: the published four, over the k largest
        reference logits, softmaxed over those alone; `entropy` is that of Q there.
    top_k_kl: cross_entropy without the entropy that it contains, which makes it comparable.
    top1, top_k: agreement of the largest, share of the k largest in common.
    """

    kl: Tensor
    error: Tensor
    scale: Tensor
    max_difference: Tensor
    cosine: Tensor
    top1: Tensor
    top_k: Tensor
    cross_entropy: Tensor
    entropy: Tensor
    prob_mean: Tensor
    prob_std: Tensor
    diff_mean: Tensor

    @property
    def top_k_kl(self) -> Tensor:
        """KL(Q, P) over the k largest reference logits, nats."""
        return self.cross_entropy - self.entropy

    @property
    def relative_error(self) -> Tensor:
        """Error over scale of each token."""
        return self.error / self.scale.clamp(min=1e-300)


def compare_logits(actual_BNV: Tensor, expected_BNV: Tensor, k: int = TOP_K) -> TokenMetrics:
    """All metrics of every token.

    Shapes: both (B, N, V).
    A NaN or infinity in `actual` makes every metric of its token NaN: it never passes a limit.
    Raises: ShapeMismatchError if the shapes differ: the shorter side decides nothing.
    """
    if actual_BNV.shape != expected_BNV.shape:
        raise ShapeMismatchError.of(actual_BNV, expected_BNV)
    batch, length, vocabulary = expected_BNV.shape
    actual, expected = actual_BNV.reshape(-1, vocabulary), expected_BNV.reshape(-1, vocabulary)
    parts = [
        _compare_chunk(a, e, min(k, vocabulary))
        for a, e in zip(actual.split(_CHUNK_TOKENS), expected.split(_CHUNK_TOKENS), strict=True)
    ]
    columns = [torch.cat(column).reshape(batch, length) for column in zip(*parts, strict=True)]
    return TokenMetrics(*columns)


def _compare_chunk(actual_TV: Tensor, expected_TV: Tensor, k: int) -> tuple[Tensor, ...]:
    q, p = actual_TV.double(), expected_TV.double()
    finite = q.isfinite().all(-1)
    q = torch.where(finite[:, None], q, torch.nan)
    difference = q - p
    kl = _divergence(p, q, difference)
    centred = difference - difference.mean(-1, keepdim=True)
    spread = p - p.mean(-1, keepdim=True)
    error = centred.pow(2).mean(-1).sqrt()
    scale = spread.pow(2).mean(-1).sqrt()
    cosine = torch.cosine_similarity(q, p, dim=-1)
    top = p.topk(k, dim=-1)
    log_p_top = top.values.log_softmax(-1)
    log_q_top = q.gather(-1, top.indices).log_softmax(-1)
    p_top, q_top = log_p_top.exp(), log_q_top.exp()
    ratio = p_top / q_top
    std = ratio.std(-1) if k > 1 else torch.zeros_like(kl)
    chosen = torch.where(finite[:, None], q, -torch.inf).topk(k, dim=-1).indices
    common = (chosen[:, :, None] == top.indices[:, None, :]).any(-1).double().mean(-1)
    top1 = (chosen[:, 0] == top.indices[:, 0]).double()
    nan = torch.full_like(kl, math.nan)
    return (
        kl, error, scale, difference.abs().amax(-1), cosine,
        torch.where(finite, top1, nan), torch.where(finite, common, nan),
        -(q_top * log_p_top).sum(-1), -(q_top * log_q_top).sum(-1),
        ratio.mean(-1) - 1, std, (p_top - q_top).abs().mean(-1),
    )  # fmt: skip


def _divergence(p_TV: Tensor, q_TV: Tensor, difference_TV: Tensor) -> Tensor:
    """KL(P, Q) of two sets of logits, (T,).

    With d the difference of the logits and E the mean under P it is ln E exp(d) - E d, which
    keeps its accuracy where d is small: of two float64 runs sum P (ln P - ln Q) is only rounding.
    """
    weights = p_TV.softmax(-1)
    d = difference_TV - (weights * difference_TV).sum(-1, keepdim=True)
    kl = (weights * d.expm1()).sum(-1).log1p()
    if not bool(kl.isfinite().all()):  # exp(d) overflows, or a value is not finite
        log_p, log_q = p_TV.log_softmax(-1), q_TV.log_softmax(-1)
        kl = torch.where(kl.isfinite(), kl, (weights * (log_p - log_q)).sum(-1))
    return kl.clamp(min=0)


def failure_rate(values: Tensor, threshold: float) -> float:
    """Share of tokens at or over `threshold`; a NaN is over every threshold."""
    if values.numel() == 0:
        return math.nan
    return float((~(values < threshold)).double().mean())


def judge_logits(candidate: TokenMetrics, noise: TokenMetrics, unit_roundoff: float) -> list[Ratio]:
    """The ratios by which the level is judged: pooled, and worst token against worst token."""
    relative, floor = candidate.relative_error, unit_roundoff / 2
    noise_relative = noise.relative_error
    # A relative error r of logits of spread s gives a KL of about (r s)**2 / 2.
    spread = float(noise.scale.pow(2).mean().sqrt())
    kl_floor = (floor * spread) ** 2 / 2
    return [
        Ratio("logits-error", _rms(relative), max(_rms(noise_relative), floor)),
        Ratio("logits-worst", _worst(relative), max(_worst(noise_relative), floor)),
        Ratio("logits-kl", float(candidate.kl.mean()), max(float(noise.kl.mean()), kl_floor)),
        Ratio("logits-kl-worst", _worst(candidate.kl), max(_worst(noise.kl), kl_floor)),
    ]


def _rms(values: Tensor) -> float:
    return float(values.pow(2).mean().sqrt())


def _worst(values: Tensor) -> float:
    # amax passes a NaN on: it is worse than any number
    return float(values.amax())
