"""Compares a model on this device with its expectations: outputs, weights, other layouts.

Run `pytest --pyargs assay_expectations.suites -k model_expectations --assay-device cuda/bfloat16`,
with the options of the group `assay expectations`.
"""

from pathlib import Path

import pytest

from assay.api.verdict import CheckedVerdict
from assay.verdicts import Outcome
from assay_expectations import models_under_test
from assay_expectations.models_under_test import ExpectedModel, tuple_differences, unused_files
from assay_expectations.pytest_plugin import (
    MODEL_OPTION,
    MODELS_VARIABLE,
    assert_none,
    expectation_folder,
    expected_models,
    named_models,
    one_line_failures,
    place_of_model,
)

OTHER_LAYOUT = f"{models_under_test.__file__}:{models_under_test.other_layout.__name__}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each kind for each model."""
    if "expected" in metafunc.fixturenames:
        metafunc.parametrize("expected", expected_models(metafunc.config), indirect=True)


@pytest.fixture
def expected(request: pytest.FixtureRequest, tmp_path: Path) -> ExpectedModel:
    """Return the model on the device under test."""
    config = request.config
    run = config.getoption("assay_device") or "cpu/float32"
    folder, place = expectation_folder(config), place_of_model(config)
    return ExpectedModel(request.param, run, folder, tmp_path, place)


@pytest.fixture
def captured(expected: ExpectedModel, pytestconfig: pytest.Config) -> ExpectedModel:
    """Return the model, unless this session captures it."""
    if pytestconfig.getoption("capture_expectation"):
        pytest.skip("--capture-expectation: test_model_output captures the model")
    return expected


def test_model_output(expected: ExpectedModel, pytestconfig: pytest.Config) -> None:
    """Require distributions as close to the yardstick as at the capture."""
    with one_line_failures():
        if pytestconfig.getoption("capture_expectation"):
            file = expected.capture()
            pytest.fail(f"saved in {file}; run again without --capture-expectation", pytrace=False)
        verdict = expected.verify()
    assert verdict.verdict is Outcome.PASS, str(CheckedVerdict.publish(expected.scratch))


def test_model_unfused(captured: ExpectedModel) -> None:
    """Require the same outputs with fused weights split, and with others fused."""
    with one_line_failures():
        verdict = captured.verify(OTHER_LAYOUT)
    assert verdict.verdict is Outcome.PASS, str(CheckedVerdict.publish(captured.scratch))


def test_model_tuple_output(captured: ExpectedModel) -> None:
    """Require the same tensors in the same order with `return_dict=False`."""
    with one_line_failures():
        differences = tuple_differences(captured.source, captured.run)
    assert_none(differences)


def test_model_expectations_are_all_used(pytestconfig: pytest.Config) -> None:
    """Require that every expectation belongs to a model under test, unless models are selected."""
    with one_line_failures():
        unused = unused_files(expectation_folder(pytestconfig), expected_models(pytestconfig))
    if unused and named_models(pytestconfig):
        reason = f"{MODEL_OPTION} or {MODELS_VARIABLE} selects models"
        pytest.skip(f"{reason}; {len(unused)} other expectations, first: {unused[0]}")
    assert_none(unused)
