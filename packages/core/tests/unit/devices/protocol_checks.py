"""All checks of the device protocol in one call."""

from assay.devices.base import Device
from assay.devices.conformance import CHECKS
from assay.errors import AssayError


class ConformanceError(AssayError):
    """Error for an adapter that violates the protocol."""

    @classmethod
    def of(cls, device: Device, problems: list[str]) -> "ConformanceError":
        """Make the error from one line per violation."""
        lines = "".join(f"\n  {problem}" for problem in problems)
        return cls(f"{type(device).__name__} does not keep the device protocol:{lines}")


def check_device_protocol(device: Device) -> None:
    """Check an opened device on its hardware. Raises: ConformanceError with every failed check."""
    problems: list[str] = []
    for name, check in CHECKS.items():
        try:
            problems += check(device)
        except Exception as error:  # noqa: BLE001 - a check that raises has failed
            problems.append(f"{name}: {type(error).__name__}: {error}")
    if problems:
        raise ConformanceError.of(device, problems)
