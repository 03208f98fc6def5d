"""The evidence from one run of a library, and from one that resumed."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from assay.errors import MachineError, exit_in_words
from assay.files import write_whole
from assay.verdicts import Ratio
from assay_smoke.cases.timeline import CyclePhase, PhaseTime
from assay_smoke.external.checkpoints import SavedModel
from assay_smoke.external.launch import Launch
from assay_smoke.external.losses import LoggedLoss
from assay_smoke.machine.failures import FULL_DISK
from assay_smoke.machine.leftovers import Leftover
from assay_smoke.machine.process_tree import MemoryUse

Phase = Literal["set-up", "steps", "tear-down"]

_TAIL_LINES = 20

# Names of worlds in timelines for runs that have a counterpart among the worlds of a case.
_WORLDS = {"uninterrupted": "train", "interrupted": "terminate", "resumed": "resume"}

_MISSING_MODULE = re.compile(
    r"^(?:\[.*?\]:\s*)?ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE
)


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
    """Places where the processes of a hung run waited."""
    leftovers: list[Leftover] = field(default_factory=list)
    host: MemoryUse = field(default_factory=lambda: MemoryUse(0, 0, 0))
    on_device: MemoryUse | None = None
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def values(self) -> list[float]:
        """Return the losses as numbers."""
        return [loss.value for loss in self.losses]

    @property
    def ended_well(self) -> bool:
        """Return whether it ended by itself, with exit code 0."""
        return self.exit_code == 0 and self.hung_in is None

    @property
    def phase(self) -> Phase:
        """Return the phase that the losses so far imply."""
        if not self.losses:
            return "set-up"
        return "steps" if self.steps_made < self.launch.library.steps else "tear-down"

    @property
    def seconds(self) -> dict[Phase, float]:
        """Return the duration of each phase: until the first loss, until the last, until the end."""
        logged = [loss.seen_at for loss in self.losses] or [self.ended_at]
        return {
            "set-up": logged[0] - self.began_at,
            "steps": logged[-1] - logged[0],
            "tear-down": self.ended_at - logged[-1],
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
        reason = f"the {name} run {exit_in_words(self.exit_code)} {where}; {self._last_line}"
        full = next((words for words in FULL_DISK if words in self.last_lines), None)
        return reason if full is None else f"{full}: {reason}"

    def describe_waits(self) -> str:
        """Describe where the processes of a hung run were, each after a semicolon."""
        return "".join(f"; {place}" for place in self.waits)

    @property
    def _log_lines(self) -> list[str]:
        return self.launch.log.read_text(encoding="utf-8", errors="replace").splitlines()

    @property
    def _last_line(self) -> str:
        last = next((line.strip() for line in reversed(self._log_lines) if line.strip()), "")
        return f"its last line is {last!r} ({self.launch.log})" if last else "it printed nothing"

    @property
    def last_lines(self) -> str:
        """Describe the end of the log, for a message."""
        lines = self._log_lines
        if not lines:
            return f" It printed nothing ({self.launch.log} is empty)."
        shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f" Its last lines ({self.launch.log}):\n{shown}"

    def require_modules(self) -> None:
        """Check that it did not fail for lack of a Python package. Raises: MachineError."""
        missing = _MISSING_MODULE.search("\n".join(self._log_lines))
        if self.exit_code and not self.losses and missing:
            name = missing[1].partition(".")[0]
            hint = self.launch.library.install or f"install it there, as by pip install {name}"
            raise MachineError(
                f"the launch line needs the Python package {name!r}, which is absent: {hint}"
            )

    def write_timeline(self, folder: Path) -> None:
        """Write the phases to timelines/WORLD/rank-0.jsonl, for the page of a session.

        A step ends when its loss is logged. A checkpoint after it counts to the next step.
        """
        ends = [*(loss.seen_at for loss in self.losses), self.ended_at]
        first = self.launch.first_step + 2
        names: list[tuple[CyclePhase, int | None]] = [
            ("set-up", None),
            *(("step", first + index) for index in range(len(self.losses) - 1)),
            ("tear-down", None),
        ]
        rows = [
            PhaseTime(
                phase=phase,
                number=number,
                begin=begin,
                end=None if self.hung_in is not None and end == self.ended_at else end,
                host_bytes=self.host.peak_bytes,
                device_bytes=0 if self.on_device is None else self.on_device.peak_bytes,
            )
            for (phase, number), begin, end in zip(
                names, [self.began_at, *ends], ends, strict=False
            )
        ]
        world = _WORLDS.get(self.launch.name, self.launch.name)
        path = folder / "timelines" / world / "rank-0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(row.model_dump_json() + "\n" for row in rows))


@dataclass(frozen=True, slots=True)
class Spread:
    """Errors of a resumed run relative to those of a repeated one."""

    losses: Ratio
    ends: Ratio
    moved: float
    """Change by training since the checkpoint, in the unit of the error of the ends."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that resumed from a checkpoint."""

    run: RunEvidence
    end: SavedModel | None = None
    """Its last checkpoint; None if there is none or the run ended badly."""
    repeated_differs: bool | None = None
    """Whether two uninterrupted runs of one seed differ; None if the resumed run is equal."""
    spread: Spread | None = None
    """None if two uninterrupted runs are equal or left nothing to compare."""

    @property
    def ratios(self) -> list[Ratio]:
        """Return the ratios of the spread."""
        return [] if self.spread is None else [self.spread.losses, self.spread.ends]
