"""Real pytest runs over small files; the machine is made up in their conftest."""

import subprocess
import sys

import pytest

# Loaded here, they are not loaded anew in each of the runs, which torch does not survive.
import assay.devices.cpu
import assay.devices.detection  # noqa: F401

pytest_plugins = ("pytester",)

MACHINE = """
import assay.devices.detection
from assay.devices.base import DeviceVendor
from assay.devices.detection import ListedDevice

def vendor(name):
    return DeviceVendor(name, name, "gloo", "inductor", ())

LISTED = (
    ListedDevice("cpu", "present", vendor("cpu"), ("a laptop",)),
    ListedDevice("acme", "present", vendor("acme"), ("Acme 1", "Acme 1")),
    ListedDevice("other", "absent", vendor("other"), missing="the driver of Other"),
)
assay.devices.detection.list_devices = lambda timeout: LISTED
"""

MARKED = """
import pytest

@pytest.mark.accelerator("acme", count=2)
def test_present():
    pass

@pytest.mark.accelerator("other", count=4)
def test_absent():
    raise RuntimeError("must not run")

@pytest.mark.world(dp=2, tp=2)
def test_ranks():
    raise RuntimeError("must not run")

@pytest.mark.world(dp=2)
def test_two_ranks():
    raise RuntimeError("must not run")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("ASSAY_REQUIRE_HARDWARE", raising=False)
    pytester.makeconftest(MACHINE)
    return pytester


# Other plugins only cost time here.
ALONE = [f"-pno:{name}" for name in ("anyio", "benchmark", "hypothesispytest", "xdist")]


def run(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    return project.runpytest_inprocess(
        *ALONE, "-pno:cacheprovider", "-rsE", "--strict-markers", *options
    )


def require_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "1")


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, assay.pytest_plugin; print({'torch', 'transformers'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed == b"set()\n"


def test_a_run_that_needs_no_device_imports_no_torch(project: pytest.Pytester) -> None:
    project.makepyfile(
        "import sys\ndef test_it():\n    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    result = project.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_what_this_machine_cannot_run_is_skipped_with_what_is_missing(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(MARKED)
    result = run(project, "--assay-world", "1")
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED [[]1] test_*.py:7: needs 4 other accelerators; missing: the driver of Other",
            (
                "SKIPPED [[]1] test_*.py:11: needs a world of 4 ranks (dp=2, tp=2); "
                "--assay-world allows 1"
            ),
            "SKIPPED [[]1] test_*.py:15: needs a world of 2 ranks (dp=2); --assay-world allows 1",
        ]
    )


def test_required_hardware_that_is_absent_is_an_error(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_hardware(monkeypatch)
    project.makepyfile(MARKED)
    result = run(project, "--assay-world", "1")
    result.assert_outcomes(passed=1, errors=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "needs 4 other accelerators; missing: the driver of Other (ASSAY_REQUIRE_HARDWARE=1)",
            (
                "needs a world of 4 ranks (dp=2, tp=2); --assay-world allows 1 "
                "(ASSAY_REQUIRE_HARDWARE=1)"
            ),
        ]
    )


@pytest.mark.parametrize(
    "body",
    [
        "import pytest\ndef test_it():\n    pytest.skip('not today')",
        "import pytest\n@pytest.mark.skip\ndef test_it(): pass",
        "import pytest\n@pytest.mark.xfail(run=False)\ndef test_it(): pass",
        "",
    ],
    ids=["skipped-inside", "skipped-by-mark", "not-run-by-xfail", "none-collected"],
)
def test_nothing_ran_is_a_failure_where_hardware_is_required(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    project.makepyfile(body)
    before = run(project)
    assert before.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    require_hardware(monkeypatch)
    result = run(project)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["assay: 0 tests ran; under ASSAY_REQUIRE_HARDWARE=1 that is a failure"]
    )


@pytest.mark.parametrize(
    "body",
    [
        "def test_it(): pass",
        "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False",
    ],
    ids=["passed", "failed-as-expected"],
)
def test_one_test_that_ran_is_enough(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    require_hardware(monkeypatch)
    project.makepyfile(body)
    result = run(project)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*0 tests ran*")


def test_listing_tests_runs_none_and_is_no_failure(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_hardware(monkeypatch)
    project.makepyfile("def test_it(): pass")
    assert run(project, "--collect-only").ret == pytest.ExitCode.OK


def test_a_tier_selects_its_tests(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import pytest

        @pytest.mark.tier("smoke")
        def test_smoke(): pass

        @pytest.mark.tier("bench")
        def test_bench(): pass

        def test_any(): pass
    """)
    run(project).assert_outcomes(passed=3)
    result = run(project, "--assay-tier", "smoke")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["assay: tier smoke"])
    assert run(project, "--assay-tier", "smoek").ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("options", [(), ("--assay-tier", "smoke")], ids=["all", "one-tier"])
def test_a_mark_that_means_nothing_is_an_error_of_its_test(
    project: pytest.Pytester, options: tuple[str, ...]
) -> None:
    project.makepyfile("""
        import pytest

        @pytest.mark.tier()
        def test_tier(): pass

        @pytest.mark.tier("smoke")
        @pytest.mark.accelerator("acmee")
        def test_accelerator(): pass

        @pytest.mark.tier("smoke")
        @pytest.mark.budget("a minute")
        def test_budget(): pass
    """)
    result = run(project, *options)
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(
        [
            'marker tier: takes one name; write it as tier("smoke")',
            (
                "marker accelerator: unknown vendor 'acmee' (there is: acme, cpu, "
                'other); write it as accelerator("nvidia", count=4)'
            ),
            "marker budget: the number of seconds is 'a minute'; write it as budget(seconds=30)",
        ]
    )


def test_a_test_over_its_budget_fails(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import time
        import pytest

        @pytest.mark.budget(0.001)
        def test_slow(): time.sleep(0.01)

        @pytest.mark.budget(seconds=60)
        def test_fast(): pass

        @pytest.mark.budget(0.001)
        def test_wrong():
            time.sleep(0.01)
            raise ValueError("its own error is shown")
    """)
    result = run(project)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.re_match_lines([r"^took 0\.\d+ s; its budget is 0\.001 s$"])
    result.stdout.fnmatch_lines(["E*ValueError: its own error is shown"])


def test_the_device_is_the_host_unless_one_is_named(project: pytest.Pytester) -> None:
    project.makepyfile("""
        def test_it(device, assay_run):
            assert (device.name, str(assay_run)) == ("cpu", "cpu/float32")
    """)
    run(project).assert_outcomes(passed=1)


def test_a_named_device_is_opened(project: pytest.Pytester) -> None:
    project.makepyfile("""
        def test_it(device, assay_run):
            assert (device.name, str(assay_run)) == ("sim:fp8", "sim:fp8/bfloat16")
    """)
    result = run(project, "--assay-device", "sim:fp8/bfloat16")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["assay: device sim:fp8/bfloat16"])


def test_a_named_device_that_is_absent_is_an_error_and_no_skip(project: pytest.Pytester) -> None:
    project.makepyfile("def test_it(device): pass")
    result = run(project, "--assay-device", "npu/bfloat16")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["device 'npu' is absent; missing: *"])


def test_required_hardware_has_to_be_named(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_hardware(monkeypatch)
    project.makepyfile("def test_it(device): pass")
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["ASSAY_REQUIRE_HARDWARE=1, but --assay-device does not say which device is tested"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--assay-device", "cpu"),
            "ERROR: 'cpu' is not a run; write one as DEVICE/DTYPE, such as cuda:1/bfloat16",
        ),
        (("--assay-world", "0"), "ERROR: --assay-world is 0; a world has at least 1 rank"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    project: pytest.Pytester, options: tuple[str, ...], message: str
) -> None:
    result = run(project, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_a_wrong_environment_is_a_usage_error(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "yes")
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: ASSAY_REQUIRE_HARDWARE is 'yes'; it must be 1, 0 or unset"]
    )


def test_a_mesh_needs_a_world(project: pytest.Pytester) -> None:
    project.makepyfile("def test_it(mesh): pass")
    result = run(project)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["the fixture mesh needs a world of ranks; mark the test world(dp=2)"]
    )
