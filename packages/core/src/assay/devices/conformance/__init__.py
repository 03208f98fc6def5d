"""Whether an adapter keeps the protocol of devices; without that, verdicts on it mean nothing.

Run as `pytest --pyargs assay.devices.conformance --assay-device npu/bfloat16`.
"""

from assay.devices.conformance.checks import ConformanceError, check_device_protocol

__all__ = ["ConformanceError", "check_device_protocol"]
