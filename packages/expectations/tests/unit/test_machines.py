"""The hardware part of a key."""

import pytest

from assay.devices.registry import open_device
from assay.devices.run_string import parse_run
from assay_expectations.observing.candidates import machine_of


@pytest.mark.parametrize(
    ("run", "architecture", "precision"),
    [
        ("cpu/bfloat16", None, "bfloat16"),
        ("sim:truncate/bfloat16", "sim-truncate", "bfloat16"),
        ("sim:split4/bfloat16", "sim-split4", "bfloat16"),
        ("sim:fp8/bfloat16", "sim-fp8", "float8_e4m3fn"),
    ],
)
def test_variants_of_the_simulated_device_are_different_machines(
    run: str, architecture: str | None, precision: str
) -> None:
    parsed = parse_run(run)
    machine = machine_of(parsed, open_device(parsed.device))
    assert machine.architecture == architecture or "-" not in machine.architecture
    assert machine.precision == precision
