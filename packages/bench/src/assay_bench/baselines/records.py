"""A baseline file: an evaluation without its texts, with who accepted it and why."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from assay.files import open_file, read_sealed
from assay.verdicts import Record
from assay_bench.evaluations.items import Evaluation, TaskResult

SCHEMA = 1

# The kind of a file stands in its first bytes.
_NUM_KIND_BYTES = 64


class Acceptance(Record):
    """Who accepted an evaluation, when and why."""

    by: str | None
    date: str
    reason: str | None
    command: list[str]


class Baseline(Record):
    """The content of a baseline file."""

    baseline: int = Field(default=SCHEMA, ge=SCHEMA, le=SCHEMA)
    name: str
    acceptance: Acceptance
    facts: dict[str, Any]
    asked: dict[str, Any]
    tasks: dict[str, TaskResult] = Field(min_length=1)

    @classmethod
    def of(cls, evaluation: Evaluation, acceptance: Acceptance) -> Self:
        """Make a baseline of an evaluation."""
        return cls(
            name=evaluation.name,
            acceptance=acceptance,
            facts=evaluation.facts,
            asked=evaluation.asked,
            tasks=evaluation.tasks,
        )

    def evaluation(self) -> Evaluation:
        """Return the evaluation that was accepted."""
        tasks = {name: replace(task, name=name) for name, task in self.tasks.items()}
        return Evaluation(self.name, tasks, self.asked, self.facts)


def is_baseline(path: Path) -> bool:
    """Return True if the file declares itself a baseline."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return b'"baseline"' in file.read(_NUM_KIND_BYTES)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises: UnreadableFileError if it is invalid or was changed."""
    return read_sealed(Baseline, path)
