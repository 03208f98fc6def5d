"""Fixtures of the suites. What they measure is in the variable of `SuiteRequest`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from assay.devices.base import Device
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError
from assay_bench.performance.requests import SuiteRequest
from assay_bench.performance.suite_table import SUITES
from assay_bench.performance.suites.measurement import Benchmark, SuiteTimer
from assay_bench.performance.suites.turn_client import TurnClient

if TYPE_CHECKING:
    from assay.models import LoadedModel

_NAMES = {suite.function: suite.name for suite in SUITES.values()}


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Nothing: the device describes itself, and pytest-benchmark would ask the processor for seconds."""
    return {}


def pytest_benchmark_generate_commit_info() -> dict[str, Any]:
    """Nothing: the provenance of a run has it."""
    return {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell a suite that is skipped to the process that waits for it."""
    function = report.nodeid.rpartition("::")[2]
    if report.skipped and function in _NAMES:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        turns = TurnClient(SuiteRequest.of_environment())
        turns.skip(_NAMES[function], reason.removeprefix("Skipped: "))


@contextmanager
def _refusals_told(asked: SuiteRequest) -> Iterator[None]:
    """Inside, an error of assay ends all suites: none can do without what is made there."""
    try:
        yield
    except AssayError as error:
        TurnClient(asked).refuse(error)
        pytest.exit(str(error), returncode=2)


@pytest.fixture(scope="session")
def asked() -> SuiteRequest:
    """What is to be measured."""
    return SuiteRequest.of_environment()


@pytest.fixture(scope="session")
def device(asked: SuiteRequest) -> Device:
    """The opened device."""
    with _refusals_told(asked):
        return open_run(parse_run(asked.run))


@pytest.fixture(scope="session")
def loaded(asked: SuiteRequest, device: Device) -> "LoadedModel":
    """The model in evaluation mode on the device; small ones run on one thread from here on."""
    from assay.models import load_model
    from assay.models.size_policy import choose_threads

    with _refusals_told(asked):
        loaded = load_model(
            asked.model, dtype=parse_run(asked.run).dtype, device=device.torch_device
        )
    choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
    return loaded


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For suites whose work does not depend on the model's size, nor their number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def measure(
    request: pytest.FixtureRequest,
    asked: SuiteRequest,
    device: Device,
    benchmark: Benchmark,
) -> SuiteTimer:
    """Times the suite that the test stands for."""
    suite = _NAMES[request.function.__name__]
    return SuiteTimer(suite, asked, device, benchmark, TurnClient(asked))
