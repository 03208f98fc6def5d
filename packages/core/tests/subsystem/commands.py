"""The command line, run in the process of the tests: the fork server of its workers is used again."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay import cli


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def verdict(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())
        return record

    @property
    def measurements(self) -> list[dict[str, Any]]:
        lines = (self.folder / "measurements.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextmanager
def arguments_of_command(arguments: list[str]) -> Iterator[None]:
    argv = sys.argv
    sys.argv = ["assay", *arguments]
    try:
        yield
    finally:
        sys.argv = argv


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`assay ARGUMENTS`, as `subprocess.run` would return it."""
    texts = [*map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with arguments_of_command(texts), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(texts, code, out.getvalue(), err.getvalue())


def run_in_process(folder: Path, *arguments: str | Path) -> Finished:
    """`assay ARGUMENTS --output FOLDER`."""
    done = run_command(*arguments, "--output", folder)
    return Finished(done.returncode, done.stdout, done.stderr, folder)


def error_of(run: Any) -> str:
    """The one message of a command that was refused."""
    assert run.code == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    messages = [line for line in run.stderr.splitlines() if line.startswith("assay: ")]
    assert len(messages) == 1, run.stderr
    message: str = run.stderr[run.stderr.index("assay: ") :]
    assert len(message) < 1000
    return message


# What a machine with torch alone lacks.
_ALONE = """
import runpy, sys
sys.modules.update(dict.fromkeys(["assay", "transformers", "safetensors", "numpy"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(script: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of reproduce.py."""
    command = [sys.executable, "-W", "ignore", "-c", _ALONE, str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout
