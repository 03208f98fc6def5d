"""Properties tried on code under check: its calls, cases, and the smallest case that breaks each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pydantic import Field

from assay.errors import AssayError, UsageError, raised_in_words
from assay.verdicts import Outcome, Record

DataLevel = Literal[
    "chat", "labels", "collator", "packing", "sampler", "batch-sampler", "accumulation", "workers"
]
LEVELS: tuple[DataLevel, ...] = get_args(DataLevel)


class RaisedError(UsageError):
    """A function of a user or library that raised an exception or returned a malformed result."""


class DeclinedError(RaisedError):
    """A case that the code declined by NotImplementedError."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The code under check."""

    name: str
    """Name in reports: FILE.py:NAME, or a library's class and version."""

    @contextmanager
    def called_for(self, case: str, hint: str = "") -> Iterator[None]:
        """Turn any exception in the block into a RaisedError that names `case`, with a hint on the next line."""
        try:
            yield
        except AssayError:
            raise
        except NotImplementedError as error:
            raise DeclinedError(f"{self.name} declines {case} ({error})") from error
        except (Exception, SystemExit) as error:
            lines = [f"{self.name} raised {raised_in_words(error)}", f"for {case}", hint]
            raise RaisedError("\n  ".join(filter(None, lines))) from error

    def returned(self, what: str, wanted: str) -> RaisedError:
        """Make the error for a malformed result."""
        return RaisedError(f"{self.name} returned {what}; it must return {wanted}")


class Fault(NamedTuple):
    """A property broken in one case."""

    name: str
    reason: str
    """One sentence."""
    example: Sequence[str] = ()
    """The case in a few lines."""


class BrokenProperty(Record):
    """A property that does not hold, with the smallest case that breaks it."""

    name: str
    reason: str
    example: list[str]
    failed: int
    """Number of the `cases` that break it."""
    cases: int


class SubjectReport(Record):
    """The report on one subject, such as a library's collator or a user's function."""

    subject: str
    """Its name, with the version of its library."""
    cases: dict[str, int]
    """Number of judged cases by promised property."""
    findings: list[BrokenProperty] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @property
    def compared(self) -> int:
        """Count the cases of all properties."""
        return sum(self.cases.values())

    @property
    def outcome(self) -> Outcome:
        """FAIL if a property is broken, NOT_COMPARED if one has no case."""
        if self.findings:
            return Outcome.FAIL
        return Outcome.PASS if self.compared and not self.untried else Outcome.NOT_COMPARED

    @property
    def untried(self) -> list[str]:
        """Return the properties without a case."""
        return [name for name, count in self.cases.items() if not count]


class PropertyLog:
    """Collects judgements on one subject. Cases must come smallest first.

    promised: properties that must be tried for the subject to pass.
    """

    def __init__(self, subject: str, promised: Iterable[str]) -> None:
        self._subject = subject
        self._cases = dict.fromkeys(promised, 0)
        self._broken: dict[str, BrokenProperty] = {}
        self._notes: dict[str, None] = {}

    def judge(self, names: Sequence[str], faults: Iterable[Fault]) -> None:
        """Count one case of each of the properties `names`. A property breaks by the first of its faults."""
        first: dict[str, Fault] = {}
        for fault in faults:
            first.setdefault(fault.name, fault)
        if unjudged := first.keys() - set(names):
            raise AssertionError(f"faults of properties that are not judged: {unjudged}")
        for name in names:
            self._cases[name] += 1
            if name in first:
                _, reason, example = first[name]
                broken = BrokenProperty(
                    name=name, reason=reason, example=list(example), failed=0, cases=0
                )
                self._broken.setdefault(name, broken).failed += 1

    def note(self, text: str) -> None:
        """Keep a remark, each text once."""
        self._notes[text] = None

    def waive_untried(self, why: str) -> None:
        """Drop untried properties from the promised ones, and note why."""
        for name in [name for name, count in self._cases.items() if not count]:
            del self._cases[name]
            self.note(f"not tried because {why}: {name}")

    def report(self) -> SubjectReport:
        """Make the report, in the order of the properties."""
        findings = [
            self._broken[name].model_copy(update={"cases": count})
            for name, count in self._cases.items()
            if name in self._broken
        ]
        return SubjectReport(
            subject=self._subject,
            cases=dict(self._cases),
            findings=findings,
            notes=list(self._notes),
        )


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """A check of one subject."""

    level: DataLevel
    name: str
    run: Callable[[], SubjectReport]
    is_own: bool = True
    """True if the user gave the subject. Its exceptions then end the command."""


def list_numbers(numbers: Sequence[int], most: int = 12) -> str:
    """List numbers, at most as many as fit a line."""
    shown = ", ".join(map(str, numbers[:most]))
    rest = len(numbers) - most
    return f"{shown} and {rest} more" if rest > 0 else shown
