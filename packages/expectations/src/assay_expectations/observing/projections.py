"""Whole distributions in few numbers: sums over the vocabulary under fixed patterns of signs.

The mean square of the difference of two projections is that of the two distributions, on average over
patterns; so it sees ids that nobody looks at, two that have changed places, a sign, a scale.
Source: Achlioptas, Database-friendly random projections, JCSS 66 (2003).

Shapes: R tokens, V vocabulary, M projections.
"""

import torch
from torch import Tensor

NUM_PROJECTIONS = 8

# Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_BITS = 64
_MASK = (1 << _BITS) - 1


def project(values_RV: Tensor) -> Tensor:
    """Projections of each row, divided by the root of V: their rms is that of the row, on average.

    values_RV: float64; minus infinity counts as zero, a NaN makes its row NaN. Returns: (R, M).
    """
    kept_RV = values_RV.masked_fill(values_RV == -torch.inf, 0.0)
    signs_VM = sign_patterns(values_RV.shape[-1]).to(kept_RV)
    projected: Tensor = kept_RV @ signs_VM / values_RV.shape[-1] ** 0.5
    return projected


def sign_patterns(num_ids: int) -> Tensor:
    """A sign for each id and projection, (V, M): bits of SplitMix64 at the id, the same everywhere."""
    ids = torch.arange(1, num_ids + 1, dtype=torch.int64)
    mixed = ids * _signed(_GOLDEN_GAMMA)
    for shift, factor in _MIXERS:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed ^= _shifted(mixed, _LAST_SHIFT)
    bits_VM = (mixed[:, None] >> torch.arange(NUM_PROJECTIONS)) & 1
    return 1.0 - 2.0 * bits_VM.double()


def _shifted(values: Tensor, places: int) -> Tensor:
    """To the right, with zeros coming in from the left, as for unsigned numbers."""
    return (values >> places) & ((1 << (_BITS - places)) - 1)


def _signed(value: int) -> int:
    """The int64 of the same bits as an unsigned number: torch multiplies modulo 2**64."""
    return value - (1 << _BITS) if value > _MASK >> 1 else value
