"""Weights rounded to the levels of a format in plain arithmetic, and faults planted in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class Rounded:
    """Codes [rows, columns], scales and zero points [groups down, groups across]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    block: tuple[int, int]

    @property
    def values(self) -> Tensor:
        return (self.codes - spread(self.zeros, self)) * spread(self.scales, self)

    def region(self, group: int) -> tuple[slice, slice]:
        down, across = divmod(group, self.scales.shape[1])
        rows, columns = self.block
        return (
            slice(down * rows, (down + 1) * rows),
            slice(across * columns, (across + 1) * columns),
        )


def spread(per_group: Tensor, rounded: Rounded) -> Tensor:
    whole = per_group.repeat_interleave(rounded.block[0], 0).repeat_interleave(rounded.block[1], 1)
    return whole[: rounded.codes.shape[0], : rounded.codes.shape[1]]


Fault = Callable[[Rounded], None]


def no_fault(rounded: Rounded) -> None:
    pass


def times(factor: float, group: int) -> Fault:
    def plant(rounded: Rounded) -> None:
        rounded.scales.view(-1)[group] *= factor

    return plant


def zero_plus_one(group: int) -> Fault:
    def plant(rounded: Rounded) -> None:
        rounded.zeros.view(-1)[group] += 1

    return plant


def swap(one: int, other: int) -> Fault:
    def plant(rounded: Rounded) -> None:
        here, there = rounded.region(one), rounded.region(other)
        codes = rounded.codes[here].clone()
        rounded.codes[here] = rounded.codes[there]
        rounded.codes[there] = codes
        for per_group in (rounded.scales, rounded.zeros):
            flat = per_group.view(-1)
            flat[[one, other]] = flat[[other, one]]

    return plant


def round_to_grid(
    weight: Tensor, block: tuple[int, int], levels: Sequence[float], zero: str,
    dtype: torch.dtype | Callable[[float], float],
) -> Rounded:  # fmt: skip
    """Round to the nearest level of each group.

    zero: "range" shifts integers to the range of a group, "middle" and "none" give constants.
    dtype: dtype of the scales, or a function that rounds them.
    """
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    table = torch.tensor(levels)
    rounded = Rounded(
        torch.zeros(rows, columns), torch.ones(down, across), torch.zeros(down, across), block
    )
    for group in range(down * across):
        region = rounded.region(group)
        part = weight[region]
        low, high = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
        if zero == "range":
            scale = (high - low) / (len(levels) - 1)
            point = round(-low / scale) + levels[0]
        else:
            point = levels[0] + (len(levels) // 2) if zero == "middle" else 0.0
            scale = max(high, -low) / (levels[-1] - point)
        scale = dtype(scale) if callable(dtype) else float(torch.tensor(scale).to(dtype))
        nearest = (part[..., None] / scale + point - table).abs().argmin(-1)
        rounded.codes[region] = table[nearest]
        rounded.scales.view(-1)[group], rounded.zeros.view(-1)[group] = scale, point
    return rounded


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row into words of 32 bits, the first number into the lowest bits."""
    packed = []
    for row in numbers.to(torch.int64).tolist():
        stream = sum(number << (index * bits) for index, number in enumerate(row))
        words = [(stream >> (32 * k)) & 0xFFFFFFFF for k in range(-(-len(row) * bits // 32))]
        packed.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(packed, dtype=torch.int32)


Module = Callable[[Tensor, Fault], tuple[Tensors, Tensor]]


@dataclass
class Case:
    """One format: its settings in config.json and the writer of a module."""

    name: str
    settings: Mapping[str, Any]
    write: Module
    block: tuple[int, int] = (1, 64)
    """Rows and columns of a group; of a weight with fewer, all."""
    has_zeros: bool = False
    is_contiguous: bool = True
    factor: float = 1.1
    """The least wrong scale that the format can store and that stands out."""

    @property
    def num_groups(self) -> int:
        """Of a weight of 32 rows and 256 columns."""
        return -(-32 // self.block[0]) * -(-256 // self.block[1])

    @property
    def group(self) -> int:
        return min(3, self.num_groups - 1)

    def corner(self, group: int) -> tuple[int, int]:
        """First row and column of a group."""
        down, across = divmod(group, -(-256 // self.block[1]))
        column = across * self.block[1]
        if not self.is_contiguous:  # column c is at 7 c mod 256
            column = min(c for c in range(256) if column <= c * 7 % 256 < column + self.block[1])
        return down * self.block[0], column
