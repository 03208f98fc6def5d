"""Processes forked from a server that has finished the slow imports.

Importing torch and transformers takes longer than a small check. Only imports run in the fork server,
so its forks start in the state of a new process.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import IO, Any, cast

from assay.errors import MachineError
from assay.runs.worker import SAME_HASHES, end_with_parent
from assay.watchdog import WATCHDOG


class ForkedProcess:
    """A forked process, with the used members of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._process = process
        self.pid = cast("int", process.pid)
        self.stdin = stdin
        self.stdout = stdout

    def poll(self) -> int | None:
        """Return the exit code: None while it runs, negative after a signal."""
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end. Returns: the exit code. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return code


def begin_preload(modules: Sequence[str]) -> None:
    """Start the fork server and its import of `modules`; return at once.

    Only the first call in a process sets the modules.
    Raises: MachineError if the folder of temporary files cannot hold a socket.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # first, as it unblocks interrupts at its end
    try:
        with _interrupts_blocked(), _environment(SAME_HASHES):
            forkserver.ensure_running()
    except OSError as error:  # a Unix socket path has at most 107 bytes
        folder = util.get_temp_dir()
        raise MachineError(
            f"no socket can be made in {folder} ({error.strerror or error}): set TMPDIR to a folder"
            " with a short path"
        ) from error
    if multiprocessing.parent_process() is None:  # else the folder is the parent's
        WATCHDOG.watch("folder", util.get_temp_dir())
        # It ends by itself when no process needs it, unless an import hangs.
        WATCHDOG.watch("process", forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined] # noqa: SLF001 - kept nowhere else


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C for a process that is started inside; this process ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def import_to_stay(*modules: str) -> None:
    """Import `modules` for all forks; called by modules that a fork server preloads.

    The garbage collector is off meanwhile, which saves a fifth of the time. Later it skips the
    imported objects, as visiting them would unshare their pages.
    """
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
    finally:
        gc.enable()


def start_forked(
    module: str, request_file: str, environment: Mapping[str, str], preload: Sequence[str]
) -> ForkedProcess:
    """Run `module` as `python -m` would, in a new process group; both output streams are one pipe.

    preload: as in `begin_preload`.
    """
    begin_preload(preload)
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    output, child_output = os.pipe()
    child_input, stdin = os.pipe()
    try:
        process = context.Process(
            target=_run,
            args=(
                module,
                request_file,
                # The fork server has older variables.
                {**os.environ, **environment},
                _Inherited(child_input, child_output),
            ),
            daemon=False,
        )
        with _main_hidden():
            process.start()
    finally:
        os.close(child_output)
        os.close(child_input)
    return ForkedProcess(process, os.fdopen(stdin, "wb"), os.fdopen(output, "rb"))


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Hide this process's main module from a process that is started inside.

    multiprocessing would import it there and run a script without a `__name__` guard again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Inherited:
    """Two descriptors, pickled for the child."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors

    def __getstate__(self) -> list[Any]:
        return [DupFd(descriptor) for descriptor in self._descriptors]

    def __setstate__(self, state: list[Any]) -> None:
        self._descriptors = tuple(item.detach() for item in state)

    def become_standard_streams(self) -> None:
        """Make the first standard input, the second standard output and error."""
        source, sink = self._descriptors
        os.dup2(source, 0)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        for descriptor in {source, sink} - {0, 1, 2}:
            os.close(descriptor)


def _run(module: str, request_file: str, environment: dict[str, str], streams: _Inherited) -> None:
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    streams.become_standard_streams()
    os.environ.update(environment)
    sys.argv = [module, request_file]
    threading.Thread(target=end_with_parent, daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=False)
