"""Sums over pairs of tensors, in one pass over both.

The sums are compiled from C where there is a compiler, once for a processor, into `__pycache__`. Elsewhere torch
computes them: equal up to the rounding of float64, in 8 to 40 times the time (`nox -s perf`).

Shape legend: R rows (tokens), C channels (last dim), K bins, T tokens, V vocabulary, k largest logits.
"""

from types import ModuleType

from torch import Tensor

from assay.kernel import compiled, torch_sums
from assay.kernel.sums import (
    FEWEST_IN_ROW,
    NUM_BINS,
    POOLED,
    ROW_FLOOR,
    CallSums,
    Extent,
    PooledSums,
    TokenSums,
    WorstElement,
)

__all__ = [
    "FEWEST_IN_ROW",
    "NUM_BINS",
    "POOLED",
    "ROW_FLOOR",
    "CallSums",
    "Extent",
    "PooledSums",
    "TokenSums",
    "WorstElement",
    "find_largest",
    "sum_pair",
    "sum_tokens",
    "summarize",
]


def _backend_for(*tensors: Tensor) -> ModuleType:
    """Return the compiled sums if they can read the memory of all tensors, else those in torch."""
    is_read = compiled.library() is not None and all(compiled.can_read(one) for one in tensors)
    return compiled if is_read else torch_sums


def sum_pair(actual_RC: Tensor, expected_RC: Tensor, extent: Extent = "all") -> CallSums:
    """Sum a pair of matrices in float64.

    Values of at least 2**120 count as infinite where the expected value is one: additive masks hold the lowest
    number of their dtype. What is not finite is counted and left out.
    """
    found: CallSums = _backend_for(actual_RC, expected_RC).sum_pair(actual_RC, expected_RC, extent)
    return found


def summarize(values_RC: Tensor) -> Tensor:
    """Summarize a matrix of at least one element.

    Returns: smallest, largest, mean, norm, numbers of NaN and infinities, and the projection: the sum of
        all elements, each times a random factor of its row and one of its channel; (7,), on the device
        of the values, in float64 where the compiled sums read them, else at least in float32.
    """
    found: Tensor = _backend_for(values_RC).summarize(values_RC)
    return found


def sum_tokens(actual_TV: Tensor, expected_TV: Tensor, largest_T: Tensor) -> TokenSums:
    """Sum the logits of each token of two runs.

    largest_T: the largest expected logit of each token, (T,) in float64.
    """
    found: TokenSums = _backend_for(actual_TV, expected_TV).sum_tokens(
        actual_TV, expected_TV, largest_T
    )
    return found


def find_largest(values_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the k largest values of each row, (T, k), largest first.

    Of equal values the first comes first.
    """
    found: tuple[Tensor, Tensor] = _backend_for(values_TV).find_largest(values_TV, k)
    return found
