"""The interface of a format of quantized weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.models.quantization.groups import Groups
from assay.models.quantization.quantized_weight import QuantizedWeight
from assay.models.quantization.stored import WeightStore


@dataclass(frozen=True)
class Format:
    """One way to store a weight `NAME.weight` as several tensors."""

    marker: str
    """A module `NAME` is quantized if this tensor is stored as `NAME.marker`."""
    scales: str
    """The tensor with one element per group."""
    parts: tuple[str, ...]
    """All tensors of a quantized module except its bias, without the module name."""
    read: Callable[[WeightStore, str], QuantizedWeight]
    """Read the named module. Raises: UsageError, naming file and key."""


def parse_count(stored: WeightStore, key: str, allowed: range, *others: object) -> int:
    """Read an integer setting of the quantization.

    others: values to use if `key` is absent.
    Raises: UsageError if the value is not in `allowed`.
    """
    value = next((one for one in (stored.quantization.get(key), *others) if one is not None), None)
    if type(value) is not int or value not in allowed:
        raise stored.refuse_setting(key)
    return value


def parse_group_size(stored: WeightStore, key: str, num_columns: int, *others: object) -> int:
    """Read the number of columns that share a scale; -1 in the settings stands for all."""
    size = parse_count(stored, key, range(-1, 1 << 30), *others)
    if size == 0:
        raise stored.refuse_setting(key)
    return num_columns if size == -1 else size


def per_group(stored: WeightStore, name: str, values: Tensor, groups: Groups) -> Tensor:
    """Return scales or zero points as one float32 per group.

    Raises: UsageError if `values` has another number of elements.
    """
    if values.numel() != groups.num_groups:
        down, across = groups.grid_shape
        problem = f"has {values.numel()} values for {down} x {across} groups"
        raise stored.refuse(name, problem)
    return values.reshape(-1).float()


def precision_of(scales: Tensor) -> float:
    """Return the unit roundoff of the dtype of stored scales.

    Powers of two (e8m0) count as exact because codes are rounded with the stored scale.
    """
    if not scales.is_floating_point() or scales.dtype == torch.float8_e8m0fnu:
        return 0.0
    return float(torch.finfo(scales.dtype).eps) / 2
