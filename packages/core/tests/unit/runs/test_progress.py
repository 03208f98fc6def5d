import contextvars
import io
import json
import threading
import time

import pytest

from assay.progress import advance_task, counted, subtask
from assay.runs import LineProgress, Progress, SilentProgress, open_progress
from assay.runs import progress as display
from assay.runs.progress import Event, WireProgress, WireReader


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that the test advances, in steps after each of which a display is ticked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.ticked: list[LineProgress] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def advance(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for progress in self.ticked:
                progress.tick()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def lines(clock: Clock, stream: io.StringIO) -> LineProgress:
    progress = LineProgress(stream)
    clock.ticked.append(progress)
    return progress


def test_a_line_at_the_begin_every_ten_seconds_and_at_the_end(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    with lines.task("generates", 8, "steps") as task:
        for _ in range(8):
            clock.advance(3)
            task.advance()
    assert stream.getvalue().splitlines() == [
        "generates, 0 of 8 steps ...",
        "generates, 3 of 8 steps: 12 s so far, about 12 s left",
        "generates, 7 of 8 steps: 22 s so far, about 2 s left",
        "generates, 8 of 8 steps: 24 s",
    ]


def test_no_end_is_expected_before_a_part_is_done(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    with lines.task("generates", 8, "steps"), subtask("hashes"):
        clock.advance(12)
    assert stream.getvalue().splitlines()[0] == "generates, 0 of 8 steps: hashes: 10 s so far"


def test_an_estimate_only_falls_and_vanishes_when_it_is_over(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    with lines.task("asks", 4, "tasks") as task:
        clock.advance(40)
        task.advance()
        clock.advance(140)
    lines_of_second = stream.getvalue().splitlines()[4:-1]
    ends = [line.rpartition(": ")[2] for line in lines_of_second]
    assert ends == [
        "42 s so far, about 1 min 58 s left",
        "52 s so far, about 1 min 48 s left",
        "62 s so far, about 98 s left",
        "72 s so far, about 88 s left",
        "82 s so far, about 78 s left",
        "92 s so far, about 68 s left",
        "1 min 42 s so far, about 58 s left",
        "1 min 52 s so far, about 48 s left",
        "2 min 2 s so far, about 38 s left",
        "2 min 12 s so far, about 28 s left",
        "2 min 22 s so far, about 18 s left",
        "2 min 32 s so far, about 8 s left",
        "2 min 42 s so far",
        "2 min 52 s so far",
    ]


def test_bytes_are_counted_in_their_largest_unit(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    with lines.task("reads", 4_446_110, "bytes") as task:
        clock.advance(4)
        task.advance(2_000_000)
    with lines.task("reads", 4_446_110, "lines"):
        clock.advance(4)
    assert [line for line in stream.getvalue().splitlines() if "..." not in line] == [
        "reads, 2.0 MB of 4.4 MB: 4 s",
        "reads, 0 of 4,446,110 lines: 4 s",
    ]


def test_minutes(clock: Clock, lines: LineProgress, stream: io.StringIO) -> None:
    with lines.task("trains", 3) as task:
        clock.advance(130)
        task.advance()
        clock.advance(10)
    assert stream.getvalue().splitlines()[-2:] == [
        "trains, 1 of 3: 2 min 12 s so far, about 4 min 18 s left",
        "trains, 1 of 3: 2 min 20 s",
    ]


def test_short_tasks_print_nothing_until_ten_seconds_passed_without_a_line(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    with lines.step("candidate"):
        clock.advance(2)
        for number in range(10):
            with subtask(f"part {number}"):
                clock.advance(1.5)
    assert stream.getvalue().splitlines() == [
        "candidate ...",
        "candidate: part 6: 1 s so far",
        "candidate: 17 s",
    ]


def test_a_display_that_was_idle_prints_nothing_when_a_task_begins(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    clock.advance(30)
    with lines.step("loads"):
        clock.advance(1)
    assert stream.getvalue() == ""


def test_finished_phases_are_counted_and_their_parts_are_not(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    lines.number_phases(2)
    with lines.step("loads"):
        for _ in counted("hashes", range(3), "tensors"):
            clock.advance(1)
    with lines.step("generates"):
        clock.advance(2)
    with lines.step("is one too many"):
        clock.advance(2)
    assert stream.getvalue().splitlines() == [
        "0 of 2 steps done: loads: hashes, 1 of 3 tensors ...",
        "0 of 2 steps done: loads: hashes, 3 of 3 tensors: 3 s",
        "0 of 2 steps done: loads: 3 s",
        "1 of 2 steps done: generates ...",
        "1 of 2 steps done: generates: 2 s",
        "2 of 3 steps done: is one too many ...",
        "2 of 3 steps done: is one too many: 2 s",
    ]


def test_the_end_is_that_of_the_outermost_task_that_counts(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    with lines.task("trains", 4, "steps") as task:
        clock.advance(9)
        task.advance()
        with subtask("computes gradients", 2, "parts") as inner:
            inner.advance()
            clock.advance(3)
    assert stream.getvalue().splitlines() == [
        "trains, 0 of 4 steps ...",
        "trains, 1 of 4 steps: computes gradients, 1 of 2 parts: 12 s so far, about 24 s left",
        "trains, 1 of 4 steps: 12 s",
    ]


def test_only_the_innermost_task_of_the_same_unit_is_advanced(
    lines: LineProgress, clock: Clock, stream: io.StringIO
) -> None:
    with lines.task("observes", 3, "expectations"):
        advance_task("steps")
        advance_task("expectations")
        clock.advance(2)
    assert stream.getvalue().splitlines()[0] == "observes, 1 of 3 expectations ..."


def test_two_threads_have_tasks_of_their_own_and_take_turns(
    lines: LineProgress, clock: Clock, stream: io.StringIO
) -> None:
    with lines.step("first"):
        thread = threading.Thread(
            target=contextvars.Context().run, args=(_advance_in, lines, "second", clock)
        )
        thread.start()
        thread.join()
    assert stream.getvalue().splitlines() == [
        "first ...",
        "second ...",
        "first: 12 s so far",
        "second: 22 s so far",
        "second: 24 s",
        "first: 24 s",
    ]


def _advance_in(progress: Progress, description: str, clock: Clock) -> None:
    with progress.step(description):
        clock.advance(24)


def test_interrupted_task_reports_how_much_was_done(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    def work() -> None:
        with lines.task("prompts", 4) as task:
            task.advance(0.5)
            clock.advance(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert stream.getvalue().splitlines()[-1] == "prompts, 0.5 of 4: 3 s"


def test_lines_come_while_the_task_is_in_one_call(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.1)
    monkeypatch.setattr(display, "_TICK_SECONDS", 0.01)
    with open_progress(stream) as progress, progress.step("loads"):
        time.sleep(0.5)
    assert stream.getvalue().splitlines()[:2] == ["loads: 0 s so far", "loads: 0 s so far"]


def test_a_terminal_gets_bars_and_a_line_for_each_long_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(display, "SHORT_SECONDS", 0.0)
    terminal = Terminal()
    with (
        open_progress(terminal) as progress,
        progress.step("candidate"),
        subtask("prompts [x]", 2, "prompts") as task,
    ):
        task.advance(2)
        progress.note("a [note]")
        time.sleep(0.2)
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    assert "2 of 2 prompts" in shown
    assert "a [note]" in shown
    assert "candidate: prompts [x], 2 of 2 prompts: 0 s" in shown


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress() as progress:
        progress.note("text")
    assert capsys.readouterr() == ("", "text\n")


def test_silent_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = SilentProgress()
    with progress.task("prompts", 4) as task:
        task.advance()
        assert list(counted("hashes", [1, 2], "tensors")) == [1, 2]
    progress.note("text")
    assert list(counted("hashes", [1, 2], "tensors")) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_events_of_another_process_are_shown(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    sent: list[Event] = []
    sender = WireProgress(sent.append)
    with sender.task("prompts", 300) as task:
        for _ in range(300):
            clock.now += 0.03
            task.advance()
    sender.note("a note")

    reader = WireReader(lines)
    for event in json.loads(json.dumps(sent)):
        reader.show(event)
    assert 50 < len(sent) < 100  # at most ten a second of the nine seconds
    assert stream.getvalue() == "a note\n"


BEGIN: Event = {"task": "1", "begin": "prompts", "total": 4, "unit": ""}


@pytest.mark.parametrize(
    "event",
    [
        "text",
        [],
        {"task": "unknown", "done": 1},
        {"task": "unknown", "end": True},
        {"begin": "x"},
        {"task": "1", "begin": "x"},
        BEGIN | {"total": "four"},
        BEGIN | {"begin": 7},
        {"note": 7},
    ],
)
def test_malformed_event_is_ignored(stream: io.StringIO, event: object) -> None:
    reader = WireReader(LineProgress(stream))
    reader.show(event)
    reader.close()
    assert stream.getvalue() == ""


def test_a_child_cannot_forge_lines(stream: io.StringIO) -> None:
    reader = WireReader(LineProgress(stream))
    reader.show({"note": "one\ntwo"})
    assert stream.getvalue() == "one\\ntwo\n"


def test_tasks_that_a_dead_child_left_open_are_ended(
    clock: Clock, lines: LineProgress, stream: io.StringIO
) -> None:
    reader = WireReader(lines)
    reader.show(BEGIN)
    reader.show(BEGIN | {"task": "2", "begin": "inner"})
    reader.show({"task": "1", "done": 3})
    clock.advance(3)
    reader.close()
    assert stream.getvalue().splitlines()[-1] == "prompts, 3 of 4: 3 s"
