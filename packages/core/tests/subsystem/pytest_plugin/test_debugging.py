"""`--pdb` in a terminal, when a test fails on ranks."""

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TEST = """
import pytest

@pytest.mark.world(dp=2)
def test_sum(mesh):
    answer = 42 + mesh.get_rank()
    assert answer == {expected}

def test_after():
    pass
"""
PROMPT = "(Pdb) "


class Terminal:
    """pytest in a terminal of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.text = ""
        self._pid, self._descriptor = pty.fork()
        if not self._pid:
            os.chdir(folder)
            program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"]
            os.execv(sys.executable, [*program, *options])  # noqa: S606 - without a shell

    def read_until(self, wanted: str, seconds: float = 90.0) -> str:
        """What came until `wanted`, or until the end."""
        begun, deadline = len(self.text), time.monotonic() + seconds
        while wanted not in self.text[begun:] and time.monotonic() < deadline:
            if not select.select([self._descriptor], [], [], 0.1)[0]:
                continue
            try:
                self.text += os.read(self._descriptor, 1 << 16).decode(errors="replace")
            except OSError:  # nobody writes any more
                break
        return self.text[begun:]

    def type(self, line: str) -> None:
        os.write(self._descriptor, f"{line}\n".encode())

    def end(self) -> int:
        """The exit code, once it has ended."""
        self.read_until("\0")
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._descriptor)
        return code


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_debugger_stops_in_rank_0_where_the_test_failed(tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(TEST.format(expected=-1))
    terminal = Terminal(tmp_path, "--pdb")

    assert PROMPT in terminal.read_until(PROMPT), terminal.text
    assert "rank 0: AssertionError" in terminal.text
    terminal.type("p answer + 1000")
    assert "1042" in terminal.read_until(PROMPT)
    time.sleep(3.0)  # the other rank has failed as well, and waits
    terminal.type("p answer + 2000")
    assert "2042" in terminal.read_until(PROMPT)
    terminal.type("c")

    code = terminal.end()
    assert code == 1
    assert "1 failed, 1 passed" in terminal.text
    assert terminal.text.count("Entering PDB") == 0  # no second debugger in pytest's process


def test_a_failure_of_another_rank_ends_without_a_debugger(tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(TEST.format(expected=42))
    terminal = Terminal(tmp_path, "--pdb")

    code = terminal.end()

    assert code == 1
    assert PROMPT not in terminal.text
    assert "rank 1" in terminal.text
    assert "1 failed, 1 passed" in terminal.text
