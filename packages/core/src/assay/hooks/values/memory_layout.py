"""Injected values in the memory layout of the values that they replace.

A kernel that ignores strides or offsets is right on contiguous tensors: if injected values were
always contiguous, a replay would hide its error.
"""

import torch
from torch import Tensor, nn

# In elements. A larger offset is shortened; its alignment is kept.
_LARGEST_OFFSET, _ALIGNMENT = 1024, 64


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` with the strides and offset of `like`, which has the same shape and device.

    Gaps between elements are zero.

    Returns: `value` itself if it has that layout, or cannot have it: elements that differ would
        share memory, or `like` is a tensor subclass.
    """
    offset = like.storage_offset() if _is_plain(like) else 0
    if offset > _LARGEST_OFFSET:
        offset = _LARGEST_OFFSET + offset % _ALIGNMENT
    if (
        not _is_plain(like)
        or not _is_plain(value)
        or value.shape != like.shape
        or not value.numel()
        or (value.stride(), value.storage_offset()) == (like.stride(), offset)
    ):
        return value
    strides = like.stride()
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
