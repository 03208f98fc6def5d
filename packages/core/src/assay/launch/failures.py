"""Errors of processes and worlds: how each ended, the cause among several failures, and the messages."""

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from pickle import dumps  # a candidate may replace the functions of the module
from types import TracebackType
from typing import Literal

from assay.errors import AssayError, MachineError, UsageError, exit_in_words
from assay.launch.world import World

# Lines of a log in a message: enough for the end of a traceback of torch or a driver.
_TAIL_LINES = 20
# Enough for the stack of a model's code.
_STACK_LINES = 60
_TAIL_BYTES = 1 << 16
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")


class ForkServerError(MachineError):
    """The fork server died or failed."""

    @classmethod
    def ended(cls, how: str) -> "ForkServerError":
        """Make the error for a dead process; `how` is from `exit_in_words`."""
        return cls(f"the fork server {how}")

    @classmethod
    def refused(cls, traceback: str) -> "ForkServerError":
        """Make the error for an exception, in most cases from the import of a preloaded module.

        The exception of such an import says what is missing; where it was raised is left out.
        """
        lines = traceback.rstrip().splitlines()
        last = max((n for n, line in enumerate(lines) if line.startswith("  ")), default=-1)
        error = " ".join(filter(None, lines[last + 1 :]))
        if error.startswith(_IMPORT_ERRORS):
            return cls(f"a process cannot import what it needs: {error}")
        return cls(f"the fork server could not start a process:\n{traceback}")


class ProcessError(MachineError):
    """A process of the run that ended without an answer."""

    @classmethod
    def died(cls, name: str, exit_code: int, log: Path) -> "ProcessError":
        """Make the error for the process `name`, with the reason and the last lines of its log.

        If its last words say which package is missing, they are the reason.
        """
        last = next((line for line in reversed(read_end(log)) if line), "")
        if exit_code > 0 and last.startswith(_IMPORT_ERRORS):
            return cls(f"the {name} process cannot import what it needs: {last} ({log})")
        how = exit_in_words(exit_code) if exit_code else "ended"
        if exit_code >= 0:
            how += " and no result" if exit_code else " without a result"
        return cls(f"the {name} process {how}.{last_words(log)}")

    @classmethod
    def hung(cls, name: str, seconds: float, tasks: Sequence[str], log: Path) -> "ProcessError":
        """Make the error for a process that was ended by the time limit, in its open `tasks`."""
        phase = f" in {' > '.join(tasks)}" if tasks else ""
        limit = f"the time limit of {seconds:g} s (--timeout) passed"
        return cls(
            f"the {name} process did not end{phase}: {limit}.{last_words(log, _STACK_LINES)}"
        )


def last_words(log: Path, num_lines: int = _TAIL_LINES) -> str:
    """Quote the last lines of a log, for a message; "" without a log."""
    if not log.is_file():
        return ""
    lines = read_end(log)
    if not lines:
        return f" It printed nothing ({log} is empty)."
    return "\n".join([f" Its last lines ({log}):", *(f"  {line}" for line in lines[-num_lines:])])


def read_end(log: Path) -> list[str]:
    """Return the last lines of a log; of one that cannot be read, none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
            # A progress bar returns to the beginning of its line.
            return re.sub(r"^[^\n]*\r(?=[^\r\n])", "", text, flags=re.MULTILINE).splitlines()
    except OSError:
        return []


class RankSkipped(Exception):  # noqa: N818 - not an error
    """Raised by a body that cannot run on this rank. The world is skipped if all ranks raise it."""


class WorldSkipped(Exception):  # noqa: N818 - not an error
    """Raised by `call` if all ranks of the world raised RankSkipped."""


class WorldError(MachineError):
    """A world in which a rank did not return, or ended with an error after it returned.

    ranks: the ranks whose failure is reported first; it may have caused the others' failures.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorldHungError(WorldError):
    """A world whose time limit passed before all of its ranks had reported."""


class UnsendableError(UsageError):
    """A value that cannot be pickled for, or by, a rank."""

    @classmethod
    def of(cls, what: str, value: object, error: BaseException) -> "UnsendableError":
        """Make the error for `value`, called `what`, from pickle's `error`."""
        return cls(
            f"{what} cannot travel to the ranks: {type(value).__name__}: {error}. "
            "What reaches a rank is pickled; make it inside of the body instead"
        )


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")

_OWN_FOLDER = str(Path(__file__).parent)

# How the files of libraries and of this package begin.
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    _OWN_FOLDER,
    "<frozen",
)
# Functions that only call the function that the body means.
_WRAPPERS = {"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn"}
# Modes around the body stand above the function that it called.
_MODES = {"__torch_function__", "__torch_dispatch__"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def read_stack(text: str) -> list[Frame]:
    """Return the last stack of the main thread, the innermost frame first.

    text: a rank's stack file, whose first line is the main thread's identity.
    """
    identity, _, dumps = text.partition("\n")
    frames: list[Frame] = []
    is_main = False
    for line in dumps.splitlines():
        if thread := _THREAD.match(line):
            is_main = int(thread["ident"], 16) == int(identity, 16)
            if is_main:
                frames = []
        elif is_main and (frame := _FRAME.match(line)):
            frames.append(Frame(**frame.groupdict()))
    return frames


def describe_place(frames: list[Frame]) -> str:
    """Return the innermost line outside libraries, and the library function that it called.

    frames: the innermost first. Returns: "" for no frames.
    """
    if not frames:
        return ""
    bodies = (frame for frame in frames if frame.function not in _MODES)
    own = next((frame for frame in bodies if not frame.file.startswith(_LIBRARIES)), None)
    if own is None:
        return str(frames[0])
    inside = [frame for frame in frames[: frames.index(own)] if frame.function not in _WRAPPERS]
    # The function that the body called is more useful than the innermost one.
    return f"{own}, in {inside[-1].function}" if inside else str(own)


Kind = Literal["returned", "skipped", "raised"]

_COMMUNICATION_WORDS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "pair closure",
    "Connection refused",
)

# Parts of gloo's messages that do not describe the event: a source line, advice.
_COMMUNICATION_NOISE = (
    re.compile(r"\[[^\]]*/gloo/[^\]]*\] "),
    re.compile(r"\.? This is typically caused by .*"),
)


@dataclass(frozen=True, slots=True)
class RankReport:
    """The end of the body of one rank."""

    kind: Kind
    summary: str = ""
    """Exception and message in one line, or the reason of a skip."""
    where: str = ""
    """The line of the body's own code that raised."""
    traceback: str = ""
    is_communication: bool = False
    """True if the exception means only that another rank did not answer."""
    words: str = ""
    """The message of an AssayError; "" for all other exceptions."""
    is_usage: bool = False
    """True if the exception is a UsageError."""
    value: bytes = b""
    """The pickled return value of the body."""


def report_of(body: Callable[[], object]) -> RankReport:
    """Run `body`. Report its return value or exception, including SystemExit and Ctrl-C."""
    try:
        value = body()
        try:
            return RankReport("returned", value=dumps(value))
        except Exception as error:  # noqa: BLE001 - pickle raises what the value's class does
            raise UnsendableError.of("what the body returned", value, error) from None
    except RankSkipped as skipped:
        return RankReport("skipped", summary=str(skipped))
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        return raised_report(error)


def raised_report(error: BaseException) -> RankReport:
    """Report an exception of the body."""
    error = error.with_traceback(_trimmed(error.__traceback__))
    return RankReport(
        "raised",
        summary=_summary(error),
        where=_place(error),
        traceback="".join(traceback.format_exception(error)).rstrip(),
        is_communication=is_communication_error(error),
        words=str(error) if isinstance(error, AssayError) else "",
        is_usage=isinstance(error, UsageError),
    )


def is_communication_error(error: BaseException | None) -> bool:
    """Return True if `error`, or a cause of it, means only that another rank did not answer.

    gloo raises plain RuntimeErrors, so this searches their messages.
    """
    from torch.distributed import DistError

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DistError):
            return True
        if isinstance(error, RuntimeError) and any(
            words in str(error) for words in _COMMUNICATION_WORDS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _summary(error: BaseException) -> str:
    text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    for noise in _COMMUNICATION_NOISE:
        text = noise.sub("", text)
    return text


def _place(error: BaseException) -> str:
    stack = traceback.extract_tb(error.__traceback__)
    return describe_place([Frame(f.filename, str(f.lineno), f.name) for f in reversed(stack)])


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    """Remove the outermost frames, which call the body on every rank."""
    while trace is not None and trace.tb_next is not None:
        frame = trace.tb_frame
        if not (
            frame.f_code.co_filename.startswith(_OWN_FOLDER)
            or frame.f_locals.get("__tracebackhide__")
        ):
            break
        trace = trace.tb_next
    return trace


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
