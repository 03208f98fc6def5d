"""Steps that a trainer skips: their batch is given again, until a step is made.

GradScaler leaves a step out whose gradients overflow, and halves its scale. The reference has made
that step: what comes after could not be compared with it.
"""

from collections.abc import Callable

import torch.distributed as dist

from assay.errors import UsageError
from assay.training.protocol import StepReport

# DeepSpeed's scale starts at 2**16, and did at 2**32 (its `initial_scale_power`); each step that is
# skipped halves it, and what overflows at a scale of 1 does so without one.
MOST_SKIPPED = 32


def step_until_made(
    step: Callable[[], StepReport], begin_again: Callable[[], None]
) -> tuple[StepReport, int]:
    """Make a step, again as long as it is skipped: `begin_again` is called before each new try.

    Returns: the report of the last try, and how many were skipped; `MOST_SKIPPED` and one if all.
    Raises: UsageError if ranks disagree about it.
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
