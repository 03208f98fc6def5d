"""Statistics of a tensor, computed on its device.

Shape legend: R rows, C channels (last dim).
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

TensorStatistic = Literal["min", "max", "mean", "norm", "nan", "inf", "projection", "channels"]
NAMES: tuple[TensorStatistic, ...] = get_args(TensorStatistic)


# The statistics of one tensor on its device, one scalar each, in the order of `NAMES`.
TensorStatistics = tuple[Tensor, ...]


def measure_statistics(tensor: Tensor) -> TensorStatistics:
    """Measure a floating-point tensor with at least one element.

    nan, inf: numbers of such elements.
    projection: the sum of all elements, each times a random factor of its row and one of its channel.
        Unlike a norm it depends on order and signs. The projections of two tensors with the
        difference D differ by about the norm of D.
    channels: size of the last dim. Only projections of the same width can be compared.
    """
    if tensor.element_size() == 1:  # torch has no arithmetic for float8
        tensor = tensor.float()
    # Widened once: each operation would widen a narrow tensor again, at twice the time.
    values = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    low, high = (one.to(tensor.dtype) for one in torch.aminmax(values))
    norm, mean = torch.linalg.vector_norm(values), values.mean()
    nan, inf = _count_not_finite(tensor, norm)
    num_channels = tensor.shape[-1] if tensor.ndim else 1
    values_RC = values.reshape(-1, num_channels)
    channels = norm.new_full((), num_channels)
    return low, high, mean, norm, nan, inf, _project(values_RC), channels


def take_values(found: Iterable[TensorStatistics]) -> dict[int, Tensor]:
    """Return the values by id on the host, (8,) float64, with one transfer per device."""
    by_device: dict[torch.device, dict[int, TensorStatistics]] = {}
    for one in found:
        by_device.setdefault(one[0].device, {})[id(one)] = one
    values: dict[int, Tensor] = {}
    for on_device in by_device.values():
        parts = [part for one in on_device.values() for part in one]
        dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
        rows = torch.stack([part.to(dtype) for part in parts]).cpu().double()
        values |= dict(zip(on_device, rows.view(-1, len(NAMES)), strict=True))
    return values


def _count_not_finite(tensor: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    if tensor.device.type == "cpu" and math.isfinite(norm):
        return norm.new_zeros(()), norm.new_zeros(())
    return tensor.isnan().sum().to(norm.dtype), tensor.isinf().sum().to(norm.dtype)


def _project(values_RC: Tensor) -> Tensor:
    num_rows, num_channels = values_RC.shape
    dtype, device = values_RC.dtype, values_RC.device
    per_row = values_RC @ _factors(num_channels, 1, dtype, device)
    return torch.dot(per_row, _factors(num_rows, 0, dtype, device))


@lru_cache(maxsize=64)
def _factors(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return standard normal factors, the same on all devices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)
