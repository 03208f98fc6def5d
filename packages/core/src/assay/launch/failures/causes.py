"""Find the cause among several failures, and word the message of a failed world; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from assay.errors import AssayError, MachineError, UsageError, exit_in_words
from assay.launch.errors import WorldError, WorldHungError
from assay.launch.failures.rank_reports import RankReport
from assay.launch.world import World

# Lines of a rank's log in a message: enough for the end of a traceback of torch or a driver.
_TAIL_LINES = 20


class Directness(IntEnum):
    """The directness of a failure; the least number is reported first.

    A killed rank causes exceptions on the ranks that wait for it. A rank that raised, skipped or
    exited causes communication errors there.
    """

    SIGNAL = 0
    EXCEPTION = 1
    EXIT = 2
    SKIP = 3
    COMMUNICATION = 4


@dataclass(slots=True)
class RankState:
    """The data received from and about one rank."""

    report: RankReport | None = None
    exit_code: int | None = None
    where: str = ""
    """The last line of its stack."""
    log: str = ""
    """The end of its output."""
    order: int = 0
    """Number of its first report or exit among those of all ranks; 0 before."""

    @property
    def directness(self) -> Directness | None:
        """Return the kind of this rank's failure; None if it has not failed."""
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
    """Find the most direct kind of failure, and its ranks, the earliest first; None without failure.

    A skip counts as a failure only if another rank failed or returned.
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
    """Make the error for a world in which a rank failed.

    found: the result of `strongest`.
    Returns: for a rank that raised an AssayError a UsageError or MachineError with its message,
        otherwise a WorldError.
    """
    best, ranks = found
    first = states[ranks[0]]
    report = first.report
    if best is Directness.EXCEPTION and report and report.words:
        return (UsageError if report.is_usage else MachineError)(report.words)
    lines = [f"rank {ranks[0]} of {world} {_describe(best, first)}"]
    if best in (Directness.EXCEPTION, Directness.COMMUNICATION) and report:
        lines += _indent(report.traceback)
    elif first.where:
        lines += ["  it stood at", *_indent(first.where, 4)]
    lines += _describe_others(states, ranks[0])
    lines += _quote_log(ranks[0], first)
    return WorldError("\n".join(lines), ranks)


def hang_of(
    world: World, states: Mapping[int, RankState], what: str, ranks: Iterable[int]
) -> WorldHungError:
    """Make the error for a world whose `ranks` did not end in time.

    what: the limit that was passed, for the message.
    """
    waiting = sorted(ranks)
    lines = [f"{name_ranks(waiting)} of {world} hung: {what}"]
    lines += _describe_others(states, None)
    for rank in waiting:
        lines += _quote_log(rank, states[rank])
    return WorldHungError("\n".join(lines), waiting)


def _describe(directness: Directness, state: RankState) -> str:
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


def _describe_others(states: Mapping[int, RankState], reported: int | None) -> list[str]:
    """Describe all ranks but `reported`; ranks with the same line share it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if rank == reported:
            continue
        directness = state.directness
        if directness is Directness.COMMUNICATION and state.report:
            line = f"waited at {state.report.where}, until {state.report.summary}"
        elif directness is not None:
            line = _describe(directness, state)
        elif state.report is not None:
            line = state.report.kind + (
                f" ({state.report.summary})" if state.report.summary else ""
            )
            if state.where and state.exit_code is None:
                line += f", and is still at {state.where}"
        else:
            line = f"waited at {state.where}" if state.where else "did not report where it stands"
        ranks_of.setdefault(line, []).append(rank)
    return [f"  {name_ranks(ranks)} {line}" for line, ranks in ranks_of.items()]


def _quote_log(rank: int, state: RankState) -> list[str]:
    lines = state.log.splitlines()[-_TAIL_LINES:]
    return [f"  rank {rank} printed last:", *(f"    {line}" for line in lines)] if lines else []


def _indent(text: str, by: int = 2) -> list[str]:
    return [f"{' ' * by}{line}".rstrip() for line in text.splitlines()]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}"
