"""Supervise the processes of a call from their parent: read reports, find the failure, end the group."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from pickle import loads
from typing import Any

from assay.errors import AssayError, MachineError, UsageError
from assay.launch.child_process import STACK_SIGNAL
from assay.launch.failures import (
    Directness,
    ProcessError,
    RankState,
    WorldError,
    WorldSkipped,
    describe_place,
    failure_of,
    hang_of,
    read_stack,
    strongest,
)
from assay.launch.process_groups import (
    LEADER_LOST,
    LinePipe,
    Pipe,
    ProcessGroup,
    started_group,
    wait_for_any,
)
from assay.launch.world import World
from assay.progress import Progress, format_size
from assay.runs.progress import WireReader
from assay.watchdog import GRACE_SECONDS

# Imported by the fork server for every world.
_PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "assay.devices.cpu",
    "assay.launch.process_group",
)

# Of more output a log holds the begin and the end.
LARGEST_LOG_BYTES = 16 << 20

# Time to wait after a failure for a more direct one. A rank may see the connection to a killed peer
# close long before the system has freed the peer's memory and reports its exit.
_SETTLE_SECONDS = {
    Directness.SIGNAL: 0.0,
    Directness.EXCEPTION: 0.1,
    Directness.EXIT: 0.5,
    Directness.SKIP: 0.5,
    Directness.COMMUNICATION: 1.0,
}
# A process writes its stack in milliseconds, unless it is stopped or blocked in a driver.
_STACK_SECONDS = 5.0
_PRINTED_STACK_SECONDS = 2.0
_POLL_SECONDS = 0.01
_END_SECONDS = 10.0
# Logs are measured this often.
_LOG_SECONDS = 1.0
_LOG_TAIL_BYTES = 1 << 14


class Logs:
    """The logs of the processes. The first output, and a cut, are noted on `progress`.

    where: the words of the first note; "" for logs that are deleted with the world, without notes.
    """

    def __init__(self, files: Sequence[Path], where: str, progress: Progress) -> None:
        self.files = files
        self._where = where
        self._notes: dict[str, None] = {}
        self.progress = progress

    def check(self) -> None:
        """Note the first output, and cut the middle out of logs that are too large."""
        for log in self.files:
            if not log.exists() or not log.stat().st_size:
                continue
            self._note_once(self._where)
            if shorten_log(log):
                size = format_size(LARGEST_LOG_BYTES)
                self._note_once(f"{log.stem}: output is cut after {size}: {log}")

    def _note_once(self, text: str) -> None:
        if self._where and text not in self._notes:
            self._notes[text] = None
            self.progress.note(text)


@contextmanager
def supervised(
    world: World | None,
    folder: Path,
    logs: Logs,
    preload: Sequence[str],
    progress: Progress,
    python: Path | None = None,
) -> "Iterator[Supervisor]":
    """Start the processes on the call in `folder`, and end their process group on exit.

    world: None for one process without other ranks.
    python: another Python environment for them.
    """
    grace = 0.0
    if world is None:
        # The process may flush its files, and end the processes that it called.
        world, grace = World({"process": 1}), GRACE_SECONDS
    else:
        preload = (*_PRELOAD, *preload, *world.preload)
    with closing(Pipe()) as gate, closing(LinePipe()) as reports:
        descriptors = (gate.reader, reports.writer)
        try:
            with started_group(folder, world.size, preload, descriptors, grace, python) as group:
                gate.close_reader()
                reports.close_writer()
                with closing(WireReader(progress)) as tasks:
                    yield Supervisor(world, folder, logs, group, gate, reports, tasks)
        finally:
            reports.read_to_end(time.monotonic() + _END_SECONDS)


class Supervisor:
    """The state of the running processes of a call, which are all ranks of a world, or one alone."""

    def __init__(
        self, world: World, folder: Path, logs: Logs, group: ProcessGroup, gate: Pipe,
        reports: LinePipe, tasks: WireReader,
    ) -> None:  # fmt: skip
        self.group = group
        self._world = world
        self._folder = folder
        self._logs = logs
        self._gate = gate
        self._reports = reports
        self._tasks = tasks
        self._states = {rank: RankState() for rank in range(world.size)}
        self._ready: set[int] = set()
        self._num_received = 0

    def wait_for_process(self, name: str, limit: tuple[float, float] | None) -> Any:  # noqa: ANN401 - value of any function
        """Wait until a process without other ranks has ended. Returns: the value of its function.

        name: of the process in messages.
        limit: its time limit in seconds, and when that passes (of `time.monotonic`); None for any time.
        Raises: UsageError or MachineError as the function raised it; ProcessError.
        """
        (log,), (state,) = self._logs.files, self._states.values()
        seconds, deadline = limit or (math.inf, math.inf)
        while state.exit_code is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._ask_for_stacks([0])
                time.sleep(_PRINTED_STACK_SECONDS)
                raise ProcessError.hung(name, seconds, self._tasks.open_tasks, log)
            self._receive(min(left, _LOG_SECONDS))
        report = state.report
        if report is not None and report.kind == "raised":
            raise (UsageError if report.is_usage else MachineError)(report.words)
        try:
            value = loads(report.value)  # type: ignore[union-attr] # noqa: S301 - written by the process
        except Exception:  # noqa: BLE001 - code of the candidate may have written anything
            raise ProcessError.died(name, state.exit_code, log) from None
        if state.exit_code:
            # Some drivers crash when a process ends, after its answer.
            code = f"exit code {state.exit_code}"
            self._logs.progress.note(f"{name}: ended with {code} after it had answered")
        return value

    def wait_for_world(self) -> list[bytes]:
        """Wait until the world has ended. Returns: the pickled value of each body, by rank.

        Raises: WorldError and WorldHungError; WorldSkipped if all ranks skipped; the UsageError
            or MachineError that a rank raised.
        """
        limits = self._world.limits
        self._wait_until(
            lambda: len(self._ready) == self._world.size,
            limits.start_seconds,
            f"not every rank had started after {limits.start_seconds:g} s",
        )
        self._wait_until(
            lambda: not self._at_work(),
            limits.body_seconds,
            f"not every body had ended after {limits.body_seconds:g} s",
        )
        reports = [state.report for state in self._states.values() if state.report]
        if all(report.kind == "skipped" for report in reports):
            raise WorldSkipped("; ".join(dict.fromkeys(report.summary for report in reports)))
        self._gate.close_writer()
        self._wait_until(
            lambda: all(state.exit_code is not None for state in self._states.values()),
            limits.start_seconds,
            f"not every rank had ended {limits.start_seconds:g} s after its body",
            self._alive,
        )
        return [report.value for report in reports]

    def _wait_until(
        self,
        reached: Callable[[], bool],
        seconds: float,
        what: str,
        waited_for: Callable[[], list[int]] | None = None,
    ) -> None:
        """Read the ranks' reports until `reached`. Raises: the error of a failed or hung rank.

        what: the limit that is passed after `seconds`, for the message.
        waited_for: the ranks that hang if time runs out; by default those without a report.
        """
        deadline = time.monotonic() + seconds
        while True:
            if found := strongest(self._states):
                raise self._failure(found)
            if reached():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = (waited_for or self._at_work)()
                self._collect_stacks(ranks)
                raise hang_of(self._world, self._states, what, ranks)
            self._receive(min(left, _LOG_SECONDS))

    def _failure(self, found: tuple[Directness, list[int]]) -> AssayError:
        """Wait for more direct failures. Returns: the error to raise."""
        begun = time.monotonic()
        while self._alive():
            left = begun + _SETTLE_SECONDS[found[0]] - time.monotonic()
            if left <= 0:
                break
            self._receive(left)
            found = strongest(self._states) or found
        self._collect_stacks(self._at_work())
        if found[0] is Directness.COMMUNICATION and self._at_work():
            return hang_of(self._world, self._states, "a collective was given up", self._at_work())
        return failure_of(self._world, self._states, found)

    def _at_work(self) -> list[int]:
        """Return the ranks that have neither reported nor ended."""
        return [rank for rank in self._alive() if self._states[rank].report is None]

    def _alive(self) -> list[int]:
        return [rank for rank, state in self._states.items() if state.exit_code is None]

    def _receive(self, seconds: float) -> None:
        """Wait at most `seconds` for reports and exits, and add them to the states."""
        wait_for_any((self.group.exits, self._reports), seconds)
        ended = self.group.receive()
        self._logs.check()
        # Read after the exits but handled before them: a rank reports before it ends.
        for line in self._reports.read_lines():
            if line["event"] == "progress":
                self._tasks.show(line.get("shown"))
            else:
                self._take_report(line["rank"], line["event"])
        if self.group.is_lost:
            raise WorldError(LEADER_LOST)
        for rank in ended:
            self._states[rank].exit_code = self.group.exit_codes[rank]
            self._note_order(rank)

    def _take_report(self, rank: int, event: str) -> None:
        if event == "ready":
            self._ready.add(rank)
            return
        data = (self._folder / f"rank{rank}.report").read_bytes()
        self._states[rank].report = loads(data)  # noqa: S301 - written by the rank
        self._ready.add(rank)
        self._note_order(rank)

    def _note_order(self, rank: int) -> None:
        self._num_received += 1
        state = self._states[rank]
        state.order = state.order or self._num_received

    def _collect_stacks(self, ranks: Iterable[int]) -> None:
        """Read the stacks of `ranks` and of killed ranks, and the end of every rank's log."""
        waiting = set(ranks)
        self._ask_for_stacks(waiting)
        deadline = time.monotonic() + _STACK_SECONDS
        while waiting and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            for rank in tuple(waiting):
                where = self._read_where(rank)
                if where and where == self._states[rank].where:  # no longer being written
                    waiting.discard(rank)
                self._states[rank].where = where
        for rank, state in self._states.items():
            if state.exit_code is not None and state.exit_code < 0:
                state.where = self._read_where(rank)
            state.log = _read_end(self._folder / f"rank{rank}.log")

    def _ask_for_stacks(self, ranks: Iterable[int]) -> None:
        for rank in set(ranks) & set(self.group.pids):
            with suppress(ProcessLookupError):
                os.kill(self.group.pids[rank], STACK_SIGNAL)

    def _read_where(self, rank: int) -> str:
        try:
            text = (self._folder / f"rank{rank}.stacks").read_text(errors="replace")
        except OSError:
            return ""
        return describe_place(read_stack(text))


def shorten_log(log: Path) -> bool:
    """Cut the middle out of a log that is too large, while its process may append to it.

    Returns: True if the log was too large.
    """
    with suppress(OSError):
        if log.stat().st_size <= LARGEST_LOG_BYTES:
            return False
        with log.open("a+b") as file:
            file.seek(-LARGEST_LOG_BYTES // 4, os.SEEK_END)
            last = file.read()
            file.truncate(LARGEST_LOG_BYTES // 2)
            file.write(b"\n[assay: output is cut here]\n" + last)
        return True
    return False


def _read_end(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
