"""Round to narrower formats in ways that torch's casts do not offer."""

import math

import torch
from torch import Tensor

from assay.dtypes import float_format

_INTEGER_OF = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_E4M3_LARGEST = float_format("float8_e4m3fn").largest

# The scale and its inverse must both be normal numbers of float32, or products would underflow.
_SMALLEST_SCALE_EXPONENT = -126

# TF32 stores the upper 10 of the 23 significand bits of float32.
_TF32_DROPPED_BITS = 13


def round_toward_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the narrower `dtype` without increasing the magnitude.

    A magnitude above the largest number becomes that number. Infinities and NaN stay.
    """
    nearest = values.to(dtype)
    grew = nearest.to(values.dtype).abs() > values.abs()
    # In sign-magnitude formats the next smaller magnitude is the next smaller integer.
    bits = nearest.view(_INTEGER_OF[dtype])
    return (bits - grew.to(bits.dtype)).view(dtype)


def round_to_tf32(values: Tensor) -> Tensor:
    """Round float32 values to the 11 significand bits of TF32, ties to even."""
    bits = values.view(torch.int32)
    half = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    rounded = (bits + half + odd) & -(1 << _TF32_DROPPED_BITS)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def round_to_scaled_e4m3(values: Tensor) -> Tensor:
    """Round to e4m3 numbers times one power of two for the whole tensor; return float32.

    The scale is the smallest power of two, at least 2^-126, that brings the largest finite magnitude
    to at most 448, so the rounding is idempotent. Infinities and NaN stay.
    """
    values = values.float()
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        finite = values.isfinite()
        return torch.where(finite, round_to_scaled_e4m3(values.where(finite, 0.0)), values)
    fraction, exponent = math.frexp(largest / _E4M3_LARGEST)
    # frexp returns a fraction in [0.5, 1); 0.5 stands for a power of two.
    exponent = max(exponent - (fraction == 0.5), _SMALLEST_SCALE_EXPONENT)  # noqa: PLR2004
    scaled = (values * math.ldexp(1.0, -exponent)).to(torch.float8_e4m3fn)
    return scaled.float() * math.ldexp(1.0, exponent)
