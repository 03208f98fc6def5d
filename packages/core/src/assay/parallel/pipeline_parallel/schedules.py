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


class ScheduleError(UsageError):
    """A schedule that is unknown or cannot run these stages."""

    @classmethod
    def unknown(cls, name: str) -> "ScheduleError":
        """Make the error for a name that is not in `SCHEDULES`."""
        return cls(f"unknown pipeline schedule {name!r}; known: {', '.join(SCHEDULES)}")

    @classmethod
    def stage_count(cls, schedule: Schedule, num_stages: int, num_ranks: int) -> "ScheduleError":
        """Make the error for a number of stages that does not fit the layout of `schedule`."""
        wanted = {
            "single": str(num_ranks),
            "loop": f"a multiple of {num_ranks}",
            "v": str(2 * num_ranks),
        }[schedule.layout]
        return cls(
            f"{schedule.name} on {num_ranks} ranks needs {wanted} pipeline stages, not {num_stages}"
        )

    @classmethod
    def sharded(cls, name: str) -> "ScheduleError":
        """Make the error for FSDP2, which loses gradients if the backward pass is split."""
        whole = ", ".join(known for known, of in SCHEDULES.items() if of.backward == "whole")
        return cls(
            f"{name} splits the backward pass, and FSDP2 then loses gradients; for sharded stages"
            f" take one of {whole}"
        )

    @classmethod
    def too_few_micro_batches(cls, name: str, num: int, needed: int) -> "ScheduleError":
        """Make the error for fewer micro-batches than the schedule needs."""
        return cls(f"{name} needs at least {needed} micro-batches in each step, not {num}")


def find_schedule(name: str) -> Schedule:
    """Return the schedule called `name`. Raises: ScheduleError."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise ScheduleError.unknown(name) from None


def stages_of_rank(name: str, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the numbers of the stages of `rank`, in order.

    Raises: ScheduleError for an unknown name or a number of stages that does not fit its layout.
    """
    schedule = find_schedule(name)
    fits = {
        "single": num_stages == num_ranks,
        "loop": num_stages % num_ranks == 0,
        "v": num_stages == 2 * num_ranks,
    }
    if not fits[schedule.layout]:
        raise ScheduleError.stage_count(schedule, num_stages, num_ranks)
    if schedule.layout == "v":
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, num_ranks))
