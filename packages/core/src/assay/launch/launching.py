"""`launch_world`: call a function on every rank of a world."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from assay.errors import UsageError
from assay.launch.errors import UnsendableError, WorldError
from assay.launch.rank import Rank
from assay.launch.rank_process import in_world
from assay.launch.supervising import supervised
from assay.launch.world import World, outer_world_size
from assay.progress import SilentProgress
from assay.runs.processes.fork_server_client import FORK_SERVER
from assay.watchdog import WATCHDOG, temporary_folder

P = ParamSpec("P")
T = TypeVar("T")


def launch_world(
    target: Callable[Concatenate[Rank, P], T], world: World, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Call `target(rank, *args, **kwargs)` in a fresh process for each rank of `world`.

    A process that has imported torch forks them. They and their children end with this call, even if
    it raises or this process is killed. Under torchrun, or any launcher that sets RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, this process is one of the ranks and calls `target` itself.

    target: a function of a module. It may raise `RankSkipped`. It gets pickled arguments, and this
        process's environment variables, working directory and import path.

    Returns: the return value of each rank, in the order of the ranks.
    Raises: WorldError if a rank raised, was killed, ended without returning, or skipped when
        others did not; WorldHungError with the line where each rank waited; WorldSkipped if all
        skipped; UsageError or MachineError as a rank raised it; UnsendableError.
    """
    outer = outer_world_size(os.environ)
    if outer is not None:
        if outer != world.size:
            raise UsageError(
                f"the body needs {world}, but the launcher of this process started {outer}"
            )
        from assay.launch.under_torchrun import call_under_torchrun

        return call_under_torchrun(target, world, *args, **kwargs)
    if in_world():
        raise UsageError("a rank cannot start a world of its own: start it outside of the first")
    call = _pickled_call(target, args, kwargs)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("assay-world-"))
        with (folder / "call.pickle").open("wb") as file:
            pickle.dump(_setup(world), file)
            file.write(call)
        if world.log_folder is not None:
            for rank in range(world.size):
                log = world.log_folder / f"rank{rank}.log"
                log.unlink(missing_ok=True)
                (folder / log.name).symlink_to(log.resolve())
        with supervised(world, folder) as supervisor:
            values = supervisor.wait()
            if world.at_end is not None:
                world.at_end(supervisor.group.id)
        logs = sorted(world.log_folder.glob("rank*.log")) if world.log_folder else []
        if any(log.stat().st_size for log in logs):
            world.progress.note(f"ranks print to {world.log_folder}/rank*.log")
        return [_loaded(value, rank) for rank, value in enumerate(values)]


def start_ahead() -> None:
    """Start watchdog and fork server, with the current environment variables."""
    WATCHDOG.start()
    FORK_SERVER.start()


def _pickled_call(
    target: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bytes:
    name = getattr(target, "__qualname__", repr(target))
    if getattr(target, "__module__", None) == "__main__":
        raise UnsendableError(
            f"{name} is defined in the script that runs; ranks import what they call: move it to "
            "a module"
        )
    try:
        return pickle.dumps((target, args, kwargs))
    except Exception as error:  # noqa: BLE001 - pickle raises what the value's class does
        parts = {"the function": target, **{f"argument {n}": a for n, a in enumerate(args)}}
        parts |= {f"argument {key}": value for key, value in kwargs.items()}
        for what, value in parts.items():
            try:
                pickle.dumps(value)
            except Exception as own:  # noqa: BLE001 - as above
                raise UnsendableError.of(what, value, own) from None
        raise UnsendableError.of(name, target, error) from None


def _setup(world: World) -> dict[str, Any]:
    """Return the settings of this process that a rank applies before it opens its device."""
    return {
        "world": replace(world, at_end=None, progress=SilentProgress()),
        "environment": dict(os.environ),
        "working_directory": str(Path.cwd()),
        "arguments": sys.argv,
    }


def _loaded(value: bytes, rank: int) -> Any:  # noqa: ANN401 - return value of any body
    try:
        return pickle.loads(value)  # noqa: S301 - written by a rank
    except Exception as error:
        raise WorldError(
            f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}",
            [rank],
        ) from error
