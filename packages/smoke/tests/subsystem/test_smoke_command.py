"""`assay smoke` as users type it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = Path(__file__).parents[1] / "planted_trainers.py"


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "assay.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_plan_is_printed_without_torch() -> None:
    done = assay("smoke", "plan", "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert plan["schema"] == 1
    assert [cycle["features"] for cycle in plan["cycles"]] == [["lora"]]
    code = "import sys, assay_smoke.commands, assay_smoke.planning; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed == b"False\n"


def test_a_clean_run_exits_with_0(tmp_path: Path) -> None:
    done = assay("smoke", "run", "--output", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["verdict"] == "PASS"
    assert verdict["compared"] > 500
    assert json.loads((tmp_path / "run/verdict.json").read_text()) == verdict
    assert (tmp_path / "run/checkpoint/model/adapter_model.safetensors").stat().st_size > 10_000


def test_a_planted_fault_exits_with_1_and_is_explained(tmp_path: Path) -> None:
    trainer = f"{PLANTED}:GeneratorsNotRestored"
    done = assay("smoke", "run", "--output", str(tmp_path / "run"), "--trainer", trainer)
    assert done.returncode == 1, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[:2] == [
        "✗ FAIL: micro:llama on cpu/float32 against the uninterrupted run",
        (
            "The checkpoint, parameter generators.torch (checkpoint, step 2) differs from the"
            " reference."
        ),
    ]
    assert "Next: assay explain rng-state" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "npu/bfloat16"], "assay: device 'npu' is absent"),
        (["--trainer", "nowhere.py:Trainer"], "assay: nowhere.py:Trainer: there is no file"),
        (["--model", "micro:bert"], "assay: micro:bert predicts no next token"),
    ],
)
def test_what_cannot_be_run_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = assay("smoke", "run", "--output", str(tmp_path / "run"), *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(message)
    assert done.stdout == ""
