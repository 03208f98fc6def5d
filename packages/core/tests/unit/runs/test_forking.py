"""Processes that are forked from the fork server of a script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SCRIPT = """
import os
import signal
import sys
from pathlib import Path

import pytest
from assay.runs import SilentProgress, run_process

print("the script runs")
for value in ("first", "second"):
    os.environ["ASSAY_TEST_VARIABLE"] = value
    answer = run_process(
        "child_work", {"act": "echo"}, Path(sys.argv[1]), name="candidate",
        progress=SilentProgress(), preload=["json"],
    )
    print(answer.result["variable"])
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

from assay.runs import SilentProgress, run_process

for preload in ([], ["json"]):
    answer = run_process(
        "child_work", {"act": "hash_names"}, Path(sys.argv[1]), name="candidate",
        progress=SilentProgress(), preload=preload,
    )
    print(answer.result["hashes"])
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_ctrl_c_does_not_reach_the_fork_server_while_it_imports() -> None:
    script = (
        "from multiprocessing import forkserver\n"
        "from pathlib import Path\n"
        "from assay.runs.forking import begin_preload\n"
        "begin_preload(['json'])\n"
        "status = Path(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read_text()\n"
        "print(status.partition('SigBlk:')[2].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert int(done.stdout, 16) == 1 << (signal.SIGINT - 1)


def test_a_folder_too_long_for_sockets_is_one_message(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    code = (
        "from assay.errors import MachineError\n"
        "from assay.runs.forking import begin_preload\n"
        "try:\n    begin_preload(['json'])\nexcept MachineError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"no socket can be made in {folder}")
    assert done.stdout.endswith("set TMPDIR to a folder with a short path\n")
