"""Numbers the rows of a training run consecutively."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from assay.training.batches import MicroBatch


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of each step and micro-batch of a run, in the order in which batches are planned."""

    numbers: Mapping[tuple[int, int], range]
    """Row numbers by step and micro-batch."""
    step_starts: tuple[int, ...]
    """Number of the first row of each step."""

    @classmethod
    def of_counts(cls, num_rows: Sequence[Sequence[int]]) -> Self:
        """Build the table from the number of rows of each micro-batch of each step."""
        places = [
            (step, number) for step, counts in enumerate(num_rows) for number in range(len(counts))
        ]
        ends = accumulate((count for counts in num_rows for count in counts), initial=0)
        numbers = dict(zip(places, (range(*pair) for pair in pairwise(ends)), strict=True))
        return cls(numbers, tuple(accumulate(map(sum, num_rows[:-1]), initial=0)))

    @classmethod
    def of_batches(cls, batches: Sequence[Sequence[MicroBatch]]) -> Self:
        """Build the table for the batches of a run."""
        return cls.of_counts(count_rows(batches))

    def of_micro_batch(self, step: int, micro_batch: int, count: int) -> tuple[int, ...]:
        """Return the numbers of the first `count` rows of a micro-batch; -1 for unplanned rows."""
        return (*self.numbers.get((step, micro_batch), ()), *[-1] * count)[:count]

    def step_of(self, row: int) -> int:
        """Return the step of a row."""
        return bisect_right(self.step_starts, row) - 1


def count_rows(batches: Sequence[Sequence[MicroBatch]]) -> list[list[int]]:
    """Count the rows of each micro-batch of each step."""
    return [[len(micro_batch["input_ids"]) for micro_batch in batch] for batch in batches]
