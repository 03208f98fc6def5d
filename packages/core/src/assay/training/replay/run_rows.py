"""The rows of a training run, numbered one after the other."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from assay.training.batches import MicroBatch


@dataclass(frozen=True, slots=True)
class RunRows:
    """Which rows of a run belong to which step and micro-batch, as both sides plan their batches.

    numbers: of the rows of each (step, micro-batch).
    step_starts: number of the first row of each step.
    """

    numbers: Mapping[tuple[int, int], range]
    step_starts: tuple[int, ...]

    @classmethod
    def of_counts(cls, num_rows: Sequence[Sequence[int]]) -> Self:
        """The table for these numbers of rows, of each micro-batch of each step."""
        places = [
            (step, number) for step, counts in enumerate(num_rows) for number in range(len(counts))
        ]
        ends = accumulate((count for counts in num_rows for count in counts), initial=0)
        numbers = dict(zip(places, (range(*pair) for pair in pairwise(ends)), strict=True))
        return cls(numbers, tuple(accumulate(map(sum, num_rows[:-1]), initial=0)))

    @classmethod
    def of_batches(cls, batches: Sequence[Sequence[MicroBatch]]) -> Self:
        """The table for the batches of a run."""
        return cls.of_counts(count_rows(batches))

    def of_micro_batch(self, step: int, micro_batch: int, count: int) -> tuple[int, ...]:
        """Numbers of the first `count` rows of a micro-batch; -1 for those that are not planned."""
        return (*self.numbers.get((step, micro_batch), ()), *[-1] * count)[:count]

    def step_of(self, row: int) -> int:
        """The step to which a row belongs."""
        return bisect_right(self.step_starts, row) - 1


def count_rows(batches: Sequence[Sequence[MicroBatch]]) -> list[list[int]]:
    """The number of rows of each micro-batch of each step."""
    return [[len(micro_batch["input_ids"]) for micro_batch in batch] for batch in batches]
