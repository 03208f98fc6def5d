"""What a verdict says of the device that a run was on."""

from typing import Any

from assay.devices.base import Device
from assay.devices.run_string import Run


def describe_run(device: Device, run: Run) -> dict[str, Any]:
    """The RUN, product, architecture, precision of products and versions, as JSON values."""
    return {
        "run": str(run),
        "device": device.product(),
        "architecture": device.architecture(),
        "effective_precision": device.effective_precision(run.dtype),
        "versions": dict(device.versions()),
    }
