"""Sums over a pair of tensors, block by block: a block stays in the caches of the core it is on.

Shape legend: R rows (tokens), C channels (last dim).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Self, TypeVar

import torch
from torch import Tensor

# Smaller blocks pay for their calls, larger ones leave the caches. Of 2**17 to 2**21 the fastest.
BLOCK_BYTES = 1 << 20

# Threads share a pair by spans of rows of about so many elements. The cut does not depend on the
# number of threads, so neither do the sums.
SPAN_ELEMENTS = 1 << 20

NUM_CHANNEL_SUMS = 5

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
    """Sums over one pair; d = actual - expected, e = expected; what is not finite is left out.

    rows: (2, R), sums over the channels of e e and d d; d d is nan where a value is not finite.
    channels: (5, C), sums over the rows of d, d e, e e, d d, e.
    dede: sum of (d e)**2.
    num_nan, num_inf: of actual where expected is finite.
    """

    rows: Tensor
    channels: Tensor
    dede: float = 0.0
    num_nan: int = 0
    num_inf: int = 0
    worst: WorstElement = field(default_factory=WorstElement)

    @classmethod
    def of(cls, actual_RC: Tensor, expected_RC: Tensor, dtype: torch.dtype) -> Self:
        """All sums of one pair: products in `dtype`, added up in float64 from block to block."""
        num_rows, num_channels = actual_RC.shape
        sums = cls(
            torch.zeros(2, num_rows, dtype=torch.float64),
            torch.zeros(NUM_CHANNEL_SUMS, num_channels, dtype=torch.float64),
        )
        memory: Tensor | None = None
        for at in _blocks(num_rows, num_channels, dtype):
            actual, expected = actual_RC[at], expected_RC[at].to(dtype)
            if memory is None or memory[0].shape != actual.shape:
                memory = torch.empty(4, *actual.shape, dtype=dtype)
            sums._add(actual, expected, memory, at)
        return sums

    def _add(
        self, actual: Tensor, expected: Tensor, memory: Tensor, at: tuple[slice, slice]
    ) -> None:
        rows, columns = at
        d, de = memory[0], memory[1]
        d.copy_(actual).sub_(expected)
        hit = None
        totals = _multiply(memory, expected)
        if not math.isfinite(float(totals.sum())):
            hit = self._count_nonfinite(actual, expected, d)
            expected = expected.masked_fill(~expected.isfinite(), 0.0)
            d.masked_fill_(~d.isfinite(), 0.0)
            totals = _multiply(memory, expected)
        self._find_worst(d, actual, expected, (rows.start, columns.start))
        self.channels[:4, columns] += totals
        self.channels[4, columns] += expected.sum(0)
        self.rows[:, rows] += memory[2:].sum(2)
        if hit is not None:
            self.rows[1, rows][hit] = math.nan
        flat = de.view(-1)
        self.dede += float(torch.dot(flat, flat))

    def _count_nonfinite(self, actual: Tensor, expected: Tensor, d: Tensor) -> Tensor:
        """Count, and return which rows were hit, (R,)."""
        wrong = ~actual.isfinite() & expected.isfinite()
        self.num_nan += int((actual.isnan() & wrong).sum())
        self.num_inf += int((actual.isinf() & wrong).sum())
        # Two infinities of one sign agree: an additive mask holds them.
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        return (~d.isfinite() & ~same).any(dim=1)

    def _find_worst(
        self, d: Tensor, actual: Tensor, expected: Tensor, start: tuple[int, int]
    ) -> None:
        low, high = torch.aminmax(d)
        largest = max(-float(low), float(high))
        if largest > self.worst.difference:
            row = int(d.abs().amax(1).argmax())  # in two steps: argmax is ten times as slow
            column = int(d[row].abs().argmax())
            values = float(actual[row, column]), float(expected[row, column])
            self.worst = WorstElement(largest, *values, (start[0] + row, start[1] + column))


def sum_pair(actual_RC: Tensor, expected_RC: Tensor, dtype: torch.dtype) -> BlockSums:
    """`BlockSums.of` on as many threads as torch has."""
    num_rows, num_channels = actual_RC.shape
    height = max(1, SPAN_ELEMENTS // num_channels)

    def sum_span(start: int) -> BlockSums:
        span = slice(start, start + height)
        return BlockSums.of(actual_RC[span], expected_RC[span], dtype)

    return _join(map_on_threads(sum_span, range(0, num_rows, height)), height)


def map_on_threads(function: Callable[[int], Result], numbers: Sequence[int]) -> list[Result]:
    """The results of `function` for each number, by as many threads as torch has."""
    with _threads_of_their_own() as num_threads:
        if len(numbers) == 1 or num_threads == 1:
            return [function(number) for number in numbers]
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(function, numbers))


@contextmanager
def _threads_of_their_own() -> Iterator[int]:
    """Let every operation run on the thread that calls it; gives the number of threads there were.

    Operations that share threads wait for each other after each of them: on a busy machine that
    takes ten times as long.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def count_misrounded(actual_RC: Tensor, expected_RC: Tensor) -> int:
    """Elements of `actual` that are not the expected value rounded to their dtype."""
    return sum(
        int((expected_RC[at].to(actual_RC.dtype) != actual_RC[at]).count_nonzero())
        for at in _blocks(len(actual_RC), actual_RC.shape[1], torch.float64)
    )


def _blocks(num_rows: int, num_channels: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    width = BLOCK_BYTES // dtype.itemsize
    height = max(1, width // num_channels)
    rows = [slice(start, start + height) for start in range(0, num_rows, height)]
    columns = [slice(start, start + width) for start in range(0, num_channels, width)]
    return product(rows, columns)


def _multiply(memory: Tensor, e: Tensor) -> Tensor:
    """Fill in d e, e e and d d behind d, and return the sums over rows of all four."""
    d, de, ee, dd = memory
    torch.mul(d, e, out=de)
    torch.mul(e, e, out=ee)
    torch.mul(d, d, out=dd)
    return memory.sum(1)


def _join(parts: list[BlockSums], height: int) -> BlockSums:
    """The sums of spans of `height` rows as those of the whole pair."""
    number, worst = max(enumerate(parts), key=lambda item: item[1].worst.difference)
    index = (number * height + worst.worst.index[0], worst.worst.index[1])
    return BlockSums(
        torch.cat([part.rows for part in parts], dim=1),
        torch.stack([part.channels for part in parts]).sum(0),
        sum(part.dede for part in parts),
        sum(part.num_nan for part in parts),
        sum(part.num_inf for part in parts),
        replace(worst.worst, index=index),
    )
