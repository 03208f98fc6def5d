"""A process that answers a call, alone or as a rank of a world, from its fork to its end."""

import atexit
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import dumps, load  # the candidate may replace functions of the module
from types import FrameType
from typing import IO, NoReturn

from assay.errors import AssayError, UsageError
from assay.launch.failures import RankReport, raised_report, report_of
from assay.launch.world import World
from assay.progress import Progress, SilentProgress
from assay.runs.progress import Event, WireProgress

CALL_FILE = "call.pickle"

# Makes a process write its stack.
STACK_SIGNAL = signal.SIGUSR1

_in_world = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The surroundings of the process that calls, for those that answer."""

    world: World | None
    """None for a process without other ranks, which needs no torch."""
    environment: Mapping[str, str]
    working_directory: str
    arguments: Sequence[str]
    """For `sys.argv`."""


def in_world() -> bool:
    """Return True in a rank of a world that assay launched."""
    return _in_world


def answer(files: str, number: int, gate: int, reports: int) -> NoReturn:
    """Answer the call in the folder `files` as process `number`, a fork of the fork server, and end it.

    The folder holds `call.pickle`: the surroundings, then the pickled function and request.
    gate: a pipe that is closed when every rank of the world has returned.
    reports: a pipe for the events "ready", "progress" and the kind of the report.
    """
    code, folder, held = 1, Path(files), ExitStack()
    is_alone = False
    try:
        _redirect_streams(folder / f"rank{number}.log")
        with (folder / CALL_FILE).open("rb") as call:
            around: Surroundings = load(call)  # noqa: S301 - written by the parent
            world = around.world
            is_alone = world is None
            process = _Process(around, call, number, folder, partial(_send, reports, number))
            report = process.answer_on_rank(world, held) if world else process.answer_alone()
        (folder / f"rank{number}.report").write_bytes(dumps(report))
        process.send(report.kind)
        if report.kind == "returned" and not is_alone:
            # Slower ranks would take a closed connection for a failure.
            os.read(gate, 1)
            held.close()
        # A rank that did not return closes its connections at once, so that waiting ranks raise.
        code = int(report.kind == "raised")
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - must not return to the leader's code
        traceback.print_exc()
    finally:
        try:
            if is_alone:
                # Ends the children of libraries. A rank leaves the handlers to the fork server.
                atexit._run_exitfuncs()  # noqa: SLF001 - no public name
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


@dataclass(frozen=True, slots=True)
class _Process:
    """A process and its call."""

    around: Surroundings
    call: IO[bytes]
    number: int
    folder: Path
    send: Callable[..., None]

    def answer_alone(self) -> RankReport:
        """Call the function, in which SIGTERM is a KeyboardInterrupt.

        Raises: every exception of the function but an AssayError, which is reported.
        """
        signal.signal(signal.SIGTERM, _interrupt)
        faulthandler.register(STACK_SIGNAL, file=2)  # any thread may get the signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})
        self._take_on_surroundings()
        try:
            function, request = load(self.call)  # noqa: S301 - written by the parent
            return RankReport("returned", value=dumps(function(request, self._progress)))
        except AssayError as error:
            return RankReport("raised", words=str(error), is_usage=isinstance(error, UsageError))

    def answer_on_rank(self, world: World, held: ExitStack) -> RankReport:
        """Join the world and call the function.

        held: keeps the rank in its process group.
        """
        global _in_world  # noqa: PLW0603 - a property of the process
        _in_world = True
        held.enter_context(_written_stacks(self.folder / f"rank{self.number}.stacks"))
        try:
            import torch

            self._take_on_surroundings(
                RANK=self.number,
                LOCAL_RANK=self.number,
                WORLD_SIZE=world.size,
                LOCAL_WORLD_SIZE=world.size,
                OMP_NUM_THREADS=world.threads,
            )
            torch.set_num_threads(world.threads)
            from assay.launch.process_group import file_store, joined, use_loopback

            use_loopback()
            store = file_store(self.folder, world)
            rank = held.enter_context(joined(world, store, self.number, self.number))
        except Exception as error:  # noqa: BLE001 - sent to the parent
            return raised_report(error)
        self.send("ready")

        def body() -> object:
            function, request = load(self.call)  # noqa: S301 - written by the parent
            return function(request, self._progress, rank)

        return report_of(body)

    @property
    def _progress(self) -> Progress:
        if self.number:  # the first rank shows the progress of all
            return SilentProgress()
        return WireProgress(partial(self.send, "progress"))

    def _take_on_surroundings(self, **variables: int) -> None:
        os.environ.clear()
        os.environ.update(self.around.environment)
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.chdir(self.around.working_directory)
        sys.argv = [*self.around.arguments]
        # All forks share the states of these generators.
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()


def _redirect_streams(log: Path) -> None:
    with Path(os.devnull).open("rb") as nothing, log.open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        # Output before a kill must be in the log.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a text stream


@contextmanager
def _written_stacks(path: Path) -> Iterator[None]:
    """Write the stacks of crashes, and those that STACK_SIGNAL asks for, to a file.

    Its first line is the identity of the main thread, as `assay.launch.failures.read_stack` reads it.
    """
    with path.open("wb", buffering=0) as stacks:
        faulthandler.enable(stacks)
        # faulthandler needs no interpreter, so hung ranks answer as well.
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})
        stacks.write(f"{threading.main_thread().ident:#018x}\n".encode())
        yield


def _send(reports: int, number: int, event: str, shown: Event | None = None) -> None:
    report = {"rank": number, "event": event} | ({"shown": shown} if shown else {})
    os.write(reports, json.dumps(report).encode() + b"\n")


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
    raise KeyboardInterrupt
