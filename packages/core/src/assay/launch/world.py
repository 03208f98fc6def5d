"""A world of ranks: its mesh, device and time limits, and the place of each rank in it. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from assay.errors import UsageError
from assay.option_ranges import parse_count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from assay.devices.base import Device

# The axes of `--mesh`.
AXES = ("dp", "tp", "pp")

# Shares of a world's total time for its start, one collective and its body. The rest is for
# collecting stacks and logs and for ending the processes.
_SHARES = (0.35, 0.25, 0.5)

# Variables that torchrun, or any launcher that follows torch's `env://`, sets in each process.
OUTER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a world, after which its ranks are ended."""

    start_seconds: float = 60.0
    """For opening the devices and joining the process group."""
    collective_seconds: float = 30.0
    """For one collective; torch then raises in the waiting ranks."""
    body_seconds: float = 60.0
    """For the body on all ranks; then the stack of every rank is collected."""

    def __post_init__(self) -> None:
        if not 0 < self.collective_seconds < self.body_seconds or self.start_seconds <= 0:
            raise UsageError(
                f"limits must be positive, and one collective ({self.collective_seconds:g} s) must "
                f"be given up before the whole body is ({self.body_seconds:g} s)"
            )

    @classmethod
    def within(cls, seconds: float) -> "TimeLimits":
        """Divide `seconds` in limits for a world that is ended from outside after that time.

        Start and body leave time to collect stacks. A collective times out before the body, so that
        torch raises its own error first.
        """
        shares = dict(zip(("start", "collective", "body"), _SHARES, strict=True))
        return cls(**{f"{name}_seconds": share * seconds for name, share in shares.items()})


@dataclass(frozen=True, slots=True)
class World:
    """Ranks on a mesh, for `call` to start."""

    axes: Mapping[str, int]
    """Sizes of the mesh axes by name, the outermost first."""
    device: str = "cpu"
    """As in a RUN. An accelerator without an index gets each rank's local number as index. All ranks
    share the host and the simulated device."""
    threads: int = 1
    """Threads of torch in each rank."""
    limits: TimeLimits = field(default_factory=TimeLimits)
    preload: Sequence[str] = ()
    """Modules that the fork server imports, also for later worlds. Their import must not start a
    thread or touch a device."""

    def __post_init__(self) -> None:
        if not self.axes or any(size < 1 for size in self.axes.values()):
            raise UsageError(f"a mesh needs axes of at least 1 rank each, not {dict(self.axes)}")

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return f"a world of {self.size} {'rank' if self.size == 1 else 'ranks'} ({axes})"


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a world, with the default process group of `torch.distributed`."""

    number: int
    local: int
    """Number of this rank on its machine."""
    size: int
    """Number of ranks."""
    axes: Mapping[str, int]
    """Sizes of the mesh axes by name."""
    device: "Device"
    mesh: "DeviceMesh"


def parse_mesh(text: str, known: Sequence[str] = AXES) -> dict[str, int]:
    """Parse a text such as "dp=2,tp=2" to sizes by axis, the outermost first. Raises: UsageError."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in known or name in axes or not size.isdecimal() or not size.strip("0"):
            raise UsageError(
                f"--mesh {text}: {part.strip()!r} is not an axis; write it as"
                f" {','.join(f'{axis}=2' for axis in known[:2])}, with axes of {', '.join(known)}, each"
                " once, of at least 1 rank"
            )
        axes[name] = parse_count(f"--mesh {name}", size)
    return axes


def outer_world_size(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks that torchrun started with this process; None without torchrun."""
    if any(variable not in environment for variable in OUTER_VARIABLES):
        return None
    return int(environment["WORLD_SIZE"])
