import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.errors import MachineError, UsageError
from assay.files import DiskError
from assay.launch import (
    FORK_SERVER,
    ProcessError,
    RemoteFunction,
    call,
    calling,
    seconds_left,
    time_limit,
)
from assay.runs import LineProgress, open_progress
from assay.runs import progress as display

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def do(function: str) -> RemoteFunction[dict[str, Any], dict[str, Any]]:
    return RemoteFunction(f"child_work:{function}")


def run(folder: Path, act: str, **request: Any) -> dict[str, Any]:
    return call(do(act), request, folder=folder, name="candidate")[0]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.02)


def wait_for_pids(file: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline, "the child did not start"
        time.sleep(0.02)
    return [int(pid) for pid in file.read_text().split()]


def test_process_returns_the_result(tmp_path: Path) -> None:
    (answer,) = call(
        do("echo"),
        {"number": 1.5},
        folder=tmp_path,
        name="candidate",
        environment={"ASSAY_TEST_VARIABLE": "set"},
    )
    assert answer == {"echo": {"number": 1.5}, "variable": "set"}
    assert (tmp_path / "candidate.log").read_text() == ""


def test_usage_error_of_the_child_is_raised_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run(tmp_path, act="usage")
    assert str(caught.value) == "no such model: 'x'\nsecond line"


def test_machine_error_of_the_child_is_raised_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        run(tmp_path, act="machine")
    assert str(caught.value) == "no such device"
    assert not isinstance(caught.value, ProcessError)


def test_other_exception_of_the_child_is_an_error_with_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ProcessError) as caught:
        run(tmp_path, act="crash")
    message = str(caught.value)
    assert message.startswith("the candidate process ended with exit code 1 and no result.")
    assert f"Its last lines ({tmp_path / 'candidate.log'}):" in message
    assert "  about to fail\n" in message
    assert message.endswith("  ZeroDivisionError: boom")


@pytest.mark.parametrize(
    ("request_fields", "how"),
    [
        ({"act": "kill"}, "was ended by SIGKILL (the machine may have run out of memory)."),
        ({"act": "leave", "code": 3}, "ended with exit code 3 and no result."),
        ({"act": "leave", "code": 0}, "ended without a result."),
    ],
)
def test_child_that_ends_without_output_is_a_clear_error(
    tmp_path: Path, request_fields: dict[str, Any], how: str
) -> None:
    with pytest.raises(ProcessError) as caught:
        run(tmp_path, **request_fields)
    log = tmp_path / "candidate.log"
    assert str(caught.value) == f"the candidate process {how} It printed nothing ({log} is empty)."


def test_answer_counts_though_the_process_crashed_at_its_end(tmp_path: Path) -> None:
    # Drivers of accelerators crash like this at the end of a process.
    progress = LineProgress(stream := io.StringIO())
    (answer,) = call(
        do("crash_after_answer"), {}, folder=tmp_path, name="candidate", progress=progress
    )
    assert answer == {"done": True}
    assert stream.getvalue() == "candidate: ended with exit code 139 after it had answered\n"


def test_module_that_is_missing_is_a_clear_error(tmp_path: Path) -> None:
    absent: RemoteFunction[None, None] = RemoteFunction("no_such_module:work")
    with pytest.raises(ProcessError, match="No module named 'no_such_module'"):
        call(absent, None, folder=tmp_path, name="x")


def test_file_in_the_working_directory_replaces_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    FORK_SERVER.stop()
    assert run(tmp_path, act="echo")["echo"] == {}


def test_what_the_child_prints_goes_to_its_log_whose_name_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    call(do("talk"), {}, folder=tmp_path, name="candidate", progress=LineProgress(stream))
    log = tmp_path / "candidate.log"
    assert stream.getvalue().splitlines() == [f"candidate: prints to {log}", "a note"]
    printed = log.read_text()
    assert printed.startswith("to stdout\n10%\n20%\n")
    assert printed.endswith("from C\nof a child\nno newline at the end")
    assert "UserWarning: a warning" in printed
    assert capfd.readouterr() == ("", "")


def test_a_slow_child_shows_its_phase_its_count_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "SHORT_SECONDS", 0.05)
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.3)
    monkeypatch.setattr(display, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(display, "format_duration", lambda seconds: f"{seconds:.0e} s")
    stream = io.StringIO()
    with open_progress(stream) as progress:
        call(do("take_long"), {}, folder=tmp_path, name="trusted", progress=progress)
    lines = stream.getvalue().splitlines()
    begin = "trusted: 0 of 2 steps done: loads: reads files, "
    assert any(one.startswith(f"{begin}0 of 3 files") for one in lines)
    seconds = r"\de[+-]\d+ s"
    assert any(
        re.fullmatch(
            rf"{re.escape(begin)}[12] of 3 files: {seconds} so far, about {seconds} left", one
        )
        for one in lines
    )
    assert any(
        re.fullmatch(
            rf"trusted: 1 of 2 steps done: runs, [123] of 4 steps: {seconds} so far, about {seconds} left",
            one,
        )
        for one in lines
    )
    ends = [one for one in lines if re.fullmatch(rf".*[^.]: {seconds}", one)]
    assert [one.rpartition(":")[0] for one in ends] == [
        "trusted: 0 of 2 steps done: loads: reads files, 3 of 3 files",
        "trusted: 0 of 2 steps done: loads",
        "trusted: 1 of 2 steps done: runs, 4 of 4 steps",
        "trusted",
    ]


def test_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot write .*candidate\.log: No such file"):
        run(tmp_path / "absent", act="echo")


@pytest.fixture
def heard_interrupt() -> Iterator[None]:
    """Handle Ctrl-C, which a background job of a shell, as CI may be one, ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupt")
def test_ctrl_c_ends_the_child_and_its_children_after_they_flushed(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(wait_for_pids(pids_file))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, act="hang", pids=str(pids_file), cleaned=str(tmp_path / "cleaned"))
    thread.join()

    assert len(pids) == 2
    wait_until_gone(pids)
    assert (tmp_path / "cleaned").read_text() == "flushed"


def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
import sys
from assay.launch import RemoteFunction, call
sys.path.insert(0, {str(HERE)!r})
request = {{"pids": {str(tmp_path / "pids")!r}, "cleaned": {str(tmp_path / "c")!r}}}
call(RemoteFunction("child_work:hang"), request, folder=Path({str(tmp_path)!r}), name="x")
"""
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        pids = wait_for_pids(tmp_path / "pids")
        parent.kill()
    wait_until_gone(pids)
    assert (tmp_path / "c").read_text() == "flushed"


def test_child_that_the_process_left_behind_ends_with_it(tmp_path: Path) -> None:
    started = time.monotonic()
    answer = run(tmp_path, act="leave_child_behind")
    took = time.monotonic() - started
    wait_until_gone([answer["pid"]])
    assert took < 4


def test_process_that_hangs_is_ended_and_its_task_and_line_are_named(tmp_path: Path) -> None:
    with time_limit(1.0), pytest.raises(ProcessError) as found:
        run(tmp_path, "wait_forever")

    message = str(found.value)
    assert "the candidate process did not end in waits: the time limit of 1 s" in message
    assert re.search(r'child_work.py", line \d+ in wait_forever', message)


def test_time_is_that_of_all_processes(tmp_path: Path) -> None:
    with time_limit(60.0):
        run(tmp_path, "echo")
        left = seconds_left()
    assert left is not None
    assert left < 60.0
    assert seconds_left() is None


def test_log_holds_the_begin_and_the_end_of_more_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "LARGEST_LOG_BYTES", 28)
    shown = io.StringIO()

    call(
        do("print_lines"),
        {"count": 9},
        folder=tmp_path,
        name="candidate",
        progress=LineProgress(shown),
    )

    log = tmp_path / "candidate.log"
    assert log.read_text().splitlines() == [
        "line 0",
        "line 1",
        "",
        "[assay: output is cut here]",
        "line 8",
    ]
    assert f"candidate: output is cut after 28 bytes: {log}" in shown.getvalue()


def test_candidate_that_replaces_pickle_still_answers(tmp_path: Path) -> None:
    assert run(tmp_path, "break_pickle") == {"done": True}


def test_answer_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="the candidate process ended without a result"):
        run(tmp_path, "unreadable")
