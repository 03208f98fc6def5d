"""Repeats the batch of a step that a trainer skips, until the trainer makes the step.

GradScaler skips a step whose gradients overflow, and halves its scale. The reference has made that
step, so later steps would not be comparable.
"""

from collections.abc import Callable

import torch.distributed as dist

from assay.errors import UsageError
from assay.training.protocol import StepReport

# DeepSpeed's scale starts at 2**16, in older versions at 2**32 (`initial_scale_power`). Each skipped
# step halves it. Gradients that overflow at scale 1 overflow without a scale too.
MOST_SKIPPED = 32


def step_until_made(
    step: Callable[[], StepReport], begin_again: Callable[[], None]
) -> tuple[StepReport, int]:
    """Call `step` until it is not skipped, and `begin_again` before each new try.

    Returns: the report of the last try, and the number of skipped ones; `MOST_SKIPPED` + 1 if all.
    Raises: UsageError if only some ranks skip.
    """
    report = step()
    for num_skipped in range(MOST_SKIPPED + 1):
        if not _is_skipped(report):
            return report, num_skipped
        if num_skipped < MOST_SKIPPED:
            begin_again()
            report = step()
    return report, MOST_SKIPPED + 1


def _is_skipped(report: StepReport) -> bool:
    if not dist.is_initialized():
        return report.skipped
    of_ranks = [False] * dist.get_world_size()
    dist.all_gather_object(of_ranks, report.skipped)
    if len(set(of_ranks)) > 1:
        skipping = [rank for rank, skipped in enumerate(of_ranks) if skipped]
        raise UsageError(
            f"step {report.step} is skipped on the ranks {skipping} of {len(of_ranks)} alone: a step"
            " is made by all ranks or by none"
        )
    return report.skipped
