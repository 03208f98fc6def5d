"""Compares decoders on this device with the reference, over input shapes.

Run `pytest --pyargs assay_expectations.suites -k decoders --assay-device cuda/bfloat16`, with the
options of the group `assay decoders`, or the published variables FMS_TEST_SHAPES_*. Under
`torchrun --nproc-per-node N -m pytest` the models are sharded over N devices.
"""

from pathlib import Path

import pytest

from assay.api.verdict import CheckedVerdict
from assay.launch import on_first_rank, require_one_machine
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from assay_expectations.decoders import DecoderCheck, Shape
from assay_expectations.pytest_plugin import decoder_options, one_line_failures


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each model, shape and attention."""
    options = decoder_options(metafunc.config)
    metafunc.parametrize("model", options.models)
    metafunc.parametrize("shape", options.shapes, ids=str)
    metafunc.parametrize("attention", options.attentions)


def test_decoders(
    model: str, shape: Shape, attention: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Require a PASS of `assay check generate`, and of the published thresholds if there are any."""
    run = pytestconfig.getoption("assay_device") or "cpu/float16"
    options = decoder_options(pytestconfig)
    setup = pytestconfig.getoption("decoder_setup")
    check = DecoderCheck(model, shape, run, tmp_path, options, setup, attention)
    with one_line_failures():
        require_one_machine()
        failures = on_first_rank(lambda: _failures(check))
    assert failures == [], "\n".join(failures)


def _failures(check: DecoderCheck) -> list[str]:
    """Return the failed verdict, or the exceeded thresholds."""
    if check.run(SilentProgress()).verdict is not Outcome.PASS:
        return [str(CheckedVerdict.publish(check.results))]
    return check.exceeded_thresholds()
