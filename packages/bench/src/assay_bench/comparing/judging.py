"""Is the candidate worse than the base, is it shown not to be, or were there too few items to say?

Each task is judged by what is right or wrong, and by the log-probability of right answers, which sees far
smaller changes; where the candidate has to be the same model, also by how far those moved, up or down. A
measure fails where it is significantly lower, all measures of all tasks taken together
(Holm), and passes where a drop by the margin is excluded; what is neither is underpowered. The whole passes
where every measure does, which needs no correction: no chance of a false pass is added up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay_bench.comparing.pairing import Pair, differences, pairs_of, trained_elsewhere
from assay_bench.comparing.terms import Terms
from assay_bench.evaluations.items import Evaluation, TaskResult
from assay_bench.outcomes import PairedOutcome
from assay_bench.statistics import accuracy as exact
from assay_bench.statistics.clusters import deflated, p_worse_of_clusters
from assay_bench.statistics.families import holm, items_needed
from assay_bench.statistics.mean_difference import MeanDifference


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of one task on both sides.

    low, high: of the difference, candidate less base; each bound is missed with the significance.
    p_worse: adjusted for all measures of all tasks; p_not_inferior: as it is.
    items_needed: that would do to show that an equally good candidate is no worse; None where it is shown.
    """

    name: str
    base: float
    candidate: float
    difference: float
    low: float
    high: float
    margin: float
    num_items: int
    p_worse: float
    p_not_inferior: float
    judged: PairedOutcome = PairedOutcome.UNDERPOWERED
    items_needed: int | None = None


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task on both sides.

    problem: why it fails, or was not compared, whatever the measures say.
    lost, gained: items that only one side got right.
    """

    name: str
    judged: PairedOutcome
    measures: tuple[Measure, ...] = ()
    problem: str | None = None
    lost: tuple[Pair, ...] = ()
    gained: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """Of two evaluations.

    refused: why they were not asked the same, if they were not. notes: what was not judged, and why.
    """

    base: Evaluation
    candidate: Evaluation
    terms: Terms
    tasks: tuple[TaskComparison, ...]
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> PairedOutcome:
        """The worst of all tasks."""
        if self.refused or not self.tasks:
            return PairedOutcome.NOT_COMPARED
        return PairedOutcome.worst(task.judged for task in self.tasks)


def compare(base: Evaluation, candidate: Evaluation, terms: Terms) -> EvaluationComparison:
    """Judge `candidate` by `base`, task by task."""
    if refused := differences(base, candidate):
        return EvaluationComparison(base, candidate, terms, (), tuple(refused))
    notes = []
    if terms.movement is not None and (elsewhere := trained_elsewhere(base, candidate)):
        notes.append(f"movement is not judged: other weights, and {elsewhere}")
        terms = terms.model_copy(update={"movement": None})
    tasks = [_measured(task, candidate.tasks[name], terms) for name, task in base.tasks.items()]
    p_values = {
        f"{task.name}\0{measure.name}": measure.p_worse
        for task in tasks
        for measure in task.measures
    }
    adjusted = holm(p_values)
    judged = [_judge(task, adjusted, terms) for task in tasks]
    return EvaluationComparison(base, candidate, terms, tuple(judged), notes=tuple(notes))


def _measured(base: TaskResult, candidate: TaskResult, terms: Terms) -> TaskComparison:
    pairs = pairs_of(base, candidate)
    name = base.name
    for side, index in (("base", 0), ("candidate", 1)):
        wrong = sum(not pair[index].is_finite for pair in pairs)
        if wrong:
            judged = PairedOutcome.NOT_COMPARED if side == "base" else PairedOutcome.FAIL
            problem = f"{wrong} of {len(pairs)} log-probabilities of the {side} are NaN or infinite"
            return TaskComparison(name, judged, problem=problem)
    measures = [
        measure
        for measure in (
            _accuracy(pairs, terms),
            _log_probability(pairs, terms),
            _movement(pairs, terms),
        )
        if measure is not None
    ]
    if not measures:
        problem = (
            "it has neither a metric that is yes or no, nor log-probabilities of right answers"
        )
        return TaskComparison(name, PairedOutcome.NOT_COMPARED, problem=problem)
    return TaskComparison(
        name,
        PairedOutcome.UNDERPOWERED,
        tuple(measures),
        lost=tuple(pair for pair in pairs if pair[0].right and pair[1].right is False),
        gained=tuple(pair for pair in pairs if pair[1].right and pair[0].right is False),
    )


def _judge(task: TaskComparison, adjusted: Mapping[str, float], terms: Terms) -> TaskComparison:
    if task.problem is not None:
        return task
    measures = tuple(
        _judge_measure(measure, adjusted[f"{task.name}\0{measure.name}"], terms)
        for measure in task.measures
    )
    return replace(
        task, measures=measures, judged=PairedOutcome.worst(measure.judged for measure in measures)
    )


def _judge_measure(measure: Measure, p_worse: float, terms: Terms) -> Measure:
    measure = replace(measure, p_worse=p_worse)
    if measure.p_not_inferior < terms.significance:
        return replace(measure, judged=PairedOutcome.PASS, items_needed=None)
    if p_worse < terms.significance:
        return replace(measure, judged=PairedOutcome.FAIL)
    return measure


def _accuracy(pairs: Sequence[Pair], terms: Terms) -> Measure | None:
    if any(item.right is None for pair in pairs for item in pair):
        return None
    base, candidate = ([bool(pair[side].right) for pair in pairs] for side in (0, 1))
    answers = exact.PairedAnswers.of(base, candidate)
    clusters = _clusters(pairs)
    if clusters is None:
        p_worse, counted = exact.p_worse(answers), answers
    else:
        differences = [float(now) - float(was) for was, now in zip(base, candidate, strict=True)]
        p_worse = p_worse_of_clusters(differences, clusters)
        counted = deflated(answers, differences, clusters)
    low, high = exact.interval(counted, 1 - 2 * terms.significance)
    # Where no item differs yet, one might: of none nothing could be planned.
    variance = max(answers.discordance, 1 / len(pairs)) * answers.num_items / counted.num_items
    return Measure(
        name="accuracy",
        base=float(np.mean(base)),
        candidate=float(np.mean(candidate)),
        difference=answers.difference,
        low=low,
        high=high,
        margin=terms.accuracy,
        num_items=len(pairs),
        p_worse=p_worse,
        p_not_inferior=exact.p_not_inferior(counted, terms.accuracy),
        items_needed=_needed(variance, terms.accuracy, terms),
    )


def _log_probability(pairs: Sequence[Pair], terms: Terms) -> Measure | None:
    values = _log_probabilities(pairs)
    if values is None:
        return None
    base, candidate = values
    differences = [now - was for was, now in zip(base, candidate, strict=True)]
    mean = MeanDifference.of(differences, _clusters(pairs))
    low, high = mean.interval(1 - 2 * terms.significance)
    # Of one item, as its share of the error of the mean: items of a cluster count as alike as they are.
    variance = mean.standard_error**2 * mean.num_items
    return Measure(
        name="log-probability",
        base=float(np.mean(base)),
        candidate=float(np.mean(candidate)),
        difference=mean.mean,
        low=low,
        high=high,
        margin=terms.log_probability,
        num_items=mean.num_items,
        p_worse=mean.p_below(0.0),
        p_not_inferior=mean.p_above(-terms.log_probability),
        items_needed=_needed(variance, terms.log_probability, terms),
    )


def _movement(pairs: Sequence[Pair], terms: Terms) -> Measure | None:
    """The root mean square of the differences, from 0 if both are the same model."""
    values = _log_probabilities(pairs)
    if values is None or terms.movement is None:
        return None
    squares = [(now - was) ** 2 for was, now in zip(*values, strict=True)]
    mean, allowed = MeanDifference.of(squares, _clusters(pairs)), terms.movement**2
    low, high = (max(0.0, bound) ** 0.5 for bound in mean.interval(1 - 2 * terms.significance))
    moved = mean.mean**0.5
    variance = mean.standard_error**2 * mean.num_items
    return Measure(
        name="movement",
        base=0.0,
        candidate=moved,
        difference=moved,
        low=low,
        high=high,
        margin=terms.movement,
        num_items=mean.num_items,
        p_worse=mean.p_above(allowed),
        p_not_inferior=mean.p_below(allowed),
        items_needed=_needed(variance, allowed, terms),
    )


def _log_probabilities(pairs: Sequence[Pair]) -> tuple[list[float], list[float]] | None:
    """Of both sides; None where the task asks for none."""
    values = [(one.log_probability, two.log_probability) for one, two in pairs]
    base = [was for was, _ in values if was is not None]
    candidate = [now for _, now in values if now is not None]
    return (base, candidate) if len(base) == len(candidate) == len(pairs) else None


def _needed(variance: float, margin: float, terms: Terms) -> int:
    return items_needed(variance, margin, terms.significance, terms.power)


def _clusters(pairs: Sequence[Pair]) -> list[str] | None:
    found = [pair[0].cluster for pair in pairs]
    return [name for name in found if name is not None] if all(found) else None
