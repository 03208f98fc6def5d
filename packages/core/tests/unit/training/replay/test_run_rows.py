import pytest
import torch

from assay.training.replay.run_rows import RunRows, count_rows


def test_rows_of_a_run_are_numbered_one_after_the_other() -> None:
    batches = [[{"input_ids": torch.zeros(count, 5)} for count in step] for step in ([2, 3], [1])]
    rows = RunRows.of_batches(batches)

    assert count_rows(batches) == [[2, 3], [1]]
    assert rows.of_micro_batch(0, 0, 2) == (0, 1)
    assert rows.of_micro_batch(0, 1, 3) == (2, 3, 4)
    assert rows.of_micro_batch(1, 0, 1) == (5,)
    assert [rows.step_of(row) for row in range(6)] == [0, 0, 0, 0, 0, 1]


def test_rows_of_many_micro_batches_have_numbers_of_their_own() -> None:
    rows = RunRows.of_counts([[2] * 1500] * 3)

    numbers = [
        (row, step)
        for step in range(3)
        for micro_batch in range(1500)
        for row in rows.of_micro_batch(step, micro_batch, 2)
    ]

    assert [row for row, _ in numbers] == list(range(3 * 1500 * 2))
    assert [step for _, step in numbers] == [rows.step_of(row) for row, _ in numbers]


@pytest.mark.parametrize(
    ("micro_batch", "count", "numbers"), [(1, 3, (2, 3, -1)), (1, 1, (2,)), (2, 2, (-1, -1))]
)
def test_rows_that_are_not_planned_have_no_number(
    micro_batch: int, count: int, numbers: tuple[int, ...]
) -> None:
    assert RunRows.of_counts([[2, 2]]).of_micro_batch(0, micro_batch, count) == numbers
