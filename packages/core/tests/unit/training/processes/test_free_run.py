"""A skipped step is made again with the same batch."""

import pytest

from assay.training.processes.free_run import MOST_SKIPPED, step_until_made
from assay.training.protocol import StepReport


@pytest.mark.parametrize("num_skipped", [0, 1, MOST_SKIPPED])
def test_step_is_tried_until_it_is_made(num_skipped: int) -> None:
    tries: list[bool] = []
    begun_again: list[int] = []

    def step() -> StepReport:
        tries.append(len(tries) < num_skipped)
        return StepReport(0, 1.0, 8, 1.0, 1e-3, skipped=tries[-1])

    report, skipped = step_until_made(step, lambda: begun_again.append(len(tries)))

    assert (report.skipped, skipped) == (False, num_skipped)
    assert begun_again == list(range(1, num_skipped + 1))


def test_step_that_is_never_made_ends() -> None:
    tries: list[int] = []

    def step() -> StepReport:
        tries.append(0)
        return StepReport(0, 1.0, 8, 1.0, 1e-3, skipped=True)

    report, skipped = step_until_made(step, lambda: None)

    assert report.skipped
    assert skipped == len(tries) == MOST_SKIPPED + 1
