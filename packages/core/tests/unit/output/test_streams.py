"""Standard output and standard error of a command, as a terminal and a log see them."""

import io
import os
import pty
import subprocess
import sys

import pytest

POISONED = r"""
import sys
from assay.output.streams import guard_standard_streams, print_text
from assay.output.console import open_console
guard_standard_streams()
poison = "\x1b]0;title\x07 \u202e"
sys.stderr.write("::error::" + poison + "\n")
print_text("::warning::" + poison)
open_console().print("::notice::" + poison)
print_text("✓ 😀")
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_log_gets_neither_controls_nor_commands() -> None:
    done = run(POISONED)
    for stream in (done.stdout, done.stderr):
        assert stream
        assert b"\x1b" not in stream
        assert b"\x07" not in stream
        assert "\u202e".encode() not in stream
        assert not any(line.startswith(b"::") for line in stream.splitlines())


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_an_encoding_lacks_is_escaped(encoding: str) -> None:
    lines = run(POISONED, PYTHONIOENCODING=encoding).stdout.splitlines()
    assert lines[-1] == rb"\u2713 \ud83d\ude00"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_pipe_leaves_the_exit_code_of_the_verdict(name: str) -> None:
    script = (
        "import sys\n"
        "from assay.output.console import open_console\n"
        "from assay.output.streams import guard_standard_streams, print_error, print_text\n"
        "guard_standard_streams()\n"
        "sys.stdin.read()\n"
        "for _ in range(2):\n"
        "    open_console().print('FAIL')\n"
        "    print_text('FAIL')\n"
        "    print_error('note')\n"
        "sys.exit(3)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=-1, stdout=-1, stderr=-1, text=True
    )
    getattr(process, name).close()
    shown = process.communicate()
    assert (process.returncode, "Broken pipe" in str(shown)) == (3, False)


def test_a_terminal_gets_styles_and_no_sequence_of_others() -> None:
    script = (
        "from assay.output.console import open_console\n"
        "from assay.output.streams import guard_standard_streams, print_text\n"
        "from rich.text import Text\n"
        "guard_standard_streams()\n"
        "open_console().print(Text('styled \\x1b[2J', style='bold red'))\n"
        "print_text('plain \\x1b[2J')\n"
    )
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    del environment["NO_COLOR"]
    subprocess.run([sys.executable, "-c", script], stdout=terminal, check=True, env=environment)
    shown = os.read(main, 1 << 16).decode()
    os.close(main)
    os.close(terminal)
    assert "\x1b[1;31m" in shown
    assert "\x1b[2J" not in shown
    assert r"plain \u001b[2J" in shown


def test_streams_of_a_test_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.output.streams import guard_standard_streams, print_warning_command

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    guard_standard_streams()
    assert sys.stdout is stream
    print_warning_command("100 %\n::error::x")
    assert stream.getvalue() == "::warning::100 %25\\n::error::x\n"
