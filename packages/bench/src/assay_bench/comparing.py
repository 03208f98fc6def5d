"""Compares two evaluations item by item: worse, not worse, or too few items to decide. Imports no torch.

Items are paired by the content of their documents. Each task has a measure for every metric with values per item, and
one for the log-probability of right answers, which detects far smaller changes. The items of several tasks are pooled
for each group and for all tasks.

A measure passes if a drop of the margin is excluded, even if it is significantly worse: the margin is the drop that is
acceptable. Otherwise it fails if it is significantly worse, and is underpowered if not. A failure's p-value is corrected
for all measures (Holm), and tasks, groups and all tasks have equal shares of the significance. Passing needs no
correction, because chances of a false pass do not add up. A pool that passes excuses underpowered measures in it.
Source: Piaggio et al., JAMA 308 (2012), 2594-2604 (outcomes of a test with a margin).
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from assay.errors import UsageError
from assay.files import validate_record
from assay.verdicts import Outcome, Record, overall_outcome
from assay_bench.paired_statistics import (
    Differences,
    holm,
    holm_in_layers,
    items_needed,
    p_not_inferior,
    p_worse,
)
from assay_bench.results import (
    LOG_PROBABILITY,
    PERPLEXITIES,
    PERPLEXITY,
    Evaluation,
    Item,
    Score,
    TaskResult,
    clusters_of,
    merge_texts,
    plain_name,
)

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Terms(Record):
    """The largest acceptable drops of a candidate, and the error rates of the comparison."""

    accuracy: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Drop in accuracy, as a share of the items."""
    log_probability: _Positive = 0.01
    """Drop in the log-probability of right answers, in nats per byte."""
    tasks: tuple[str, ...] = ()
    """The tasks or groups to judge; all if empty."""
    metrics: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The metrics to judge of a task or group; all of a task that is not named."""
    significance: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Chance of a false FAIL of the whole comparison, and of a false PASS of one measure at its margin."""
    power: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """Chance of a PASS for an equally good candidate with the reported number of items."""
    sources: dict[str, str] = Field(default_factory=dict, exclude=True)
    """Suite or option that set each limit, by the name of its field."""


class SuiteTerms(Record):
    """The suite of an evaluation."""

    name: str
    terms: Terms
    clusters: dict[str, str] = Field(default_factory=dict)
    """For each task, the document field that names the cluster."""

    @property
    def judging(self) -> Terms:
        """Return the terms, with this suite as the source of each limit."""
        sources = dict.fromkeys(Terms.model_fields, f"suite {self.name}")
        return self.terms.model_copy(update={"sources": sources})

    @classmethod
    def of(cls, evaluation: Evaluation) -> "SuiteTerms | None":
        """Return the suite that the evaluation records. Raises: UsageError if the record is invalid."""
        kept = evaluation.facts.get("suite")
        place = f"{evaluation.name}: invalid suite"
        return None if kept is None else validate_record(cls, kept, place)


def choose_terms(
    base: Evaluation, candidate: Evaluation, given: SuiteTerms | None, default: SuiteTerms
) -> tuple[Terms, str]:
    """Return the terms that judge, and a note that names their suite.

    The candidate's suite never judges, nor do its clusters: they could accept any candidate.

    given: takes the place of the suite that the base records.
    default: judges if the base records no suite.
    """
    sides = {"base": SuiteTerms.of(base), "candidate": SuiteTerms.of(candidate)}
    used = given or sides["base"] or default
    owner = "--suite" if given else "of the base" if sides["base"] else "default"
    unused = [
        f"suite {suite.name} of the {side}"
        for side, suite in sides.items()
        if suite and suite.terms != used.terms
    ]
    but = f", not {unused[0]}" if unused else ""
    return used.judging, f"margins: suite {used.name} ({owner}){but}"


Pair = tuple[Item, Item]


def pairs_of(base: TaskResult, candidate: TaskResult) -> list[Pair]:
    """Pair all items, in the order of the base. Raises: KeyError for a missing item."""
    others = {item.key: item for item in candidate.items}
    return [(item, others[item.key]) for item in base.items]


def _differences_of(base: TaskResult, candidate: TaskResult) -> Iterator[str]:
    yield from _differing(base.asked, candidate.asked).values()
    ours, theirs = ({item.key: item for item in side.items} for side in (base, candidate))
    if missing := len(ours.keys() - theirs.keys()):
        yield f"{missing} of the base's {len(ours)} documents are missing from the candidate"
    if extra := len(theirs.keys() - ours.keys()):
        yield f"{extra} of the candidate's {len(theirs)} documents are missing from the base"
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    for what, key in (("prompts", "prompt_hash"), ("right answers", "target_hash")):
        if num_different := sum(getattr(one, key) != getattr(two, key) for one, two in both):
            yield f"{num_different} of {len(both)} {what} differ"


def _differing(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, str]:
    """Describe each setting that differs by its two values, around their first differing character."""
    found = {}
    for name in sorted(base.keys() | candidate.keys()):
        if candidate.get(name) != base.get(name):
            texts = [repr(side.get(name)) for side in (candidate, base)]
            pairs = enumerate(zip(*texts, strict=False))
            start = next((place for place, (now, was) in pairs if now != was), 0) - _NUM_BEFORE
            now, was = (_cut(text, max(0, start)) for text in texts)
            found[name] = f"{name} is {now}, base {was}"
    return found


def _cut(text: str, start: int) -> str:
    """Return the whole of a short text, and of a longer one the characters from `start`."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    end = start + _MAX_CHARACTERS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


_MAX_CHARACTERS, _NUM_BEFORE = 60, 20


ALL_TASKS = "all tasks"
_Problem = tuple[Outcome, str]


class Loss(NamedTuple):
    """An item whose value of a measure became worse."""

    change: float
    """Negative."""
    pair: Pair
    base: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of a task or pool on both sides."""

    name: str
    kind: str
    """That of the score."""
    base: float
    candidate: float
    difference: float
    """Candidate minus base."""
    low: float
    """Lower bound of the difference, one-sided at the significance."""
    high: float
    confidence: float
    """That of the interval from `low` to `high`."""
    margin: float
    differences: Differences
    """Of the paired items, positive if the candidate is better."""
    num_items: int
    p_worse: float
    """After judging, adjusted for all measures."""
    p_not_inferior: float
    higher_is_better: bool = True
    source: str = ""
    """Suite or option that set the margin; "" if unknown."""
    judged: Outcome = Outcome.NOT_COMPARED
    """NOT_COMPARED only if it is underpowered: a measure that cannot be compared is a problem of its task."""
    items_needed: int | None = None
    """Items that an equally good candidate would need for a PASS; None if decided, or if these suffice."""
    pool: str | None = None
    """The pool that passes, and contains this underpowered measure."""
    num_clusters: int | None = None
    """None if every item is independent of the others."""
    num_documents: int | None = None
    """All documents of the task; None if unknown, or for a pool."""
    losses: tuple[Loss, ...] = ()
    """The items that lost most, worst first."""

    @property
    def is_worse(self) -> bool:
        """Return True if the candidate is worse by more than chance, whatever the margin."""
        return self.p_worse < (1 - self.confidence) / 2


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task, or the pooled items of several, on both sides."""

    name: str
    judged: Outcome
    measures: tuple[Measure, ...] = ()
    problem: str | None = None
    """Reason for a FAIL or NOT_COMPARED, whatever the measures."""
    next_step: str = ""
    """Action that solves the problem; "" if `problem` names it."""
    is_non_finite: bool = False
    """True if the problem is a NaN or infinity of the candidate."""
    lost: tuple[Pair, ...] = ()
    """Items that only the base got right."""
    gained: tuple[Pair, ...] = ()
    """Items that only the candidate got right."""
    members: tuple[str, ...] = ()
    """The tasks of a pool."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """The comparison of two evaluations."""

    base: Evaluation
    candidate: Evaluation
    terms: Terms
    tasks: tuple[TaskComparison, ...]
    pools: tuple[TaskComparison, ...] = ()
    """Groups, and all tasks, where several tasks have the same measure."""
    unjudged: Mapping[str, str] = field(default_factory=dict)
    """Tasks that the base cannot judge, with reasons. They do not affect the verdict."""
    notes: tuple[str, ...] = ()
    """Tasks of the candidate alone, and measures that were not judged, with reasons."""

    @property
    def parts(self) -> tuple[TaskComparison, ...]:
        """Return the pools and the tasks."""
        return self.pools + self.tasks

    @property
    def judged(self) -> Outcome:
        """Return the worst outcome of all pools and tasks."""
        return overall_outcome(part.judged for part in self.parts)


def compare(base: Evaluation, candidate: Evaluation, terms: Terms) -> EvaluationComparison:
    """Judge a candidate by a base. Raises: UsageError for tasks and metrics that the base does not have."""
    chosen = chosen_metrics(base, terms.metrics)
    notes, changed = list(dict.fromkeys((*base.notes, *candidate.notes))), _changed(base, candidate)
    if others := [text for name, text in changed.items() if name not in _IN_NAMES]:
        notes.append(f"settings differ: {'; '.join(others)}")
    if terms.tasks:
        kept = {task for name in terms.tasks for task in _find_tasks(base, "task", name)}
        left = [task for task in base.tasks if task not in kept]
        notes.append(
            f"chosen: {', '.join(terms.tasks)}; not judged: {', '.join(left) or 'nothing'}"
        )
        base, candidate = (side.of_tasks(kept) for side in (base, candidate))
    of_tasks = list(_notes(base, candidate, chosen))
    whole = base, candidate
    base, candidate = (side.only(chosen) for side in whole)
    tasks: list[TaskComparison] = []
    measured: dict[str, TaskComparison] = {}
    unjudged: dict[str, str] = {}
    for name, task in base.tasks.items():
        if refused := _refusal(name, base, candidate) or _suspicion(name, *whole, changed):
            tasks.append(TaskComparison(name, Outcome.NOT_COMPARED, (), *refused))
            continue
        nothing = _without_right_answer(task)
        found = measured[name] = _measured(task, candidate.tasks[name], terms)
        if nothing and not found.measures and found.problem is None:
            unjudged[name] = nothing
        else:
            of_tasks += [(name, nothing)] * bool(nothing)
            tasks.append(found)
    members = {f"group {name}": tasks_ for name, tasks_ in base.groups.items()}
    if len(measured) > 1 and all(len(names) < len(measured) for names in members.values()):
        members[ALL_TASKS] = tuple(measured)
    pools = [
        TaskComparison(name, Outcome.PASS, measures, members=names)
        for name, names in members.items()
        if (measures := _pooled([measured[one] for one in names if one in measured], terms))
    ]
    judged, notes = _judge(tasks, pools, terms), [*notes, *merge_texts(of_tasks)]
    return EvaluationComparison(base, candidate, terms, *judged, unjudged, tuple(notes))


def _refusal(name: str, was: Evaluation, now: Evaluation) -> tuple[str, str] | None:
    """Return why a task cannot be compared at all, and what to do."""
    base, candidate = was.tasks[name], now.tasks.get(name)
    if candidate is None:
        step = "run the candidate again with this task"
        if common := [one for one in was.tasks if one in now.tasks]:
            step += f", or judge what both sides have: {_options('task', common)}"
        return "only the base has this task: the candidate is not compared with it", step
    for side, task in (("base", base), ("candidate", candidate)):
        if task.problem:
            return f"{side}: {task.problem}", ""
    found = [*_differing(was.asked, now.asked).values(), *_differences_of(base, candidate)]
    if not found:
        return None
    ours, theirs = ({item.key for item in side.items} for side in (base, candidate))
    limited = [len(one.items) < (one.num_documents or 0) for one in (base, candidate)]
    step = "evaluate the base again with the settings of the candidate, and compare with that"
    if (ours < theirs or theirs < ours) and any(limited):
        step = "run both sides with the same --limit"
    elif theirs < ours:
        step = "evaluate the candidate on all documents of the base"
    elif ours < theirs:
        step = "evaluate the base on all documents of the candidate"
    elif ours != theirs:
        found.append("the documents themselves differ: were texts or labels edited?")
        step = "evaluate the base again with the new documents, and compare with that"
    return f"the two sides answered different questions: {'; '.join(found)}", step


def _options(name: str, values: Sequence[str]) -> str:
    """Return a repeated option for a shell, with the first few of its values."""
    shown = values[:_MAX_OPTIONS]
    line = shlex.join(word for value in shown for word in (f"--{name}", value))
    return f"{line} ..." if len(values) > len(shown) else line


_MAX_OPTIONS = 3


def _without_right_answer(base: TaskResult) -> str:
    """Name the yes-or-no metrics of which no answer is right: they cannot drop. Return "" without any."""
    names = [name for name, score in base.all_scores().items() if _cannot_drop(score)]
    told = f"{', '.join(names)} is not judged: no answer of the base is right, which shows nothing"
    return told if names else ""


def _cannot_drop(score: Score) -> bool:
    return score.kind == "yes-no" and score.higher_is_better and score.mean == 0


def _notes(
    base: Evaluation, candidate: Evaluation, chosen: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield each task with what is not judged of it."""
    for name in candidate.tasks:
        if name not in base.tasks:
            yield name, "only the candidate has it: not judged, and without effect on the verdict"
    for name, task in base.tasks.items():
        yield from ((name, remark) for remark in task.remarks)
        if name in chosen:
            left = ", ".join(one for one in task.all_scores() if one not in chosen[name])
            yield name, f"{', '.join(chosen[name])} was chosen; not judged: {left or 'nothing'}"
        else:
            for one, metric in task.unjudged.items():
                yield name, f"{one} is not judged: {metric.reason}"


def chosen_metrics(base: Evaluation, metrics: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the metrics of each task for which some are chosen: by its name, without its filter, or its groups.

    Raises: UsageError for a task or metric that the evaluation does not have.
    """
    chosen: dict[str, list[str]] = {}
    for place, names in metrics.items():
        for task in _find_tasks(base, "metric of", place):
            known = base.tasks[task].all_scores()
            likelihood = PERPLEXITY if PERPLEXITY in known else LOG_PROBABILITY
            found = [likelihood if name in PERPLEXITIES else name for name in names]
            if wrong := [name for name in found if name not in known]:
                raise UsageError(f"metric {wrong[0]}: {task} has {', '.join(known) or 'no metric'}")
            chosen.setdefault(task, []).extend(found)
    return chosen


def _find_tasks(base: Evaluation, what: str, given: str) -> list[str]:
    """Return the tasks of a name, each filter's or a group's. Raises: UsageError, which starts with `what`."""
    tasks = [
        name
        for name in base.tasks
        if given in (name, plain_name(name)) or name in base.groups.get(given, ())
    ]
    if not tasks:
        raise UsageError(
            f"{what} {given}: {base.name} has no such task, only {', '.join(base.tasks)}"
        )
    return tasks


# Settings that change nearly every log-probability; the names of the sides show the first ones.
_IN_NAMES = ("model", "pretrained", "dtype", "model_dtype")
NUMERICS = (
    *_IN_NAMES, "peft", "delta", "gguf_file", "quantization", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype", "autogptq", "gptqmodel",
)  # fmt: skip


def _changed(base: Evaluation, candidate: Evaluation) -> dict[str, str]:
    """Describe each setting outside of the tasks that differs. An unknown one differs from none."""
    was, now = base.settings, candidate.settings
    unsure = {*_IN_NAMES} if was and now else was.keys() | now.keys()
    found = _differing(was, now)
    return {
        name: found[name] for name in found if name in was.keys() & now.keys() or name not in unsure
    }


def _suspicion(
    name: str, base: Evaluation, candidate: Evaluation, changed: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return why the answers to a task do not compare two models, and what to do.

    The response cache of lm-eval 0.4.13 has no key for model and dtype: it answers for others too. Equal
    log-probabilities show it. Two models may give equal texts, which show it only if a cache was in use.
    """
    now = candidate.tasks[name]
    pairs = pairs_of(base.tasks[name], now)
    same = [
        (one.stored, two.stored) for one, two in pairs if one.stored and one.answer == two.answer
    ]
    rescored = [dict(was.items() - is_.items()).keys() & is_.keys() for was, is_ in same]
    if any(rescored) and not any(score.num_wrong for score in now.scores.values()):
        metrics = ", ".join(sorted(set().union(*rescored)))
        return (
            f"{sum(map(bool, rescored))} documents have equal answers and other scores ({metrics}): the scorers differ",
            "score both sides with the same version of lm-eval and of the task's own code",
        )
    is_cached = "use_cache" in base.settings | candidate.settings
    equal = "answers" if is_cached and len(same) == len(pairs) else ""
    if all(one.log_probability == two.log_probability is not None for one, two in pairs):
        equal = "log-probabilities"
    others = [text for setting, text in changed.items() if setting in NUMERICS]
    if not equal or not others:
        return None
    return (
        f"{', '.join(others)}, but all {equal} are equal: a response cache may have answered for the candidate",
        "evaluate the candidate again without a cache (lm-eval --use_cache), or in a cache of its own",
    )


def _measured(base: TaskResult, candidate: TaskResult, terms: Terms) -> TaskComparison:
    """Return the measures of a task before they are judged."""
    pairs = pairs_of(base, candidate)
    same = base.metric == candidate.metric
    place_of = {item.key: place for place, item in enumerate(candidate.items)}
    places = [place_of[item.key] for item in base.items]
    theirs, next_step = candidate.all_scores(), ""
    problems = list(_unjudged_drops(base, candidate))
    for side, task, outcome in (
        ("candidate", candidate, Outcome.FAIL),
        ("base", base, Outcome.NOT_COMPARED),
    ):
        if task.num_nan_calls:
            problems.append((outcome, f"{side}: {task.nan_calls_in_words}"))
    measures: list[Measure] = []
    for name, was in base.all_scores().items():
        if name not in theirs:
            why = candidate.unjudged.get(name)
            reason = why.reason if why else "the candidate has no values of it"
            problems.append(
                (Outcome.NOT_COMPARED, f"{name} of the candidate is not judged: {reason}")
            )
            common = [f"{base.name}={one}" for one in base.all_scores() if one in theirs]
            next_step = "no metric is on both sides: evaluate both with the same metrics"
            if common:
                next_step = f"judge a metric of both sides: {_options('metric', common[:1])}"
            continue
        now = replace(theirs[name], values=tuple(theirs[name].values[place] for place in places))
        if found := _problem_of(name, was, now):
            problems.append(found)
            continue
        of_pairs = zip(pairs, was.values, now.values, strict=True)
        values = [
            (pair, one, two) for pair, one, two in of_pairs if one is not None and two is not None
        ]
        if not values or _cannot_drop(was):
            continue
        measures.append(_measure(name, was, values, terms, base.num_documents))
    if not measures and not problems and not _without_right_answer(base):
        problem = "the task has neither a metric with values nor log-probabilities of right answers"
        problems.append((Outcome.NOT_COMPARED, problem))
    return TaskComparison(
        base.name,
        overall_outcome([Outcome.PASS, *(outcome for outcome, _ in problems)]),
        tuple(measures),
        problem="; ".join(problem for _, problem in problems) or None,
        next_step=next_step,
        is_non_finite=any(outcome is Outcome.FAIL for outcome, _ in problems),
        lost=tuple(pair for pair in pairs if same and pair[0].right and pair[1].right is False),
        gained=tuple(pair for pair in pairs if same and pair[1].right and pair[0].right is False),
    )


def _unjudged_drops(base: TaskResult, candidate: TaskResult) -> Iterator[_Problem]:
    """Name metrics without values per item that are worse, or that the candidate lacks."""
    for name, was in base.unjudged.items():
        if was.value is None:
            continue
        other = candidate.unjudged.get(name)
        now = other.value if other else None
        if name in candidate.scores:
            now = candidate.scores[name].mean
        if now is None:
            yield Outcome.NOT_COMPARED, f"{name} is missing from the candidate"
        elif was.higher_is_better is None or now == was.value:
            continue
        elif (now > was.value) != was.higher_is_better:  # also for NaN
            change = f"{name} is worse ({was.value:.4g} -> {now:.4g})"
            yield Outcome.NOT_COMPARED, f"{change} and nobody judges it: {was.reason}"


def _problem_of(name: str, was: Score, now: Score) -> _Problem | None:
    """Return why a score cannot be compared."""
    what = "log-probabilities" if name == LOG_PROBABILITY else f"values of {name}"
    for outcome, side, score in (
        (Outcome.FAIL, "candidate", now),
        (Outcome.NOT_COMPARED, "base", was),
    ):
        if wrong := score.num_wrong:
            all_ = len(score.values)
            return outcome, f"NaN or infinite: {wrong} of {all_} {what} of the {side}"
    if was.higher_is_better is not now.higher_is_better:
        return Outcome.NOT_COMPARED, f"{name}: the sides differ in whether higher is better"
    if any(
        (one is None) is not (two is None) for one, two in zip(was.values, now.values, strict=True)
    ):
        return Outcome.NOT_COMPARED, f"{name} applies to other items of the candidate"
    return None


_Values = Sequence[tuple[Pair, float, float]]
"""Each item on both sides, with the values of base and candidate."""


def _measure(
    name: str, score: Score, values: _Values, terms: Terms, num_documents: int | None
) -> Measure:
    sign = 1 if score.higher_is_better else -1
    differences = Differences.of(
        [sign * (now - was) for _, was, now in values],
        clusters_of([pair[0] for pair, *_ in values]),
        largest=1.0 if score.kind == "yes-no" else None,
    )
    changes = (Loss(sign * (now - was), pair, was, now) for pair, was, now in values)
    nats = score.kind == "nats per byte"
    margin = terms.log_probability if nats else terms.accuracy * score.scale
    return Measure(
        name=name,
        kind=score.kind,
        base=fmean(was for _, was, _ in values),
        candidate=fmean(now for *_, now in values),
        margin=margin,
        source=terms.sources.get("log_probability" if nats else "accuracy", ""),
        higher_is_better=score.higher_is_better,
        num_documents=num_documents,
        losses=_largest(one for one in changes if one.change < 0),
        **_test(differences, terms, margin, sign),
    )


def _largest(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    return tuple(nsmallest(_MOST_LOSSES, losses, key=lambda one: one.change))


_MOST_LOSSES = 10


def _test(differences: Differences, terms: Terms, margin: float, sign: int) -> dict[str, Any]:
    """Return the fields of a measure that follow from its differences. sign: -1 if lower is better."""
    bounds = (
        differences.lower_bound(terms.significance),
        differences.upper_bound(terms.significance),
    )
    low, high = sorted(sign * bound for bound in bounds)
    needed = items_needed(differences, margin, terms.significance, terms.power)
    num_clusters = len(differences.names_K)
    return {
        "differences": differences,
        "difference": sign * differences.mean + 0.0,  # not -0.0
        "low": low,
        "high": high,
        "confidence": 1 - 2 * terms.significance,
        "num_items": differences.num_items,
        "num_clusters": num_clusters if num_clusters < differences.num_items else None,
        "p_worse": p_worse(differences),
        "p_not_inferior": p_not_inferior(differences, margin),
        # An equally good candidate may need no more items: this one's difference is why.
        "items_needed": needed if needed > differences.num_items else None,
    }


def _pooled(members: Iterable[TaskComparison], terms: Terms) -> tuple[Measure, ...]:
    """Return a measure for each that several tasks have, over the items of all of them."""
    alike: dict[tuple[str, str, float, bool], list[Measure]] = {}
    for one in (measure for member in members for measure in member.measures):
        key = (one.name, one.kind, one.margin, one.higher_is_better)
        alike.setdefault(key, []).append(one)
    found = []
    for measures in (measures for measures in alike.values() if len(measures) > 1):
        first, sizes = measures[0], [one.num_items for one in measures]
        base, candidate = (
            float(np.average([getattr(one, side) for one in measures], weights=sizes))
            for side in ("base", "candidate")
        )
        joined = Differences.pooled(one.differences for one in measures)
        sign = 1 if first.higher_is_better else -1
        pool = replace(
            first,
            base=base,
            candidate=candidate,
            num_documents=None,
            losses=_largest(loss for one in measures for loss in one.losses),
            **_test(joined, terms, first.margin, sign),
        )
        found.append(pool)
    return tuple(found)


def _judge(
    tasks: Sequence[TaskComparison], pools: Sequence[TaskComparison], terms: Terms
) -> tuple[tuple[TaskComparison, ...], tuple[TaskComparison, ...]]:
    groups = [pool for pool in pools if pool.name != ALL_TASKS]
    suite = [pool for pool in pools if pool.name == ALL_TASKS]
    layers = [
        {(one.name, measure.name): measure.p_worse for one in compared for measure in one.measures}
        for compared in (tasks, groups, suite)
    ]
    adjusted = holm_in_layers(layers)
    among_tasks = holm(layers[0])

    def judged(layer: int, given: TaskComparison) -> TaskComparison:
        measures = []
        for one in given.measures:
            key = given.name, one.name
            measure = replace(one, p_worse=adjusted[layer][key])
            if measure.p_not_inferior < terms.significance:
                measure = replace(measure, judged=Outcome.PASS, items_needed=None)
            elif measure.p_worse < terms.significance:
                measure = replace(measure, judged=Outcome.FAIL, items_needed=None)
            elif layer == 0 and among_tasks[key] >= 1 - terms.power:
                # One of the tasks of an equal candidate drops by more with a chance of 1 - power.
                measure = replace(measure, pool=passing.get(key))
            measures.append(measure)
        outcomes = [Outcome.PASS if one.pool else one.judged for one in measures]
        return replace(
            given, measures=tuple(measures), judged=overall_outcome([given.judged, *outcomes])
        )

    passing: dict[tuple[str, str], str] = {}
    judged_pools = [*(judged(1, one) for one in groups), *(judged(2, one) for one in suite)]
    for pool in judged_pools:
        passed = [one.name for one in pool.measures if one.judged is Outcome.PASS]
        passing |= {(member, name): pool.name for member in pool.members for name in passed}
    judged_tasks = tuple(judged(0, task) for task in tasks)
    return judged_tasks, tuple(judged_pools)
