"""Processes that are forked from the fork server of a script."""

import os
import subprocess
import sys
from pathlib import Path

from assay.launch import FORK_SERVER

HERE = Path(__file__).parent

SCRIPT = """
import os
import signal
import sys
from pathlib import Path

import pytest
from assay.launch import RemoteFunction, call

print("the script runs")
for value in ("first", "second"):
    os.environ["ASSAY_TEST_VARIABLE"] = value
    function = RemoteFunction("child_work:echo", ["json"])
    (answer,) = call(function, {}, folder=Path(sys.argv[1]), name="candidate")
    print(answer["variable"])
"""


def test_a_script_needs_no_guard_and_may_set_variables(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["the script runs", "first", "second"]
    assert "the script runs" not in (tmp_path / "candidate.log").read_text()


HASHING = """
import os
import sys
from pathlib import Path

from assay.launch import RemoteFunction, call

for preload in ([], ["json"]):
    function = RemoteFunction("child_work:hash_names", preload)
    (answer,) = call(function, {}, folder=Path(sys.argv[1]), name="candidate")
    print(answer["hashes"])
print(os.environ["PYTHONHASHSEED"])
"""


def test_sets_of_names_have_one_order_in_all_processes(tmp_path: Path) -> None:
    hashes, own = set(), []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", HASHING, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "PYTHONHASHSEED": seed},
        )
        *of_children, seed_of_parent = done.stdout.splitlines()
        assert len(of_children) == 2
        hashes |= set(of_children)
        own.append(seed_of_parent)
    assert len(hashes) == 1
    assert own == ["1", "2"]


def test_ctrl_c_in_a_terminal_does_not_reach_the_fork_server() -> None:
    FORK_SERVER.start()
    assert FORK_SERVER.pid is not None
    assert os.getpgid(FORK_SERVER.pid) not in (os.getpgrp(), 0)
