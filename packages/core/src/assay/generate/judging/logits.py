"""The logits level: next-token distributions of two runs, token by token.

Shape legend: B prompts, N generated tokens, T tokens, V vocabulary, k largest reference logits. P is the
reference's distribution, Q the candidate's; d = actual - expected are differences of logits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.blocks import map_on_threads
from assay.metrics import ShapeMismatchError
from assay.noise import Ratio, at_least

# The largest logits are searched in the blocks with the largest maxima: one pass over the
# vocabulary, an eighth of the time of a plain topk.
_BLOCK = 64

# The series of e**c - 1 - c ends when the next term is this share of the first one. In float32 its
# terms cancel to 2**-24 * e**4 or 3e-6 at most; larger changes are rare and computed in float64.
_SERIES_REMAINDER = 1e-7
_LARGEST_IN_SERIES = 4.0

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


def compare_whole(actual_TV: Tensor, expected_TV: Tensor) -> WholeMetrics:
    """Measure the distance of the distributions; nan where `actual` has a NaN or an infinity.

    Differences are computed in the wider dtype, then rounded to float32: a relative error of 2**-24,
    which the sums tolerate.
    """
    wide = torch.promote_types(actual_TV.dtype, torch.float32)
    d_TV = (actual_TV.to(wide) - expected_TV).float()
    p_TV = expected_TV.float()
    vocabulary = d_TV.shape[-1]
    mean_d = d_TV.mean(-1, keepdim=True)
    error = (d_TV - mean_d).norm(dim=-1).double() / vocabulary**0.5
    pp, dd = (tensor.norm(dim=-1).double().square() for tensor in (p_TV, d_TV))
    pd = (p_TV * d_TV).sum(-1).double()
    variance = pp / vocabulary - p_TV.mean(-1).double().square()
    low, high = d_TV.amin(-1), d_TV.amax(-1)
    return WholeMetrics(
        _divergence(actual_TV, expected_TV, d_TV, torch.stack([low, high], -1)),
        error,
        variance.clamp(min=0).sqrt(),
        torch.maximum(high, -low).double(),
        _cosine(pp, pd, dd),
    )


def _divergence(actual_TV: Tensor, expected_TV: Tensor, d_TV: Tensor, range_T2: Tensor) -> Tensor:
    """Compute KL(P, Q) of every token, nats, (T,) in float64.

    KL = ln E[e**d] - E[d] under P. With c = d - E[d] this is ln(1 + E[e**c - 1 - c]). No term of the
    sum is negative, so nothing cancels: a divergence of 1e-30 is as exact as one of 1. The rounding
    error of E[c] is subtracted at the end.
    """
    p_TV = expected_TV.float().softmax(-1)
    mean_T1 = (p_TV * d_TV).sum(-1, keepdim=True)
    change = (range_T2 - mean_T1).abs().amax(-1)
    fits = change <= _LARGEST_IN_SERIES
    largest_change = max(change[fits].tolist(), default=0.0)
    kl = _series_divergence(p_TV, d_TV - mean_T1, largest_change)
    if not bool(fits.all()):
        kl[~fits] = _large_divergence(actual_TV[~fits], expected_TV[~fits])
    return kl


def _series_divergence(p_TV: Tensor, c_TV: Tensor, largest_change: float) -> Tensor:
    """Sum the series of e**c - 1 - c for `_divergence`. Overwrites p."""
    product = p_TV.mul_(c_TV)
    rest = product.sum(-1).double()
    excess = torch.zeros_like(rest)
    power, remainder = 2, 1.0
    while remainder > _SERIES_REMAINDER:
        excess += product.mul_(c_TV).sum(-1).double() / math.factorial(power)
        # The next term over the first one, c**2 / 2.
        remainder = 2 * largest_change ** (power - 1) / math.factorial(power + 1)
        power += 1
    return (rest + excess).log1p() - rest


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


def largest(values_TV: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest values of each token, largest first, (T, k)."""
    num_blocks = values_TV.shape[-1] // _BLOCK
    if num_blocks <= k:
        return values_TV.topk(k, dim=-1).indices
    # A value among the k largest lies in a block whose maximum is among the k largest maxima.
    end = num_blocks * _BLOCK
    maxima = values_TV[:, :end].unflatten(-1, (num_blocks, _BLOCK)).amax(-1)
    blocks = maxima.topk(k, dim=-1).indices
    ids = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(end, values_TV.shape[-1]).expand(len(ids), -1)
    ids = torch.cat([ids, rest], dim=-1)
    return ids.gather(-1, values_TV.gather(-1, ids).topk(k, dim=-1).indices)


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
# Logits per chunk: these fit the caches of one core.
_CHUNK_ELEMENTS = 1 << 18


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
    num_tokens = max(1, _CHUNK_ELEMENTS // vocabulary)

    def compare(start: int) -> tuple[WholeMetrics, Tensor, Tensor]:
        tokens = slice(start, start + num_tokens)
        a, e = actual[tokens], expected[tokens]
        return compare_whole(a, e), largest(a, min(k, vocabulary)), largest(e, min(k, vocabulary))

    starts = range(0, max(1, len(expected)), num_tokens)
    whole, chosen, top = zip(*map_on_threads(compare, starts), strict=True)
    chosen_Tk, top_Tk = torch.cat(chosen), torch.cat(top)
    columns = {name: torch.cat([vars(part)[name] for part in whole]) for name in vars(whole[0])}
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
