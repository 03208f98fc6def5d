"""The stored and the injected value at a module boundary.

An injected value gets the memory layout of the value that it replaces. A kernel that ignores strides or
offsets is right on contiguous tensors: if injected values were always contiguous, a replay would hide its
error.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn


def cast_within_range(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor; finite values stay finite, clamped to the largest number of `dtype`.

    Additive masks hold the lowest number of their dtype, which is -inf in a narrower one. A row
    with no allowed column would then become NaN.
    """
    if tensor.dtype == dtype:
        return tensor
    limit = _narrower_limit(tensor.dtype, dtype)
    if limit is not None and tensor.numel():
        low, high = torch.aminmax(tensor)
        # False for NaN, which stays NaN without a clamp
        if -float(low) > limit or float(high) > limit:
            infinite = tensor.isinf()
            return (
                tensor.clamp(-limit, limit)
                .masked_fill(infinite, torch.inf)
                .copysign(tensor)
                .to(dtype)
            )
    return tensor.to(dtype)


@cache
def _narrower_limit(dtype: torch.dtype, to: torch.dtype) -> float | None:
    """Return the largest number of the floating-point dtype `to`; None unless that of `dtype` is larger."""
    if not (dtype.is_floating_point and to.is_floating_point):
        return None
    limit = torch.finfo(to).max
    return limit if limit < torch.finfo(dtype).max else None


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
        stored = self.as_stored(value)
        # The injected value may be written over `value`, as into a cache.
        is_replaced = self.rounded is not None and (value.is_floating_point() or value.is_complex())
        return stored.clone() if is_replaced and stored is value else stored

    def as_stored(self, value: Tensor) -> Tensor:
        """Return the stored value; `value` itself if it has that dtype."""
        if self.stored is None or not value.is_floating_point():
            return value
        return cast_within_range(value, self.stored)

    def rounded_input(self, value: Tensor) -> Tensor:
        """Return the input of the next stage for a value, without a copy to store."""
        return self.injected(self.as_stored(value.detach()), value.dtype)

    def injected(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of the next stage, in `dtype`, for a stored value.

        Complex numbers are pairs of float32: torch has none of bfloat16.
        """
        if self.rounded is not None and stored.is_complex():
            return stored.to(torch.complex64).to(dtype)
        if self.rounded is None or not stored.is_floating_point():
            return cast_within_range(stored, dtype)
        return cast_within_range(cast_within_range(stored, self.rounded), dtype)


# In elements. A larger offset is shortened; its alignment is kept.
_LARGEST_OFFSET, _ALIGNMENT = 1024, 64


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` with the strides and offset of `like`, which has the same shape and device.

    Gaps between elements are zero.

    Returns: `value` itself if it has that layout, or cannot have it: elements that differ would
        share memory, or `like` is a tensor subclass.
    """
    if not (_is_plain(like) and _is_plain(value)):
        return value
    strides, offset = like.stride(), like.storage_offset()
    if offset > _LARGEST_OFFSET:
        offset = _LARGEST_OFFSET + offset % _ALIGNMENT
    has_layout = value.stride() == strides and value.storage_offset() == offset
    if has_layout or value.shape != like.shape or not value.numel():
        return value
    once = value
    for dim, stride in enumerate(strides):
        if stride == 0:
            once = once.narrow(dim, 0, 1)
    if once.shape != value.shape and not torch.equal(once.expand_as(value), value):
        return value
    span = _span(once.shape, strides)
    if span is None:
        return value
    storage = value.new_zeros(offset + span).untyped_storage()
    # Not by as_strided: to autograd that is a view, which may not be changed in place.
    value.new_empty(0).set_(storage, offset, once.shape, strides).copy_(once)
    return value.new_empty(0).set_(storage, offset, value.shape, strides)


def copy_of(value: Tensor) -> Tensor:
    """Copy a tensor with its layout; `clone` closes gaps."""
    return laid_out_as(value.clone(), value)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _span(shape: torch.Size, strides: tuple[int, ...]) -> int | None:
    """Return the number of elements from the first to the last; None if two share memory."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    span = 1
    for stride, size in dims:
        if stride < span:
            return None
        span += stride * (size - 1)
    return span
