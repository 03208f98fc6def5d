"""Fixtures of the suites."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from assay.devices.base import Device
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError
from assay_bench.performance.requests import SuiteRequest, TurnClient
from assay_bench.performance.suite_table import SUITES
from assay_bench.performance.suites.measurement import Benchmark, SuiteTimer

if TYPE_CHECKING:
    from assay.models import LoadedModel

_NAMES = {suite.function: suite.name for suite in SUITES.values()}


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Skip the machine information of pytest-benchmark, which takes seconds to collect."""
    return {}


def pytest_benchmark_generate_commit_info() -> dict[str, Any]:
    """Skip the commit information, which the provenance of a run holds."""
    return {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a skipped suite to the process that waits for it."""
    function = report.nodeid.rpartition("::")[2]
    if report.skipped and function in _NAMES:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        turns = TurnClient(SuiteRequest.of_environment())
        turns.skip(_NAMES[function], reason.removeprefix("Skipped: "))


@contextmanager
def _errors_reported(suite_request: SuiteRequest) -> Iterator[None]:
    """End all suites on an error of assay in the context, because every suite needs its result."""
    try:
        yield
    except AssayError as error:
        TurnClient(suite_request).report_error(error)
        pytest.exit(str(error), returncode=2)


@pytest.fixture(scope="session")
def suite_request() -> SuiteRequest:
    """Return the settings of the suites."""
    return SuiteRequest.of_environment()


@pytest.fixture(scope="session")
def device(suite_request: SuiteRequest) -> Device:
    """Open the device."""
    with _errors_reported(suite_request):
        return open_run(parse_run(suite_request.run))


@pytest.fixture(scope="session")
def loaded(suite_request: SuiteRequest, device: Device) -> "LoadedModel":
    """Load the model on the device, and choose the number of threads for its size."""
    from assay.models import load_model
    from assay.models.size import choose_threads

    with _errors_reported(suite_request):
        loaded = load_model(
            suite_request.model,
            dtype=parse_run(suite_request.run).dtype,
            device=device.torch_device,
        )
    choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
    return loaded


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, for suites whose work does not depend on the model's size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def measure(
    request: pytest.FixtureRequest,
    suite_request: SuiteRequest,
    device: Device,
    benchmark: Benchmark,
) -> SuiteTimer:
    """Return the timer of the test's suite."""
    suite = _NAMES[request.function.__name__]
    return SuiteTimer(suite, suite_request, device, benchmark, TurnClient(suite_request))
