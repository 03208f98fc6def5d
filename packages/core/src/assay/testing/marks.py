"""Parse the markers of the pytest plugin: hardware, ranks, tier and budget of a test."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from assay.errors import UsageError

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
