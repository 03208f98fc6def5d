"""`assay capture -- COMMAND` of scripts as users have them: Trainer, TRL, generate, a loop of their own.

Two captures of a script are bitwise equal; of a planted fault, compare names the module.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict

pytestmark = pytest.mark.long

SCRIPTS = Path(__file__).with_name("captured_scripts")
LAUNCH = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
)  # fmt: skip


def capture(folder: Path, script: str, launcher: tuple[str, ...], fault: str) -> Path:
    words = (sys.executable, "-m", "assay.cli", "capture", "--output", str(folder), "--weights")
    command = (sys.executable, *launcher, str(SCRIPTS / script))
    done = subprocess.run(
        [*words, "--min-parameters", "100", "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"FAULT": fault, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    ranks = ": rank-0, rank-1" if launcher else ""
    assert f"assay: captured {folder}{ranks}\n" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return folder


def assert_bitwise_equal(expected: Path, actual: Path) -> None:
    sides = open_dump(str(expected)), open_dump(str(actual))
    for one, other in zip(*(side.tensors for side in sides), strict=True):
        assert one.site == other.site
        assert torch.equal(one.read(), other.read()), one.site


def judged(expected: Path, actual: Path) -> Verdict:
    sides = open_dump(str(expected)), open_dump(str(actual))
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


@pytest.mark.parametrize(
    ("script", "launcher", "phase", "module"),
    [
        ("trainer.py", (), "backward", "model.layers.1.mlp.up_proj"),
        ("sft.py", LAUNCH, "backward", "model.layers.0.self_attn.o_proj"),
        ("generate.py", (), "forward", "model.layers.1.mlp.down_proj"),
        ("own_loop.py", (), "forward", "second.conv"),
    ],
)
def test_a_script_agrees_with_itself_and_its_fault_is_located(
    tmp_path: Path, script: str, launcher: tuple[str, ...], phase: str, module: str
) -> None:
    one, two, fault = (
        capture(tmp_path / name, script, launcher, "yes" if name == "fault" else "")
        for name in ("one", "two", "fault")
    )

    assert judged(one, two).verdict is Outcome.PASS
    assert_bitwise_equal(one, two)
    location = judged(one, fault).location
    assert location is not None
    assert (location.phase, location.module) == (phase, module)
