"""An evaluation becomes what later ones are held to."""

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
    """Write the baseline file `path`, beside nothing or in place of the one that is there.

    Raises: UsageError, without a reason, for an evaluation that is worse than the one it replaces, or
        better by more than the margins: a leak of the questions looks like that; and for one that no
        reason makes a baseline, whose numbers are not finite or no better than a guess.
    """
    scores = judge_scores(evaluation)
    if scores.verdict is not Outcome.PASS:
        problems = [
            f"{name}: {level.reason}" for name, level in scores.levels.items() if level.reason
        ]
        raise UsageError(f"nothing to hold others to: {'; '.join(problems)}")
    if reason is None and path.is_file():
        _refuse_surprises(read_baseline(path).evaluation(), evaluation, path, terms)
    run = provenance()
    acceptance = Acceptance(by=by, date=run["date"], reason=reason, command=run["command"])
    return write_sealed(path, Baseline.of(evaluation, acceptance))


def _refuse_surprises(before: Evaluation, now: Evaluation, path: Path, terms: Terms) -> None:
    if other := differences(before, now):
        raise UsageError(
            f"{path} was asked something else ({'; '.join(other)}); to replace it: --reason TEXT"
        )
    worse = compare(before, now, terms)
    if worse.judged is not PairedOutcome.PASS:
        raise UsageError(
            f"{path} is there, and this is not shown to be as good ({_told(worse)}); nothing was"
            " written. If it is meant: --reason TEXT"
        )
    surprising = _better_by_margin(compare(now, before, terms))
    if surprising:
        raise UsageError(
            f"{path} is there, and this is too good to be taken without a word: {surprising}; were"
            " the questions in what it was trained on? If it is meant: --reason TEXT"
        )


def _told(comparison: EvaluationComparison) -> str:
    return "; ".join(
        f"{task.name}: {task.judged}" for task in comparison.tasks if task.judged != "PASS"
    )


def _better_by_margin(reversed_: EvaluationComparison) -> str:
    """Measures that rose by more than their margin, and by more than chance; "" for none.

    reversed_: the older one, held to the newer.
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
