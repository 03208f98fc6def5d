"""The hooks and fixtures of the pytest plugin. `assay.testing` decides. Imports no torch."""

import inspect
import os
import time
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from unittest import TestCase

import pytest

from assay.devices.run_string import Run, parse_device, parse_run
from assay.errors import AssayError, UsageError
from assay.testing.marks import (
    REQUIRE_HARDWARE,
    AcceleratorMark,
    MarkError,
    WorldMark,
    hardware_policy,
    missing_accelerators,
    missing_ranks,
    read_budget,
    read_tier,
)

if TYPE_CHECKING:
    from assay.devices.base import Device
    from assay.devices.detection import ListedDevice
    from assay.testing.golden import Golden, Mode
    from assay.testing.worlds import MeshOfRanks

_MARKERS = (
    'accelerator(vendor, count=1): the test needs this number of devices of a vendor ("nvidia").',
    "world(dp=2, tp=2): the test runs on every rank of a mesh with these axes.",
    'tier(name): the tier that the test belongs to, such as "smoke"; see --assay-tier.',
    "budget(seconds): the test fails when its body takes longer.",
)


class PluginState:
    """The options of one pytest process, the devices of its machine, and its collected goldens."""

    def __init__(self, config: pytest.Config) -> None:
        run: str | None = config.getoption("assay_device")
        self.run = None if run is None else parse_run(run)
        self.world: int | None = config.getoption("assay_world")
        self.tier: str | None = config.getoption("assay_tier")
        self.mode: Mode = "capture" if config.getoption("capture_expectation") else "check"
        if self.mode == "capture" and os.environ.get("CI") == "true":
            raise UsageError(
                "--capture-expectation: nothing is captured under CI=true, where nobody reviews it"
            )
        self.policy = hardware_policy(os.environ)
        self.golden_tests: dict[Path, list[str]] | None = None
        """By file, all tests with the fixture golden; None if the command line names single tests."""
        if self.world is not None and self.world < 1:
            raise UsageError(f"--assay-world is {self.world}; a world has at least 1 rank")

    @cached_property
    def listed(self) -> "tuple[ListedDevice, ...]":
        """List the devices of this machine."""
        from assay.devices.detection import DETECTION_TIMEOUT_SECONDS, list_devices

        return list_devices(DETECTION_TIMEOUT_SECONDS)

    def count_accelerators(self) -> int | None:
        """Count this machine's devices of the kind under test; None if ranks share one."""
        from assay.devices.registry import is_host_adapter

        if self.run is None:  # the host, whose adapter would import torch
            return None
        kind = parse_device(self.run.device).kind
        if is_host_adapter(kind):
            return None
        return sum(len(line.products) for line in self.listed if line.device == kind)

    def refuse(self, reason: str) -> NoReturn:
        """Skip the test, or fail it if the hardware is required."""
        if self.policy == "fail":
            pytest.fail(f"{reason} ({REQUIRE_HARDWARE}=1)", pytrace=False)
        # Reported at the location of the test, as for a skip by marker.
        raise pytest.skip.Exception(reason, _use_item_location=True)


STATE = pytest.StashKey[PluginState]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("assay", "tests of models on accelerators")
    group.addoption(
        "--assay-device", metavar="RUN", help="Device under test, as DEVICE/DTYPE: cpu/float32."
    )
    group.addoption(
        "--assay-world",
        metavar="N",
        type=int,
        help="Ranks that this machine can run: tests with more ranks are skipped.",
    )
    group.addoption("--assay-tier", metavar="NAME", help="Run only the tests marked tier(NAME).")
    group.addoption(
        "--capture-expectation",
        action="store_true",
        help="Capture the goldens of the tests, on a trusted device, instead of comparing with them.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and declare the markers."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        state = config.stash[STATE] = PluginState(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    # A worker of xdist sees a part of the reports, and its controller all of them.
    is_worker = hasattr(config, "workerinput")
    if state.policy == "fail" and not is_worker and not config.option.collectonly:
        config.pluginmanager.register(RequiredHardware(), "assay-required-hardware")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the device, tier and policy that options or the environment set."""
    state = config.stash[STATE]
    facts = [f"device {state.run}"] if state.run else []
    facts += [f"tier {state.tier}"] if state.tier else []
    facts += ["hardware required"] if state.policy == "fail" else []
    return f"assay: {', '.join(facts)}" if facts else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests with a golden, and keep those of the selected tier."""
    state = config.stash[STATE]
    if not any("::" in argument for argument in config.args):
        state.golden_tests = {}
        for item in items:
            if "golden" in getattr(item, "fixturenames", ()):
                state.golden_tests.setdefault(item.path, []).append(_test_name(item))
    tier = state.tier
    if tier is None:
        return
    others = [item for item in items if not _is_in_tier(item, tier)]
    items[:] = [item for item in items if _is_in_tier(item, tier)]
    config.hook.pytest_deselected(items=others)


def _is_in_tier(item: pytest.Item, tier: str) -> bool:
    try:
        return any(read_tier(mark.args, mark.kwargs) == tier for mark in item.iter_markers("tier"))
    except MarkError:  # the setup of the test reports it
        return True


def _test_name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test that this machine cannot run."""
    try:
        _set_up(item, item.config.stash[STATE])
    except AssayError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _set_up(item: pytest.Item, state: PluginState) -> None:
    for mark in item.iter_markers("tier"):
        read_tier(mark.args, mark.kwargs)
    for mark in item.iter_markers("budget"):
        read_budget(mark.args, mark.kwargs)
    for mark in item.iter_markers("world"):
        _refuse_unlaunchable(item)
        world = WorldMark.read(mark.args, mark.kwargs)
        missing = missing_ranks(world, state.world, os.environ, state.count_accelerators)
        if missing:
            state.refuse(f"needs {world}; {missing}")
    for mark in item.iter_markers("accelerator"):
        accelerators = AcceleratorMark.read(mark.args, mark.kwargs)
        missing = missing_accelerators(accelerators, state.listed)
        if missing:
            state.refuse(f"needs {accelerators}; {missing}")


def _refuse_unlaunchable(item: pytest.Item) -> None:
    """Fail a test that would run in this process only, and pass."""
    if (
        not isinstance(item, pytest.Function)
        or (item.cls and issubclass(item.cls, TestCase))
        or inspect.iscoroutinefunction(item.obj)
    ):
        pytest.fail(
            "marker world: only plain functions, and methods of plain classes, run on ranks",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked world on every rank."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("world")
    if mark is None:
        return None
    from assay.launch import TimeLimits, World, WorldSkipped
    from assay.testing.worlds import run_test_in_world

    config = pyfuncitem.config
    run = config.stash[STATE].run
    seconds = _timeout_seconds(pyfuncitem)
    limits = TimeLimits.within(seconds) if seconds else TimeLimits()
    stops: bool = config.getoption("usepdb", default=False)
    if stops:
        from assay.testing.rank_body import DEBUGGING_LIMITS

        limits = DEBUGGING_LIMITS
        # Plugins that end slow tests wait from now on.
        config.hook.pytest_enter_pdb(config=config, pdb=None)
    world = World(
        WorldMark.read(mark.args, mark.kwargs).axes,
        device=run.device if run else "cpu",
        limits=limits,
    )
    try:
        run_test_in_world(pyfuncitem, world)
    except WorldSkipped as skipped:
        raise pytest.skip.Exception(str(skipped), _use_item_location=True) from None
    except AssayError as error:
        if stops:
            from assay.testing.rank_body import StoppedInRank

            raise StoppedInRank(str(error)) from None
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    return True


def _timeout_seconds(item: pytest.Item) -> float | None:
    """Return the time after which pytest-timeout ends the test; None if it does not."""
    if not item.config.pluginmanager.hasplugin("timeout"):
        return None
    mark = item.get_closest_marker("timeout")
    values = [*mark.args[:1], mark.kwargs.get("timeout")] if mark else []
    values += [item.config.getoption("timeout"), item.config.getini("timeout")]
    return next((float(value) or None for value in values if value not in (None, "")), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that took longer than its budget."""
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    for mark in item.iter_markers("budget"):
        budget = read_budget(mark.args, mark.kwargs)
        if seconds > budget:
            pytest.fail(f"took {seconds:.3g} s; its budget is {budget:g} s", pytrace=False)


class RequiredHardware:
    """Makes a session in which no test ran a failure, under ASSAY_REQUIRE_HARDWARE=1."""

    def __init__(self) -> None:
        self._num_ran = 0
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the tests whose body ran, expected failures included."""
        if report.when == "call" and (not report.skipped or hasattr(report, "wasxfail")):
            self._num_ran += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Turn an empty success into a failure."""
        empty = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if empty and not self._num_ran:
            self._failed = True
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Explain the failure."""
        if self._failed:
            terminalreporter.write_line(
                f"assay: 0 tests ran; under {REQUIRE_HARDWARE}=1 that is a failure", red=True
            )


@pytest.fixture(scope="session")
def assay_run(request: pytest.FixtureRequest) -> Run:
    """Return the RUN under test: --assay-device, by default cpu/float32."""
    state = request.config.stash[STATE]
    if state.run is None and state.policy == "fail":
        pytest.fail(
            f"{REQUIRE_HARDWARE}=1, but --assay-device does not say which device is tested",
            pytrace=False,
        )
    return state.run or Run("cpu", "float32")


@pytest.fixture(scope="session")
def device(assay_run: Run) -> "Device":
    """Open the device under test."""
    from assay.devices.registry import open_run

    try:
        return open_run(assay_run)
    except AssayError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.fixture
def golden(request: pytest.FixtureRequest, assay_run: Run, tmp_path: Path) -> "Golden":
    """Return the golden of this test, for `golden.check("micro:llama")`."""
    from assay.testing.golden import Golden, golden_folder, refuse_stale_goldens

    item: pytest.Item = request.node
    state = request.config.stash[STATE]
    if state.mode == "check" and state.golden_tests is not None:
        refuse_stale_goldens(item.path, state.golden_tests[item.path])
    folder = golden_folder(item.path, _test_name(item))
    return Golden(folder, tmp_path / "assay", assay_run, state.mode)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> "MeshOfRanks":
    """Return the `DeviceMesh` of a test marked world; each rank has its own."""
    from assay.testing.worlds import MeshOfRanks

    if request.node.get_closest_marker("world") is None:
        pytest.fail(
            "the fixture mesh needs a world of ranks; mark the test world(dp=2)", pytrace=False
        )
    return MeshOfRanks()
