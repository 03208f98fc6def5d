"""`assay devices` on machines with devices of every maker, whose software works, hangs, breaks or ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAND_INS = Path(__file__).parents[1] / "stand_ins"
MAKERS = ("hpu", "mps", "npu", "spyre", "xla", "xpu")
# Waited for only where something hangs; others answer at once, on a busy machine later.
TIMEOUT_SECONDS = {"hanging": 8}
PATIENCE_SECONDS = 60
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
        timeout = TIMEOUT_SECONDS.get(situation, PATIENCE_SECONDS)
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
