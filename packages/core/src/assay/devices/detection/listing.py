"""List the devices of this machine, for every adapter."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from assay.devices.base import DeviceVendor
from assay.devices.detection.isolation import detect_isolated
from assay.devices.registry import adapter_names

Status = Literal["present", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One vendor's line of `assay devices`."""

    device: str
    """Its name in a RUN."""
    status: Status
    vendor: DeviceVendor | None = None
    """None if a broken adapter did not report it."""
    products: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    missing: str = ""
    """Requirement that a run on it lacks; "" if it is present."""

    def to_json(self) -> dict[str, Any]:
        """Return the line as `assay devices --json` prints it."""
        vendor = self.vendor
        return {
            **asdict(self),
            "vendor": vendor.name if vendor else None,
            "title": vendor.title if vendor else None,
            "count": len(self.products),
            "distributed_backend": vendor.distributed_backend if vendor else None,
            "compile_backend": vendor.compile_backend if vendor else None,
            "runner_labels": list(vendor.runner_labels) if vendor else [],
            "verified": vendor.verified if vendor else "",
        }


def list_devices(timeout_seconds: float) -> tuple[ListedDevice, ...]:
    """Return one line per vendor, present ones first. A broken adapter is a line, not an error.

    timeout_seconds: for all adapters together, including the start of Python and torch.
    """
    lines: list[ListedDevice] = []
    for answer in detect_isolated(adapter_names(), timeout_seconds):
        if answer.problem:
            lines.append(ListedDevice(answer.kind, "broken", missing=answer.problem))
        lines += [
            ListedDevice(
                answer.kind,
                "present" if found.present else "absent",
                found.vendor,
                found.products,
                found.variants,
                found.missing,
            )
            for found in answer.detections
        ]
    order: list[Status] = ["present", "absent", "broken"]
    return tuple(sorted(lines, key=lambda line: (order.index(line.status), line.device)))
