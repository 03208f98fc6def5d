"""The request of `assay smoke data`, the cases and broken properties of its answer, and the verdict by level."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import Field

from assay.errors import AssayError, UsageError, raised_in_words
from assay.judge.levels import Cause, LevelResult, conclude, not_run
from assay.judge.wording import LEVEL_QUESTIONS
from assay.models.sources import RemoteCode
from assay.plugins import find_plugin_file
from assay.verdicts import Level, Outcome, Record, Verdict
from assay_smoke.data.protocols import FeatureKind, Truncation

DataLevel = Literal[
    "chat", "labels", "collator", "packing", "sampler", "batch-sampler", "accumulation", "workers"
]
LEVELS: tuple[DataLevel, ...] = get_args(DataLevel)


class RaisedError(UsageError):
    """A function of a user or library that raised an exception or returned a malformed result."""


class DeclinedError(RaisedError):
    """A case that the code declined by NotImplementedError."""

    def __init__(self, case: str, reason: str) -> None:
        super().__init__(f"declines {case} ({reason})")
        self.case, self.reason = case, reason


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
            raise DeclinedError(case, str(error) or type(error).__name__) from error
        except (Exception, SystemExit) as error:
            lines = [f"{self.name} raised {raised_in_words(error)}", f"for {case}", hint]
            raise RaisedError("\n  ".join(filter(None, lines))) from error

    def returned(self, what: str, wanted: str) -> RaisedError:
        """Make the error for a malformed result."""
        return RaisedError(f"{self.name} returned {what}; it must return {wanted}")

    def iterate(self, given: Any, place: str, wanted: str) -> Iterator[Any]:  # noqa: ANN401 - of users' code
        """Iterate a result or a part of it, the place. Raises: RaisedError if it is not iterable."""
        if not hasattr(given, "__iter__"):
            raise self.returned(f"{given!r:.60}{place}", wanted)
        return iter(given)


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
    """The report on one subject, such as a library's collator or a user's function.

    Cases must be judged smallest first.
    """

    subject: str
    """Its name, with the version of its library."""
    cases: dict[str, int]
    """Number of judged cases by promised property."""
    findings: list[BrokenProperty] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    problem: str = ""
    """Exception of the subject, or a description of its malformed result."""

    @property
    def compared(self) -> int:
        """Count the cases of all properties."""
        return sum(self.cases.values())

    @property
    def untried(self) -> list[str]:
        """Return the properties without a case."""
        return [name for name, count in self.cases.items() if not count]

    @classmethod
    def promising(cls, subject: str, promised: Iterable[str]) -> Self:
        """Make an empty report. promised: properties that must be tried for the subject to pass."""
        return cls(subject=subject, cases=dict.fromkeys(promised, 0))

    def judge(self, names: Sequence[str], faults: Iterable[Fault]) -> None:
        """Count one case of each of the properties `names`. A property breaks by the first of its faults."""
        first: dict[str, Fault] = {}
        for fault in faults:
            first.setdefault(fault.name, fault)
        if unjudged := first.keys() - set(names):
            raise AssertionError(f"faults of properties that are not judged: {unjudged}")
        broken = {finding.name: finding for finding in self.findings}
        for name in names:
            self.cases[name] += 1
            if name in first and name not in broken:
                _, reason, example = first[name]
                broken[name] = BrokenProperty(
                    name=name, reason=reason, example=list(example), failed=0, cases=0
                )
            if name in broken:
                broken[name].failed += name in first
                broken[name].cases = self.cases[name]
        self.findings = [broken[name] for name in self.cases if name in broken]

    def note(self, text: str) -> None:
        """Keep a remark, each text once."""
        if text not in self.notes:
            self.notes.append(text)

    def waive_untried(self, declined: Sequence[DeclinedError]) -> None:
        """Drop untried properties from the promised ones. Note them, and the declined cases by reason."""
        by_reason: dict[str, list[str]] = {}
        for error in declined:
            by_reason.setdefault(error.reason, []).append(error.case)
        for reason, cases in by_reason.items():
            number = "1 case" if len(cases) == 1 else f"{len(cases)} cases, such as"
            self.note(f"declines {number} {cases[0]} ({reason})")
        for name in self.untried if declined else ():
            del self.cases[name]
            self.note(f"not tried because all plans for it are declined: {name}")


class DataRequest(Record):
    """Options of the command."""

    model: str | None = None
    """MODEL, or a folder with a tokenizer alone; None for generated tokenizers."""
    own_code: dict[str, str] = Field(default_factory=dict)
    """FILE.py:NAME by option."""
    truncation: Truncation | None = None
    """Declared treatment of chats that are too long."""
    features: FeatureKind = "masked"
    """Samples with masked labels, or without labels, so that every token counts."""
    remote_code: RemoteCode = "refuse"

    @property
    def is_of_libraries(self) -> bool:
        """Return True for a request that names nothing: it checks the installed libraries."""
        return self.model is None and not self.own_code

    def require_meaning(self) -> None:
        """Raise UsageError for a missing file, or an option that has no effect."""
        for reference in self.own_code.values():
            find_plugin_file(reference)
        if self.truncation and not (self.model or "render" in self.own_code):
            raise UsageError(
                "--truncation declares what --render or MODEL's template does: give one"
            )
        if self.features != "masked" and self.own_code.keys().isdisjoint(("collator", "packing")):
            raise UsageError("--features are samples for --collator or --packing: give one")


class DataAnswer(Record):
    """All reports, and the reasons why levels were left out."""

    reports: list[tuple[DataLevel, SubjectReport]] = Field(default_factory=list)
    left_out: dict[DataLevel, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    errors: list[str] = Field(default_factory=list)
    """Exceptions and malformed results of the user's code."""


def judge_data(request: DataRequest, answer: DataAnswer) -> Verdict:
    """Judge all levels. FAIL if a property is broken, NOT_COMPARED if one was never tried or none checked."""
    levels: dict[str, LevelResult] = {}
    for name in LEVELS:
        reports = [report for level, report in answer.reports if level == name]
        if reports or name in answer.left_out:
            one = _judge_level(reports) if reports else not_run(answer.left_out[name])
            one.level = one.level.model_copy(
                update={"question": LEVEL_QUESTIONS["assay smoke data"][name]}
            )
            levels[name] = one
    failed = [name for name in LEVELS if name in levels and levels[name].is_failed]
    subjects_of: dict[str, list[str]] = {}
    for _, report in answer.reports:
        for note in report.notes:
            subjects_of.setdefault(note, []).append(report.subject)
    notes = [f"{', '.join(subjects)}: {note}" for note, subjects in subjects_of.items()]
    broken = {report.subject for _, report in answer.reports if report.findings}
    own = list(dict.fromkeys(request.own_code.values()))
    own = [code for code in own if code in broken] or own
    verdict = conclude(
        levels,
        Cause("loss-scale" if failed[0] == "accumulation" else None) if failed else None,
        notes=dict.fromkeys([*answer.notes, *notes]),
        model={"name": request.model},
        reference={"run": "the properties of docs/smoke-data.md"},
        candidate={"case": ", ".join(own) or ("its template" if request.model else "libraries")},
        statistic="exact",
        resolution=0.0,
        compared_unit="cases",
    )
    if verdict.verdict is Outcome.PASS:
        verdict.headline = "All tried properties hold."
    return verdict


def _judge_level(reports: Sequence[SubjectReport]) -> LevelResult:
    reason = "; ".join(filter(None, map(_find_gap, reports))) or None
    outcome = Outcome.NOT_COMPARED if reason else Outcome.PASS
    found = [(report, finding) for report in reports for finding in report.findings]
    if found:
        (report, finding), *rest = found
        more = f" (and {len(rest)} more)" if rest else ""
        outcome, reason = Outcome.FAIL, f"{report.subject}: {finding.reason}{more}"
    compared = sum(report.compared for report in reports)
    subjects = [report.model_dump(mode="json") for report in reports]
    return LevelResult(Level(verdict=outcome, reason=reason, compared=compared, subjects=subjects))


def _find_gap(report: SubjectReport) -> str:
    """Describe what was not tried."""
    if report.problem or report.findings or (report.compared and not report.untried):
        return report.problem
    untried = f"never tried: {', '.join(report.untried)}"
    return f"{report.subject}: {untried if report.untried else 'tried no case'}"
