"""Which properties were tried on a subject, in how many cases, and the smallest that breaks each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from assay.verdicts import Record


@dataclass(frozen=True, slots=True)
class Wrong:
    """A property that does not hold in one case: why in a sentence, and the case in a few lines."""

    reason: str
    example: tuple[str, ...] = ()


class Finding(Record):
    """A property that does not hold, with the first case that shows it, cases being tried smallest first.

    failed: how many of the `cases` show it.
    """

    name: str
    reason: str
    example: list[str]
    failed: int
    cases: int


class SubjectReport(Record):
    """What was found out about one subject, such as a library's collator or a user's function.

    subject: its name, with the version of its library.
    cases: of each property that was promised, how many were judged.
    """

    subject: str
    cases: dict[str, int]
    findings: list[Finding] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @property
    def compared(self) -> int:
        """The cases of all properties."""
        return sum(self.cases.values())

    @property
    def untried(self) -> list[str]:
        """Properties that no case was found for."""
        return [name for name, count in self.cases.items() if not count]


class PropertyLog:
    """Collects the judgements on one subject; cases have to come smallest first.

    promised: every property that has to be tried for the subject to pass.
    """

    def __init__(self, subject: str, promised: Iterable[str]) -> None:
        self._subject = subject
        self._cases = dict.fromkeys(promised, 0)
        self._first: dict[str, Wrong] = {}
        self._failed: dict[str, int] = {}
        self._notes: dict[str, None] = {}

    def judge(self, name: str, wrong: Wrong | None) -> None:
        """Count one case of the property `name`, which holds in it if there is nothing wrong."""
        self._cases[name] += 1
        if wrong is not None:
            self._first.setdefault(name, wrong)
            self._failed[name] = self._failed.get(name, 0) + 1

    def note(self, text: str) -> None:
        """Keep what is no failure; the same text once."""
        self._notes[text] = None

    def waive_untried(self, why: str) -> None:
        """Take back the promise of the properties that no case was judged for; `why` is noted."""
        for name in [name for name, count in self._cases.items() if not count]:
            del self._cases[name]
            self.note(f"not tried, {why}: {name}")

    def report(self) -> SubjectReport:
        """Everything that was found, in the order of the properties."""
        findings = [
            Finding(
                name=name,
                reason=self._first[name].reason,
                example=list(self._first[name].example),
                failed=self._failed[name],
                cases=count,
            )
            for name, count in self._cases.items()
            if name in self._first
        ]
        return SubjectReport(
            subject=self._subject,
            cases=dict(self._cases),
            findings=findings,
            notes=list(self._notes),
        )


def first_wrong(judged: Iterable[Wrong | None]) -> Wrong | None:
    """The first that is wrong."""
    return next((wrong for wrong in judged if wrong is not None), None)


def listed(numbers: Sequence[int], most: int = 12) -> str:
    """Numbers in words, as far as a line has room."""
    shown = ", ".join(map(str, numbers[:most]))
    rest = len(numbers) - most
    return f"{shown} and {rest} more" if rest > 0 else shown
