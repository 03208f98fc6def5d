"""One evaluation of a model: its tasks, and of each task what the model made of every item."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One document of a task, asked once.

    key: hash of the document, with a number where the same document is there again.
    prompt_hash: of what the model was given; target_hash: of the right answer.
    question, target, answer: as people read them.
    right: by the task's own metric; None where that is no yes or no.
    log_probability: of the right answer, in nats a byte; None where the task asks for no probability.
    cluster: of documents that belong together, such as questions on one text; None for none.
    """

    key: str
    prompt_hash: str
    target_hash: str
    question: str
    target: str
    answer: str
    right: bool | None
    log_probability: float | None
    cluster: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether its log-probability, if it has one, is a number."""
        return self.log_probability is None or math.isfinite(self.log_probability)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task by one of its metrics.

    name: of the task, with the filter of its answers where it has several.
    metric: that says what is right; None where it has none.
    chance: the share that guessing gets right; None where there is nothing to choose from.
    asked: version, few-shot examples and whatever else of its configuration decides what is asked.
    """

    name: str
    metric: str | None
    items: tuple[Item, ...]
    asked: dict[str, Any] = field(default_factory=dict)
    chance: float | None = None

    @property
    def accuracy(self) -> float | None:
        """The share of items that are right."""
        return _mean([float(item.right) for item in self.items if item.right is not None])

    @property
    def log_probability(self) -> float | None:
        """The mean of the items', in nats a byte."""
        return _mean([v for item in self.items if (v := item.log_probability) is not None])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model on a battery of tasks.

    name: of the model, for people; asked: what holds for all tasks, such as a chat template.
    facts: of model, versions and machine, where the one who ran it kept them.
    """

    name: str
    tasks: dict[str, TaskResult]
    asked: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
