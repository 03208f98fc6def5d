"""Schedules of torch.distributed.pipelining, and their assignment of stages to ranks; pure."""

from dataclasses import dataclass
from typing import Literal

from assay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of the forward and backward passes of a pipeline."""

    name: str
    """The name in torch."""
    layout: Literal["single", "loop", "v"]
    """single: one stage for each rank; loop: stages are assigned round-robin; v: two for each rank,
    in order and back, so that the first rank also has the last stage."""
    backward: Literal["whole", "split"] = "whole"
    """split: gradients of inputs and of weights are computed separately."""


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", "single"),
        Schedule("1F1B", "single"),
        Schedule("Interleaved1F1B", "loop"),
        Schedule("LoopedBFS", "loop"),
        Schedule("InterleavedZeroBubble", "loop", "split"),
        Schedule("ZBVZeroBubble", "v", "split"),
        Schedule("DualPipeV", "v", "split"),
    )
}


def find_schedule(name: str) -> Schedule:
    """Return the schedule called `name`. Raises: UsageError."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown pipeline schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def stages_of_rank(name: str, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the numbers of the stages of `rank`, in order.

    Raises: UsageError for an unknown name or a number of stages that does not fit its layout.
    """
    layout = find_schedule(name).layout
    fits, wanted = {
        "single": (num_stages == num_ranks, f"{num_ranks}"),
        "loop": (num_stages % num_ranks == 0, f"a multiple of {num_ranks}"),
        "v": (num_stages == 2 * num_ranks, f"{2 * num_ranks}"),
    }[layout]
    if not fits:
        raise UsageError(
            f"{name} on {num_ranks} ranks needs {wanted} pipeline stages, not {num_stages}"
        )
    if layout == "v":
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, num_ranks))
