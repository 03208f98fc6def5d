"""The stored and the injected value at a module boundary."""

from dataclasses import dataclass

import torch
from torch import Tensor


def cast_within_range(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor; finite values stay finite, clamped to the largest number of `dtype`.

    Additive masks hold the lowest number of their dtype, which is -inf in a narrower one. A row
    with no allowed column would then become NaN.
    """
    if tensor.dtype == dtype or not (tensor.is_floating_point() and dtype.is_floating_point):
        return tensor.to(dtype)
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max and tensor.numel():
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        if -low > limit or high > limit:  # False for NaN, which stays NaN without a clamp
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
    """The dtypes of floating-point values at module boundaries."""

    stored: torch.dtype | None = None
    """Dtype of stored values; None for their own."""
    rounded: torch.dtype | None = None
    """Dtype to which injected values are rounded; None to inject nothing."""

    @classmethod
    def exact_inputs_for(cls, dtype: torch.dtype) -> "Boundary":
        """Return the boundary of a yardstick whose stages all get inputs that `dtype` can hold.

        Values are stored with a relative accuracy of 2**-24 where that of `dtype` is 2**-11 or
        less, else in double precision.
        """
        wide = dtype in (torch.float32, torch.float64)
        return cls(torch.float64 if wide else torch.float32, dtype)

    def store(self, value: Tensor) -> Tensor:
        """Return the stored value; a copy if the boundary rounds."""
        if self.rounded is not None and value.is_complex():
            return value.clone()
        if self.stored is None or not value.is_floating_point():
            return value
        stored = cast_within_range(value, self.stored)
        # The injected value may be written over `value`, as into a cache.
        return stored.clone() if self.rounded is not None and stored is value else stored

    def injected(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of the next stage, in `dtype`, for a stored value.

        Complex numbers are pairs of float32: torch has none of bfloat16.
        """
        if self.rounded is not None and stored.is_complex():
            return stored.to(torch.complex64).to(dtype)
        if self.rounded is None or not stored.is_floating_point():
            return cast_within_range(stored, dtype)
        return cast_within_range(cast_within_range(stored, self.rounded), dtype)
