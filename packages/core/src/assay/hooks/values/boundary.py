"""Values at a module boundary: what is stored of them, and what is injected instead."""

from dataclasses import dataclass

import torch
from torch import Tensor


def cast_within_range(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`; what is finite stays finite, at the largest number if need be.

    Additive masks hold the lowest number of their dtype, which is -inf in a narrower one: a row
    without any allowed column would then become NaN.
    """
    if tensor.dtype == dtype or not (tensor.is_floating_point() and dtype.is_floating_point):
        return tensor.to(dtype)
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max and tensor.numel():
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        # Not written as "is larger": a NaN leaves the values as they are.
        if -low > limit or high > limit:
            infinite = tensor.isinf()
            return (
                tensor.clamp(-limit, limit)
                .masked_fill(infinite, torch.inf)
                .copysign(tensor)
                .to(dtype)
            )
    return tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class Boundary:
    """What happens to floating-point values at module boundaries.

    stored: dtype in which values are kept, None for their own.
    rounded: dtype to which values are rounded before they are injected, None for not at all.
    """

    stored: torch.dtype | None = None
    rounded: torch.dtype | None = None

    @classmethod
    def exact_inputs_for(cls, dtype: torch.dtype) -> "Boundary":
        """The boundary of a yardstick whose every stage gets inputs that `dtype` can hold.

        Stored with at least 2**-24 of relative accuracy where `dtype` has 2**-11 or less, else in
        double precision.
        """
        wide = dtype in (torch.float32, torch.float64)
        return cls(torch.float64 if wide else torch.float32, dtype)

    def store(self, value: Tensor) -> Tensor:
        """What is kept of `value`; a tensor of its own if the boundary rounds."""
        if self.rounded is not None and value.is_complex():
            return value.clone()
        if self.stored is None or not value.is_floating_point():
            return value
        stored = cast_within_range(value, self.stored)
        # The injected value may be written over `value`, as into a cache.
        return stored.clone() if self.rounded is not None and stored is value else stored

    def injected(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The value that the next stage gets, in `dtype`, made from what was stored.

        Complex numbers are pairs of float32 whatever dtype a model has: there are none of bfloat16.
        """
        if self.rounded is not None and stored.is_complex():
            return stored.to(torch.complex64).to(dtype)
        if self.rounded is None or not stored.is_floating_point():
            return cast_within_range(stored, dtype)
        return cast_within_range(cast_within_range(stored, self.rounded), dtype)
