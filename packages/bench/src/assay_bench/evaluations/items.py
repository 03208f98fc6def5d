"""The answers of a model to a battery of tasks."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from assay.verdicts import Number

LOG_PROBABILITY = "log-probability"

# Baselines are published: they hold hashes of the texts, not the texts.
_Text = Annotated[str, Field(exclude=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One document of a task, with the model's answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    """Hash of the document; repeated documents are numbered."""
    prompt_hash: str
    target_hash: str
    """Hash of the right answer."""
    right: bool | None = None
    """Verdict of the task's metric; None if the metric is not a yes-or-no one."""
    log_probability: Number | None = None
    """Log probability of the right answer in nats per byte; None if the task does not use probabilities."""
    cluster: str | None = None
    """Name shared by documents that belong together, such as questions on one text."""
    question: _Text = ""
    target: _Text = ""
    answer: _Text = ""

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
        values = [value for value in self.values if value is not None]
        return sum(values) / len(values) if values else math.nan

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
    num_nan_calls: int = 0
    """Calls of the model that gave NaN or infinity for the next token, if our process ran it."""

    def all_scores(self) -> dict[str, Score]:
        """Return the scores, including log-probabilities if every item has one."""
        scores = dict(self.scores)
        if not scores and all(item.right is not None for item in self.items):
            values = tuple(float(item.right is True) for item in self.items)
            scores[self.metric or "right"] = Score(kind="yes-no", values=values)
        nats = tuple(item.log_probability for item in self.items)
        if None not in nats:
            scores[LOG_PROBABILITY] = Score(kind="nats per byte", values=nats)
        return scores

    @property
    def nan_calls_in_words(self) -> str:
        """Describe calls of the model that gave NaN."""
        return f"the model gave NaN or infinity for the next token in {self.num_nan_calls} calls"

    @property
    def accuracy(self) -> float | None:
        """Return the share of items that are right."""
        return _mean([float(item.right) for item in self.items if item.right is not None])

    @property
    def log_probability(self) -> float | None:
        """Return the mean over the items, in nats per byte."""
        return _mean([v for item in self.items if (v := item.log_probability) is not None])


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


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
