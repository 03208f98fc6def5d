"""The logits level: next-token distributions of two runs, token by token.

Shape legend: B prompts, N generated tokens, V vocabulary, k largest reference logits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.blocks import map_on_threads
from assay.generate.judging.distributions import (
    TopMetrics,
    WholeMetrics,
    compare_largest,
    compare_whole,
    largest,
)
from assay.metrics import ShapeMismatchError
from assay.noise import Ratio, at_least

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
