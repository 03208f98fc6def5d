"""Runs a training library from its launch line to the end of its last process.

An aborted Python process prints its stacks if PYTHONFAULTHANDLER was set at its start. For other
processes, the kernel names the function in which they sleep.
"""

import os
import re
import resource
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, cast

import psutil

from assay.errors import AssayError, MachineError
from assay.launch.failures.stacks import describe_place, read_stack
from assay.runs import Progress, Task
from assay.watchdog import temporary_folder, watched
from assay_smoke.external.evidence import Phase, RunEvidence
from assay_smoke.external.launch import Launch, search_path
from assay_smoke.external.library import fill
from assay_smoke.external.losses import LossReader
from assay_smoke.machine.leftovers import Snapshot, find_leftovers
from assay_smoke.machine.process_tree import MemoryWatch, ProcessTree, describe

_POLL_SECONDS = 0.02
_CHUNK_BYTES = _LONGEST_LINE_BYTES = 1 << 16
_LINE_END = re.compile(rb"[\r\n]")
# Time to read the rest of the pipe after the launched process has ended.
_DRAIN_SECONDS = 2.0
_ABORT_SECONDS = 3.0
_STACK_POLL_SECONDS = 0.05
_CURRENT_THREAD = re.compile(r"^Current thread (0x[0-9a-f]+)", re.MULTILINE)


def run(launch: Launch, progress: Progress) -> RunEvidence:
    """Run it to its end or to a time limit, after which none of its processes is left.

    Raises: MachineError if it cannot start; LossesError for a malformed log.
    """
    tree = ProcessTree()
    evidence = RunEvidence(launch)
    launch.output.mkdir(parents=True, exist_ok=True)
    with temporary_folder("assay-smoke-") as temporary:
        before = Snapshot.take(temporary)
        try:
            with MemoryWatch(tree, launch.device) as memory:
                progress.note(f"{launch.name}: prints to {launch.log}")
                _Running(launch, tree, evidence, temporary, progress).until_end()
                if evidence.hung_in is None:  # otherwise it could not clean up
                    evidence.leftovers = find_leftovers(
                        before, tree, allowed=launch.library.leftovers_allowed
                    )
        finally:
            tree.kill()
        evidence.host, evidence.on_device = memory.host, memory.device
    return evidence


class _Running:
    """The launched process with its log, losses and time limits."""

    def __init__(
        self,
        launch: Launch,
        tree: ProcessTree,
        evidence: RunEvidence,
        temporary: Path,
        progress: Progress,
    ) -> None:
        self._launch, self._tree, self._evidence = launch, tree, evidence
        self._library = launch.library
        file = launch.library.losses.file
        self._reader = LossReader(
            launch.library.losses,
            None if file is None else launch.working_folder / fill(file, launch.values),
        )
        evidence.losses = self._reader.found
        self._environment = {
            **os.environ,
            "PATH": search_path(),
            "PYTHONUNBUFFERED": "1",
            # Makes Python print the stacks of its threads on SIGABRT.
            "PYTHONFAULTHANDLER": "1",
            **launch.library.environment,
            **tree.environment,
            "TMPDIR": str(temporary),
        }
        self._progress, self._shown = progress, ExitStack()
        self._num_shown = 0
        self._error: AssayError | None = None

    def until_end(self) -> None:
        evidence = self._evidence
        with self._launch.log.open("wb", buffering=0) as log, self._shown:
            evidence.began_at = time.time()
            process = self._start()
            self._tree.add_root(process.pid)
            listener = threading.Thread(target=self._listen, args=(process, log), daemon=True)
            listener.start()
            try:
                with watched("group", process.pid):
                    self._show("set-up")
                    self._watch(process)
                    if evidence.hung_in is not None:
                        # The first may be the launcher of the others.
                        evidence.waits = [
                            _abort(one, self._launch.log) for one in self._tree.living()
                        ]
                        self._tree.kill()
            except BaseException:
                self._tree.kill()
                raise
            finally:
                evidence.exit_code = process.wait()
                listener.join(_DRAIN_SECONDS)
            self._take_losses()
        evidence.losses = [*self._reader.found]  # a leftover process may still print
        evidence.ended_at = time.time()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = self._launch.command()
        try:
            return subprocess.Popen(
                command,
                cwd=self._launch.working_folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start {command[0]}: {error.strerror or error}") from error

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of the process or of a time limit."""
        begun = time.monotonic()
        ended_at: float | None = None
        sigterm_after = self._launch.sigterm_after
        while process.poll() is None:
            self._take_losses()
            now, num_losses = time.monotonic(), self._num_shown
            if sigterm_after is not None and num_losses >= sigterm_after:
                self._send_sigterm(process)
                self._evidence.signalled_after = num_losses
                sigterm_after, ended_at = None, now
            if self._evidence.phase == "tear-down" and ended_at is None:
                ended_at = now
            over = now - begun > self._library.time_limit_seconds
            if over or (ended_at and now - ended_at > self._library.end_limit_seconds):
                self._evidence.hung_in = self._evidence.phase
                return
            time.sleep(_POLL_SECONDS)

    def _send_sigterm(self, process: "subprocess.Popen[bytes]") -> None:
        if self._library.sigterm_to == "launcher":
            process.send_signal(signal.SIGTERM)
            return
        for one in self._tree.living():
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGTERM)

    def _take_losses(self) -> None:
        """Read new losses and display the phase that they imply."""
        self._reader.poll()
        if self._error is not None:
            raise self._error
        num_losses = len(self._evidence.losses)
        if num_losses == self._num_shown:
            return
        num_expected = self._library.steps - self._launch.first_step
        if self._num_shown == 0:
            self._show("steps", num_expected)
        self._task.advance(num_losses - self._num_shown)
        if self._num_shown < num_expected <= num_losses:
            self._show("tear-down")
        self._num_shown = num_losses

    def _show(self, phase: Phase, total: int | None = None) -> None:
        self._shown.close()
        task = self._progress.task(f"{self._launch.name}: {phase}", total)
        self._task: Task = self._shown.enter_context(task)

    def _listen(self, process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
        stream = cast("IO[bytes]", process.stdout)
        line = b""
        with stream, suppress(ValueError):  # a leftover process may keep the pipe open
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                with suppress(OSError):  # a full disk must not block the run
                    log.write(chunk)
                # Progress bars redraw their line after a carriage return and may never end it.
                *lines, line = _LINE_END.split(line + chunk)
                for whole in lines:
                    self._take_line(whole)
                line = line[-_LONGEST_LINE_BYTES:]
        self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        try:
            self._reader.take(line.decode(errors="replace"))
        except AssayError as error:
            self._error = self._error or error


def _abort(process: psutil.Process, log: Path) -> str:
    """Abort a process and describe where it was. log: file with its standard error."""
    name = describe(process)
    asleep = ""
    with suppress(OSError):
        asleep = Path(f"/proc/{process.pid}/wchan").read_text(encoding="utf-8").strip()
    begin = log.stat().st_size
    with suppress(psutil.Error, OSError, ValueError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # no core file
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + _ABORT_SECONDS
    place = ""
    while time.monotonic() < deadline and not place:
        time.sleep(_STACK_POLL_SECONDS)
        place = _place(_text_after(log, begin))
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            time.sleep(2 * _STACK_POLL_SECONDS)  # its last output may not be in the log yet
            place = place or _place(_text_after(log, begin))
            break
    if place:
        return f"{name} was at {place}"
    return f"{name} was in the kernel's {asleep}" if asleep not in ("", "0") else name


def _place(text: str) -> str:
    current = _CURRENT_THREAD.search(text)
    return describe_place(read_stack(f"{current[1]}\n{text}")) if current else ""


def _text_after(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
