"""The process of one rank, from its fork to its end."""

import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from assay.launch.failures.rank_reports import RankReport, raised_report, report_of
from assay.launch.world import World
from assay.runs.processes.answering import reseed
from assay.runs.processes.group_leader import STACK_SIGNAL
from assay.runs.progress.wire import Event, WireProgress

_in_world = False


def in_world() -> bool:
    """Return True in a rank of a world that assay launched."""
    return _in_world


def run_rank(files: str, number: int, gate: int, reports: int) -> NoReturn:
    """Run the call in `call.pickle` of the folder `files` as rank `number`, and end this process.

    gate: a pipe that is closed when every rank has returned.
    reports: a pipe for the events "ready", "progress" and the kind of the report.
    Skips Python's exit handlers, which are the fork server's.
    """
    global _in_world  # noqa: PLW0603 - a property of the process
    _in_world = True
    code, folder = 1, Path(files)
    held = ExitStack()
    try:
        stacks = _prepare_streams(folder, number)
        with (folder / "call.pickle").open("rb") as call:
            report = _run_call(folder, number, call, held, partial(_report_event, reports, number))
        (folder / f"rank{number}.report").write_bytes(pickle.dumps(report))
        _report_event(reports, number, report.kind)
        if report.kind == "returned":
            # Slower ranks would take a closed connection for a failure.
            os.read(gate, 1)
            held.close()
        # A rank that did not return closes its connections at once, so that waiting ranks raise.
        code = int(report.kind == "raised")
        stacks.close()
    except BaseException as error:  # noqa: BLE001 - must not return to the leader's code
        code = 1
        sys.stderr.write(f"{raised_report(error).traceback}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_call(
    folder: Path,
    number: int,
    call: IO[bytes],
    held: ExitStack,
    report_event: Callable[..., None],
) -> RankReport:
    setup: dict[str, Any] = pickle.load(call)  # noqa: S301 - written by the parent
    world: World = setup["world"]
    try:
        _become_rank(world, number, setup)
        from assay.launch.joining import file_store, joined, use_loopback

        use_loopback()
        rank = held.enter_context(joined(world, file_store(folder, world), number, number))
    except Exception as error:  # noqa: BLE001 - sent to the parent
        return raised_report(error)
    if number == 0:
        rank = replace(rank, progress=WireProgress(partial(report_event, "progress")))
    report_event("ready")

    def body() -> object:
        target, args, kwargs = pickle.load(call)  # noqa: S301 - written by the parent
        return target(rank, *args, **kwargs)

    return report_of(body)


def _prepare_streams(folder: Path, number: int) -> IO[bytes]:
    """Redirect input, output and errors, and open the file that faulthandler writes stacks to."""
    with Path(os.devnull).open("rb") as nothing, (folder / f"rank{number}.log").open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        # Output before a kill must be in the log.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a text stream
    stacks = (folder / f"rank{number}.stacks").open("wb", buffering=0)
    faulthandler.enable(stacks)
    # faulthandler needs no interpreter, so hung ranks answer as well.
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})
    stacks.write(f"{threading.main_thread().ident:#018x}\n".encode())
    return stacks


def _become_rank(world: World, number: int, setup: dict[str, Any]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(setup["environment"])
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(world.size),
        LOCAL_WORLD_SIZE=str(world.size),
        OMP_NUM_THREADS=str(world.threads),
    )
    os.chdir(setup["working_directory"])
    sys.argv = setup["arguments"]
    torch.set_num_threads(world.threads)
    reseed()


def _report_event(reports: int, number: int, event: str, shown: Event | None = None) -> None:
    report = {"rank": number, "event": event} | ({"shown": shown} if shown else {})
    os.write(reports, json.dumps(report).encode() + b"\n")
