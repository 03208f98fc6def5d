"""Processes: their descriptions, and those that a leader leaves behind in its group."""

import os
import signal
import subprocess
import sys

import psutil

from assay_smoke.machine import describe, find_in_group


def test_process_is_described_by_its_command_until_it_ends() -> None:
    # It prints once it runs: until then the system may not know its command.
    command = [sys.executable, "-c", "input(print(flush=True) or '')", "x" * 100]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as started:  # type: ignore[call-overload]
        started.stdout.readline()
        process = psutil.Process(started.pid)
        running = describe(process)
        started.communicate(b"\n")

    assert running.startswith(f"process {started.pid} ({sys.executable} -c input(")
    assert running.endswith("x...)")
    assert describe(process) == f"process {started.pid} (ended)"


def test_member_of_a_group_is_left_over_and_its_leader_is_not() -> None:
    child = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", child], start_new_session=True, **pipes) as leader:  # type: ignore[call-overload]
        pid = int(leader.stdout.readline())
        (left,) = find_in_group(leader.pid, patience_seconds=0.1)
        os.kill(pid, signal.SIGKILL)
        leader.communicate("\n")

    assert f"process {pid} (sleep 60)" in str(left)
    assert find_in_group(leader.pid, patience_seconds=0.1) == []
