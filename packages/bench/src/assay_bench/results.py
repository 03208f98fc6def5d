"""The answers of a model to tasks, and their verdict: finite numbers, and answers that are better than a guess.

A guess depends on the task. Of several options, it chooses one at random. Of generated text, it gives the most frequent
right answer every time. Of text that the model must find probable, it knows how often each token occurs, and nothing of
the context: no weights without use of the context are better.
"""

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from scipy.stats import binom, binomtest, norm

from assay.errors import name_some
from assay.judge.levels import (
    Cause,
    LevelResult,
    conclude,
    failed,
    not_compared,
    not_run,
    outcome_of_levels,
    passed,
)
from assay.judge.wording import format_count
from assay.verdicts import Measurement, Number, Outcome, Verdict
from assay_bench.paired_statistics import Differences, p_worse

# `assay explain underpowered` explains the word.
UNDERPOWERED = "underpowered"
TOO_FEW_ITEMS = f"{UNDERPOWERED}: too few items to decide"


def underpowered(reason: str, compared: int) -> LevelResult:
    """Return a level that compared `compared` things, which are too few or too noisy to decide."""
    return not_compared(f"{UNDERPOWERED}: {reason}", compared)


def undecided_levels(results: Mapping[str, LevelResult]) -> list[str]:
    """Name the levels that decide a verdict which lacks nothing but data; an empty list for any other verdict."""
    levels = {name: one.level for name, one in results.items()}
    open_ = [name for name, one in levels.items() if one.verdict is Outcome.NOT_COMPARED]
    lacks_data = all(str(levels[name].reason).startswith(UNDERPOWERED) for name in open_)
    return open_ if lacks_data and outcome_of_levels(levels) is Outcome.NOT_COMPARED else []


LOG_PROBABILITY = "log-probability"
# The log-likelihood per byte that all perplexities of lm-eval depend on.
PERPLEXITY = "perplexity"
PERPLEXITIES = (PERPLEXITY, "word_perplexity", "byte_perplexity", "bits_per_byte")

# Settings of generation that need do_sample.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# Baselines are published: they hold hashes of the texts, not the texts.
_Text = Annotated[str, Field(exclude=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One document of a task with all its repeats, and the model's answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    """Hash of the document."""
    prompt_hash: str
    target_hash: str
    """Hash of the right answer."""
    right: bool | None = None
    """Verdict of the task's metric; None if the metric is not a yes-or-no one."""
    log_probability: Number | None = None
    """Log probability of the right answer in nats per byte; None if the task does not use probabilities."""
    guess: Annotated[Number | None, Field(exclude=True)] = None
    """Its log probability by a guess that knows how often each token occurs in all right answers; None if unknown."""
    cluster: str | None = None
    """Name shared by documents that belong together, such as questions on one text."""
    question: _Text = ""
    target: _Text = ""
    answer: _Text = ""
    stored: Annotated[dict[str, str], Field(exclude=True)] = field(default_factory=dict)
    """Metrics as lm-eval wrote them, where they follow from document and answer alone."""

    @property
    def is_finite(self) -> bool:
        """Return False for a log-probability that is NaN or infinite."""
        return self.log_probability is None or math.isfinite(self.log_probability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The values of one metric, whose mean over the items is the metric of the task."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Literal["yes-no", "number", "nats per byte"]
    values: tuple[Number | None, ...]
    """One for each item; None if the metric does not apply to it."""
    higher_is_better: bool = True
    scale: float = 1.0
    """The value of a perfect metric, such as 100 for percent. Margins of numbers refer to it."""

    @property
    def mean(self) -> float:
        """Return the mean over the items that have a value; NaN without any."""
        mean = mean_of_known(self.values)
        return math.nan if mean is None else mean

    def over(self, groups: Iterable[Iterable[int]]) -> "Score":
        """Return the score with the mean over the known values of each group of places."""
        means = (mean_of_known(self.values[place] for place in group) for group in groups)
        return replace(self, values=tuple(means))

    @property
    def num_wrong(self) -> int:
        """Return how many values are NaN or infinite."""
        return sum(value is not None and not math.isfinite(value) for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnjudgedMetric:
    """A metric that only the results state, because its values per item are not understood."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    value: Number | None
    higher_is_better: bool | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The answers to one task."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: _Text = ""
    """The task, with the filter of its answers if it has several filters."""
    metric: str | None
    """The first yes-or-no metric, which decides what is right; None if the task has no such metric."""
    chance: float | None = None
    """Accuracy of a guess; None if there is nothing to choose from."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Settings that decide what the task asks, such as its version and few-shot examples."""
    items: Annotated[tuple[Item, ...], Field(min_length=1)]
    scores: dict[str, Score] = field(default_factory=dict)
    """Every metric with values per item. Older baselines only have `metric`."""
    unjudged: dict[str, UnjudgedMetric] = field(default_factory=dict)
    num_documents: int | None = None
    """All documents of the task, of which `items` may be the first; None if the results do not say."""
    num_repeats: int = 0
    """Documents that count as one item with another one, whose content or prompt they repeat."""
    num_nan_calls: int = 0
    """Calls of the model that gave NaN or infinity for the next token, if our process ran it."""
    nan_weights: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    """Weights that hold NaN or infinity, if such a call was seen."""
    problem: str = ""
    """Why the scores are wrong, whatever the model; "" for a sound task."""
    notes: tuple[str, ...] = ()
    """Oddities of the documents that leave the scores comparable."""

    def all_scores(self) -> dict[str, Score]:
        """Return the scores, including log-probabilities if every item has one."""
        scores = dict(self.scores)
        if not scores and all(item.right is not None for item in self.items):
            values = tuple(float(item.right is True) for item in self.items)
            scores[self.metric or "right"] = Score(kind="yes-no", values=values)
        nats = tuple(item.log_probability for item in self.items)
        if None not in nats:
            score = Score(kind="nats per byte", values=nats)
            # Of whole texts, the perplexity is the same measure, with each text weighted by its length.
            scores[LOG_PROBABILITY] = scores.pop(PERPLEXITY, score) if self.is_rolling else score
        return scores

    @property
    def is_rolling(self) -> bool:
        """Return True for a task that asks for the probability of whole texts."""
        return self.asked.get("output_type") == "loglikelihood_rolling"

    def only(self, names: Iterable[str]) -> "TaskResult":
        """Return the task with only these of its scores. The first yes-or-no one decides what is right."""
        known = self.all_scores()
        scores = {name: known[name] for name in names if name in known}
        nats = scores.pop(LOG_PROBABILITY, None)
        if nats is not None and self.is_rolling:
            scores[PERPLEXITY] = nats
        metric = next((name for name, one in scores.items() if one.kind == "yes-no"), None)
        rights: Sequence[bool | None] = [None] * len(self.items)
        if metric is not None:
            best, values = float(scores[metric].higher_is_better), scores[metric].values
            rights = [None if value is None else value == best for value in values]
        items = tuple(
            replace(one, right=right, log_probability=one.log_probability if nats else None)
            for one, right in zip(self.items, rights, strict=True)
        )
        chance = self.chance if metric is not None and metric.startswith("acc") else None
        return replace(self, metric=metric, chance=chance, items=items, scores=scores, unjudged={})

    @property
    def nan_calls_in_words(self) -> str:
        """Describe calls of the model that gave NaN, and its weights that hold them."""
        calls = format_count(self.num_nan_calls, "call")
        words = f"the model gave NaN or infinity for the next token in {calls}"
        weights = name_some(self.nan_weights)
        return f"{words}; NaN or infinity is in the weights {weights}" if weights else words

    @property
    def remarks(self) -> list[str]:
        """Name documents that count as one item, and settings of sampling that have no effect."""
        num, asked = len(self.items), self.asked.get("generation_kwargs")
        settings = asked if isinstance(asked, dict) else {}
        sampling = [f"{name}={settings[name]}" for name in _SAMPLING if settings.get(name)]
        found = [*self.notes]
        if self.num_repeats:
            found.append(
                f"{num + self.num_repeats:,} documents, {num:,} of them distinct: documents with equal content or"
                " prompts count as one item"
            )
        if sampling and settings.get("do_sample") is False:
            found.append(
                f"{', '.join(sampling)} has no effect (assay's loader, hf, vllm), because do_sample is False: set --gen-kwargs do_sample=True"
            )
        return found

    @property
    def accuracy(self) -> float | None:
        """Return the share of items that are right."""
        return mean_of_known(None if one.right is None else float(one.right) for one in self.items)

    @property
    def log_probability(self) -> float | None:
        """Return the mean over the items, in nats per byte."""
        return mean_of_known(item.log_probability for item in self.items)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of a model on a battery of tasks."""

    name: str
    """Name of the model in reports."""
    tasks: dict[str, TaskResult]
    asked: dict[str, Any] = field(default_factory=dict)
    """Settings that hold for all tasks, such as a chat template."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Model, versions and machine, if known."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of groups of tasks, with the names of their tasks."""
    notes: tuple[str, ...] = ()
    """Sentences about older results that were ignored."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings outside of the tasks that may change answers; {} if unknown."""

    @property
    def side(self) -> dict[str, Any]:
        """Return the facts of a verdict about this side."""
        return {"run": self.facts.get("run", self.name), "seeds": self.facts.get("seeds", {})}

    def of_tasks(self, names: Collection[str]) -> "Evaluation":
        """Return the evaluation with only these tasks, also in its groups."""
        groups = {
            group: tuple(name for name in members if name in names)
            for group, members in self.groups.items()
        }
        return replace(
            self,
            tasks={name: task for name, task in self.tasks.items() if name in names},
            groups={group: members for group, members in groups.items() if members},
        )

    def only(self, metrics: Mapping[str, Sequence[str]]) -> "Evaluation":
        """Return the evaluation with only these metrics of the tasks that are named."""
        tasks = self.tasks.items()
        kept = {n: task.only(metrics[n]) if n in metrics else task for n, task in tasks}
        return replace(self, tasks=kept)


def merge_texts(of_tasks: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the texts, each once, after the names of its tasks."""
    names: dict[str, list[str]] = {}
    for name, text in of_tasks:
        names.setdefault(text, []).append(name)
    yield from (f"{name_some(tasks)}: {text}" for text, tasks in names.items())


def plain_name(task: str) -> str:
    """Return the name of a task without its filter."""
    return task.partition(" (")[0]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean over the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# Chance that a guess passes.
SIGNIFICANCE = 0.01
# A model fails if the test excludes this advantage over a guess. With it, a model passes with this power.
_ADVANTAGE, _POWER = 0.2, 0.8
# Log probability of a byte by a guess that knows nothing.
_UNIFORM = -math.log(256)


def judge_scores(
    evaluation: Evaluation, metrics: Mapping[str, Sequence[str]] | None = None
) -> Verdict:
    """Judge each task by a guess. Only `assay bench compare` judges how good a score is.

    metrics: those to judge of a task; all of a task that is not named. NaN fails in any.
    """
    judged = evaluation.only(metrics or {}).tasks
    found = {name: _non_finite(task) for name, task in evaluation.tasks.items()}
    levels = {name: level or _level(judged[name]) for name, level in found.items()}
    return conclude(
        levels,
        Cause("non-finite") if any(found.values()) else None,
        notes=[
            *evaluation.notes,
            *(
                f"{name}: {remark}"
                for name, task in evaluation.tasks.items()
                for remark in task.remarks
            ),
            *(
                f"{name}: {metric} is not judged: {one.reason}"
                for name, task in judged.items()
                for metric, one in task.unjudged.items()
            ),
            # The message gives the reasons of all other levels.
            *(
                f"{name}: {one.level.reason}"
                for name, one in levels.items()
                if one.level.verdict is Outcome.PASS
            ),
        ],
        headline=_headline(levels),
        model={"name": evaluation.facts.get("model", evaluation.name)}
        | {key: evaluation.facts[key] for key in ("weights_hash",) if key in evaluation.facts},
        reference={"run": "a guess"},
        candidate=evaluation.side,
        compared=sum(one.level.compared for one in levels.values() if one.level.verdict),
        compared_unit="items",
    )


def measurement(
    level: str, port: str, statistic: str, *, actual: float, expected: float
) -> Measurement:
    """Make a row of measurements.jsonl that no limit judges."""
    ratio = actual / expected if expected else math.inf
    return Measurement(
        level=level, module="", port=port, statistic=statistic, actual=actual, expected=expected, ratio=ratio
    )  # fmt: skip


def measurements_of(evaluation: Evaluation) -> list[Measurement]:
    """Return the accuracy and log-probability of each task, with those of a guess, where it is known."""
    return [
        measurement(name, "task", statistic or "", actual=actual, expected=expected)
        for name, task in evaluation.tasks.items()
        for statistic, actual, expected in (
            (task.metric, task.accuracy, task.chance),
            (LOG_PROBABILITY, task.log_probability, mean_of_known(one.guess for one in task.items)),
        )
        if actual is not None and expected is not None
    ]


def _headline(results: dict[str, LevelResult]) -> str:
    """Name the tasks that decided, and those that no test judged."""
    levels = {name: one.level for name, one in results.items()}
    outcome = outcome_of_levels(levels)
    names = [name for name, one in levels.items() if one.verdict is outcome]
    unjudged = [name for name, one in levels.items() if one.verdict is None]
    match outcome:
        case Outcome.PASS:
            words = f"Better than a guess: {', '.join(names)}"
        case Outcome.FAIL:
            words = f"Failed: {', '.join(names)}"
        case _ if undecided := undecided_levels(results):
            words = f"{TOO_FEW_ITEMS} {', '.join(undecided)}"
        case _:
            words = f"Not compared: {', '.join(names)}" if names else "No task was judged"
    if unjudged and names:
        words += f"; not judged: {', '.join(unjudged)}"
    return f"{words}."


def score_in_words(task: TaskResult) -> str:
    """Describe accuracy, the accuracy of a guess, and the log-probability of right answers."""
    parts = []
    if task.accuracy is not None:
        guess = "" if task.chance is None else f" (a guess: {task.chance:.1%})"
        parts.append(f"{task.metric} {task.accuracy:.1%}{guess}")
    if task.log_probability is not None:
        mean = mean_of_known(item.guess for item in task.items)
        guess = "" if mean is None or task.chance is not None else f" (a guess: {mean:.3f})"
        parts.append(f"{task.log_probability:.3f} nats per byte{guess}")
    return f"{', '.join(parts) or 'no score'}, {format_count(len(task.items), 'item')}"


def _non_finite(task: TaskResult) -> LevelResult | None:
    num_items, reasons = len(task.items), []
    if wrong := sum(not item.is_finite for item in task.items):
        reasons.append(f"NaN or infinite: {wrong} of {num_items} log-probabilities")
    if task.num_nan_calls:
        reasons.append(task.nan_calls_in_words)
    return failed(num_items, "; ".join(reasons)) if reasons else None


def _level(task: TaskResult) -> LevelResult:
    if not task.items:
        return not_compared("it has no items")
    if task.problem:
        return not_compared(task.problem)
    if task.chance is not None and task.chance < 1 and task.accuracy is not None:
        return _judge_choice(task, task.chance)
    if task.log_probability is not None:
        return _judge_text(task)
    if task.accuracy is not None:
        return _judge_answers(task)
    return _unjudged("not judged, as no guess of its metric is known", task)


def _unjudged(reason: str, task: TaskResult) -> LevelResult:
    return not_run(f"{reason}: {score_in_words(task)}", compared=len(task.items))


def _judge_choice(task: TaskResult, chance: float) -> LevelResult:
    """Judge the choice among options by exact binomial tests: better than a guess, or not by the advantage."""
    num_items, p = len(task.items), _p_of_right(task, chance)
    if p < SIGNIFICANCE:
        return passed(num_items, reason=_in_words("better than a guess", p, task))
    better = min(chance + _ADVANTAGE, (1 + chance) / 2)
    advantage = f"{100 * (better - chance):.3g} points"
    num_right = sum(item.right is True for item in task.items)
    p_better = float(binom.cdf(num_right, num_items, better))
    if p_better < SIGNIFICANCE:
        excluded = f"no better than a guess: an advantage of {advantage} is excluded"
        return failed(num_items, _in_words(excluded, p_better, task))
    share = num_right / num_items
    needed = max(num_items + 1, min(_items_to_tell(share, known) for known in (chance, better)))
    would = f"about {needed:,} would"
    if task.num_documents is not None and needed > task.num_documents:
        would += f", but the task has only {task.num_documents:,} documents: add documents"
    else:
        would += f" (--limit {needed})"
    nothing = f"{num_items:,} items neither show an advantage over a guess nor exclude one of {advantage}; {would}"
    return underpowered(_in_words(nothing, p, task), num_items)


def _judge_text(task: TaskResult) -> LevelResult:
    """Judge the log probability of text: random signs of the differences of items or clusters."""
    items, num_items = task.items, len(task.items)
    nats = [one.log_probability for one in items if one.log_probability is not None]
    clusters = clusters_of(items)
    p = p_worse(Differences.of([one - _UNIFORM for one in nats], clusters))
    if p < SIGNIFICANCE:
        worse = f"worse than a guess of every byte, {_UNIFORM:.3f} nats"
        return failed(num_items, _in_words(worse, p, task))
    guesses = [one.guess for one in items if one.guess is not None]
    if len(guesses) < num_items:
        unknown = "not judged, as lm-eval's own files do not hold the tokens that a guess needs"
        return _unjudged(unknown, task)
    guess = "a guess that knows how often each token occurs"
    gains = [one - known for one, known in zip(nats, guesses, strict=True)]
    p_below = p_worse(Differences.of(gains, clusters))
    if p_below < SIGNIFICANCE:
        # The opposite of what a PASS says of the run, though a sound model of other texts may be no better.
        return not_compared(_in_words(f"worse than {guess}", p_below, task), num_items)
    losses = [-gain for gain in gains]
    return _better_or_unjudged(guess, p_worse(Differences.of(losses, clusters)), task)


def _judge_answers(task: TaskResult) -> LevelResult:
    """Judge answers without options: exact binomial test against the most frequent right answer."""
    if not task.accuracy:
        return _unjudged("no answer is right, which shows nothing", task)
    share = max(Counter(item.target_hash for item in task.items).values()) / len(task.items)
    guess = f"the most frequent right answer, {share:.1%}"
    return _better_or_unjudged(guess, _p_of_right(task, share), task)


def clusters_of(items: Sequence[Item]) -> list[str]:
    """Name the cluster of each item; without clusters, its document, which other tasks may share."""
    names = [one.cluster for one in items if one.cluster]
    return names if len(names) == len(items) else [one.key for one in items]


def _better_or_unjudged(guess: str, p: float, task: TaskResult) -> LevelResult:
    if p < SIGNIFICANCE:
        return passed(len(task.items), reason=_in_words(f"better than {guess}", p, task))
    return not_run(
        _in_words(f"not judged: not shown to be better than {guess}", p, task),
        compared=len(task.items),
    )


def _p_of_right(task: TaskResult, chance: float) -> float:
    right = sum(item.right is True for item in task.items)
    return float(binomtest(right, len(task.items), chance, alternative="greater").pvalue)


def _in_words(conclusion: str, p: float, task: TaskResult) -> str:
    limit = "" if p < SIGNIFICANCE else f", must be below {SIGNIFICANCE:g}"
    return f"{conclusion} (p = {p:.2g}{limit}): {score_in_words(task)}"


def _items_to_tell(share: float, known: float) -> float:
    """Return how many items tell a model with this share of right answers from a known share, with the power.

    Source: Fleiss, Levin & Paik, Statistical Methods for Rates and Proportions, 2.4 (normal approximation).
    """
    if share == known:
        return math.inf
    deviations = (math.sqrt(one * (1 - one)) for one in (known, share))
    quantiles = norm.isf(SIGNIFICANCE), norm.isf(1 - _POWER)
    distance = math.fsum(map(operator.mul, quantiles, deviations)) / (share - known)
    return math.ceil(distance**2)
