"""The request of `assay smoke data`, the cases and broken properties of its answer, and the verdict by level."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.errors import AssayError, UsageError, raised_in_words
from assay.foreign_text import one_line
from assay.judge.levels import Cause, LevelResult, conclude, not_run
from assay.judge.wording import OUTCOME_SIGNS
from assay.models.sources import RemoteCode
from assay.output.console import new_table
from assay.plugins import find_plugin_file
from assay.verdicts import Diagnosis, Level, Outcome, Record, Verdict
from assay_smoke.data.protocols import FeatureKind, Truncation

DataLevel = Literal[
    "chat", "labels", "collator", "packing", "sampler", "batch-sampler", "accumulation", "workers"
]
LEVELS: tuple[DataLevel, ...] = get_args(DataLevel)

_MOST_NAMED = 3


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
            more = f"; and {len(cases) - _MOST_NAMED} more" if len(cases) > _MOST_NAMED else ""
            number = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
            self.note(f"declines {number} ({reason}): {'; '.join(cases[:_MOST_NAMED])}{more}")
        for name in self.untried if declined else ():
            del self.cases[name]
            self.note(f"not tried because all plans for it are declined: {name}")


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """A check of one subject."""

    level: DataLevel
    name: str
    run: Callable[[], SubjectReport]
    is_own: bool = True
    """True if the user gave the subject. Its exceptions are then errors of the command."""


NOT_ASKED_FOR = "not asked for"


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


class CheckReport(Record):
    """The report on one subject, or the reason why it has none."""

    level: DataLevel
    report: SubjectReport
    problem: str = ""
    """Exception of the subject, or a description of its malformed result."""


class DataAnswer(Record):
    """All reports, and the reasons why levels were left out."""

    checks: list[CheckReport]
    left_out: dict[DataLevel, str]
    notes: list[str] = Field(default_factory=list)
    errors: list[str] = Field(default_factory=list)
    """Exceptions and malformed results of the user's code."""


_DIAGNOSES: dict[DataLevel, Diagnosis] = {
    "chat": "inputs-differ", "labels": "inputs-differ", "collator": "inputs-differ",
    "packing": "inputs-differ", "accumulation": "loss-scale", "workers": "rng-state",
}  # fmt: skip

QUESTIONS: dict[str, str] = {
    "chat": "Does the template keep all turns, with one BOS and an end for each answer?",
    "labels": "Do exactly the answers have labels?",
    "collator": "Is each sample one row, whole, with its labels and masked padding?",
    "packing": "Does each packed sample train as it does alone?",
    "sampler": "Is every sample read once in each epoch, and the rest after a resume?",
    "batch-sampler": "Is every sample read once in each epoch, within the token budget?",
    "accumulation": "Does a step over micro-batches have the gradient of one big batch?",
    "workers": "Do workers and epochs draw different random numbers?",
}

_STYLES = {Outcome.PASS: "bold blue", Outcome.FAIL: "bold red", Outcome.NOT_COMPARED: "bold yellow"}


def judge_data(request: DataRequest, answer: DataAnswer) -> Verdict:
    """Judge all levels. FAIL if a property is broken, NOT_COMPARED if one was never tried or none checked."""
    levels: dict[str, LevelResult] = {}
    for name in LEVELS:
        checks = [check for check in answer.checks if check.level == name]
        left_out = answer.left_out.get(name, NOT_ASKED_FOR)
        one = levels[name] = _judge_level(checks) if checks else not_run(left_out)
        one.level = one.level.model_copy(update={"question": QUESTIONS[name]})
    failed = [name for name in LEVELS if levels[name].is_failed]
    subjects_of: dict[str, list[str]] = {}
    for report in (check.report for check in answer.checks):
        for note in report.notes:
            subjects_of.setdefault(note, []).append(report.subject)
    notes = [f"{', '.join(subjects)}: {note}" for note, subjects in subjects_of.items()]
    own = list(dict.fromkeys(request.own_code.values()))
    return conclude(
        levels,
        Cause(_DIAGNOSES.get(failed[0])) if failed else None,
        notes=dict.fromkeys([*answer.notes, *notes]),
        model={"name": request.model or "generated tokenizers"},
        reference={"run": "the properties of docs/smoke-data.md"},
        candidate={"run": ", ".join(own) or ("its template" if request.model else "libraries")},
        statistic="exact",
        resolution=0.0,
        compared_unit="cases",
    )


def _judge_level(checks: Sequence[CheckReport]) -> LevelResult:
    reports = [check.report for check in checks]
    reason = "; ".join(filter(None, map(_find_gap, checks))) or None
    outcome = Outcome.NOT_COMPARED if reason else Outcome.PASS
    found = [(report, finding) for report in reports for finding in report.findings]
    if found:
        (report, finding), *rest = found
        more = f" (and {len(rest)} more)" if rest else ""
        outcome, reason = Outcome.FAIL, f"{report.subject}: {finding.reason}{more}"
    compared = sum(report.compared for report in reports)
    subjects = [report.model_dump(mode="json") for report in reports]
    return LevelResult(Level(verdict=outcome, reason=reason, compared=compared, subjects=subjects))


def _find_gap(check: CheckReport) -> str:
    """Describe a promised property that was not tried."""
    report = check.report
    if check.problem or report.outcome is not Outcome.NOT_COMPARED:
        return check.problem
    untried = f"never tried: {', '.join(report.untried)}"
    return f"{report.subject}: {untried if report.untried else 'tried no case'}"


def print_data_verdict(verdict: Verdict, console: Console, page: Path) -> None:
    """Print `verdict`. page: its report."""
    outcome = verdict.verdict
    cases = f": {verdict.compared:,} cases with {verdict.model['name']}"
    word = (outcome.value, _STYLES[outcome])
    console.print(Text.assemble(f"{OUTCOME_SIGNS[outcome]} ", word, cases))
    console.print(_table(verdict))
    others = [name for name, level in verdict.levels.items() if level.reason == NOT_ASKED_FOR]
    if others:
        console.print(Text(f"{NOT_ASKED_FOR}: {', '.join(others)}", style="dim"), soft_wrap=True)
    notes = (f"note: {one_line(note)}" for note in verdict.notes)
    for line in (*_findings(verdict), *notes, f"report: {page}"):
        console.print(Text(line), soft_wrap=True)


def reports_of(level: Level) -> list[SubjectReport]:
    """Return the reports behind a level."""
    extra = level.model_extra or {}
    return [SubjectReport.model_validate(report) for report in extra.get("subjects", ())]


def _table(verdict: Verdict) -> Table:
    table = new_table("level", "subject", "cases", "verdict")
    table.columns[2].justify = "right"
    for name, level in verdict.levels.items():
        reports = reports_of(level)
        for report in reports:
            outcome = report.outcome
            cells = Text(one_line(report.subject)), f"{report.compared:,}"
            table.add_row(name, *cells, Text(outcome.value, style=_STYLES[outcome]))
        if not reports and level.reason != NOT_ASKED_FOR:
            table.add_row(name, Text(one_line(level.reason or ""), style="dim"), "", "not run")
    return table


def _findings(verdict: Verdict) -> Iterator[str]:
    for name, level in verdict.levels.items():
        for report in reports_of(level):
            for finding in report.findings:
                broken = f"broken in {finding.failed} of {finding.cases} cases"
                yield ""
                yield one_line(f"{name}: {report.subject}")
                yield one_line(f"  must hold: {finding.name}; {broken}")
                yield from (f"  {one_line(line)}" for line in finding.reason.splitlines())
                yield from (f"    {one_line(line)}" for line in finding.example)
        if level.verdict is Outcome.NOT_COMPARED:
            yield ""
            yield from (one_line(line) for line in f"{name}: {level.reason}".splitlines())
    if verdict.verdict is not Outcome.PASS:
        yield ""
