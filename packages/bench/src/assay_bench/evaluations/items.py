"""The answers of a model to a battery of tasks."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from assay.verdicts import Number

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
class TaskResult:
    """The answers to one task, judged by one of its metrics."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: _Text = ""
    """The task, with the filter of its answers if it has several filters."""
    metric: str | None
    """The metric that decides what is right; None if the task has no such metric."""
    chance: float | None = None
    """Accuracy of a guess; None if there is nothing to choose from."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Settings that decide what the task asks, such as its version and few-shot examples."""
    items: Annotated[tuple[Item, ...], Field(min_length=1)]

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


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
