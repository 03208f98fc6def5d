"""`call`: run a function in another process, or on every rank of a world, and supervise it."""

import math
import os
import pickle
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import loads
from typing import Any, Concatenate, Generic, TypeVar, cast

from assay.errors import AssayError, MachineError, UsageError
from assay.files import DiskError
from assay.launch.child_process import CALL_FILE, STACK_SIGNAL, Surroundings, in_world
from assay.launch.failures import (
    Directness,
    ProcessError,
    RankState,
    UnsendableError,
    WorldError,
    WorldSkipped,
    describe_place,
    failure_of,
    hang_of,
    read_end,
    read_stack,
    strongest,
)
from assay.launch.process_groups import (
    FORK_SERVER,
    LEADER_LOST,
    SAME_HASHES,
    LinePipe,
    Pipe,
    ProcessGroup,
    own_variables,
    started_group,
    wait_for_any,
)
from assay.launch.world import Rank, TimeLimits, World, outer_world_size
from assay.progress import Progress, SilentProgress, format_size
from assay.runs.progress import WireReader
from assay.watchdog import GRACE_SECONDS, WATCHDOG, temporary_folder

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
            state.log = "\n".join(read_end(self._folder / f"rank{rank}.log"))

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


Request = TypeVar("Request")
Result = TypeVar("Result")

_LIMIT: ContextVar[tuple[float, float] | None] = ContextVar("assay_time_limit", default=None)

# Ranks start once and work as long as the model needs. No collective takes minutes.
_LIMITS_OF_A_SIDE = TimeLimits(start_seconds=300.0, collective_seconds=300.0, body_seconds=86_400.0)


@dataclass(frozen=True, slots=True)
class RemoteFunction(Generic[Request, Result]):
    """A function `(Request, Progress) -> Result`, named so that this process need not import it.

    On a rank of a world it also takes a `Rank`. Both types must be picklable.
    """

    path: str
    """MODULE:FUNCTION."""
    preload: Sequence[str] = ()
    """Slow modules, which the fork server imports once for all processes."""

    def load(self) -> Callable[..., Result]:
        """Import the module and return the function."""
        return cast("Callable[..., Result]", pkgutil.resolve_name(self.path))

    def __call__(self, request: Request, progress: Progress, *rank: Rank) -> Result:
        """Import the module and call the function."""
        return self.load()(request, progress, *rank)


def call(  # noqa: PLR0913 - all but two are keywords
    function: Callable[Concatenate[Request, Progress, ...], Result],
    request: Request,
    *,
    world: World | None = None,
    folder: Path | None = None,
    name: str = "",
    progress: Progress | None = None,
    environment: Mapping[str, str] | None = None,
    at_end: Callable[[int], None] | None = None,
    python: Path | None = None,
) -> list[Result]:
    """Call `function` in a new process, or on every rank of `world`, and return the results by rank.

    A process that has imported slow modules forks them. They get `request` by pickle, and this process's
    environment variables, working directory and import path. They and their children end with this
    call, even on Ctrl-C, an exception or a kill of this process.

    One process alone calls `function(request, progress)`. It ends by SIGTERM (a KeyboardInterrupt in
    `function`), and by SIGKILL a few seconds later. Its time limit is that of `time_limit`.

    The ranks of a world call `function(request, progress, rank)`, and may raise `RankSkipped`. Under
    torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, this process is
    one of the ranks and calls `function` itself.

    Args:
        function: a function of a module.
        request: a picklable value.
        world: the ranks; None for one process, which needs no torch.
        folder: an existing folder. The log of one process is `NAME.log` in it, the log of rank N
            `NAME/rankN.log`. A world may have none: errors then quote the last lines of its logs.
        name: of the process in messages, such as "candidate"; also the name of its task on `progress`.
        progress: shows the tasks of the process, or of rank 0, and the place of the logs.
        environment: variables to set on top of this process's own.
        python: the interpreter of another environment, which has the same assay (`require_candidate_python`);
            its processes get no import path from here.
        at_end: called with the number of the ranks' process group when all have returned, before the
            group is killed.

    Raises: UsageError or MachineError that `function` raised; DiskError if the folder cannot be
        written; UnsendableError. For one process ProcessError with the end of the log. For a world
        WorldError if a rank raised, was killed, ended without returning, or skipped when others did
        not; WorldHungError with the line where each rank waited; WorldSkipped if all skipped.
    """
    progress = SilentProgress() if progress is None else progress
    outer = None if world is None else outer_world_size(os.environ)
    if world is not None and outer is not None:
        if outer != world.size:
            raise UsageError(
                f"the body needs {world}, but the launcher of this process started {outer}"
            )
        from assay.launch.process_group import call_under_torchrun

        return call_under_torchrun(function, request, world)
    if world is not None and in_world():
        raise UsageError("a rank cannot start a world of its own: start it outside of the first")
    pickled = _pickled_call(function, request)
    preload = function.preload if isinstance(function, RemoteFunction) else ()
    with ExitStack() as stack:
        if name:
            where = "" if world is None else f" on {str(world).removeprefix('a world of ')}"
            stack.enter_context(progress.step(name + where))
        scratch = stack.enter_context(temporary_folder("assay-world-"))
        logs = _opened_logs(scratch, world, folder, name, progress)
        with (scratch / CALL_FILE).open("wb") as file:
            surroundings = _surroundings(function, world, environment or {}, python)
            pickle.dump(surroundings, file)
            file.write(pickled)
        with supervised(world, scratch, logs, preload, progress, python) as supervisor:
            if world is None:
                return [supervisor.wait_for_process(name, _LIMIT.get())]
            values = supervisor.wait_for_world()
            if at_end is not None:
                at_end(supervisor.group.id)
        return [_loaded(value, rank) for rank, value in enumerate(values)]


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Let the processes that are called inside the context take `seconds` together; None for any time."""
    limit = None if seconds is None else (seconds, time.monotonic() + seconds)
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def seconds_left() -> float | None:
    """Return the time that the innermost `time_limit` leaves; None without one."""
    limit = _LIMIT.get()
    return None if limit is None else max(0.0, limit[1] - time.monotonic())


def world_of(mesh: Mapping[str, int], device: str) -> World | None:
    """Make the world for one side of a check, within the `time_limit`; None for a mesh of one rank.

    device: as in a RUN.
    """
    if prod(mesh.values()) == 1:
        return None
    left = seconds_left()
    limits = _LIMITS_OF_A_SIDE if left is None else TimeLimits.within(max(1.0, left))
    return World(mesh, device, limits=limits)


def start_ahead() -> None:
    """Start watchdog and fork server, with the current environment variables."""
    WATCHDOG.start()
    FORK_SERVER.start()


def _pickled_call(function: Callable[..., object], request: object) -> bytes:
    name = getattr(function, "__qualname__", repr(function))
    if function.__module__ == "__main__":
        raise UnsendableError(
            f"{name} is defined in the script that runs; ranks import what they call: move it to "
            "a module"
        )
    try:
        return pickle.dumps((function, request))
    except Exception as error:  # noqa: BLE001 - pickle raises what the value's class does
        for what, value in {"the function": function, "the request": request}.items():
            try:
                pickle.dumps(value)
            except Exception as own:  # noqa: BLE001 - as above
                raise UnsendableError.of(what, value, own) from None
        raise UnsendableError.of(name, function, error) from None


def _surroundings(
    function: Callable[..., object],
    world: World | None,
    given: Mapping[str, str],
    python: Path | None,
) -> Surroundings:
    """Describe what the processes take on before they call `function`."""
    own = dict(os.environ) if python is None else own_variables(python, os.environ)
    if world is not None:
        return Surroundings(world, {**own, **given}, str(Path.cwd()), sys.argv)
    arguments = [function.path] if isinstance(function, RemoteFunction) else sys.argv
    variables = {**own, **SAME_HASHES, **given}
    return Surroundings(None, variables, str(Path.cwd()), arguments)


def _opened_logs(
    scratch: Path, world: World | None, folder: Path | None, name: str, progress: Progress
) -> Logs:
    """Empty the logs, and link to them from `scratch`, where the processes look for them."""
    size = 1 if world is None else world.size
    links = [scratch / f"rank{rank}.log" for rank in range(size)]
    if folder is None:
        return Logs(links, "", progress)
    if world is None:
        files = [folder / f"{name}.log"]
        where = f"{name}: prints to {files[0]}"
    else:
        files = [folder / name / link.name for link in links]
        where = f"ranks print to {folder / name}/rank*.log"
    for link, log in zip(links, files, strict=True):
        try:
            if world is not None:
                log.parent.mkdir(exist_ok=True)
            log.open("wb").close()
        except OSError as error:
            raise DiskError.refused(log, error) from error
        link.symlink_to(log.resolve())
    return Logs(files, where, progress)


def _loaded(value: bytes, rank: int) -> Any:  # noqa: ANN401 - return value of any function
    try:
        return pickle.loads(value)  # noqa: S301 - written by the process
    except Exception as error:
        raise WorldError(
            f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}",
            [rank],
        ) from error
