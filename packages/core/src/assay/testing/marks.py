"""Parse the markers of the pytest plugin, and find the hardware that a test needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.devices.detection import ListedDevice

_EXAMPLES = {
    "accelerator": 'accelerator("nvidia", count=4)',
    "world": "world(dp=2, tp=2)",
    "tier": 'tier("smoke")',
    "budget": "budget(seconds=30)",
}


class MarkError(UsageError):
    """Error for a marker with invalid arguments."""

    @classmethod
    def of(cls, marker: str, problem: str) -> Self:
        """Make the error, which shows a valid use of the marker."""
        return cls(f"marker {marker}: {problem}; write it as {_EXAMPLES[marker]}")


@dataclass(frozen=True, slots=True)
class AcceleratorMark:
    """`accelerator("nvidia", count=4)`. Without a vendor, any accelerator is accepted."""

    vendor: str | None = None
    count: int = 1

    @classmethod
    def read(cls, arguments: tuple[object, ...], options: Mapping[str, object]) -> Self:
        """Parse the marker. Raises: MarkError."""
        unknown = set(options) - {"vendor", "count"}
        if unknown or len(arguments) > 1 or (arguments and "vendor" in options):
            raise MarkError.of("accelerator", "takes one vendor and a count")
        vendor = arguments[0] if arguments else options.get("vendor")
        count = options.get("count", 1)
        if vendor is not None and not isinstance(vendor, str):
            raise MarkError.of("accelerator", f"the vendor is {vendor!r}")
        if type(count) is not int or count < 1:
            raise MarkError.of("accelerator", f"the count is {count!r}")
        return cls(vendor, count)

    def __str__(self) -> str:
        kind = "accelerator" if self.count == 1 else "accelerators"
        return f"{self.count} {self.vendor} {kind}" if self.vendor else f"{self.count} {kind}"


@dataclass(frozen=True, slots=True)
class WorldMark:
    """`world(dp=2, tp=2)`: the mesh of ranks for a test."""

    axes: Mapping[str, int]

    @classmethod
    def read(cls, arguments: tuple[object, ...], options: Mapping[str, object]) -> Self:
        """Parse the marker. Raises: MarkError."""
        axes: dict[str, int] = {}
        for axis, size in options.items():
            if type(size) is not int or size < 1:
                raise MarkError.of("world", f"{axis} is {size!r}")
            axes[axis] = size
        if arguments or not axes:
            raise MarkError.of("world", "takes the sizes of mesh axes by name")
        return cls(axes)

    @property
    def size(self) -> int:
        """Count the ranks."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return f"a world of {self.size} ranks ({axes})"


def read_tier(arguments: tuple[object, ...], options: Mapping[str, object]) -> str:
    """Return the name in `tier("smoke")`. Raises: MarkError."""
    if options or len(arguments) != 1 or not isinstance(arguments[0], str) or not arguments[0]:
        raise MarkError.of("tier", "takes one name")
    return arguments[0]


def read_budget(arguments: tuple[object, ...], options: Mapping[str, object]) -> float:
    """Return the seconds in `budget(30)` or `budget(seconds=30)`. Raises: MarkError."""
    values = [*arguments, *options.values()]
    if len(values) != 1 or set(options) - {"seconds"}:
        raise MarkError.of("budget", "takes one number of seconds")
    seconds = values[0]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise MarkError.of("budget", f"the number of seconds is {seconds!r}")
    return float(seconds)


REQUIRE_HARDWARE = "ASSAY_REQUIRE_HARDWARE"

Policy = Literal["skip", "fail"]


def hardware_policy(environment: Mapping[str, str]) -> Policy:
    """Return "skip" or "fail" for tests whose hardware is absent.

    Raises: UsageError for a value other than 0 and 1. Reading it as 0 would hide that nothing was
        tested.
    """
    value = environment.get(REQUIRE_HARDWARE, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{REQUIRE_HARDWARE} is {value!r}; it must be 1, 0 or unset")
    return "fail" if value == "1" else "skip"


def missing_accelerators(mark: AcceleratorMark, listed: "Sequence[ListedDevice]") -> str:
    """Say what this machine lacks for a test with this mark; return "" if the test can run.

    listed: the devices of this machine.
    Raises: MarkError for a vendor that is not in `listed`, so that the test could never run.
    """
    if mark.vendor is None:
        from assay.devices.registry import is_host_adapter

        # A broken adapter is not asked.
        hosts = {
            line.device
            for line in listed
            if line.status == "present" and is_host_adapter(line.device)
        }
        lines = [line for line in listed if line.vendor is None or line.device not in hosts]
    else:
        lines = [line for line in listed if line.vendor and line.vendor.name == mark.vendor]
        if not lines:
            known = ", ".join(sorted({line.vendor.name for line in listed if line.vendor}))
            problem = f"unknown vendor {mark.vendor!r} (there is: {known})"
            raise MarkError.of("accelerator", problem)
    if any(line.status == "present" and len(line.products) >= mark.count for line in lines):
        return ""
    present = [line for line in lines if line.status == "present"]
    if present:
        found = "; ".join(f"{len(line.products)} x {line.products[0]}" for line in present)
        return f"this machine has {found}"
    if mark.vendor is None:
        return "this machine has none"
    return "missing: " + "; or ".join(line.missing for line in lines)


def missing_ranks(
    mark: WorldMark,
    allowed: int | None,
    environment: Mapping[str, str],
    count_accelerators: Callable[[], int | None],
) -> str:
    """Say why a test with this mark cannot run here; return "" if it can.

    allowed: the largest number of ranks that the user allows; None for any.
    environment: has torchrun's variables if torchrun started this process as a rank.
    count_accelerators: returns the number of devices, or None if ranks can share one.
    """
    from assay.launch import outer_world_size

    outer = outer_world_size(environment)
    if outer is not None:
        return "" if outer == mark.size else f"the launcher of this process started {outer}"
    if allowed is not None and mark.size > allowed:
        return f"--assay-world allows {allowed}"
    count = count_accelerators()
    if count is not None and count < mark.size:
        return f"this machine has {count} of the device under test"
    return ""
