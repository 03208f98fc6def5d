"""Which of several failures is the cause, and how a failed world is told. No processes here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from assay.errors import AssayError, MachineError, UsageError, exit_in_words
from assay.launch.errors import WorldError, WorldHungError
from assay.launch.failures.rank_reports import RankReport
from assay.launch.world import World

# Of a rank's log: enough for the end of a traceback that torch or a driver printed.
_TAIL_LINES = 20


class Directness(IntEnum):
    """How directly a failure shows its cause; the least number is told first.

    A rank that was killed shows as an exception on the ranks that waited for it, and one that
    raised, skipped or went away as an error of their communication.
    """

    SIGNAL = 0
    EXCEPTION = 1
    EXIT = 2
    SKIP = 3
    COMMUNICATION = 4


@dataclass(slots=True)
class RankState:
    """What is known of one rank: its report, its exit code, and where it stood at the end.

    order: of its failure among all failures of the world.
    """

    report: RankReport | None = None
    exit_code: int | None = None
    where: str = ""
    log: str = ""
    order: int = 0

    @property
    def directness(self) -> Directness | None:
        """How this rank failed; None while it did not."""
        if self.exit_code is not None and self.exit_code < 0:
            return Directness.SIGNAL
        if self.report is None:
            return None if self.exit_code is None else Directness.EXIT
        if self.report.kind == "raised":
            is_communication = self.report.is_communication
            return Directness.COMMUNICATION if is_communication else Directness.EXCEPTION
        if self.exit_code:
            return Directness.EXIT
        return None


def strongest(states: Mapping[int, RankState]) -> tuple[Directness, list[int]] | None:
    """The ranks whose failure says most, the earliest first; None if nothing failed.

    A skip is a failure only where another rank did not skip, so it takes another failure, or a
    rank that returned, to make it one.
    """
    found = {rank: state.directness for rank, state in states.items()}
    failed = {rank: directness for rank, directness in found.items() if directness is not None}
    kinds = {state.report.kind for state in states.values() if state.report}
    if "skipped" in kinds and (failed or "returned" in kinds):
        failed |= {
            rank: Directness.SKIP
            for rank, state in states.items()
            if rank not in failed and state.report and state.report.kind == "skipped"
        }
    if not failed:
        return None
    best = min(failed.values())
    ranks = sorted(
        (rank for rank, directness in failed.items() if directness is best),
        key=lambda rank: (states[rank].order, rank),
    )
    return best, ranks


def failure_of(
    world: World, states: Mapping[int, RankState], found: tuple[Directness, list[int]]
) -> AssayError:
    """The error for a world in which a rank failed.

    found: what `strongest` gave.
    Returns: of an AssayError of a rank a UsageError or MachineError in its words.
    """
    best, ranks = found
    first = states[ranks[0]]
    report = first.report
    if best is Directness.EXCEPTION and report and report.words:
        return (UsageError if report.is_usage else MachineError)(report.words)
    lines = [f"rank {ranks[0]} of {world} {_say(best, first)}"]
    if best in (Directness.EXCEPTION, Directness.COMMUNICATION) and report:
        lines += _indent(report.traceback)
    elif first.where:
        lines += ["  it stood at", *_indent(first.where, 4)]
    lines += _say_others(states, ranks[0])
    lines += _say_log(ranks[0], first)
    return WorldError("\n".join(lines), ranks)


def hang_of(
    world: World, states: Mapping[int, RankState], what: str, ranks: Iterable[int]
) -> WorldHungError:
    """The error for a world whose `ranks` did not come to their end.

    what: the limit that was passed, in words.
    """
    waiting = sorted(ranks)
    lines = [f"{_name(waiting)} of {world} hung: {what}"]
    lines += _say_others(states, None)
    for rank in waiting:
        lines += _say_log(rank, states[rank])
    return WorldHungError("\n".join(lines), waiting)


def _say(directness: Directness, state: RankState) -> str:
    report = state.report
    if directness in (Directness.SIGNAL, Directness.EXIT):
        when = " before its body returned" if report is None else " after its body"
        if report and report.kind == "returned":
            when += " had returned"
        return f"{exit_in_words(state.exit_code or 0)}{when}"
    summary = report.summary if report else ""
    if directness is Directness.SKIP:
        return f"skipped ({summary}), but not all ranks did"
    return f"raised {summary}"


def _say_others(states: Mapping[int, RankState], told: int | None) -> list[str]:
    """A line for every other rank; ranks of which the same is to be said share one."""
    said: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if rank == told:
            continue
        directness = state.directness
        if directness is Directness.COMMUNICATION and state.report:
            line = f"waited at {state.report.where}, until {state.report.summary}"
        elif directness is not None:
            line = _say(directness, state)
        elif state.report is not None:
            line = state.report.kind + (
                f" ({state.report.summary})" if state.report.summary else ""
            )
            if state.where and state.exit_code is None:
                line += f", and is still at {state.where}"
        else:
            line = f"waited at {state.where}" if state.where else "did not say where it stands"
        said.setdefault(line, []).append(rank)
    return [f"  {_name(ranks)} {line}" for line, ranks in said.items()]


def _say_log(rank: int, state: RankState) -> list[str]:
    lines = state.log.splitlines()[-_TAIL_LINES:]
    return [f"  rank {rank} printed last:", *(f"    {line}" for line in lines)] if lines else []


def _indent(text: str, by: int = 2) -> list[str]:
    return [f"{' ' * by}{line}".rstrip() for line in text.splitlines()]


def _name(ranks: Sequence[int]) -> str:
    """As in "rank 3" and "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}"
