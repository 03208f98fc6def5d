"""What is launched, what has to be there for it, and what was seen of it."""

import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from assay.devices.base import Device
from assay.errors import MachineError
from assay_smoke.external.library import ExternalLibrary, LibraryFileError, fill
from assay_smoke.external.running.losses import LoggedLoss
from assay_smoke.machine.leftovers import Leftover, free_port, ports_taken
from assay_smoke.machine.memory import MemoryUse

Phase = Literal["set-up", "steps", "tear-down"]

_TAIL_LINES = 20
_MISSING_MODULE = re.compile(
    r"^(?:\[.*?\]:\s*)?ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is launched: NAME.log and the library's own output go into `folder`.

    resume_from: the checkpoint to resume from; None: from the start.
    first_step: the number of steps that were made before.
    sigterm_after: after how many logged losses the process is sent SIGTERM; None: never.
    """

    name: str
    library: ExternalLibrary
    model: Path
    folder: Path
    working_folder: Path
    resume_from: Path | None = None
    first_step: int = 0
    sigterm_after: int | None = None
    device: Device | None = None

    @property
    def log(self) -> Path:
        """All that the processes print."""
        return self.folder / f"{self.name}.log"

    @property
    def output(self) -> Path:
        """What {output} is."""
        return self.folder / f"{self.name}-output"

    @property
    def values(self) -> dict[str, object]:
        """The values of the placeholders but for the port."""
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
        """The words of the launch line; a {port} is one that is free now."""
        values = self.values | {"port": free_port()}
        words = [fill(word, values) for word in self.library.launch]
        if self.resume_from is not None:
            values["resume_from"] = self.resume_from.resolve()
            words += [fill(word, values) for word in self.library.resume]
        return words


@dataclass(slots=True)
class RunEvidence:
    """What was seen of one run.

    signalled_after: how many losses there were when SIGTERM was sent; None: it was not.
    hung_in: the phase in which a limit of time was over; waits: where its processes then were.
    began_at, logged_at, ended_at: when it was started, when each loss was seen, and when it had ended,
        in seconds since the epoch.
    """

    launch: Launch
    exit_code: int = 0
    losses: list[LoggedLoss] = field(default_factory=list)
    signalled_after: int | None = None
    hung_in: Phase | None = None
    waits: list[str] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    host: MemoryUse = field(default_factory=lambda: MemoryUse(0, 0, 0))
    on_device: MemoryUse | None = None
    began_at: float = 0.0
    logged_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def seconds(self) -> dict[Phase, float]:
        """How long each phase took: until the first loss, until the last, until the end."""
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
    def last_line(self) -> str:
        """The last thing that it printed, and where the rest is, in words for a message."""
        lines = self.launch.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its last line is {last!r} ({self.launch.log})" if last else "it printed nothing"

    @property
    def last_lines(self) -> str:
        """The end of what it printed, in words for a message."""
        lines = self.launch.log.read_text(encoding="utf-8", errors="replace").splitlines()
        if not lines:
            return f" It printed nothing ({self.launch.log} is empty)."
        shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f" Its last lines ({self.launch.log}):\n{shown}"


def search_path() -> str:
    """Where programs are searched: beside the Python that runs this first, as if it were activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def find_program(library: ExternalLibrary, working_folder: Path) -> None:
    """Make sure that the launch line names a program. Raises: LibraryFileError."""
    program = fill(library.launch[0], {"python": sys.executable})
    path = search_path()
    if not any(shutil.which(name, path=path) for name in (program, str(working_folder / program))):
        hint = library.install or "install it, or give its path"
        raise LibraryFileError(f"launch: there is no program {program!r} here: {hint}")


def require_modules(run: RunEvidence) -> None:
    """Make sure that a run did not end because a Python package is absent. Raises: MachineError."""
    missing = _MISSING_MODULE.search(run.launch.log.read_text(encoding="utf-8", errors="replace"))
    if run.exit_code and not run.losses and missing:
        name = missing[1].partition(".")[0]
        hint = run.launch.library.install or f"install it there, as by pip install {name}"
        raise MachineError(
            f"the launch line needs the Python package {name!r}, which is absent: {hint}"
        )


def require_free_ports(library: ExternalLibrary) -> None:
    """Make sure that nobody listens on the ports of the launch line. Raises: MachineError."""
    if taken := ports_taken(library.ports):
        raise MachineError(
            f"port {taken[0]} of `ports` is taken: end what listens there (ss -ltnp), or write {{port}}"
            " in the launch line, which is a free one"
        )
