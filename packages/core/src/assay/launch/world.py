"""The description of a world before it starts: its mesh, its device and its time limits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import UsageError
from assay.progress import Progress, SilentProgress

# Shares of the time after which a world is ended from outside: for its start, one collective and
# its body. The rest is for collecting stacks and logs and for ending the processes.
_SHARES = (0.35, 0.25, 0.5)

# Variables that torchrun, or any launcher that follows torch's `env://`, sets in each process.
OUTER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long each part of a world may take before its ranks are ended.

    start_seconds: until every rank has opened its device and joined the process group.
    collective_seconds: of one collective; torch then raises in the ranks that wait in it.
    body_seconds: of the body on all ranks; then the stack of every rank is collected.
    """

    start_seconds: float = 60.0
    collective_seconds: float = 30.0
    body_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.collective_seconds < self.body_seconds or self.start_seconds <= 0:
            raise UsageError(
                f"limits must be positive, and one collective ({self.collective_seconds:g} s) must "
                f"be given up before the whole body is ({self.body_seconds:g} s)"
            )

    @classmethod
    def within(cls, seconds: float) -> "TimeLimits":
        """Limits of a world that is ended from outside after `seconds`.

        Its start and its body together end before that, so that stacks can still be collected,
        and a collective before the body, so that torch raises its own error first.
        """
        shares = dict(zip(("start", "collective", "body"), _SHARES, strict=True))
        return cls(**{f"{name}_seconds": share * seconds for name, share in shares.items()})


@dataclass(frozen=True, slots=True)
class World:
    """Ranks on a mesh, for `launch_world` to start.

    axes: sizes of the mesh axes by name, the outermost first; their product is the number of ranks.
    device: as in a RUN. For an accelerator without an index each rank opens the device with its
        local rank as index; the simulated device and the host's are shared by all ranks.
    threads: number of threads of torch in each rank.
    preload: modules that the fork server imports first, for all worlds that follow. They must
        start no thread and touch no device when they are imported.
    at_end: called in this process with the number of the ranks' process group when all ranks have
        returned, before what they left in it is killed.
    log_folder: an existing folder where `rankN.log` with all that rank N printed is kept. By
        default the logs are deleted with the world, and an error quotes their last lines.
    progress: shows the tasks of rank 0.
    """

    axes: Mapping[str, int]
    device: str = "cpu"
    threads: int = 1
    limits: TimeLimits = field(default_factory=TimeLimits)
    preload: tuple[str, ...] = ()
    log_folder: Path | None = None
    at_end: Callable[[int], None] | None = None
    progress: Progress = field(default_factory=SilentProgress)

    def __post_init__(self) -> None:
        if not self.axes or any(size < 1 for size in self.axes.values()):
            raise UsageError(f"a mesh needs axes of at least 1 rank each, not {dict(self.axes)}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return f"a world of {self.size} {'rank' if self.size == 1 else 'ranks'} ({axes})"


def outer_world_size(environment: Mapping[str, str]) -> int | None:
    """Number of ranks that torchrun started with this process; None if it started none."""
    if any(variable not in environment for variable in OUTER_VARIABLES):
        return None
    return int(environment["WORLD_SIZE"])
