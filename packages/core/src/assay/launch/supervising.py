"""Supervise a world from its parent: read reports, find the failure, end the process group."""

import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from assay.errors import AssayError
from assay.launch.errors import WorldError, WorldSkipped
from assay.launch.failures.causes import Directness, RankState, failure_of, hang_of, strongest
from assay.launch.failures.stacks import describe_place, read_stack
from assay.launch.world import World
from assay.runs.processes.asking import LARGEST_LOG_BYTES
from assay.runs.processes.group_leader import STACK_SIGNAL
from assay.runs.processes.groups import LEADER_LOST, ProcessGroup, started_group
from assay.runs.processes.pipes import LinePipe, Pipe, opened, wait_for_any
from assay.runs.progress.wire import WireReader

# Imported by the fork server for every world.
_PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "assay.devices.cpu",
    "assay.launch.joining",
    "assay.launch.rank_process",
)

# Time to wait after a failure for a more direct one. A rank may see the connection to a killed peer
# close long before the system has freed the peer's memory and reports its exit.
_SETTLE_SECONDS = {
    Directness.SIGNAL: 0.0,
    Directness.EXCEPTION: 0.1,
    Directness.EXIT: 0.5,
    Directness.SKIP: 0.5,
    Directness.COMMUNICATION: 1.0,
}
# A rank writes its stack in milliseconds, unless it is stopped or blocked in a driver.
_STACK_SECONDS = 5.0
_POLL_SECONDS = 0.01
_END_SECONDS = 10.0
# Logs are measured this often.
_LOG_SECONDS = 1.0
_LOG_TAIL_BYTES = 1 << 14


@contextmanager
def supervised(world: World, folder: Path) -> Iterator["WorldSupervisor"]:
    """Start the ranks of `world` on the call in `folder`, and kill their process group on exit."""
    body = ("assay.launch.rank_process:run_rank", (str(folder),))
    preload = (*_PRELOAD, *world.preload)
    with opened(Pipe) as gate, opened(LinePipe) as reports:
        descriptors = (gate.reader, reports.writer)
        try:
            with started_group(body, world.size, preload, descriptors) as group:
                gate.close_reader()
                reports.close_writer()
                with closing(WireReader(world.progress)) as tasks:
                    yield WorldSupervisor(world, folder, group, gate, reports, tasks)
        finally:
            reports.read_to_end(time.monotonic() + _END_SECONDS)


class WorldSupervisor:
    """The state of a running world."""

    def __init__(
        self, world: World, folder: Path, group: ProcessGroup, gate: Pipe, reports: LinePipe,
        tasks: WireReader,
    ) -> None:  # fmt: skip
        self.group = group
        self._world = world
        self._folder = folder
        self._gate = gate
        self._reports = reports
        self._tasks = tasks
        self._states = {rank: RankState() for rank in range(world.size)}
        self._ready: set[int] = set()
        self._num_received = 0

    def wait(self) -> list[bytes]:
        """Wait until the world has ended. Returns: the pickled value of each body, by rank.

        Raises: WorldError and WorldHungError; WorldSkipped if all ranks skipped; the UsageError
            or MachineError that a rank raised.
        """
        limits = self._world.limits
        size = self._world.size
        self._wait_until(
            lambda: len(self._ready) == size,
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
        # Read after the exits but handled before them: a rank reports before it ends.
        for line in self._reports.read_lines():
            if line["event"] == "progress":
                self._tasks.show(line["shown"])
            else:
                self._take_report(line["rank"], line["event"])
        if self.group.is_lost:
            raise WorldError(LEADER_LOST)
        for rank in ended:
            self._states[rank].exit_code = self.group.exit_codes[rank]
            self._note_order(rank)
        for rank in self._states:
            shorten_log(self._folder / f"rank{rank}.log")

    def _take_report(self, rank: int, event: str) -> None:
        if event == "ready":
            self._ready.add(rank)
            return
        data = (self._folder / f"rank{rank}.report").read_bytes()
        self._states[rank].report = pickle.loads(data)  # noqa: S301 - written by the rank
        self._ready.add(rank)
        self._note_order(rank)

    def _note_order(self, rank: int) -> None:
        self._num_received += 1
        state = self._states[rank]
        state.order = state.order or self._num_received

    def _collect_stacks(self, ranks: Iterable[int]) -> None:
        """Read the stacks of `ranks` and of killed ranks, and the end of every rank's log."""
        waiting = set(ranks)
        for rank in waiting & set(self.group.pids):
            with suppress(ProcessLookupError):
                os.kill(self.group.pids[rank], STACK_SIGNAL)
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

    def _read_where(self, rank: int) -> str:
        try:
            text = (self._folder / f"rank{rank}.stacks").read_text(errors="replace")
        except OSError:
            return ""
        return describe_place(read_stack(text))


def shorten_log(log: Path) -> None:
    """Cut the middle out of a log that is too large, while its rank may append to it."""
    with suppress(OSError):
        if log.stat().st_size <= LARGEST_LOG_BYTES:
            return
        with log.open("a+b") as file:
            file.seek(-LARGEST_LOG_BYTES // 4, os.SEEK_END)
            last = file.read()
            file.truncate(LARGEST_LOG_BYTES // 2)
            file.write(b"\n[assay: output is cut here]\n" + last)


def _read_end(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
