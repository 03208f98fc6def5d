"""Displays of progress: bars on a terminal, lines in a log, and the events of another process."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from assay.foreign_text import one_line
from assay.progress import Progress, Task, format_duration, format_size, innermost_task

if TYPE_CHECKING:
    from rich import progress as rich_progress

SHORT_SECONDS = 2.0  # a shorter task is over before its line is read
_LINE_SECONDS = 10.0  # more often would fill logs
_TICK_SECONDS = 0.5
# More frequent events of another process would be unreadable.
_EVENT_SECONDS = 0.1

Event = dict[str, Any]


class ShownTask:
    """A task and the text that describes it.

    chain: the enclosing tasks, outermost first, and this task.
    shown: time of the last line about it; 0 before the first.
    """

    def __init__(self, description: str, total: float | None, unit: str) -> None:
        outer = innermost_task()
        self.chain: list[ShownTask] = [*(outer.chain if isinstance(outer, ShownTask) else ()), self]
        self.total, self.done, self.shown = total, 0.0, 0.0
        self._description, self._unit = description, unit
        self._started, self._advanced = time.monotonic(), 0.0

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more parts as done."""
        self.done += amount
        self._advanced = self.seconds

    @property
    def seconds(self) -> float:
        """Return the seconds since the task began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the finished parts. Return None before the first, and when it is over."""
        if not self.total or not 0 < self.done < self.total:
            return None
        left = self._advanced / self.done * self.total - self.seconds
        return left if left > 0 else None

    @property
    def has_own_lines(self) -> bool:
        """Return True for a long task, unless an enclosing task counts parts."""
        return self.seconds >= SHORT_SECONDS and all(one.total is None for one in self.chain[:-1])

    def __str__(self) -> str:
        if len(self.chain) > 1:
            return f"{self.chain[-2]}: {self._label()}"
        return self._label()

    def _label(self) -> str:
        return ", ".join(filter(None, (self._description, self.counted)))

    @property
    def counted(self) -> str:
        """Return the finished parts and their total, such as "3 of 8 steps"; "" if it is unknown."""
        if self.total is None:
            return ""
        if self._unit == "bytes":
            return f"{format_size(int(self.done))} of {format_size(int(self.total))}"
        done, total = (f"{one:,.1f}".removesuffix(".0") for one in (self.done, self.total))
        return f"{done} of {total} {self._unit}".rstrip()

    def describe_state(self) -> str:
        """Describe the time taken, and the time left of the outermost task with a known rate."""
        timed = next((one for one in self.chain if one.seconds_left is not None), self)
        text, left = f"{self}: {format_duration(timed.seconds)} so far", timed.seconds_left
        return text if left is None else f"{text}, about {format_duration(left)} left"

    def describe_end(self) -> str:
        """Describe the time that the task took."""
        return f"{self}: {format_duration(self.seconds)}"


class LineProgress(Progress):
    """A display of plain lines for logs: for tasks over two seconds, and every ten seconds.

    Call `tick` every half second.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._open: list[ShownTask] = []
        self._written = time.monotonic()

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        """Begin a task within the caller's open task."""
        task = ShownTask(description, total, unit)
        with self._lock:
            self._open.append(task)
        try:
            yield task
        finally:
            with self._lock:
                self._open.remove(task)
                if task.has_own_lines:
                    self.note(task.describe_end())

    def note(self, text: str) -> None:
        """Print `text` as a line."""
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()
            self._written = time.monotonic()

    def tick(self) -> None:
        """Print the lines that are due, for new tasks and for the current one."""
        with self._lock:
            outer = {id(one) for task in self._open for one in task.chain[:-1]}
            innermost = [task for task in self._open if id(task) not in outer]
            for task in innermost:
                if task.has_own_lines and not task.shown:
                    self._show(task, f"{task} ...")
            # A new task waits, even if the last line is old.
            waiting = [task for task in innermost if task.chain[0].seconds >= _LINE_SECONDS]
            if waiting and time.monotonic() - self._written >= _LINE_SECONDS:
                task = min(waiting, key=lambda one: one.shown)
                self._show(task, task.describe_state())

    def _show(self, task: ShownTask, text: str) -> None:
        for one in task.chain:
            one.shown = time.monotonic()
        self.note(text)


class _Bar(ShownTask):
    def __init__(
        self, bars: "rich_progress.Progress", description: str, total: float | None, unit: str
    ) -> None:
        super().__init__(description, total, unit)
        self._bars = bars
        self.key = bars.add_task(description, total=total, counted=self.counted)

    def advance(self, amount: float = 1) -> None:
        super().advance(amount)
        self._bars.update(self.key, advance=amount, counted=self.counted)


class BarProgress(Progress):
    """A display with a bar for each open task, outer ones first, and a line after each long task."""

    def __init__(self, stream: TextIO) -> None:
        from rich import progress as rich_progress  # slow, and only for a terminal

        from assay.output.console import open_console

        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.fields[counted]}", markup=False),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left:"),
            rich_progress.TimeRemainingColumn(),
            console=open_console(stream),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[_Bar]:
        """Begin a task with a bar. At its end the bar becomes a line."""
        bar = _Bar(self._bars, description, total, unit)
        try:
            yield bar
        finally:
            self._bars.remove_task(bar.key)
            if bar.has_own_lines:
                self.note(bar.describe_end())

    def note(self, text: str) -> None:
        """Print `text` above the bars."""
        from rich.text import Text

        self._bars.console.print(Text(text), soft_wrap=True)


@contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Open a display on `stream`, by default standard error: bars on a terminal, else lines."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        with BarProgress(stream) as bars:
            yield bars
        return
    lines, ended = LineProgress(stream), threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            lines.tick()

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield lines
    finally:
        ended.set()


class _WireTask:
    """A task that sends its number of finished parts, at most every `_EVENT_SECONDS`."""

    def __init__(self, send: Callable[[Event], None], key: str) -> None:
        self._send, self._key = send, key
        self._done = 0.0
        self._sent = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        if time.monotonic() - self._sent >= _EVENT_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._sent = time.monotonic()
        self._send({"task": self._key, "done": self._done})


class WireProgress(Progress):
    """A display that sends tasks and notes as events to a `WireReader` in the parent."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._num_tasks = 0

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        """Begin a task, with events for its begin, progress and end."""
        self._num_tasks += 1
        key = f"{os.getpid()}.{self._num_tasks}"
        self._send({"task": key, "begin": description, "total": total, "unit": unit})
        task = _WireTask(self._send, key)
        try:
            yield task
        finally:
            task.flush()
            self._send({"task": key, "end": True})

    def note(self, text: str) -> None:
        """Send one line."""
        self._send({"note": text})


class WireReader:
    """A reader that shows the events of a child on `progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, tuple[AbstractContextManager[Task], Task, float]] = {}
        self._descriptions: dict[str, str] = {}

    def show(self, event: object) -> None:
        """Show one event; ignore what is not one, as code of a candidate may fork and write anything."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            self._show(cast("Event", event))

    def _show(self, event: Event) -> None:
        if "note" in event:
            self._progress.note(one_line(event["note"]))
            return
        key = event["task"]
        if "begin" in event:
            total = None if event["total"] is None else float(event["total"])
            context: AbstractContextManager[Task] = self._progress.task(
                one_line(event["begin"]), total, one_line(event["unit"])
            )
            self._tasks[key] = (context, context.__enter__(), 0.0)
            self._descriptions[key] = one_line(event["begin"])
        elif "done" in event:
            opened, task, before = self._tasks[key]
            task.advance(event["done"] - before)
            self._tasks[key] = (opened, task, event["done"])
        else:
            self._tasks.pop(key)[0].__exit__(None, None, None)

    @property
    def open_tasks(self) -> list[str]:
        """Return the descriptions of the tasks that have not ended, the outermost first."""
        return [self._descriptions[key] for key in tuple(self._tasks)]

    def close(self) -> None:
        """End the tasks that the child left open, the innermost first."""
        while self._tasks:
            self._tasks.popitem()[1][0].__exit__(None, None, None)
