"""A baseline file: an evaluation without its texts, who accepted it, and why."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field

from assay.files import open_file, read_sealed
from assay.verdicts import Number, Record
from assay_bench.evaluations.items import Evaluation, Item, TaskResult

SCHEMA = 1

# Number of first bytes that hold the kind of a file.
_BEGINNING = 64

# Of what was said nothing is kept: the same question is asked on the other side.
_NOT_KEPT = ""


class KeptItem(Record):
    """An item, without its texts."""

    key: str
    prompt_hash: str
    target_hash: str
    right: bool | None = None
    log_probability: Number | None = None
    cluster: str | None = None


class KeptTask(Record):
    """A task with its items."""

    metric: str | None
    chance: float | None
    asked: dict[str, Any]
    items: list[KeptItem] = Field(min_length=1)


class Acceptance(Record):
    """Who took it for right, when and why."""

    by: str | None
    date: str
    reason: str | None
    command: list[str]


class Baseline(Record):
    """One file. facts: of the model, the machine and the versions that were evaluated."""

    baseline: int = Field(default=SCHEMA, ge=SCHEMA, le=SCHEMA)
    name: str
    acceptance: Acceptance
    facts: dict[str, Any]
    asked: dict[str, Any]
    tasks: dict[str, KeptTask] = Field(min_length=1)

    @classmethod
    def of(cls, evaluation: Evaluation, acceptance: Acceptance) -> Self:
        """From an evaluation."""
        return cls(
            name=evaluation.name,
            acceptance=acceptance,
            facts=evaluation.facts,
            asked=evaluation.asked,
            tasks={name: _kept(task) for name, task in evaluation.tasks.items()},
        )

    def evaluation(self) -> Evaluation:
        """As a comparison takes it."""
        tasks = {name: _as_result(name, task) for name, task in self.tasks.items()}
        return Evaluation(self.name, tasks, self.asked, self.facts)


def is_baseline(path: Path) -> bool:
    """Return True if the file declares itself a baseline."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return b'"baseline"' in file.read(_BEGINNING)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises: UnreadableFileError if it is invalid or was changed."""
    return read_sealed(Baseline, path)


def _kept(task: TaskResult) -> KeptTask:
    fields = KeptItem.model_fields
    items = [KeptItem(**{name: getattr(item, name) for name in fields}) for item in task.items]
    return KeptTask(metric=task.metric, chance=task.chance, asked=task.asked, items=items)


def _as_result(name: str, task: KeptTask) -> TaskResult:
    items = tuple(
        Item(**item.model_dump(), question=_NOT_KEPT, target=_NOT_KEPT, answer=_NOT_KEPT)
        for item in task.items
    )
    return TaskResult(name, task.metric, items, task.asked, task.chance)
