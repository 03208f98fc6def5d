"""Records when each phase of a process began and ended. Each is written at once, so kills lose nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import Field

from assay.devices.base import Device
from assay.devices.cpu import peak_resident_bytes
from assay.files import parse_record, read_lines
from assay.verdicts import Record

CyclePhase = Literal["set-up", "step", "checkpoint", "resume", "read", "tear-down"]


class PhaseTime(Record):
    """A phase of a process."""

    phase: CyclePhase
    number: int | None = None
    """Number of the step."""
    begin: float
    """Seconds since the epoch."""
    end: float | None = None
    """Seconds since the epoch; None for an unfinished phase."""
    host_bytes: int = Field(default=0, ge=0)
    """Peak resident memory of the process so far."""
    device_bytes: int = Field(default=0, ge=0)
    """Peak device memory within the phase. On a CPU, peak memory of the process."""


class Timeline:
    """Writes a line when a phase begins and another when it ends."""

    def __init__(self, path: Path, device: Device) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._device = device

    @contextmanager
    def phase(self, phase: CyclePhase, number: int | None = None) -> Iterator[None]:
        """Record the block as a phase, which ends after the device has finished its work."""
        self._device.reset_peak_memory()
        one = PhaseTime(phase=phase, number=number, begin=time.time())
        self._write(one)
        yield
        self._device.synchronize()
        one.end, one.host_bytes = time.time(), peak_resident_bytes()
        one.device_bytes = self._device.peak_memory_bytes()
        self._write(one)

    def _write(self, phase: PhaseTime) -> None:
        self._file.write(phase.model_dump_json() + "\n")
        self._file.flush()


def read_timeline(path: Path) -> list[PhaseTime]:
    """Read the phases of a file in the order of their begin. A missing file has none."""
    if not path.is_file():
        return []
    phases: dict[float, PhaseTime] = {}
    for number, line in read_lines(path):
        if line.endswith("\n"):  # otherwise the process was killed while writing
            phase = parse_record(PhaseTime, line, path, number)
            phases[phase.begin] = phase
    return [phases[begin] for begin in sorted(phases)]


def where_it_stopped(path: Path) -> str | None:
    """Return the last unfinished phase, as "step 2", or None if the process ended between two phases."""
    for one in read_timeline(path)[::-1]:
        if one.end is None:
            return one.phase if one.number is None else f"{one.phase} {one.number}"
    return None


class PhaseSeconds(Record):
    """A phase of a world on its slowest rank, in seconds since the case began."""

    world: str
    phase: CyclePhase
    number: int | None = None
    begin: float
    end: float
    finished: bool = True
    """False if the process ended within the phase."""


def phases_of(folder: Path) -> list[PhaseSeconds]:
    """Read the phases of each world from the timeline of its slowest rank."""
    of_worlds = _read_worlds(folder)
    start = min((ranks[0][0].begin for ranks in of_worlds.values()), default=0.0)
    return [
        PhaseSeconds(
            world=world,
            phase=phase.phase,
            number=phase.number,
            begin=phase.begin - start,
            end=(phase.end if phase.end is not None else phase.begin) - start,
            finished=phase.end is not None,
        )
        for world, ranks in of_worlds.items()
        for phase in max(ranks, key=lambda rank: max(phase.end or phase.begin for phase in rank))
    ]


def peak_memory(folder: Path) -> tuple[int, int]:
    """Return the peak host and device memory of any rank, in bytes."""
    phases = [phase for ranks in _read_worlds(folder).values() for rank in ranks for phase in rank]
    return (
        max((phase.host_bytes for phase in phases), default=0),
        max((phase.device_bytes for phase in phases), default=0),
    )


def _read_worlds(folder: Path) -> dict[str, list[list[PhaseTime]]]:
    """Read the timelines of all ranks by world, the earliest world first."""
    worlds: dict[str, list[list[PhaseTime]]] = {}
    for file in sorted((folder / "timelines").glob("*/rank-*.jsonl")):
        if phases := read_timeline(file):
            worlds.setdefault(file.parent.name, []).append(phases)
    return dict(sorted(worlds.items(), key=lambda item: min(rank[0].begin for rank in item[1])))
