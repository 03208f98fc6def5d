"""Random projections: sums over the vocabulary with fixed patterns of signs.

Averaged over patterns, the mean square difference of projections equals that of the distributions. So
projections detect errors of unlikely ids, swapped ids, a wrong sign and a wrong scale.
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
    """Project each row and divide by the root of V, which preserves the average rms.

    values_RV: float64; minus infinity counts as zero, a NaN makes its row NaN. Returns: (R, M).
    """
    kept_RV = values_RV.masked_fill(values_RV == -torch.inf, 0.0)
    signs_VM = sign_patterns(values_RV.shape[-1]).to(kept_RV)
    projected: Tensor = kept_RV @ signs_VM / values_RV.shape[-1] ** 0.5
    return projected


def sign_patterns(num_ids: int) -> Tensor:
    """Return a sign for each id and projection, (V, M), from the bits of SplitMix64 at the id."""
    ids = torch.arange(1, num_ids + 1, dtype=torch.int64)
    mixed = ids * _signed(_GOLDEN_GAMMA)
    for shift, factor in _MIXERS:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed ^= _shifted(mixed, _LAST_SHIFT)
    bits_VM = (mixed[:, None] >> torch.arange(NUM_PROJECTIONS)) & 1
    return 1.0 - 2.0 * bits_VM.double()


def _shifted(values: Tensor, places: int) -> Tensor:
    """Shift to the right with zeros from the left, as for unsigned numbers."""
    return (values >> places) & ((1 << (_BITS - places)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number. torch multiplies modulo 2**64."""
    return value - (1 << _BITS) if value > _MASK >> 1 else value
