"""`call`: run a function in another process, or on every rank of a world."""

import os
import pickle
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Concatenate, Generic, TypeVar, cast

from assay.errors import UsageError
from assay.files import DiskError
from assay.launch.child_process import CALL_FILE, Surroundings, in_world
from assay.launch.failures import UnsendableError, WorldError
from assay.launch.process_groups import FORK_SERVER, SAME_HASHES, own_variables
from assay.launch.supervising import Logs, supervised
from assay.launch.world import Rank, TimeLimits, World, outer_world_size
from assay.progress import Progress, SilentProgress
from assay.watchdog import WATCHDOG, temporary_folder

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
        python: the interpreter of another environment, which has the same assay (`require_same_assay`);
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
