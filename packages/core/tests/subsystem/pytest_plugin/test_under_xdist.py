"""The plugin where the tests run in workers and the exit status is made by their controller."""

import pytest

pytestmark = pytest.mark.long

pytest_plugins = ("pytester",)

BODY = """
import pytest

@pytest.mark.accelerator("nobody")
def test_absent(): pass

@pytest.mark.tier("smoke")
def test_present(device):
    assert device.name == "cpu"

@pytest.mark.tier("smoke")
@pytest.mark.skip
def test_skipped(): pass
"""

MACHINE = """
import assay.devices.detection
from assay.devices.base import DeviceVendor
from assay.devices.detection import ListedDevice

NOBODY = DeviceVendor("nobody", "Nobody", "gloo", "inductor", ())
LISTED = (ListedDevice("nobody", "absent", NOBODY, missing="its driver"),)
assay.devices.detection.list_devices = lambda timeout: LISTED
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    pytester.makeconftest(MACHINE)
    pytester.makepyfile(BODY)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n2", "-rsE", *options)


def test_workers_skip_and_open_the_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASSAY_REQUIRE_HARDWARE", raising=False)
    result = run(pytester, "--assay-device", "cpu/float32")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["SKIPPED [[]1] test_*.py:3: needs 1 nobody accelerator; missing: its driver"]
    )


def test_required_hardware_fails_in_a_worker(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "1")
    result = run(pytester, "--assay-device", "cpu/float32")
    result.assert_outcomes(passed=1, skipped=1, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_the_controller_knows_that_no_worker_ran_a_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "1")
    result = run(pytester, "-k", "test_skipped", "--assay-device", "cpu/float32")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["assay: 0 tests ran; under ASSAY_REQUIRE_HARDWARE=1 that is a failure"]
    )
    passing = run(pytester, "-k", "test_present", "--assay-device", "cpu/float32")
    assert passing.ret == pytest.ExitCode.OK
    passing.stdout.no_fnmatch_line("*0 tests ran*")
