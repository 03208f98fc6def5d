"""Sums over a pair of tensors, computed in blocks that fit into the caches of a core.

Shape legend: R rows (tokens), C channels (last dim).
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from threading import Barrier
from typing import Self, TypeVar

import torch
from torch import Tensor

# Fastest of 2**17 to 2**21: smaller blocks need more calls, and larger ones exceed the caches.
BLOCK_BYTES = 1 << 20

# Number of elements in the rows that one thread computes. It does not depend on the number of threads,
# so neither do the sums.
SPAN_ELEMENTS = 1 << 20

# Range of a tensor's largest value in which sums of squared products neither overflow nor vanish in
# float32. Other tensors (gradients, logits masked by the lowest number) are summed in float64.
USUAL_SIZE = (2.0**-20, 2.0**20)

# Larger than any activation. Masks contain the lowest number of their dtype. The difference between
# those of two dtypes would exceed all other errors.
MASKED_SIZE = 2.0**120

NUM_CHANNEL_SUMS = 5
NUM_ROW_SUMS = 4

_LINE_BYTES = 64

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorstElement:
    """The element with the largest absolute error."""

    difference: float = -1.0
    actual: float = math.nan
    expected: float = math.nan
    index: tuple[int, ...] = ()


@dataclass(slots=True)
class BlockSums:
    """Sums over the finite values of one pair; d = actual - expected, e = expected."""

    rows: Tensor
    """(4, R): sums over the channels of e e, d d, d e and (d e)**2; d d is nan if a value is not finite."""
    channels: Tensor
    """(5, C): sums over the rows of d, d e, e e, d d, e."""
    num_nan: int = 0
    """Number of actual NaN values where the expected value is finite."""
    num_inf: int = 0
    worst: WorstElement = field(default_factory=WorstElement)

    @classmethod
    def of(cls, actual_RC: Tensor, expected_RC: Tensor) -> Self:
        """Compute all sums of one pair; blocks are added in float64."""
        num_rows, num_channels = actual_RC.shape
        sums = cls(
            torch.zeros(NUM_ROW_SUMS, num_rows, dtype=torch.float64),
            torch.zeros(NUM_CHANNEL_SUMS, num_channels, dtype=torch.float64),
        )
        products: _Products | None = None
        for at in list_blocks(actual_RC.shape, compute_dtype(actual_RC.dtype).itemsize):
            actual, expected = prepare_pair(actual_RC[at], expected_RC[at])
            if products is None or not products.fit(expected):
                products = _Products(expected)
            sums._add(actual, expected, products, at)
        return sums

    def _add(
        self, actual: Tensor, expected: Tensor, products: "_Products", at: tuple[slice, slice]
    ) -> None:
        rows, columns = at
        d = products.d
        d.copy_(actual).sub_(expected)
        hit = None
        totals = products.multiply(expected)
        if not math.isfinite(float(totals.sum())):
            hit = self._count_nonfinite(actual, expected, d)
            expected = expected.masked_fill(~expected.isfinite(), 0.0)
            d.masked_fill_(~d.isfinite(), 0.0)
            totals = products.multiply(expected)
        largest = products.largest_difference()
        if largest > self.worst.difference:
            row = int(d.abs().amax(1).argmax())  # in two steps: argmax is ten times as slow
            column = int(d[row].abs().argmax())
            index = (rows.start + row, columns.start + column)
            values = float(actual[row, column]), float(expected[row, column])
            self.worst = WorstElement(largest, *values, index)
        self.channels[:4, columns] += totals
        self.channels[4, columns] += expected.sum(0)
        self.rows[:, rows] += products.sum_rows()
        if hit is not None:
            self.rows[1, rows][hit] = math.nan

    def _count_nonfinite(self, actual: Tensor, expected: Tensor, d: Tensor) -> Tensor:
        """Count NaN and infinity, and return the rows that have any, (R,) bool."""
        wrong = ~actual.isfinite() & expected.isfinite()
        self.num_nan += int((actual.isnan() & wrong).sum())
        self.num_inf += int((actual.isinf() & wrong).sum())
        # Infinities of one sign agree: additive masks contain them.
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        return (~d.isfinite() & ~same).any(dim=1)


class _Products:
    """d, d e, e e and d d of one block, (4, R, C), in memory that all blocks share."""

    def __init__(self, expected: Tensor) -> None:
        num_rows, num_channels = expected.shape
        # Rows a power of two apart share cache lines, which doubles the time of a sum. The zeros of
        # the padding change no sum and no maximum.
        apart = num_channels + _LINE_BYTES // expected.itemsize
        self._whole = torch.zeros(4, num_rows, apart, dtype=expected.dtype)
        self._used = self._whole[:, :, :num_channels]
        self.d = self._used[0]

    def fit(self, expected: Tensor) -> bool:
        """Return True if `expected` has the shape and dtype of the memory."""
        return self.d.shape == expected.shape and self.d.dtype == expected.dtype

    def multiply(self, e: Tensor) -> Tensor:
        """Compute the products of d, and return the sums over rows of all four, (4, C)."""
        d, de, ee, dd = self._used
        torch.mul(d, e, out=de)
        torch.mul(e, e, out=ee)
        torch.mul(d, d, out=dd)
        return self._used.sum(1)

    def sum_rows(self) -> Tensor:
        """Return the sums over channels of e e, d d, d e and (d e)**2, (4, R), and overwrite d e."""
        de, ee, dd = self._used[1:].sum(2)
        return torch.stack([ee, dd, de, self._whole[1].square_().sum(1)])

    def largest_difference(self) -> float:
        """Return the largest absolute d."""
        low, high = torch.aminmax(self._whole[0])
        return max(-float(low), float(high))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which differences from values of `dtype` are computed.

    Low-precision values differ from the expected ones by 2**-12 and more. float32 resolves such a
    difference to a relative 2**-12. Differences of float32 values need float64.
    """
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def prepare_pair(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair with infinities as mask values, and `expected` in the dtype to compute in."""
    low, high = torch.aminmax(expected)
    largest = max(-float(low), float(high))
    usual = USUAL_SIZE[0] <= largest <= USUAL_SIZE[1]
    if largest >= MASKED_SIZE:
        actual, expected = _mask_infinitely(actual, expected)
    return actual, expected.to(compute_dtype(actual.dtype) if usual else torch.float64)


def _mask_infinitely(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the lowest and the largest number of each dtype by infinities."""
    masked = expected.abs() >= MASKED_SIZE
    masked_alike = masked & (actual.abs() >= torch.finfo(actual.dtype).max / 2)
    infinite = torch.tensor(torch.inf)
    return (
        torch.where(masked_alike, infinite.to(actual.dtype).copysign(actual), actual),
        torch.where(masked, infinite.to(expected.dtype).copysign(expected), expected),
    )


def sum_pair(actual_RC: Tensor, expected_RC: Tensor) -> BlockSums:
    """Compute the result of `BlockSums.of` on as many threads as torch has."""
    num_rows, num_channels = actual_RC.shape
    height = max(1, SPAN_ELEMENTS // num_channels)

    def sum_span(start: int) -> BlockSums:
        span = slice(start, start + height)
        return BlockSums.of(actual_RC[span], expected_RC[span])

    return _join(map_on_threads(sum_span, range(0, num_rows, height)), height)


def map_on_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of `function` for each item, computed on as many threads as torch has.

    Operations inside of `function` use one thread, so that results do not depend on the number.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return [function(item) for item in items]
    if len(items) > 1:
        return list(_single_threaded_pool(num_threads).map(function, items))
    torch.set_num_threads(1)  # handing one item to another thread takes longer than a small sum
    try:
        return [function(item) for item in items]
    finally:
        torch.set_num_threads(num_threads)


@cache
def _single_threaded_pool(number: int) -> ThreadPoolExecutor:
    """Start threads whose torch operations start no further threads.

    An operation on several threads synchronizes them at its end, which takes ten times as long on a
    busy machine.
    """
    pool = ThreadPoolExecutor(number)
    all_started = Barrier(number)

    def prepare(_: int) -> None:
        torch.set_num_threads(1)
        all_started.wait()

    list(pool.map(prepare, range(number)))
    torch.set_num_threads(number)  # the last call applies to threads started later
    return pool


# A forked process does not have its parent's threads.
os.register_at_fork(after_in_child=_single_threaded_pool.cache_clear)


def count_misrounded(actual_RC: Tensor, expected_RC: Tensor) -> int:
    """Count the elements of `actual` that differ from the expected value rounded to their dtype."""
    count = 0
    for at in list_blocks(actual_RC.shape, compute_dtype(actual_RC.dtype).itemsize):
        actual, expected = prepare_pair(actual_RC[at], expected_RC[at])
        count += int((expected.to(actual.dtype) != actual).count_nonzero())
    return count


def list_blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of blocks that cover (R, C) elements, each of at most BLOCK_BYTES."""
    num_rows, num_channels = shape
    width = BLOCK_BYTES // itemsize
    height = max(1, width // num_channels)
    rows = [slice(start, start + height) for start in range(0, num_rows, height)]
    columns = [slice(start, start + width) for start in range(0, num_channels, width)]
    return product(rows, columns)


def _join(parts: list[BlockSums], height: int) -> BlockSums:
    """Combine the sums of spans of `height` rows into those of the whole pair."""
    number, worst = max(enumerate(parts), key=lambda item: item[1].worst.difference)
    index = (number * height + worst.worst.index[0], worst.worst.index[1])
    return BlockSums(
        torch.cat([part.rows for part in parts], dim=1),
        torch.stack([part.channels for part in parts]).sum(0),
        sum(part.num_nan for part in parts),
        sum(part.num_inf for part in parts),
        replace(worst.worst, index=index),
    )
