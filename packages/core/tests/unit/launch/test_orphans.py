"""What is left when a process is killed whose worker holds the interpreter's lock: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).parent

SCRIPT = """
import sys
from pathlib import Path
from assay.launch import RemoteFunction, call

preload, folder = sys.argv[1:]
request = {"pids": folder + "/pids"}
function = RemoteFunction("child_work:hold_interpreter", preload.split())
call(function, request, folder=Path(folder), name="x")
"""

# How the main process is ended, as words in front of its command; none: by the test.
ENDS: dict[str, tuple[list[str], int | None]] = {
    "SIGKILL": ([], signal.SIGKILL),
    "SIGTERM": ([], signal.SIGTERM),
    "timeout -s TERM": (["timeout", "-s", "TERM", "6"], None),
    "timeout -s KILL": (["timeout", "-s", "KILL", "6"], None),
}


def processes_with(variable: str) -> dict[int, str]:
    """All processes with an environment variable that begins so, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            variables = b"\0" + (folder / "environ").read_bytes()
            if f"\0{variable}".encode() in variables:
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def kill_all(variable: str) -> None:
    for pid in processes_with(variable):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("preload", ["json", ""], ids=["preloaded", "bare"])
def test_worker_that_holds_the_interpreter_ends_with_its_killed_parent(
    preload: str, request: pytest.FixtureRequest
) -> None:
    scratch = TemporaryDirectory()  # not tmp_path: names of sockets are short
    request.addfinalizer(scratch.cleanup)
    request.addfinalizer(lambda: kill_all(f"ASSAY_TEST_PARENT={scratch.name}"))
    parents: dict[Path, subprocess.Popen[bytes]] = {}
    for name, (words, _) in ENDS.items():
        folder = Path(scratch.name, name.replace(" ", ""))
        temporary = folder / "temporary"
        temporary.mkdir(parents=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "TMPDIR": str(temporary),
            "ASSAY_TEST_PARENT": str(folder),
        }
        command = [*words, sys.executable, "-c", SCRIPT, preload, str(folder)]
        parents[folder] = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    for folder, parent in parents.items():
        while not (folder / "pids").exists():
            assert parent.poll() is None
            assert time.monotonic() < deadline, f"the worker of {folder.name} did not start"
            time.sleep(0.02)
    for folder, (_, number) in zip(parents, ENDS.values(), strict=True):
        assert len(processes_with(f"ASSAY_TEST_PARENT={folder}\0")) > 2
        if number is not None:
            os.kill(parents[folder].pid, number)

    for folder, parent in parents.items():
        parent.wait(timeout=20)
        left = processes_with(variable := f"ASSAY_TEST_PARENT={folder}\0")
        while left:
            assert time.monotonic() < deadline, f"{folder.name}: left behind: {left}"
            time.sleep(0.05)
            left = processes_with(variable)
        assert list((folder / "temporary").iterdir()) == []
