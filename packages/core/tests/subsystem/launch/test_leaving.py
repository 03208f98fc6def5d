"""Ranks of torchrun that end one after the other."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

LAST_WORDS = """
import os, sys, time
from assay.launch import leave_together, on_first_rank

assert on_first_rank(lambda: 7) == 7
if os.environ["RANK"] == "1":
    time.sleep(3)  # torchrun looks every tenth of a second whether a rank has failed
print("last words", flush=True)
leave_together()
sys.exit(1)
"""


def test_a_rank_that_fails_early_lets_the_others_finish(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(LAST_WORDS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs"), str(tmp_path / "ranks.py")]
    done = subprocess.run([*command, *logs], capture_output=True, text=True, check=False)
    told = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert told == ["last words\n"] * 2, done.stderr
    assert done.returncode == 1
