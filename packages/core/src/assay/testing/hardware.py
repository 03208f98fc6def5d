"""Find the hardware that a test needs, and decide what its absence means."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from assay.errors import UsageError
from assay.testing.marks import AcceleratorMark, MarkError, WorldMark

if TYPE_CHECKING:
    from assay.devices.detection.listing import ListedDevice

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
        lines = [line for line in listed if line.vendor is None or not _is_host(line)]
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


def _is_host(line: "ListedDevice") -> bool:
    from assay.devices.registry import is_host_adapter

    return line.status == "present" and is_host_adapter(line.device)
