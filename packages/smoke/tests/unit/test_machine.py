"""The words for a process."""

import subprocess
import sys

import psutil

from assay_smoke.machine import describe


def test_process_is_described_by_its_command_until_it_ends() -> None:
    command = [sys.executable, "-c", "input()", "x" * 100]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as started:
        process = psutil.Process(started.pid)
        running = describe(process)
        started.communicate(b"\n")

    assert running.startswith(f"process {started.pid} ({sys.executable} -c input()")
    assert running.endswith("x...)")
    assert describe(process) == f"process {started.pid} (ended)"
