"""The compilation of DeepSpeed's CPU Adam when it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.long

pytest.importorskip("deepspeed", reason="the extra of this package is not installed")

_HANGS = """#!/bin/sh
echo $$ > {pid}.part && mv {pid}.part {pid}
exec sleep 600
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compilation_that_is_ended_leaves_nothing(tmp_path: Path, number: int) -> None:
    compiler, pid_file, cache = (tmp_path / name for name in ("hangs", "pid", "cache"))
    compiler.write_text(_HANGS.format(pid=pid_file))
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "assay.cli", "smoke", "run", "zero1-1-offload"]
    variables = {"XDG_CACHE_HOME": str(cache), "CXX": str(compiler)}
    session = subprocess.Popen(
        [*command, "--output", str(tmp_path / "run")], env={**os.environ, **variables}
    )
    try:
        _wait_until(pid_file.exists, seconds=60.0)
        assert _files_in(cache)
        session.send_signal(number)
        session.wait(30.0)
    finally:
        session.kill()
    pid = int(pid_file.read_text())
    _wait_until(lambda: not psutil.pid_exists(pid), seconds=10.0)
    _wait_until(lambda: not _files_in(cache), seconds=10.0)


def _files_in(cache: Path) -> list[Path]:
    return list(cache.glob("assay/deepspeed-*/*"))


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
