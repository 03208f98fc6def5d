"""Adapters that hang, crash or raise do not stop the process that detects devices."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.devices import detection
from assay.devices.detection import detect_isolated, list_devices, require_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError

# Long enough for Python to start on a busy machine, far below the sleep of the fakes.
PATIENCE_SECONDS = 15.0
SLEEP_SECONDS = 600


def test_detection_runs_in_another_process(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    install_vendor("acme", acme_code, "AcmeDevice")
    (finding,) = detect_isolated(("acme",))
    assert finding.missing == ""
    assert finding.vendor is not None
    assert finding.vendor.title == "Acme Rocket"
    assert finding.products == ("Rocket 1", "Rocket 2")
    assert finding.variants == ("0", "1")
    assert "vendor_of_acme" not in sys.modules


def test_adapter_that_hangs_on_import_is_reported_and_others_still_run(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    install_vendor("stuck", f"import time; time.sleep({SLEEP_SECONDS})", "Stuck")
    install_vendor("acme", acme_code, "AcmeDevice")
    begin = time.monotonic()
    stuck, acme = detect_isolated(("stuck", "acme"), timeout_seconds=3.0)
    assert time.monotonic() - begin < SLEEP_SECONDS / 10
    assert stuck.missing == (
        "the adapter for 'stuck' is broken: asked for its devices, it did not answer within 3 s"
    )
    assert len(acme.products) == 2


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", f"was ended by {signal.SIGSEGV.name}"),
        ("os._exit(3)", "ended with exit code 3"),
        ("os._exit(0)", "ended with exit code 0"),
    ],
)
def test_adapter_that_crashes_is_a_finding(
    install_vendor: Callable[..., None], death: str, words: str
) -> None:
    install_vendor("crash", f"import os, signal\n{death}", "Crash")
    first, second = detect_isolated(("crash", "warp"), PATIENCE_SECONDS)
    assert first.missing == f"the adapter for 'crash' is broken: asked for its devices, it {words}"
    assert second.missing.startswith("unknown device 'warp'")


def test_detection_of_another_type_is_a_finding(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    labels = acme_code.replace('runner_labels=("assay-acme",)', 'runner_labels="assay-acme"')
    install_vendor("typed", labels, "AcmeDevice")
    first, second = detect_isolated(("typed", "cpu"), PATIENCE_SECONDS)
    assert first.missing.startswith("the adapter for 'typed' is broken: 0.vendor.runner_labels")
    assert second.status == "present"


def test_output_of_an_adapter_does_not_corrupt_its_answer(
    install_vendor: Callable[..., None], acme_code: str, tmp_path: Path
) -> None:
    noise = "import os\nprint('welcome')\nos.system('echo loaded')\nos.write(1, b'driver 7\\n')\n"
    install_vendor("acme", acme_code + noise, "AcmeDevice")
    # What Python itself imports before anything else.
    (tmp_path / "sitecustomize.py").write_text(noise)
    (finding,) = detect_isolated(("acme",), PATIENCE_SECONDS)
    assert finding.missing == ""
    assert len(finding.products) == 2


def test_adapters_are_asked_in_processes_of_their_own_where_a_fork_would_break_them(
    install_vendor: Callable[..., None], acme_code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "FORKS_KEEP_DRIVERS", False)
    no_fork = "import os\ndef fork(): raise OSError('forked')\nos.fork = fork\n"
    install_vendor("acme", no_fork + acme_code, "AcmeDevice")
    install_vendor("crash", f"{no_fork}os.kill(os.getpid(), 11)", "Crash")
    acme, crash = detect_isolated(("acme", "crash"), PATIENCE_SECONDS)
    assert len(acme.products) == 2
    assert crash.missing.endswith("it was ended by SIGSEGV")


def test_process_left_behind_by_an_adapter_does_not_delay_the_caller(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    daemon = f"import os, time\nif os.fork() == 0: time.sleep({SLEEP_SECONDS})\n"
    install_vendor("acme", acme_code + daemon, "AcmeDevice")
    begin = time.monotonic()
    (finding,) = detect_isolated(("acme",), PATIENCE_SECONDS)
    assert time.monotonic() - begin < PATIENCE_SECONDS
    assert len(finding.products) == 2


def test_listing_shows_present_absent_and_broken_devices(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    install_vendor("acme", acme_code, "AcmeDevice")
    install_vendor("bad", "raise RuntimeError('no driver')", "Bad")
    lines = list_devices(PATIENCE_SECONDS)
    status = {(line.device, line.vendor.name if line.vendor else None): line for line in lines}
    assert len(status) == len(lines)
    assert {key: line.status for key, line in status.items() if key[0] != "cuda"} == {
        ("acme", "acme"): "present",
        ("cpu", "cpu"): "present",
        ("sim", "sim"): "present",
        ("hpu", "gaudi"): "absent",
        ("mps", "apple"): "absent",
        ("npu", "ascend"): "absent",
        ("spyre", "spyre"): "absent",
        ("xla", "trainium"): "absent",
        ("xpu", "intel"): "absent",
        ("bad", None): "broken",
    }
    assert {key[1] for key in status if key[0] == "cuda"} == {"nvidia", "amd"}
    assert status["bad", None].missing == (
        "the adapter for 'bad' is broken: RuntimeError: no driver"
    )
    assert status["spyre", "spyre"].missing == "the Python package torch_spyre"
    assert status["acme", "acme"].to_json() == {
        "device": "acme",
        "status": "present",
        "vendor": "acme",
        "title": "Acme Rocket",
        "count": 2,
        "products": ("Rocket 1", "Rocket 2"),
        "variants": ("0", "1"),
        "missing": "",
        "distributed_backend": "gloo",
        "compile_backend": "eager",
        "runner_labels": ["assay-acme"],
        "verified": "",
    }


def test_require_run_prints_nothing_for_a_run_that_can_be_opened(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    install_vendor("acme", acme_code, "AcmeDevice")
    require_run(parse_run("acme:1/float16"))
    assert "vendor_of_acme" not in sys.modules


@pytest.mark.parametrize(
    ("run", "kind", "message"),
    [
        ("acme/float64", UsageError, "acme has no float64; it has: float32, float16"),
        ("acme:x/float32", UsageError, "unknown device 'acme:x'; there is: acme, acme:0, acme:1"),
        (
            "acme:7/float32",
            MachineError,
            "device 'acme:7' is absent; missing: there are 2. On this machine: acme:0, acme:1",
        ),
    ],
)
def test_error_of_opening_a_run_in_another_process_is_raised_here(
    install_vendor: Callable[..., None],
    acme_code: str,
    run: str,
    kind: type[Exception],
    message: str,
) -> None:
    install_vendor("acme", acme_code, "AcmeDevice")
    with pytest.raises(kind) as raised:
        require_run(parse_run(run))
    assert str(raised.value) == message


def test_required_run_on_an_adapter_that_hangs_is_a_machine_error(
    install_vendor: Callable[..., None],
) -> None:
    install_vendor("stuck", f"import time; time.sleep({SLEEP_SECONDS})", "Stuck")
    with pytest.raises(MachineError, match=r"'stuck' is broken.* did not answer within 1 s"):
        require_run(parse_run("stuck/float32"), timeout_seconds=1.0)


def test_hosts_own_devices_are_required_without_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started a process"))
    require_run(parse_run("cpu/float64"))
    require_run(parse_run("sim:fp8/bfloat16"))
    with pytest.raises(UsageError, match="unknown device 'sim:fp9'"):
        require_run(parse_run("sim:fp9/bfloat16"))
    with pytest.raises(UsageError, match="sim has no float64"):
        require_run(parse_run("sim/float64"))


STAND_INS = Path(__file__).parent / "stand_ins"
MAKERS = ("hpu", "mps", "npu", "spyre", "xla", "xpu")
# Waited for only where something hangs; others answer at once, on a busy machine later.
TIMEOUT_SECONDS = {"hanging": 8}
LISTING_SECONDS = 60
# Of 600 that each stand-in would hang.
LIMIT_SECONDS = 300.0

# `assay` whose other processes have the devices of the stand-ins.
ASSAY = "import sys; sys.executable = sys.argv.pop(1); from assay.cli import main; main()"

List = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def list_machine(tmp_path: Path) -> List:
    """Run `assay devices --json` in a situation; standard output has to be JSON, by device."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_INS / "machine.py"}" "$@"\n')
    python.chmod(0o755)
    paths = os.pathsep.join([str(STAND_INS), *filter(None, sys.path)])

    def list_(situation: str) -> dict[str, dict[str, Any]]:
        begin = time.monotonic()
        timeout = TIMEOUT_SECONDS.get(situation, LISTING_SECONDS)
        done = subprocess.run(
            [
                *(sys.executable, "-c", ASSAY, str(python)),
                *("devices", "--json", "--timeout", str(timeout)),
            ],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": paths, "STAND_INS_SITUATION": situation},
        )
        assert time.monotonic() - begin < LIMIT_SECONDS
        listed = json.loads(done.stdout)["devices"]
        assert {line["status"] for line in listed if line["device"] in ("cpu", "sim")} == {
            "present"
        }
        return {line["device"]: line for line in listed if line["device"] in MAKERS}

    return list_


def test_devices_of_every_maker_are_present(list_machine: List) -> None:
    lines = list_machine("present")
    assert {name: (line["status"], line["count"]) for name, line in lines.items()} == {
        "hpu": ("present", 8),
        "mps": ("present", 1),
        "npu": ("present", 2),
        "spyre": ("present", 1),
        "xla": ("present", 2),
        "xpu": ("present", 1),
    }
    assert lines["npu"]["products"] == ["Ascend910B1", "Ascend910B1"]
    assert lines["npu"]["variants"] == ["0", "1"]
    assert {line["verified"] for line in lines.values()} == {""}


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        ("hanging", "asked for its devices, it did not answer within 8 s"),
        ("broken", "OSError: the driver of {name} is too old"),
        ("ending", "asked for its devices, it ended with exit code 0"),
    ],
)
def test_software_that_does_not_work_is_broken_for_every_maker(
    list_machine: List, situation: str, reason: str
) -> None:
    named = {
        "hpu": "habana_frameworks",
        "npu": "torch_npu",
        "spyre": "torch_spyre",
        "xla": "torch_neuronx",
    }
    lines = list_machine(situation)
    assert {name: (line["status"], line["missing"]) for name, line in lines.items()} == {
        maker: (
            "broken",
            f"the adapter for {maker!r} is broken: {reason.format(name=named.get(maker, maker))}",
        )
        for maker in MAKERS
    }
