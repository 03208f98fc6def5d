import io
import os
import time

import pytest

from assay.runs import LineProgress, Progress, SilentProgress, open_progress
from assay.runs.progress import WireProgress, WireReader


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_plain_lines_come_at_begin_and_end_and_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with LineProgress(stream).task("prompts", 4) as task:
        for _ in range(4):
            clock.now += 2.0
            task.advance()
    assert stream.getvalue().splitlines() == [
        "prompts ...",
        "prompts: 3 of 4",
        "prompts: 4 of 4 in 8.0 s",
    ]


def test_interrupted_task_reports_how_much_was_done() -> None:
    stream = io.StringIO()

    def work() -> None:
        with LineProgress(stream).task("prompts", 4) as task:
            task.advance(0.5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert stream.getvalue().splitlines()[-1] == "prompts: 0.5 of 4 in 0.0 s"


def test_step_reports_only_its_time() -> None:
    stream = io.StringIO()
    with LineProgress(stream).step("loads"):
        pass
    assert stream.getvalue().splitlines() == ["loads ...", "loads: 0.0 s"]


def test_log_gets_lines_and_a_terminal_gets_bars() -> None:
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        with open_progress(stream) as progress, progress.task("prompts [x]", 2) as task:
            task.advance(2)
            progress.note("a [note]")
    assert log.getvalue().splitlines() == [
        "prompts [x] ...",
        "a [note]",
        "prompts [x]: 2 of 2 in 0.0 s",
    ]
    assert "\x1b[" in terminal.getvalue()
    assert "prompts [x]" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert "a [note]" in terminal.getvalue()


def test_bar_of_a_step_ends_full() -> None:
    terminal = Terminal()
    with open_progress(terminal) as progress, progress.step("loads"):
        pass
    assert terminal.getvalue().rstrip().rpartition("loads")[2].count("1/1") == 1


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress() as progress:
        progress.note("text")
    assert capsys.readouterr() == ("", "text\n")


def test_silent_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = SilentProgress()
    with progress.task("prompts", 4) as task:
        task.advance()
    progress.note("text")
    assert capsys.readouterr() == ("", "")


def lines_of(descriptor: int) -> list[str]:
    return os.read(descriptor, 1 << 16).decode().split("\n")[:-1]


def test_progress_is_sent_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    source, sink = os.pipe()
    with WireProgress(sink).task("prompts", 300) as task:
        for _ in range(300):
            clock.now += 0.03
            task.advance()
    lines = lines_of(source)
    os.close(source)
    os.close(sink)

    texts: list[str] = []
    reader = WireReader(LineProgress(stream), texts.append)
    for line in lines:
        reader.read_line(line)
    assert texts == []
    assert 50 < len(lines) < 100  # at most ten a second of the nine seconds
    assert stream.getvalue().splitlines()[-1].startswith("prompts: 300 of 300 in ")


def test_text_before_progress_in_one_line_is_kept() -> None:
    shown: list[str] = []
    reader = WireReader(LineProgress(stream := io.StringIO()), shown.append)
    reader.read_line('10%|##\r\x1eassay {"task": "1.1", "begin": "x", "total": null}')
    assert shown == ["10%|##"]
    assert stream.getvalue() == "x ...\n"


@pytest.mark.parametrize(
    "line",
    [
        "text",
        "\x1eassay not json",
        "\x1eassay []",
        '\x1eassay {"task": "unknown", "done": 1}',
        '\x1eassay {"task": "unknown", "end": true}',
        '\x1eassay {"begin": "x"}',
        '\x1eassay {"task": "1", "begin": "x"}',
    ],
)
def test_malformed_progress_is_shown_as_text(line: str) -> None:
    shown: list[str] = []
    WireReader(SilentProgress(), shown.append).read_line(line)
    assert shown == [line]


def test_tasks_that_a_dead_child_left_open_are_ended() -> None:
    stream = io.StringIO()
    reader = WireReader(LineProgress(stream), print)
    reader.read_line('\x1eassay {"task": "1", "begin": "prompts", "total": 4}')
    reader.read_line('\x1eassay {"task": "1", "done": 3}')
    reader.close()
    assert stream.getvalue().splitlines()[-1] == "prompts: 3 of 4 in 0.0 s"
