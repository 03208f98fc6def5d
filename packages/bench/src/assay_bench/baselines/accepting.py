"""Acceptance of an evaluation as a baseline."""

from pathlib import Path

from assay.errors import UsageError
from assay.files import write_sealed
from assay.runs import provenance
from assay.verdicts import Outcome
from assay_bench.baselines.records import Acceptance, Baseline, read_baseline
from assay_bench.comparing.judging import EvaluationComparison, compare
from assay_bench.comparing.pairing import differences
from assay_bench.comparing.terms import Terms
from assay_bench.evaluations.items import Evaluation
from assay_bench.evaluations.scores import judge_scores
from assay_bench.outcomes import PairedOutcome
from assay_bench.statistics.families import holm


def accept(
    evaluation: Evaluation, path: Path, terms: Terms, *, by: str | None, reason: str | None
) -> Path:
    """Write or replace the baseline file `path` and return it.

    Raises: UsageError if the numbers are not finite or no better than a guess; and, without a reason, if
        the evaluation is worse than the one it replaces, or better by more than the margins, which
        suggests that the training data contains the questions.
    """
    scores = judge_scores(evaluation)
    if scores.verdict is not Outcome.PASS:
        problems = [
            f"{name}: {level.reason}" for name, level in scores.levels.items() if level.reason
        ]
        raise UsageError(f"this evaluation cannot be a baseline: {'; '.join(problems)}")
    if reason is None and path.is_file():
        _refuse_surprises(read_baseline(path).evaluation(), evaluation, path, terms)
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
    if worse.judged is not PairedOutcome.PASS:
        raise UsageError(
            f"{path} exists, and the new evaluation is not shown to be as good"
            f" ({_list_failing_tasks(worse)}). Nothing was written. To replace it anyway: --reason TEXT"
        )
    surprising = _better_by_margin(compare(now, before, terms))
    if surprising:
        raise UsageError(
            f"{path} exists, and the new evaluation is suspiciously good: {surprising}. Did the training"
            " data contain the questions? To replace it anyway: --reason TEXT"
        )


def _list_failing_tasks(comparison: EvaluationComparison) -> str:
    return "; ".join(
        f"{task.name}: {task.judged}" for task in comparison.tasks if task.judged != "PASS"
    )


def _better_by_margin(reversed_: EvaluationComparison) -> str:
    """List the measures that rose by more than their margin and by more than chance.

    reversed_: the comparison of the older evaluation with the newer one as base.
    """
    p_values = holm(
        {
            f"{task.name} {measure.name}": measure.p_worse
            for task in reversed_.tasks
            for measure in task.measures
        }
    )
    found = [
        f"{task.name} {measure.name} rose by {-measure.difference:.3g}"
        for task in reversed_.tasks
        for measure in task.measures
        if -measure.difference > measure.margin
        and p_values[f"{task.name} {measure.name}"] < reversed_.terms.significance
    ]
    return ", ".join(found)
