"""What a session says of its cases, as JSON."""

from pathlib import Path

from pydantic import Field

from assay.verdicts import SCHEMA, Outcome, Record, Verdict
from assay_smoke.cases.timeline import CyclePhase, PhaseTime, read_timeline

# The worlds of a case, in their order.


class PhaseSeconds(Record):
    """How long one phase of one world took, on its slowest rank.

    begin: after the case began; end: of the phase, which if `finished` is false was never reached.
    """

    world: str
    phase: CyclePhase
    number: int | None = None
    begin: float
    end: float
    finished: bool = True


class CaseResult(Record):
    """One case of a session.

    name: id of the case or other item.
    reason: text of the first level that failed or was not compared. For a PASS, text of a level that
        could not be checked.
    error: why the case could not be judged: the library does not do what its file states, or a
        dependency is missing.
    infrastructure: machine failure in the last try, unrelated to the case.
    tries: number of runs. tried_again_for: earlier machine failures.
    command: the command line for this case alone.
    folder: folder of its verdict, report and logs, below that of the session.
    host_bytes, device_bytes: peak memory of a rank.
    """

    name: str
    outcome: Outcome
    seconds: float
    reason: str | None = None
    diagnosis: str | None = None
    error: str | None = None
    infrastructure: str | None = None
    tries: int = 1
    tried_again_for: str | None = None
    command: str = ""
    folder: str = ""
    phases: list[PhaseSeconds] = Field(default_factory=list)
    host_bytes: int = 0
    device_bytes: int = 0

    @property
    def word(self) -> str:
        """PASS, FAIL or NOT_COMPARED, or ERROR where there was nothing to judge."""
        return "ERROR" if self.error else self.outcome.value


class SessionReport(Record):
    """All cases of a session, in the order in which they ended."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    device: str
    cases: list[CaseResult]
    seconds: float
    pairs_covered: int
    pairs_possible: int

    @property
    def exit_code(self) -> int:
        """2 for an error or where the machine failed; else 1, 3 or 0, as the cases say."""
        if any(
            case.error or (case.infrastructure and case.outcome is not Outcome.PASS)
            for case in self.cases
        ):
            return 2
        outcomes = {case.outcome for case in self.cases}
        if Outcome.FAIL in outcomes:
            return Outcome.FAIL.exit_code
        if Outcome.NOT_COMPARED in outcomes or not self.cases:
            return Outcome.NOT_COMPARED.exit_code
        return Outcome.PASS.exit_code


def reason_of(verdict: Verdict) -> str | None:
    """Return the reason of the first failed or uncompared level, or of an unchecked one in a PASS."""
    for outcome in (Outcome.FAIL, Outcome.NOT_COMPARED):
        for name, level in verdict.levels.items():
            if level.verdict is outcome:
                worst = (level.model_extra or {}).get("worst")
                return f"{name}: {level.reason or worst or 'over its limit'}"
    for name, level in verdict.levels.items():
        if (level.model_extra or {}).get("unchecked"):
            return f"{name}: {level.reason}"
    return None


def phases_of(folder: Path) -> list[PhaseSeconds]:
    """The phases of every world of the case in `folder`, by what its slowest rank needed."""
    of_worlds = _worlds(folder)
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
        for phase in max(ranks, key=_end_of)
    ]


def peak_memory(folder: Path) -> tuple[int, int]:
    """Most bytes of the host, and of the device, that any rank of the case in `folder` needed."""
    phases = [phase for ranks in _worlds(folder).values() for rank in ranks for phase in rank]
    return (
        max((phase.host_bytes for phase in phases), default=0),
        max((phase.device_bytes for phase in phases), default=0),
    )


def _worlds(folder: Path) -> dict[str, list[list[PhaseTime]]]:
    """The timelines of the ranks of every world that began, the earliest world first."""
    worlds: dict[str, list[list[PhaseTime]]] = {}
    for file in sorted((folder / "timelines").glob("*/rank-*.jsonl")):
        if phases := read_timeline(file):
            worlds.setdefault(file.parent.name, []).append(phases)
    return dict(sorted(worlds.items(), key=lambda item: min(rank[0].begin for rank in item[1])))


def _end_of(phases: list[PhaseTime]) -> float:
    return max((phase.end or phase.begin for phase in phases), default=0.0)
