"""Judges a candidate by a base: worse, not worse, or too few items to decide.

Each task has up to three measures: accuracy; the log-probability of right answers, which detects far
smaller changes; and, if both sides must be the same model, how far these log-probabilities moved. A measure
fails if it is significantly lower, corrected for all measures of all tasks (Holm). It passes if a drop of
the margin is excluded. Otherwise it is underpowered. The comparison passes if every measure passes. That
needs no correction, because chances of a false pass do not add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay_bench.comparing.pairing import Pair, differences, pairs_of, trained_elsewhere
from assay_bench.comparing.terms import Terms
from assay_bench.evaluations.items import Evaluation, TaskResult
from assay_bench.outcomes import PairedOutcome
from assay_bench.statistics import accuracy as exact
from assay_bench.statistics.accuracy import deflated, p_worse_of_clusters
from assay_bench.statistics.families import holm, items_needed
from assay_bench.statistics.mean_difference import MeanDifference


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of one task on both sides."""

    name: str
    base: float
    candidate: float
    difference: float
    """Candidate minus base."""
    low: float
    """Lower bound of the difference, one-sided at the significance."""
    high: float
    margin: float
    num_items: int
    p_worse: float
    """After judging, adjusted for all measures of all tasks."""
    p_not_inferior: float
    judged: PairedOutcome = PairedOutcome.UNDERPOWERED
    items_needed: int | None = None
    """Items that would give an equally good candidate a PASS; None after a PASS."""


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task on both sides."""

    name: str
    judged: PairedOutcome
    measures: tuple[Measure, ...] = ()
    problem: str | None = None
    """Reason for a FAIL or NOT_COMPARED without measures."""
    lost: tuple[Pair, ...] = ()
    """Items that only the base got right."""
    gained: tuple[Pair, ...] = ()
    """Items that only the candidate got right."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """The comparison of two evaluations."""

    base: Evaluation
    candidate: Evaluation
    terms: Terms
    tasks: tuple[TaskComparison, ...]
    refused: tuple[str, ...] = ()
    """Differences between the questions; nothing is compared if there are any."""
    notes: tuple[str, ...] = ()
    """Measures that were not judged, with reasons."""

    @property
    def judged(self) -> PairedOutcome:
        """Return the worst outcome of all tasks."""
        if self.refused or not self.tasks:
            return PairedOutcome.NOT_COMPARED
        return PairedOutcome.worst(task.judged for task in self.tasks)


def compare(base: Evaluation, candidate: Evaluation, terms: Terms) -> EvaluationComparison:
    """Judge a candidate by a base."""
    if refused := differences(base, candidate):
        return EvaluationComparison(base, candidate, terms, (), tuple(refused))
    notes = []
    if terms.movement is not None and (elsewhere := trained_elsewhere(base, candidate)):
        notes.append(f"movement is not judged: other weights, and {elsewhere}")
        terms = terms.model_copy(update={"movement": None})
    tasks = [_measured(task, candidate.tasks[name], terms) for name, task in base.tasks.items()]
    adjusted = holm({(t.name, m.name): m.p_worse for t in tasks for m in t.measures})
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
    found = (_accuracy(pairs, terms), _log_probability(pairs, terms), _movement(pairs, terms))
    measures = tuple(measure for measure in found if measure is not None)
    if not measures:
        problem = "the task has neither a yes-or-no metric nor log-probabilities of right answers"
        return TaskComparison(name, PairedOutcome.NOT_COMPARED, problem=problem)
    return TaskComparison(
        name,
        PairedOutcome.UNDERPOWERED,
        measures,
        lost=tuple(pair for pair in pairs if pair[0].right and pair[1].right is False),
        gained=tuple(pair for pair in pairs if pair[1].right and pair[0].right is False),
    )


def _judge(
    task: TaskComparison, adjusted: Mapping[tuple[str, str], float], terms: Terms
) -> TaskComparison:
    if task.problem is not None:
        return task
    measures = []
    for given in task.measures:
        measure = replace(given, p_worse=adjusted[task.name, given.name])
        if measure.p_not_inferior < terms.significance:
            measure = replace(measure, judged=PairedOutcome.PASS, items_needed=None)
        elif measure.p_worse < terms.significance:
            measure = replace(measure, judged=PairedOutcome.FAIL)
        measures.append(measure)
    judged = PairedOutcome.worst(measure.judged for measure in measures)
    return replace(task, measures=tuple(measures), judged=judged)


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
    # At least one discordant item: a variance of zero would ask for no items.
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
    # The variance of one item, including the correlation within clusters.
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
    """Measure the root mean square of the differences."""
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
    """Return the values of both sides; None if an item has none."""
    values = [(one.log_probability, two.log_probability) for one, two in pairs]
    base = [was for was, _ in values if was is not None]
    candidate = [now for _, now in values if now is not None]
    return (base, candidate) if len(base) == len(candidate) == len(pairs) else None


def _needed(variance: float, margin: float, terms: Terms) -> int:
    return items_needed(variance, margin, terms.significance, terms.power)


def _clusters(pairs: Sequence[Pair]) -> list[str] | None:
    found = [pair[0].cluster for pair in pairs]
    return [name for name in found if name is not None] if all(found) else None
