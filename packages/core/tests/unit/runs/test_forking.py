"""Processes that are forked from the fork server of a script."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

SCRIPT = """
import os
import sys
from pathlib import Path
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
