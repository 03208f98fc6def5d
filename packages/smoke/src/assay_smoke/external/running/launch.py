"""The launch of a run, its requirements, and the evidence from it."""

import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from assay.devices.base import Device
from assay.errors import MachineError, exit_in_words
from assay.files import UnreadableFileError, write_whole
from assay_smoke.cases.timeline import CyclePhase, PhaseTime
from assay_smoke.external.library import ExternalLibrary, fill
from assay_smoke.external.running.losses import LoggedLoss
from assay_smoke.machine.failures import FULL_DISK
from assay_smoke.machine.leftovers import Leftover, free_port, ports_taken
from assay_smoke.machine.process_tree import MemoryUse

Phase = Literal["set-up", "steps", "tear-down"]

_TAIL_LINES = 20

# Names of worlds in timelines for runs that have a counterpart among the worlds of a case.
_WORLDS = {"uninterrupted": "train", "interrupted": "terminate", "resumed": "resume"}

_MISSING_MODULE = re.compile(
    r"^(?:\[.*?\]:\s*)?ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of the library. Its log NAME.log and its output go to `folder`."""

    name: str
    library: ExternalLibrary
    model: Path
    folder: Path
    working_folder: Path
    device: Device | None = None
    resume_from: Path | None = None
    """Checkpoint to resume from."""
    first_step: int = 0
    """Number of steps made before."""
    sigterm_after: int | None = None
    """Number of logged losses after which the process gets SIGTERM; None for never."""

    @property
    def log(self) -> Path:
        """Return the file with all output of the processes."""
        return self.folder / f"{self.name}.log"

    @property
    def output(self) -> Path:
        """Return the folder of {output}."""
        return self.folder / f"{self.name}-output"

    @property
    def values(self) -> dict[str, object]:
        """Return the values of all placeholders except the port."""
        library = self.library
        values = {
            "python": sys.executable, "model": self.model, "output": self.output.resolve(),
            "steps": library.steps, "save_every": library.save_every, "seed": library.seed,
            "ranks": library.ranks, "cards": library.cards,
            "batch_size": library.batch_size, "accumulation": library.accumulation,
            "saves": len(library.saved_steps),
            "keep": len(library.saved_steps) if library.keep is None else library.keep,
        }  # fmt: skip
        if library.data is not None:
            values["data"] = (self.working_folder / library.data).resolve()
        return values

    def command(self) -> list[str]:
        """Return the words of the launch line, with a free port for {port}."""
        values = self.values | {"port": free_port()}
        words = [fill(word, values) for word in self.library.launch]
        if self.resume_from is not None:
            values["resume_from"] = self.resume_from.resolve()
            words += [fill(word, values) for word in self.library.resume]
        return words


@dataclass(slots=True)
class RunEvidence:
    """The evidence from one run. Times are in seconds since the epoch."""

    launch: Launch
    exit_code: int = 0
    losses: list[LoggedLoss] = field(default_factory=list)
    signalled_after: int | None = None
    """Number of losses when SIGTERM was sent."""
    hung_in: Phase | None = None
    """Phase in which a time limit passed."""
    waits: list[str] = field(default_factory=list)
    """Where the processes of a hung run were."""
    leftovers: list[Leftover] = field(default_factory=list)
    host: MemoryUse = field(default_factory=lambda: MemoryUse(0, 0, 0))
    on_device: MemoryUse | None = None
    began_at: float = 0.0
    logged_at: list[float] = field(default_factory=list)
    """Time at which each loss was seen."""
    ended_at: float = 0.0

    @property
    def seconds(self) -> dict[Phase, float]:
        """Return the duration of each phase: until the first loss, until the last, until the end."""
        first, last = (
            (self.logged_at or [self.ended_at])[0],
            (self.logged_at or [self.ended_at])[-1],
        )
        ends: dict[Phase, float] = {"set-up": first, "steps": last, "tear-down": self.ended_at}
        begins = [self.began_at, *ends.values()]
        return {
            phase: end - begin for (phase, end), begin in zip(ends.items(), begins, strict=False)
        }

    @property
    def steps_made(self) -> int:
        """Return the number of steps made, including those before a resume."""
        return self.launch.first_step + len(self.losses)

    def describe_bad_end(self) -> str | None:
        """Describe a bad end and its place, or return None for a good end. A full disk comes first."""
        name, library = self.launch.name, self.launch.library
        where = f"after step {self.steps_made} of {library.steps}"
        if not self.losses:
            where = "before its first loss"
        if self.hung_in is not None:
            tears_down = self.hung_in == "tear-down"
            limit = library.end_limit_seconds if tears_down else library.time_limit_seconds
            return (
                f"the {name} run hung in {self.hung_in}, {where}: over {limit:g} s"
                f"{self.describe_waits()}"
            )
        if not self.exit_code:
            return None
        reason = f"the {name} run {exit_in_words(self.exit_code)} {where}; {self.last_line}"
        full = next((words for words in FULL_DISK if words in self.last_lines), None)
        return reason if full is None else f"{full}: {reason}"

    def describe_waits(self) -> str:
        """Describe where the processes of a hung run were, each after a semicolon."""
        return "".join(f"; {place}" for place in self.waits)

    @property
    def log_lines(self) -> list[str]:
        """Read the log."""
        return self.launch.log.read_text(encoding="utf-8", errors="replace").splitlines()

    @property
    def last_line(self) -> str:
        """Describe the last line of the log, for a message."""
        lines = self.log_lines
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its last line is {last!r} ({self.launch.log})" if last else "it printed nothing"

    @property
    def last_lines(self) -> str:
        """Describe the end of the log, for a message."""
        lines = self.log_lines
        if not lines:
            return f" It printed nothing ({self.launch.log} is empty)."
        shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f" Its last lines ({self.launch.log}):\n{shown}"


def search_path() -> str:
    """Return the search path of programs, with the folder of this Python first, as if it were activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def require_program(library: ExternalLibrary, working_folder: Path) -> None:
    """Check that the launch line names a program. Raises: UnreadableFileError."""
    program = fill(library.launch[0], {"python": sys.executable})
    path = search_path()
    if not any(shutil.which(name, path=path) for name in (program, str(working_folder / program))):
        hint = library.install or "install it, or give its path"
        raise UnreadableFileError(f"launch: there is no program {program!r} here: {hint}")


def require_modules(run: RunEvidence) -> None:
    """Check that the run did not fail for lack of a Python package. Raises: MachineError."""
    missing = _MISSING_MODULE.search("\n".join(run.log_lines))
    if run.exit_code and not run.losses and missing:
        name = missing[1].partition(".")[0]
        hint = run.launch.library.install or f"install it there, as by pip install {name}"
        raise MachineError(
            f"the launch line needs the Python package {name!r}, which is absent: {hint}"
        )


def require_free_ports(library: ExternalLibrary) -> None:
    """Check that nothing listens on the ports of the launch line. Raises: MachineError."""
    if taken := ports_taken(library.ports):
        raise MachineError(
            f"port {taken[0]} of `ports` is taken: end the process that listens there (ss -ltnp), or"
            " write {port} in the launch line for a free one"
        )


def write_timeline(run: RunEvidence, folder: Path) -> None:
    """Write the phases of a run to timelines/WORLD/rank-0.jsonl, for the page of a session.

    A step ends when its loss is logged. A checkpoint after it counts to the next step.
    """
    launch = run.launch
    device = 0 if run.on_device is None else run.on_device.peak_bytes
    ends = [*run.logged_at, run.ended_at]
    names: list[tuple[CyclePhase, int | None]] = [("set-up", None)]
    names += [("step", launch.first_step + 2 + index) for index in range(len(run.logged_at) - 1)]
    if run.logged_at:
        names.append(("tear-down", None))
    rows = [
        PhaseTime(
            phase=phase,
            number=number,
            begin=begin,
            end=None if run.hung_in is not None and end == run.ended_at else end,
            host_bytes=run.host.peak_bytes,
            device_bytes=device,
        )
        for (phase, number), begin, end in zip(names, [run.began_at, *ends], ends, strict=False)
    ]
    path = folder / "timelines" / _WORLDS.get(launch.name, launch.name) / "rank-0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(row.model_dump_json() + "\n" for row in rows))
