"""When each phase of a process began and ended, written at once: a killed process leaves it too."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import Field

from assay.devices.base import Device
from assay.devices.host_memory import peak_resident_bytes
from assay.files import parse_record, read_lines
from assay.verdicts import Record

CyclePhase = Literal["set-up", "step", "checkpoint", "resume", "read", "tear-down"]


class PhaseTime(Record):
    """One phase of one process.

    number: of the step; begin, end: seconds since the epoch; None for a phase that never ended.
    host_bytes: most resident memory of the process so far; device_bytes: most of the device's in
        this phase, which of a CPU is the process's.
    """

    phase: CyclePhase
    number: int | None = None
    begin: float
    end: float | None = None
    host_bytes: int = Field(default=0, ge=0)
    device_bytes: int = Field(default=0, ge=0)

    @property
    def name(self) -> str:
        """As in `step 2`."""
        return self.phase if self.number is None else f"{self.phase} {self.number}"


class Timeline:
    """Writes the phases of one process into a file of lines, each as it begins and as it ends."""

    def __init__(self, path: Path, device: Device) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._device = device

    @contextmanager
    def phase(self, phase: CyclePhase, number: int | None = None) -> Iterator[None]:
        """Inside, this phase runs; it ends after the device has done its work."""
        self._device.reset_peak_memory()
        begun = PhaseTime(phase=phase, number=number, begin=time.time())
        self._write(begun)
        yield
        self._device.synchronize()
        self._write(
            begun.model_copy(
                update={
                    "end": time.time(),
                    "host_bytes": peak_resident_bytes(),
                    "device_bytes": self._device.peak_memory_bytes(),
                }
            )
        )

    def _write(self, phase: PhaseTime) -> None:
        self._file.write(phase.model_dump_json() + "\n")
        self._file.flush()


def read_timeline(path: Path) -> list[PhaseTime]:
    """The phases in a file, in the order in which they began; none if there is no file."""
    if not path.is_file():
        return []
    phases: dict[float, PhaseTime] = {}
    for number, line in read_lines(path):
        if line.endswith("\n"):  # otherwise its process was killed during the write
            phase = parse_record(PhaseTime, line, path, number)
            phases[phase.begin] = phase
    return [phases[begin] for begin in sorted(phases)]


def where_it_stopped(path: Path) -> str | None:
    """The phase that a process was in when it ended; None if it was between two."""
    unfinished = [phase.name for phase in read_timeline(path) if phase.end is None]
    return unfinished[-1] if unfinished else None
