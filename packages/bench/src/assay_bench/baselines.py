"""Baseline files: evaluations without their texts, with who accepted them and why."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from assay.errors import UsageError
from assay.files import DiskError, open_file, read_sealed, write_sealed
from assay.runs import provenance
from assay.verdicts import Outcome, Record
from assay_bench.comparing import (
    EvaluationComparison,
    Terms,
    chosen_metrics,
    compare,
    differences,
)
from assay_bench.results import UNDERPOWERED, Evaluation, TaskResult, judge_scores

SCHEMA = 1

# The kind of a file stands in its first bytes.
_NUM_KIND_BYTES = 64


class Acceptance(Record):
    """Who accepted an evaluation, when and why."""

    by: str | None
    date: str
    reason: str | None
    command: list[str]


class Baseline(Record):
    """The content of a baseline file."""

    baseline: int = Field(default=SCHEMA, ge=SCHEMA, le=SCHEMA)
    name: str
    acceptance: Acceptance
    facts: dict[str, Any]
    asked: dict[str, Any]
    tasks: dict[str, TaskResult] = Field(min_length=1)
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @classmethod
    def of(cls, evaluation: Evaluation, acceptance: Acceptance) -> Self:
        """Make a baseline of an evaluation."""
        kept = {one.name: getattr(evaluation, one.name) for one in fields(evaluation)}
        return cls(acceptance=acceptance, **kept)

    def evaluation(self) -> Evaluation:
        """Return the evaluation that was accepted."""
        tasks = {name: replace(task, name=name) for name, task in self.tasks.items()}
        return Evaluation(self.name, tasks, self.asked, self.facts, self.groups)


def is_baseline(path: Path) -> bool:
    """Return True if the file declares itself a baseline."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return b'"baseline"' in file.read(_NUM_KIND_BYTES)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises: UnreadableFileError if it is invalid or was changed."""
    return read_sealed(Baseline, path)


def accept(
    evaluation: Evaluation, path: Path, terms: Terms, *, by: str | None, reason: str | None
) -> Path:
    """Write or replace the baseline file `path`, and create its folder. Return the file.

    Raises: UsageError if the numbers are not finite or no better than a guess; and, without a reason, if
        the evaluation is worse than the one it replaces, or better by more than the margins, which
        suggests that the training data contains the questions.
    """
    scores = judge_scores(evaluation, chosen_metrics(evaluation, terms.metrics))
    problems = [
        f"{name}: {level.reason}"
        for name, level in scores.levels.items()
        if level.verdict in (Outcome.FAIL, Outcome.NOT_COMPARED)
    ]
    if problems:
        raise UsageError(f"this evaluation cannot be a baseline: {'; '.join(problems)}")
    if reason is None and path.is_file():
        _refuse_surprises(read_baseline(path).evaluation(), evaluation, path, terms)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError.refused(path.parent, error) from error
    run = provenance()
    acceptance = Acceptance(by=by, date=run["date"], reason=reason, command=run["command"])
    return write_sealed(path, Baseline.of(evaluation, acceptance))


def _refuse_surprises(before: Evaluation, now: Evaluation, path: Path, terms: Terms) -> None:
    if different := differences(before, now):
        raise UsageError(
            f"{path} holds answers to different questions ({'; '.join(different)}). To replace it:"
            " --reason TEXT"
        )
    worse = compare(before, now, terms)
    if worse.judged is not Outcome.PASS:
        failing = [
            f"{part.name}: {UNDERPOWERED if part.is_underpowered else part.judged}"
            for part in worse.parts
            if part.judged is not Outcome.PASS
        ]
        raise UsageError(
            f"{path} exists, and the new evaluation is not shown to be as good"
            f" ({'; '.join(failing)}). Nothing was written. To replace it anyway: --reason TEXT"
        )
    surprising = _better_by_margin(compare(now, before, terms))
    if surprising:
        raise UsageError(
            f"{path} exists, and the new evaluation is suspiciously good: {surprising}. Did the training"
            " data contain the questions? To replace it anyway: --reason TEXT"
        )


def _better_by_margin(reversed_: EvaluationComparison) -> str:
    """List the measures that improved by more than their margin and by more than chance.

    reversed_: the comparison of the older evaluation with the newer one as base.
    """
    return ", ".join(
        f"{task.name} {measure.name} improved by {-measure.gain:.3g}"
        for task in reversed_.parts
        for measure in task.measures
        if -measure.gain > measure.margin and measure.p_worse < reversed_.terms.significance
    )
