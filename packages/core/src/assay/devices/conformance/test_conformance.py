"""Check the adapter of this device, one test per point of the protocol."""

import pytest

from assay.devices.base import Device
from assay.devices.conformance.checks import CHECKS
from assay.devices.detection.isolation import require_run
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    """Open the device under test, first in another process because a driver may hang or crash."""
    run = parse_run(request.config.getoption("assay_device") or "cpu/float32")
    try:
        require_run(run)
        return open_run(run)
    except AssayError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.mark.parametrize("point", CHECKS)
def test_device_keeps_the_protocol(device: Device, point: str) -> None:
    """Expect no violation of this point."""
    assert CHECKS[point](device) == []
