"""What a watchdog does when its process ends in order; unit/runs/test_orphans.py kills processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.watchdog import Watchdog


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()


def test_process_that_still_runs_is_ended_and_a_folder_is_left_to_its_owner(
    watchdog: Watchdog, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        watchdog.watch("folder", str(tmp_path))
        watchdog.watch("process", process.pid)
        watchdog.close()
        assert process.wait(10) == -9
    assert tmp_path.is_dir()
    assert watchdog.pid is None


def test_what_was_forgotten_is_left_alone(watchdog: Watchdog) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watchdog.watch("process", process.pid)
        watchdog.forget("process", process.pid)
        watchdog.close()
        time.sleep(0.1)
        assert process.poll() is None
        process.communicate(b"\n")
    assert process.returncode == 0


def test_watchdog_that_was_killed_is_replaced(watchdog: Watchdog) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        watchdog.watch("process", process.pid)
        first = watchdog.pid
        assert first is not None
        os.kill(first, 9)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        watchdog.watch("process", os.getppid())  # the pipe to the first is broken
        watchdog.forget("process", os.getppid())
        assert watchdog.pid not in (None, first)
        watchdog.close()
        assert process.wait(10) == -9


def test_fork_keeps_no_watchdog_of_its_parent_open() -> None:
    script = (
        "import os, sys, time\n"
        "from assay.watchdog import WATCHDOG\n"
        "WATCHDOG.watch('folder', '/nowhere')\n"
        "if os.fork() == 0:\n"
        "    assert WATCHDOG.pid is None\n"
        "    sys.exit()\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
