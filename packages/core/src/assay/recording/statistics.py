"""Statistics of a tensor, computed on its device."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from assay import kernel

TensorStatistic = Literal["min", "max", "mean", "norm", "nan", "inf", "projection", "channels"]
NAMES: tuple[TensorStatistic, ...] = get_args(TensorStatistic)


class TensorStatistics(NamedTuple):
    """The statistics of one tensor on its device, all but its channels, in the order of `NAMES`."""

    values: Tensor
    dtype: torch.dtype
    channels: int


def measure_statistics(tensor: Tensor) -> TensorStatistics:
    """Measure a floating-point tensor with at least one element.

    nan, inf: numbers of such elements.
    projection: the sum of all elements, each times a random factor of its row and one of its channel.
        Unlike a norm it depends on order and signs. The projections of two tensors with the
        difference D differ by about the norm of D.
    channels: size of the last dim. Only projections of the same width can be compared.
    """
    channels = tensor.shape[-1] if tensor.ndim else 1
    # torch has no arithmetic for float8
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return TensorStatistics(kernel.measure(values.reshape(-1, channels)), values.dtype, channels)


def take_values(found: Iterable[TensorStatistics]) -> dict[int, Tensor]:
    """Return the values by id on the host, (8,) float64, with one transfer per device."""
    by_kind: dict[tuple[torch.device, torch.dtype], dict[int, TensorStatistics]] = {}
    for one in found:
        kind = one.values.device, one.values.dtype
        by_kind.setdefault(kind, {})[id(one)] = one
    taken: dict[int, Tensor] = {}
    for alike in by_kind.values():
        rows = torch.stack([one.values for one in alike.values()]).cpu().double()
        channels = torch.tensor([[one.channels] for one in alike.values()], dtype=torch.float64)
        taken |= dict(zip(alike, torch.cat([rows, channels], 1), strict=True))
    return taken
