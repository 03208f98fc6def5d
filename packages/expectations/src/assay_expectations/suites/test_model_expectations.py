"""Is a model on this device what was captured: its output, its weights, in any layout of them?

Run as `pytest --pyargs assay_expectations.suites -k model_expectations --assay-device cuda/bfloat16`,
with the options of the group `assay expectations`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from assay.api.verdict import CheckedVerdict
from assay.errors import AssayError
from assay.verdicts import Outcome
from assay_expectations.models import layouts
from assay_expectations.models.expected import ExpectedModel, unused_files
from assay_expectations.models.outputs import tuple_differences
from assay_expectations.pytest_plugin import expectation_folder, expected_models

OTHER_LAYOUT = f"{layouts.__file__}:{layouts.other_layout.__name__}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test of each kind for each model."""
    if "expected" in metafunc.fixturenames:
        metafunc.parametrize("expected", expected_models(metafunc.config), indirect=True)


@pytest.fixture
def expected(request: pytest.FixtureRequest, tmp_path: Path) -> ExpectedModel:
    """The model that is tried, on the device under test."""
    config = request.config
    run = config.getoption("assay_device") or "cpu/float32"
    return ExpectedModel(request.param, run, expectation_folder(config), tmp_path)


@pytest.fixture
def captured(expected: ExpectedModel, pytestconfig: pytest.Config) -> ExpectedModel:
    """One of which something was captured before."""
    if pytestconfig.getoption("capture_expectation"):
        pytest.skip("--capture-expectation: it is captured by test_model_output")
    return expected


@contextmanager
def told_in_words() -> Iterator[None]:
    """Inside, an error of assay fails the test by its message alone."""
    try:
        yield
    except AssayError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def test_model_output(expected: ExpectedModel, pytestconfig: pytest.Config) -> None:
    """Its distributions are as near to the yardstick as they were."""
    with told_in_words():
        if pytestconfig.getoption("capture_expectation"):
            file = expected.capture()
            pytest.fail(f"saved in {file}; run again without --capture-expectation", pytrace=False)
        verdict = expected.verify()
    assert verdict.verdict is Outcome.PASS, str(CheckedVerdict.publish(expected.scratch))


def test_model_weight_keys(captured: ExpectedModel) -> None:
    """Its stored weights have the names, dtypes, shapes and values that they had."""
    with told_in_words():
        differences = captured.weight_differences()
    assert differences == []


def test_model_unfused(captured: ExpectedModel) -> None:
    """It gives the same with fused weights taken apart, and with others fused."""
    with told_in_words():
        verdict = captured.verify(OTHER_LAYOUT)
    assert verdict.verdict is Outcome.PASS, str(CheckedVerdict.publish(captured.scratch))


def test_model_tuple_output(captured: ExpectedModel) -> None:
    """Without names its outputs are the same tensors in the same order."""
    with told_in_words():
        differences = tuple_differences(captured.model, captured.run)
    assert differences == []


def test_model_expectations_are_all_used(pytestconfig: pytest.Config) -> None:
    """Nobody keeps an expectation of a model that is not tried."""
    options = (pytestconfig.getoption(name) for name in ("expectation_folder", "expectation_model"))
    if [bool(one) for one in options] == [False, True]:
        pytest.skip("--expectation-model chooses some of those that are shipped")
    with told_in_words():
        unused = unused_files(expectation_folder(pytestconfig), expected_models(pytestconfig))
    assert unused == []
