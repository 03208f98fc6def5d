"""The command as a process of its own: streams, start-up, Ctrl-C, a full disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.trace import Trace

ASSAY = [sys.executable, "-m", "assay.cli"]
CHECK = [*ASSAY, "check", "generate", "micro:llama", "--candidate", "cpu/bfloat16"]
LIVE = [*CHECK, "--reference", "cpu/float32"]
HELPS = ("", "check", "check generate", "capture", "devices", "report", "explain")


def test_json_is_all_that_goes_to_standard_output(golden: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [*CHECK, "--golden", str(golden), "--json", "--output", str(tmp_path / "run")],
        check=False,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0
    verdict = json.loads(result.stdout)
    assert verdict["verdict"] == "PASS"
    assert verdict == json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["command"][:3] == ["assay", "check", "generate"]
    assert "Traceback" not in result.stderr
    assert not {"\r", "\x1b"} & set(result.stderr)  # plain lines, no bars


@pytest.mark.long
def test_what_the_candidate_prints_is_in_its_log_alone(golden: Path, tmp_path: Path) -> None:
    setup = tmp_path / "loud.py"
    setup.write_text(
        "import os, sys, warnings\n"
        "def loud(model):\n"
        "    print('printed')\n"
        "    print('to stderr', file=sys.stderr)\n"
        "    warnings.warn('warned')\n"
        "    os.write(1, b'from C\\n')\n"
        "    return model\n"
    )
    run = tmp_path / "run"
    result = subprocess.run(
        [
            *CHECK,
            "--golden",
            str(golden),
            "--candidate-setup",
            f"{setup}:loud",
            "--output",
            str(run),
        ],
        check=False,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0
    log = (run / "candidate.log").read_text()
    for text in ("printed\n", "to stderr\n", "UserWarning: warned\n", "from C\n"):
        assert text in log
        assert text not in result.stderr + result.stdout
    assert result.stderr.count(str(run / "candidate.log")) == 1


@pytest.mark.parametrize("command", HELPS)
def test_help_loads_no_slow_library(command: str) -> None:
    slow = ("torch", "transformers", "numpy", "rich")
    code = (
        "import sys\n"
        f"sys.argv = ['assay', *{command.split()!r}, '--help']\n"
        "from assay.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    print([name for name in {slow!r} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )

    assert result.returncode == 0, result.stderr
    assert "Usage: assay" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def heard_interrupt() -> Iterator[None]:
    """A background job of a shell, as CI may be one, ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupt")
def test_ctrl_c_ends_all_processes_and_leaves_files_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [*LIVE, "--output", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    index = folder / "golden" / "bfloat16" / "index.jsonl"
    deadline = time.monotonic() + 90
    while not (index.is_file() and _holds_calls(index)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)

    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err, err
    trace = Trace.open(folder / "golden" / "bfloat16")
    assert not trace.complete
    assert trace.calls
    last = trace.calls[-1]
    assert trace.tensor(last, last.ports[-1]).numel() > 0
    assert json.loads((folder / "run.json").read_text())["run"] == "check generate"
    assert not (folder / "verdict.json").exists()
    with pytest.raises(ProcessLookupError):  # nobody of the session is left
        _wait_for_end_of_group(process.pid)


def _holds_calls(index: Path) -> bool:
    """Whether calls were flushed; attachments have lines of their own."""
    finished = index.read_text().split("\n")[:-1]
    return any(json.loads(line).get("calls") for line in finished)


def _wait_for_end_of_group(group: int) -> None:
    for _ in range(100):
        os.killpg(group, 0)
        time.sleep(0.1)


@pytest.mark.long
def test_full_disk_is_one_error_and_exit_code_2(tmp_path: Path) -> None:
    def limit() -> None:
        # Every write beyond is refused, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    result = subprocess.run(
        [*LIVE, "--output", str(tmp_path / "run"), "--max-new-tokens", "2"],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )

    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("assay: ")]
    assert str(tmp_path / "run") in message
    assert not (tmp_path / "run" / "verdict.json").exists()
