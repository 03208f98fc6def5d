"""The verdict of a comparison."""

from assay.verdicts import Level, Measurement, Outcome, Unmatched, Verdict
from assay_bench.comparing.judging import EvaluationComparison, Measure, TaskComparison
from assay_bench.outcomes import PairedOutcome


def verdict_of(comparison: EvaluationComparison) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict, with a level for each task, and a row for each measure.

    An underpowered task has `judged` UNDERPOWERED and verdict NOT_COMPARED.
    """
    base, candidate = comparison.base, comparison.candidate
    if comparison.refused:
        reason = f"the two sides answered different questions: {'; '.join(comparison.refused)}"
        levels = {"tasks": Level(verdict=Outcome.NOT_COMPARED, reason=reason)}
    else:
        levels = {task.name: _level(task) for task in comparison.tasks}
    wrong = any(task.problem and task.judged is PairedOutcome.FAIL for task in comparison.tasks)
    verdict = Verdict(
        verdict=comparison.judged.as_verdict,
        model={"name": candidate.facts.get("model", candidate.name)},
        reference={"run": base.name},
        candidate={"run": candidate.facts.get("run", candidate.name)},
        levels=levels,
        notes=[
            *comparison.notes,
            *(
                f"{task.name}: {measure_in_words(measure)}"
                for task in comparison.tasks
                for measure in task.measures
            ),
        ],
        diagnosis="non-finite" if wrong else None,
        compared=sum(level.compared for level in levels.values()),
        compared_unit="items",
        unmatched=Unmatched(expected=list(base.tasks) if comparison.refused else []),
    )
    rows = [_row(task.name, measure) for task in comparison.tasks for measure in task.measures]
    return verdict, rows


def measure_in_words(measure: Measure) -> str:
    """Describe both values, the difference with its bounds, and the conclusion."""
    values = (
        f"{measure.name} {_number(measure, measure.base)} -> {_number(measure, measure.candidate)},"
        f" difference {_signed(measure, measure.difference)} ({_signed(measure, measure.low)} to"
        f" {_signed(measure, measure.high)}): "
    )
    margin = _number(measure, measure.margin)
    if measure.name == "movement":
        return f"{values}{_movement_in_words(measure, margin)}"
    if measure.judged is PairedOutcome.FAIL:
        return f"{values}lower by more than chance (p = {measure.p_worse:.2g})"
    if measure.judged is PairedOutcome.PASS and measure.low > measure.margin:
        return f"{values}higher by more than {margin}: did the training data contain the questions?"
    if measure.judged is PairedOutcome.PASS:
        return f"{values}a drop of {margin} is excluded"
    return (
        f"{values}{measure.num_items:,} items cannot exclude a drop of {margin}; about"
        f" {measure.items_needed:,} would"
    )


def _movement_in_words(measure: Measure, margin: str) -> str:
    if measure.judged is PairedOutcome.FAIL:
        return f"more than {margin}, so it is a different model (p = {measure.p_worse:.2g})"
    if measure.judged is PairedOutcome.PASS:
        return f"less than {margin}"
    return (
        f"{measure.num_items:,} items cannot decide if this is less than {margin}; about"
        f" {measure.items_needed:,} would if the models are the same"
    )


def _level(task: TaskComparison) -> Level:
    failed = [m for m in task.measures if m.judged is PairedOutcome.FAIL]
    unsure = [m for m in task.measures if m.judged is PairedOutcome.UNDERPOWERED]
    deciding = failed or unsure
    reason = task.problem or "; ".join(map(measure_in_words, deciding)) or None
    compared = max((measure.num_items for measure in task.measures), default=0)
    judged = task.judged.value
    return Level(verdict=task.judged.as_verdict, reason=reason, compared=compared, judged=judged)


def _row(task: str, measure: Measure) -> Measurement:
    return Measurement(
        level=task,
        module="",
        port=measure.name,
        statistic=measure.name,
        actual=measure.candidate,
        expected=measure.base,
        # The share of the margin that the difference takes.
        ratio=abs(min(0.0, measure.difference) or measure.candidate * (measure.name == "movement"))
        / measure.margin,
        limit=1.0,
    )


def _number(measure: Measure, value: float) -> str:
    return f"{value:.1%}" if measure.name == "accuracy" else f"{value:.4f}"


def _signed(measure: Measure, value: float) -> str:
    return f"{value:+.1%}" if measure.name == "accuracy" else f"{value:+.4f}"
