"""Runs a training library from its launch line to the end of its last process.

An aborted Python process prints its stacks if PYTHONFAULTHANDLER was set at its start. For other
processes, the kernel names the function in which they sleep.
"""

import fnmatch
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import IO, Literal, cast

import psutil

from assay.devices.base import Device
from assay.devices.registry import open_device
from assay.errors import AssayError, MachineError, UsageError, exit_in_words, suggest
from assay.files import UnreadableFileError, parse_json, read_bytes, write_whole
from assay.foreign_text import shorten
from assay.launch.failures import describe_place, last_words, read_stack
from assay.models.load import load_outline
from assay.runs import Progress, Task
from assay.watchdog import temporary_folder, watched
from assay_smoke import machine
from assay_smoke.external.library import ExternalLibrary, Losses, fill, read_library, require_files
from assay_smoke.timelines import CyclePhase, PhaseTime


def search_path() -> str:
    """Return the search path of programs, with the folder of this Python first, as if it were activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def require_runnable(toml: Path, device_name: str | None = None) -> ExternalLibrary:
    """Read the library that `toml` describes, and check what its launch line needs of this machine.

    device_name: to train on, if not the file's.
    Raises: UsageError or MachineError for a wrong key, file, program, port or number of cards.
    """
    library = read_library(toml)
    require_files(library, toml)
    if device_name is not None:
        library = library.model_copy(update={"device": device_name})
    program, path = fill(library.launch[0], {"python": sys.executable}), search_path()
    if not any(shutil.which(name, path=path) for name in (program, str(toml.parent / program))):
        hint = library.install or "install it, or give its path"
        raise UnreadableFileError(f"launch: the program {program!r} was not found: {hint}")
    if taken := machine.ports_taken(library.ports):
        raise MachineError(
            f"port {taken[0]} of `ports` is taken: end the process that listens there (ss -ltnp), or"
            " write {port} in the launch line for a free one"
        )
    names = [*load_outline(library.model).model.state_dict()] if library.frozen else []
    for pattern in library.frozen:
        if not fnmatch.filter(names, pattern):
            raise UnreadableFileError.of(toml, f"frozen: {suggest('parameter', pattern, names)}")
    device = open_device(library.device)
    here = 0 if device.torch_device == "cpu" else device.count()
    if library.cards > here:
        raise MachineError(
            f"`cards` is {library.cards}, but this machine has {here} of `device` {library.device!r}"
            " (`assay devices` lists all): ask for fewer, or name another device"
        )
    return library


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step's logged loss, with its number, learning rate and norm of the gradient if they are logged too."""

    step: int | None
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    seen_at: float = field(default_factory=time.time, compare=False)
    """Time of its reading, in seconds since the epoch."""


class LossReader:
    """Collects losses: `take` gets every line of the output, `poll` reads the file."""

    def __init__(self, losses: Losses, file: Path | None) -> None:
        self._losses, self._file = losses, file
        self._pattern = None if losses.pattern is None else re.compile(losses.pattern)
        rates = (losses.learning_rate,) if losses.learning_rate else ("lr", "learning_rate")
        self._names = (
            ("step", losses.step), ("loss", losses.loss), *(("lr", name) for name in rates),
            ("grad_norm", losses.grad_norm),
        )  # fmt: skip
        # Losses in a copied output belong to an earlier run.
        self._lines_read = len(_whole_lines(file))
        self.found: list[LoggedStep] = []

    def take(self, line: str) -> None:
        """Search a line of the output for a loss."""
        if self._pattern is not None and (match := self._pattern.search(line)):
            self._add("losses.pattern", **match.groupdict())

    def poll(self) -> None:
        """Read new lines of the file."""
        lines = _whole_lines(self._file)
        if len(lines) < self._lines_read:
            self._lines_read = 0  # the library has restarted the file
        for line in lines[self._lines_read :]:
            with suppress(UnreadableFileError):
                values = parse_json(line, "a line of a log")
                if isinstance(values, dict) and self._losses.loss in values:
                    logged = {key: values[name] for key, name in self._names if name in values}
                    self._add("losses.file", **logged)
        self._lines_read = len(lines)

    def _add(self, where: str, **logged: object) -> None:
        """Add a loss and the values logged in the same line. logged: by group name of `losses.pattern`."""
        step, loss, rate, norm = (
            _number(logged.get(name), f"`{name}` of {where}")
            if name == "loss" or logged.get(name) is not None
            else None
            for name in ("step", "loss", "lr", "grad_norm")
        )
        if step is not None and not math.isfinite(step):
            raise _not_a_number(logged["step"], f"`step` of {where}")
        one = LoggedStep(None if step is None else int(step), cast("float", loss), rate, norm)
        # Each rank may log the loss of the step.
        if one.step is None or self.found[-1:] != [one]:
            self.found.append(one)


def _whole_lines(file: Path | None) -> list[str]:
    if file is None or not file.is_file():
        return []
    return read_bytes(file).decode(errors="replace").split("\n")[:-1]


def _not_a_number(value: object, where: str) -> UsageError:
    return UsageError(f"{where} gives {shorten(repr(value))}, which is not a number")


def _number(value: object, where: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise _not_a_number(value, where) from None


Phase = Literal["set-up", "steps", "tear-down"]

# Names of worlds in timelines for runs that have a counterpart among the worlds of a case.
_WORLDS = {"uninterrupted": "train", "interrupted": "terminate", "resumed": "resume"}

_MISSING_MODULE = re.compile(r"(?:\[.*?\]:\s*)?ModuleNotFoundError: No module named '([^'.]+)")

# What torchrun writes after a rank has ended, in front of its own traceback.
_END_OF_RANKS = re.compile(
    r"torch/distributed/elastic/multiprocessing/api\.py.*(closing signal|exitcode)"
)
_FAILED_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_ERROR = re.compile(r"(\[rank\d+\]:\s*)?([\w.]+(Error|Exception|Interrupt)\b|Fatal Python error)")


@dataclass(slots=True)
class Run:
    """A run of a library: its launch, and what was seen of it. Times are in seconds since the epoch."""

    name: str
    library: ExternalLibrary
    model: Path
    folder: Path
    """For its log NAME.log and its output."""
    working_folder: Path
    device: Device | None = None
    resume_from: Path | None = None
    """Checkpoint to resume from."""
    first_step: int = 0
    """Number of steps made before."""
    sigterm_after: int | None = None
    """Number of logged losses after which the process gets SIGTERM; None for never."""
    exit_code: int = field(default=0, init=False)
    losses: list[LoggedStep] = field(default_factory=list, init=False)
    signalled_after: int | None = field(default=None, init=False)
    """Number of losses when SIGTERM was sent."""
    hung_in: Phase | None = field(default=None, init=False)
    """Phase in which a time limit passed."""
    waits: list[str] = field(default_factory=list, init=False)
    """Places where the processes of a hung run waited."""
    leftovers: list[machine.Leftover] = field(default_factory=list, init=False)
    host: machine.MemoryUse = field(default=machine.MemoryUse(0, 0, 0), init=False)
    on_device: machine.MemoryUse | None = field(default=None, init=False)
    began_at: float = field(default=0.0, init=False)
    ended_at: float = field(default=0.0, init=False)

    @property
    def log(self) -> Path:
        """Return the file with all output of the processes."""
        return self.folder / f"{self.name}.log"

    @property
    def output(self) -> Path:
        """Return the folder of {output}."""
        return self.folder / f"{self.name}-output"

    @property
    def placeholders(self) -> dict[str, object]:
        """Return the values of all placeholders except the port."""
        library = self.library
        values = {
            "python": sys.executable, "model": self.model, "output": self.output.resolve(),
            "steps": library.steps, "save_every": library.save_every, "seed": library.seed,
            "ranks": library.ranks, "device": library.device, "cards": library.cards,
            "batch_size": library.batch_size, "accumulation": library.accumulation,
            "saves": len(library.saved_steps),
            "keep": len(library.saved_steps) if library.keep is None else library.keep,
        }  # fmt: skip
        if library.data is not None:
            values["data"] = library.data_path
        return values

    def command(self) -> list[str]:
        """Return the words of the launch line, with a free port for {port}."""
        values = self.placeholders | {"port": machine.free_port()}
        words = [fill(word, values) for word in self.library.launch]
        if self.resume_from is not None:
            values["resume_from"] = self.resume_from.resolve()
            words += [fill(word, values) for word in self.library.resume]
        return words

    @property
    def values(self) -> list[float]:
        """Return the losses as numbers."""
        return [logged.loss for logged in self.losses]

    @property
    def phase(self) -> Phase:
        """Return the phase that the losses so far imply."""
        if not self.losses:
            return "set-up"
        return "steps" if self.steps_made < self.library.steps else "tear-down"

    @property
    def seconds(self) -> dict[Phase, float]:
        """Return the duration of each phase: until the first loss, until the last, until the end."""
        times = [logged.seen_at for logged in self.losses] or [self.ended_at]
        return {
            "set-up": times[0] - self.began_at,
            "steps": times[-1] - times[0],
            "tear-down": self.ended_at - times[-1],
        }

    @property
    def steps_left(self) -> int:
        """Return the number of steps that it has to make."""
        return self.library.steps - self.first_step

    @property
    def steps_made(self) -> int:
        """Return the number of steps made, including those before a resume."""
        return self.first_step + len(self.losses)

    @property
    def made_all_steps(self) -> bool:
        """Return whether it made its last step and was not interrupted before."""
        return self.sigterm_after is None and self.steps_made >= self.library.steps

    def describe_bad_end(self) -> str | None:
        """Describe a bad end and its place, or return None for a good end. A full disk comes first."""
        library, run = self.library, f"the {self.name} run"
        where = f"after step {self.steps_made} of {library.steps}"
        where = where if self.losses else "before its first loss"
        if self.hung_in is not None:
            tears_down = self.hung_in == "tear-down"
            limit = library.end_limit_seconds if tears_down else library.time_limit_seconds
            return f"{run} hung in {self.hung_in}, {where}: over {limit:g} s{self.describe_waits()}"
        if not self.exit_code:
            return None
        full = next(
            (f"{words}: " for words in machine.FULL_DISK if words in last_words(self.log)), ""
        )
        where += ", when training was complete" if self.made_all_steps else ""
        return f"{full}{run} {exit_in_words(self.exit_code)} {where}; {self._last_line}"

    def describe_waits(self) -> str:
        """Describe where the processes of a hung run were, each after a semicolon."""
        return "".join(f"; {place}" for place in self.waits)

    @property
    def _log_lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    @property
    def _last_line(self) -> str:
        """Quote the last error of the ranks or the last line, and name the rank that ended first."""
        lines = [line.strip() for line in self._log_lines if line.strip()]
        by_ranks = [*takewhile(lambda line: not _END_OF_RANKS.search(line), lines)]
        if not by_ranks:
            return "it printed nothing"
        errors, words = [line for line in by_ranks[-_NUM_LAST:] if _ERROR.match(line)], ""
        # Nothing handles it, and stacks of many lines may follow.
        thrown = [at for at, line in enumerate(by_ranks) if line.startswith("terminate called")]
        if thrown:
            first, *after = by_ranks[thrown[0] :][:2]
            errors = [": ".join([first, *(line for line in after if line.startswith("what()"))])]
        failed = next(filter(None, map(_FAILED_RANK.search, lines)), None)
        if failed is not None and len(by_ranks) < len(lines):
            words = f"local rank {failed[2]} {exit_in_words(int(failed[1]))}; "
            errors = [line for line in errors if line.startswith(f"[rank{failed[2]}]")] or errors
        last = f"last error is {errors[-1]!r}" if errors else f"last line is {by_ranks[-1]!r}"
        return f"{words}its {last} ({self.log})"

    def require_modules(self) -> None:
        """Check that it did not fail for lack of a Python package. Raises: MachineError."""
        missing = next(filter(None, map(_MISSING_MODULE.match, self._log_lines)), None)
        if self.exit_code and not self.losses and missing:
            hint = self.library.install or f"install it there, as by pip install {missing[1]}"
            needed = f"the launch line needs the Python package {missing[1]!r}"
            raise MachineError(f"{needed}, which is absent: {hint}")

    def require_losses(self) -> None:
        """Check that it logged the loss of every step. Raises: UsageError."""
        losses = self.library.losses
        if not self.losses:
            where = (
                f"no line of its output matches losses.pattern, '{losses.pattern}'"
                if losses.pattern is not None
                else f"losses.file, {losses.file}, is absent or empty"
            )
            raise UsageError(f"the launch line logs no losses: {where}.{last_words(self.log)}")
        steps = [logged.step for logged in self.losses if logged.step is not None]
        spacings = {later - earlier for earlier, later in pairwise(steps)}
        if len(spacings) == 1 and (spacing := spacings.pop()) > 1:
            raise UsageError(
                f"a loss is logged every {spacing} steps, but every step is needed: set the library's"
                " logging interval to 1"
            )

    def write_timeline(self, folder: Path) -> None:
        """Write the phases to timelines/WORLD/rank-0.jsonl, for the page of a session.

        A step ends when its loss is logged. A checkpoint after it counts to the next step.
        """
        times = [self.began_at, *(logged.seen_at for logged in self.losses), self.ended_at]
        steps = range(self.first_step + 2, self.steps_made + 1)
        names: list[tuple[CyclePhase, int | None]] = [
            ("set-up", None), *(("step", step) for step in steps), ("tear-down", None),
        ]  # fmt: skip
        path = folder / "timelines" / _WORLDS.get(self.name, self.name) / "rank-0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        device_bytes = 0 if self.on_device is None else self.on_device.peak_bytes
        lines = ""
        for (phase, number), (begin, end) in zip(names, pairwise(times), strict=False):
            row = PhaseTime(
                phase=phase,
                number=number,
                begin=begin,
                end=None if self.hung_in is not None and end == self.ended_at else end,
                host_bytes=self.host.peak_bytes,
                device_bytes=device_bytes,
            )
            lines += f"{row.model_dump_json()}\n"
        write_whole(path, lines)


_POLL_SECONDS = 0.02
_CHUNK_BYTES = _LONGEST_LINE_BYTES = 1 << 16
# An error above that many lines was probably handled.
_NUM_LAST = 40
_LINE_END = re.compile(rb"[\r\n]")
# Time to read the rest of the pipe after the launched process has ended.
_DRAIN_SECONDS = 2.0
_ABORT_SECONDS = 3.0
_STACK_POLL_SECONDS = 0.05
_CURRENT_THREAD = re.compile(r"^Current thread (0x[0-9a-f]+)", re.MULTILINE)


def make(run: Run, progress: Progress) -> Run:
    """Run it to its end or to a time limit, after which none of its processes is left.

    Raises: MachineError if it cannot start; UsageError for a malformed log.
    """
    tree = machine.ProcessTree()
    run.output.mkdir(parents=True, exist_ok=True)
    with temporary_folder("assay-smoke-") as temporary:
        before = machine.Snapshot.take(temporary)
        try:
            with machine.MemoryWatch(tree, run.device) as memory:
                progress.note(f"{run.name}: prints to {run.log}")
                _Watch(run, tree, progress).until_end({"TMPDIR": str(temporary)})
                if run.hung_in is None:  # otherwise it could not clean up
                    allowed = run.library.leftovers_allowed
                    run.leftovers = machine.find_leftovers(before, tree, allowed=allowed)
        finally:
            tree.kill()
        run.host, run.on_device = memory.host, memory.device
    return run


class _Watch:
    """Starts the process of a run and reads its losses until it ends or a time limit passes."""

    def __init__(self, run: Run, tree: machine.ProcessTree, progress: Progress) -> None:
        self._run, self._tree, self._progress = run, tree, progress
        file = run.library.losses.file
        path = None if file is None else run.working_folder / fill(file, run.placeholders)
        self._reader = LossReader(run.library.losses, path)
        run.losses = self._reader.found
        self._shown = ExitStack()
        self._num_shown = 0
        self._error: AssayError | None = None

    def until_end(self, variables: Mapping[str, str]) -> None:
        """Run the process. variables: of its environment, on top of those of the library and the tree."""
        run = self._run
        with run.log.open("wb", buffering=0) as log, self._shown:
            run.began_at = time.time()
            process = self._start(variables)
            self._tree.add_root(process.pid)
            listener = threading.Thread(target=self._listen, args=(process, log), daemon=True)
            listener.start()
            try:
                with watched("group", process.pid):
                    self._show("set-up")
                    self._wait(process)
                    if run.hung_in is not None:
                        # The first may be the launcher of the others.
                        run.waits = [_abort(one, run.log) for one in self._tree.living()]
                        self._tree.kill()
            except BaseException:
                self._tree.kill()
                raise
            finally:
                run.exit_code = process.wait()
                listener.join(_DRAIN_SECONDS)
            self._take_losses()
        run.losses = [*self._reader.found]  # a leftover process may still print
        run.ended_at = time.time()

    def _start(self, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        command = self._run.command()
        # PYTHONFAULTHANDLER makes Python print the stacks of its threads on SIGABRT.
        usual = {"PATH": search_path(), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        own = {**self._run.library.environment, **self._tree.environment, **variables}
        try:
            return subprocess.Popen(
                command,
                cwd=self._run.working_folder,
                env={**os.environ, **usual, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start {command[0]}: {error.strerror or error}") from error

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of the process or of a time limit."""
        run, library, begun = self._run, self._run.library, time.monotonic()
        ended_at: float | None = None
        while process.poll() is None:
            self._take_losses()
            now, num_losses = time.monotonic(), self._num_shown
            is_due = run.sigterm_after is not None and num_losses >= run.sigterm_after
            if is_due and run.signalled_after is None:
                is_all = library.sigterm_to == "all"
                for one in self._tree.living() if is_all else [process]:
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(signal.SIGTERM)
                run.signalled_after, ended_at = num_losses, now
            if run.phase == "tear-down" and ended_at is None:
                ended_at = now
            over = now - begun > library.time_limit_seconds
            if over or (ended_at and now - ended_at > library.end_limit_seconds):
                run.hung_in = run.phase
                return
            time.sleep(_POLL_SECONDS)

    def _take_losses(self) -> None:
        """Read new losses and display the phase that they imply."""
        self._reader.poll()
        if self._error is not None:
            raise self._error
        num_losses, num_expected = len(self._run.losses), self._run.steps_left
        if num_losses == self._num_shown:
            return
        if self._num_shown == 0:
            self._show("steps", num_expected)
        self._task.advance(num_losses - self._num_shown)
        if self._num_shown < num_expected <= num_losses:
            self._show("tear-down")
        self._num_shown = num_losses

    def _show(self, phase: Phase, total: int | None = None) -> None:
        self._shown.close()
        task = self._progress.task(f"{self._run.name}: {phase}", total)
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
    name, asleep, begin = machine.describe(process), "", log.stat().st_size
    with suppress(OSError):
        asleep = Path(f"/proc/{process.pid}/wchan").read_text(encoding="utf-8").strip()
    with suppress(psutil.Error, OSError, ValueError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # no core file
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + _ABORT_SECONDS
    has_ended = False
    while time.monotonic() < deadline and not has_ended:
        has_ended = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        # After its end, its last output may not be in the log yet.
        time.sleep(_STACK_POLL_SECONDS * (2 if has_ended else 1))
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
        current = _CURRENT_THREAD.search(text)
        if current and (place := describe_place(read_stack(f"{current[1]}\n{text}"))):
            return f"{name} was at {place}"
    return f"{name} was in the kernel's {asleep}" if asleep not in ("", "0") else name
